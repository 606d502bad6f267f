"""An engine over a model in training, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from samewise import machine
from samewise.config import EngineConfig
from samewise.contract import Contract
from samewise.engine import Engine
from samewise.engine.weights import WeightUpdate
from samewise.errors import GuaranteeLost
from samewise.execute.load import Loaded
from samewise.llm.intake import CheckedRequest, CheckedScore, Prompt
from samewise.llm.llm import LLM
from samewise.outputs import ScoreOutput
from samewise.params import SamplingParams
from samewise.rl.alias import alias_model, architecture, refuse_other_models, weights_of
from samewise.rl.state import state_of

KV_SHARE = 0.2
"""Of a card's free memory, for KV: gradients and the optimizer's state, which come later, need the rest."""


class SharedLLM(LLM):
    """An LLM over the tensors of a model in training.

    The trainer may write them in ways that torch does not count, through `.data`: so their content is
    compared with the certified one before every call.
    """

    def _share(self, model: PreTrainedModel) -> None:
        self._shared = [tensor for _, tensor in weights_of(model)]
        self._certified = state_of(self._shared)

    def update_weights(self, update: WeightUpdate, *, mode: str | None = None) -> Contract:
        """See LLM.update_weights."""
        contract = super().update_weights(update, mode=mode)
        self._certified = state_of(self._shared)
        return contract

    def _check_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[CheckedRequest]:
        self._refuse_changed()
        return super()._check_all(prompts, params)

    def _score(self, requests: list[CheckedScore], *, use_tqdm: bool) -> list[ScoreOutput]:
        self._refuse_changed()
        return super()._score(requests, use_tqdm=use_tqdm)

    def _refuse_changed(self) -> None:
        if state_of(self._shared) != self._certified:
            raise GuaranteeLost(
                "the weights are not the certified ones: a tensor of the model was written in place, through "
                ".data or replaced; call update_weights(model.state_dict())"
            )


def llm_over(model: PreTrainedModel, tokenizer: Any = None, **settings: Any) -> LLM:
    """An LLM that generates with the weights of a transformers model in training.

    The model's tensors are shared: a CPU makes packed copies, CUDA copies of q/k/v and gate/up weights, which
    it stacks. After the weights have changed, in whatever way, call `llm.update_weights(model.state_dict())`:
    until then calls are refused. `settings` are keywords of EngineConfig; on CUDA `kv_memory` is by default a
    fifth of what is free.
    """
    machine.pin_environment()
    refuse_other_models(model)
    first = next(model.parameters())
    own = {"device": first.device.type, "dtype": str(first.dtype).removeprefix("torch.")}
    name = str(getattr(model.config, "name_or_path", "") or "a model in training")
    default = {"kv_memory": KV_SHARE} if first.device.type == "cuda" else {}
    config = EngineConfig.of(**{"model": name} | default | settings | own)
    with torch.inference_mode(mode=False):
        aliases = alias_model(model)
    eos_ids = _eos_ids(model)
    llm = SharedLLM.over(Engine(Loaded(aliases, architecture(model), {}, tokenizer, {}, eos_ids), config))
    llm._share(model)  # noqa: SLF001 - an alternative constructor
    return llm


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end an answer, as transformers' `generate` would take them."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    eos = model.config.eos_token_id if eos is None else eos
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


__all__ = ["SharedLLM", "llm_over"]
