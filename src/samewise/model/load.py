"""Load a model's weights with transformers, then wrap its linears and activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from samewise.model.activation import ACTIVATIONS, FrameActivation
from samewise.model.attention_binding import ATTENTION
from samewise.model.linear import FrameLinear
from samewise.model.source import Source, weight_files


def load(source: Source, config: Any, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The model with its weights on the CPU, linears wrapped, attention ours; seats not yet taken."""
    with _quiet_if_small(source):
        model = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    return wrap(model)


@contextmanager
def _quiet_if_small(source: Source) -> Iterator[None]:
    """Loading shows progress where it takes long enough to wonder about."""
    size = sum(path.stat().st_size for path in weight_files(source.path))
    if size > 2**31 or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def wrap(model: PreTrainedModel) -> PreTrainedModel:
    """Wrap every linear and every activation once and freeze the model."""
    for module in list(model.modules()):
        if isinstance(module, FrameActivation):
            continue
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, FrameLinear.around(child))
            elif type(child).__module__ in ACTIVATIONS:
                setattr(module, name, FrameActivation(child))
    return model.eval().requires_grad_(requires_grad=False)


def weights_version(model: nn.Module) -> int:
    """How often the weights under these modules were changed since they were loaded."""
    return int(getattr(model, "samewise_weights_version", 0))


def touch_weights(model: nn.Module) -> int:
    """The weights were changed; every engine over them will notice."""
    version = weights_version(model) + 1
    model.samewise_weights_version = version  # type: ignore[assignment]
    return version


__all__ = ["load", "touch_weights", "weights_version", "wrap"]
