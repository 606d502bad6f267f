"""An engine over a model in training, in one process."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from samewise import machine
from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.execute.load import Loaded
from samewise.llm.llm import LLM
from samewise.rl.alias import alias_model, architecture, refuse_other_models

KV_SHARE = 0.2
"""Of a card's free memory, for KV: gradients and the optimizer's state, which come later, need the rest."""


def llm_over(model: PreTrainedModel, tokenizer: Any = None, **settings: Any) -> LLM:
    """An LLM that generates with the weights of a transformers model in training.

    The model's tensors are shared: a CPU makes packed copies, CUDA copies of q/k/v and gate/up weights, which
    it stacks. After the weights have changed call `llm.update_weights(model.state_dict())`: until then the
    engine refuses to serve. `settings` are keywords of EngineConfig; on CUDA `kv_memory` is by default a
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
    return LLM.over(Engine(Loaded(aliases, architecture(model), {}, tokenizer, {}, eos_ids), config))


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end an answer, as transformers' `generate` would take them."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    eos = model.config.eos_token_id if eos is None else eos
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


__all__ = ["llm_over"]
