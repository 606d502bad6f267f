"""TRL's GRPOTrainer with rollouts by Samewise in the same process, and its log-probabilities.

>>> from samewise.rl.trl import GRPOTrainer  # in place of trl's
>>> GRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=dataset).train()

Rollout and trainer agree to the last bit: the log-probabilities of generation are the old policy's, so that
the importance ratio is exactly 1 until the weights change. Needs `pip install trl`.

A subclass, not a `rollout_func`: that returns log-probabilities of generation, but those of the loss would
still come from the trainer's own forward pass. The methods replaced are in OVERRIDDEN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import trl

from samewise.errors import BadParameter
from samewise.llm.llm import LLM
from samewise.params import SamplingParams
from samewise.rl.forward import TrainingForward
from samewise.rl.rollout import llm_over
from samewise.rl.seeds import answer_seed


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far rollout and trainer agree on the tokens of one forward pass of the loss."""

    step: int  # the trainer's global step
    contract: str  # of the weights that generated
    max_difference: float  # of log-probabilities
    min_ratio: float  # of the importance weights
    max_ratio: float
    same_weights: bool  # whether the trainer's weights are still those that generated


@dataclass(frozen=True, slots=True)
class _LastRollout:
    """The last rollout of a mode."""

    step: int = -1  # the trainer's global step
    number: int = 0  # of rollouts in this step, counted from 0
    contract: str = ""


OVERRIDDEN = (
    "_generate_single_turn", "_generate_and_score_completions", "_get_per_token_logps_and_entropies",
    "_compute_loss",
)  # fmt: skip
"""TRL's own methods that are replaced below. They are private, so that a version may do without them."""


def check_trl(trainer: type, version: str) -> None:
    """Raise ImportError for a version of TRL whose trainer would not call what is replaced here."""
    missing = [name for name in OVERRIDDEN if not callable(getattr(trainer, name, None))]
    if missing:
        raise ImportError(
            f"trl {version}: its GRPOTrainer has no {', '.join(missing)}, which samewise.rl.trl replaces; "
            "install another version: pip install 'samewise[rl]'"
        )


check_trl(trl.GRPOTrainer, trl.__version__)


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, whose answers and log-probabilities come from an engine over its own model.

    Arguments are TRL's. `engine_settings` are keywords of EngineConfig. One process; no filters when
    sampling: log-probabilities of a filtered distribution are not those that the loss is made of.
    """

    def __init__(self, *args: Any, engine_settings: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self)
        self._settings = {"proposer": "auto"} | (engine_settings or {})
        self._llm: LLM | None = None
        self._forwards: dict[int, TrainingForward] = {}  # by the model's id: the policy's, the reference's
        # Refreshes of the policy's forward pass when the engine got its weights.
        self._given: int | None = None
        # Evaluations are counted by themselves: a resumed run has not made those before its checkpoint.
        self._rollouts = {"train": _LastRollout(), "eval": _LastRollout()}
        self.agreements: list[Agreement] = []
        """Of every forward pass of the loss, in order."""

    @property
    def llm(self) -> LLM:
        """The engine that generates."""
        if self._llm is None:
            self._llm = llm_over(self._policy, self.processing_class, **self._settings)
        return self._llm

    @property
    def _mode(self) -> str:
        """As TRL names it."""
        return "train" if self.model.training else "eval"

    @property
    def _policy(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def forward_of(self, model: Any) -> TrainingForward:
        """The forward pass of a model with the bits of the engine."""
        plain = self.accelerator.unwrap_model(model)
        if id(plain) not in self._forwards:
            self._forwards[id(plain)] = TrainingForward(plain, like=self.llm)
        return self._forwards[id(plain)]

    # ---- rollout

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: list[Any] | None, *_: Any, **__: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """TRL's rollout, and each turn after a tool's result: an answer to every prompt.

        Token ids and log-probabilities, after the engine has got the trainer's weights.
        """
        if images is not None and any(images):
            raise BadParameter("prompts with images are not supported; text only", param="prompts")
        forward = self.forward_of(self.model)
        forward.refresh()
        if forward.num_refreshes != self._given:  # another forward pass may have noticed the change
            self.llm.update_weights(self._policy.state_dict())
            self._given = forward.num_refreshes
        outputs = self.llm.generate(
            [list(ids) for ids in prompt_ids], self._sampling(len(prompt_ids)), use_tqdm=False
        )
        answers = [output.outputs[0] for output in outputs]
        return [answer.token_ids for answer in answers], [answer.token_logprobs for answer in answers]

    def _sampling(self, num: int) -> list[SamplingParams]:
        """A seed for every answer, of the trainer's seed and step alone: a resumed run repeats it."""
        step, last = self.state.global_step, self._rollouts[self._mode]
        count = last.number + 1 if step == last.step else 0
        self._rollouts[self._mode] = _LastRollout(step, count, self.llm.contract.id)
        parts = (self.args.seed, step, count) if self._mode == "train" else (self.args.seed, step, count, 1)
        return [
            SamplingParams(
                temperature=self.temperature,
                max_tokens=self.max_completion_length,
                logprobs_mode="processed_logprobs",
                seed=answer_seed(*parts, number),
                detokenize=False,
            )
            for number in range(num)
        ]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's batch; the old policy's log-probabilities are those that generation returned."""
        output = super()._generate_and_score_completions(inputs)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    # ---- loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Log-probabilities of the last tokens, with the bits of generation."""
        del batch_size  # no value depends on it
        scores = self.forward_of(model).score(
            input_ids,
            attention_mask,
            temperature=self.temperature,
            logits_to_keep=logits_to_keep,
            entropy=compute_entropy,
        )
        self._last_logprobs = scores.logprobs.detach()
        return scores.logprobs, scores.entropy, None

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """TRL's loss; notes how far the rollout's and the trainer's log-probabilities agree."""
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask &= inputs["tool_mask"].bool()
        difference = (self._last_logprobs - inputs["sampling_per_token_logps"])[mask]
        ratio = difference.exp()
        rollout = self._rollouts[self._mode]
        self.agreements.append(
            Agreement(
                self.state.global_step,
                rollout.contract,
                float(difference.abs().max()) if len(difference) else 0.0,
                float(ratio.min()) if len(ratio) else 1.0,
                float(ratio.max()) if len(ratio) else 1.0,
                rollout.step == self.state.global_step,
            )
        )
        self._metrics[self._mode]["sampling/sampling_logp_difference/max"].append(
            self.agreements[-1].max_difference
        )
        return loss


def _refuse_unsupported(trainer: Any) -> None:
    """Raise BadParameter for settings under which rollout and trainer could not agree."""
    neutral = {
        "top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None)
    }  # fmt: skip
    for name, values in neutral.items():
        if getattr(trainer, name, None) not in values:
            raise BadParameter(
                f"{name}={getattr(trainer, name)}: the loss knows the temperature alone; give {values[0]}",
                param=name,
            )
    checks = {
        "rollout_func": trainer.rollout_func,
        "use_vllm": trainer.use_vllm,
        "use_transformers_continuous_batching": getattr(
            trainer, "use_transformers_continuous_batching", False
        ),
        "use_liger_kernel": trainer.args.use_liger_kernel,
        "cast_lm_head_to_fp32": getattr(trainer.args, "cast_lm_head_to_fp32", False),
        "entropy_coef": getattr(trainer, "_entropy_bonus_enabled", False),
        "generation_kwargs": getattr(trainer.args, "generation_kwargs", None),
    }
    for name, used in checks.items():
        if used:
            raise BadParameter(f"{name} is not supported with rollouts by Samewise; leave it out", param=name)
    if trainer.accelerator.num_processes > 1:
        raise BadParameter(
            f"{trainer.accelerator.num_processes} processes: this trainer rolls out in one; use "
            "`samewise serve --enable-training`",
            param="args",
        )


__all__ = ["OVERRIDDEN", "Agreement", "GRPOTrainer", "check_trl"]
