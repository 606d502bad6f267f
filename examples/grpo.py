"""GRPO on a CPU, in a few minutes: rollout and trainer agree to the last bit.

    pip install 'samewise[rl]'
    python examples/grpo.py                      # a tiny random model, a minute
    python examples/grpo.py --model smollm2      # the embedded model, some minutes
    python examples/grpo.py --resume             # from the first checkpoint: the same curve, bit for bit

Prints for every step the largest difference between the log-probabilities of the rollout and of the trainer,
the importance ratio and the reward, and then the same run with transformers' own forward pass in the loss.
Writes both as a picture where matplotlib is installed. Resumed, it says whether the curves are those of the
run before.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from samewise import machine

machine.pin_environment()  # before torch is used

import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback  # noqa: E402
from transformers.utils import logging  # noqa: E402

from samewise.model.resolve import resolve  # noqa: E402
from samewise.rl.alias import set_attention  # noqa: E402
from samewise.rl.trl import GRPOTrainer  # noqa: E402
from samewise.testing import byte_tokenizer, tiny_model  # noqa: E402

PROMPTS = ["The sea is", "A good friend", "In the morning", "My favourite colour"]


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of vowels: anything that a model can learn in a few steps."""
    return [sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text)) for text in completions]


class OrdinaryTrainer(GRPOTrainer):
    """The same rollouts; the loss is made of transformers' own forward pass, as in other trainers."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = trl.GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **kwargs)
        self._last_logprobs = found[0].detach()
        return found


class Report(TrainerCallback):
    """Prints a line for every step."""

    def __init__(self) -> None:
        self.trainer: GRPOTrainer | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.trainer is None or "reward" not in logs:
            return
        last = self.trainer.agreements[-1]
        print(
            f"step {state.global_step:3}  difference {last.max_difference:.3g}  "
            f"ratio {last.min_ratio!r} to {last.max_ratio!r}  reward {logs['reward']:.4f}  {last.contract}"
        )


def load(name: str) -> tuple[Any, Any]:
    """A model in training and its tokenizer."""
    if name == "tiny":
        model = tiny_model(eos_token_id=257)
        set_attention(model, "sdpa")
        return model.requires_grad_(True), byte_tokenizer()
    path = resolve(name, revision=None, trust_remote_code=False).path
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32"), AutoTokenizer.from_pretrained(path)


def train(kind: type[GRPOTrainer], options: argparse.Namespace) -> GRPOTrainer:
    """One run."""
    model, tokenizer = load(options.model)
    out = options.out / kind.__name__
    config = trl.GRPOConfig(
        str(out), per_device_train_batch_size=8, num_generations=8, max_completion_length=options.tokens,
        max_steps=options.steps, learning_rate=options.rate, use_cpu=True, bf16=False, seed=1,
        logging_steps=1, save_steps=max(1, options.steps // 2), report_to="none", disable_tqdm=True,
        log_level="error",
    )  # fmt: skip
    report = Report()
    trainer = kind(
        model, reward_funcs=reward, args=config, train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
        processing_class=tokenizer, callbacks=[report], engine_settings={"kv_memory": "256MiB"},
    )  # fmt: skip
    report.trainer = trainer
    trainer.remove_callback(PrinterCallback)  # Report says it shorter
    checkpoints = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if not options.resume:
        trainer.train()
        return trainer
    if not checkpoints:
        raise SystemExit(f"{out} holds no checkpoint; run this without --resume first")
    before = curve(json.loads((checkpoints[-1] / "trainer_state.json").read_text())["log_history"])
    trainer.train(resume_from_checkpoint=str(checkpoints[0]))
    after = curve(trainer.state.log_history)
    print(f"from {checkpoints[0].name}: the same curve, bit for bit: {after[: len(before)] == before}")
    return trainer


def curve(entries: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    """Step, reward, loss and length of the gradient of every step."""
    names = ("step", "reward", "loss", "grad_norm")
    return [tuple(entry[name] for name in names) for entry in entries if "reward" in entry]


def picture(ours: GRPOTrainer, ordinary: GRPOTrainer, path: Path) -> bool:
    """Differences and rewards of both runs; False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True)
    runs = ((ours, "samewise.rl", "-"), (ordinary, "transformers' forward", "--"))
    for trainer, name, line in runs:
        top.plot(
            [one.step + 1 for one in trainer.agreements],  # counted from 1, as rewards are
            [one.max_difference for one in trainer.agreements],
            line,
            label=name,
        )
        steps, rewards, *_ = zip(*curve(trainer.state.log_history), strict=True)
        bottom.plot(steps, rewards, line, label=name)
    top.set_ylabel("largest difference")
    bottom.set_ylabel("reward")
    bottom.set_xlabel("step")
    top.legend()
    figure.savefig(path)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("grpo-out"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    print("log-probabilities by samewise.rl")
    ours = train(GRPOTrainer, options)
    print("log-probabilities by transformers' own forward pass")
    ordinary = train(OrdinaryTrainer, options)
    path = options.out / "grpo.png"
    if picture(ours, ordinary, path):
        print(f"picture: {path}")


if __name__ == "__main__":
    main()
