"""Load a model's weights with transformers, and put its linears and activations under the frame rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from samewise.errors import UnsupportedModel
from samewise.model.activation import ACTIVATION_MODULES, FrameActivation
from samewise.model.attention_binding import ATTENTION
from samewise.model.linear import FrameLinear
from samewise.model.source import Source, refuse_cut_short, weight_files

log = getLogger(__name__)

PROGRESS_BYTES = 2**31  # above 2 GiB of weights loading takes seconds, and shows a progress bar


def load_model(
    source: Source, config: Any, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """The model on its device with its modules wrapped; its attention is not yet bound to KV pages.

    UnsupportedModel if weights are damaged, missing or of another shape than config.json says.
    """
    for file in weight_files(source.path):
        refuse_cut_short(file)
    with _progress_bar_if_large(source), _without_load_report():
        model, info = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    _refuse_incomplete(source, info)
    model.to(device)
    own_memory(model)
    return wrap_modules(model)


def _refuse_incomplete(source: Source, info: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would fill with random numbers: another model in every process."""
    missing = sorted(info["missing_keys"])
    mismatched = sorted(entry[0] for entry in info["mismatched_keys"])
    for names, fault in ((missing, "lacks"), (mismatched, "has with another shape than config.json says")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UnsupportedModel(
                f"the checkpoint {source.name!r} {fault}: {names[0]}{more}; download it again, or check that "
                "config.json belongs to it",
                param="model",
            )
    if unexpected := sorted(info["unexpected_keys"]):
        log.warning(
            "%s: %d tensors are not part of the model and not used, such as %s",
            source.name, len(unexpected), unexpected[0],
        )  # fmt: skip


@contextmanager
def _without_load_report() -> Iterator[None]:
    """transformers' table of missing and unexpected tensors is left out; `_refuse_incomplete` says it."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def own_memory(model: nn.Module) -> None:
    """Copy every tensor that is mapped from a file: an overwritten file would change it in memory.

    Only a storage with memory of its own can be resized, which tells the two apart. Tensors that were
    converted to another dtype have memory of their own already.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def tracked_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers whose writes torch counts: all but those made in inference mode."""
    return [t for t in (*model.parameters(), *model.buffers()) if not t.is_inference()]


def count_writes(tensors: Iterable[torch.Tensor]) -> int:
    """How often these tensors were written in place. Writes through `.data` or raw memory are not counted."""
    return sum([tensor._version for tensor in tensors])  # noqa: SLF001 - torch has no public name for it


def num_updates(model: nn.Module) -> int:
    """How often engines over this model replaced weights of it."""
    return int(getattr(model, "samewise_weights_version", 0))


@contextmanager
def _progress_bar_if_large(source: Source) -> Iterator[None]:
    num_bytes = sum(path.stat().st_size for path in weight_files(source.path))
    if num_bytes > PROGRESS_BYTES or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def wrap_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Replace every linear and activation by one under the frame rule, unless done, and freeze the model."""
    for module in list(model.modules()):
        if isinstance(module, FrameActivation):
            continue
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, FrameLinear.from_linear(child))
            elif type(child).__module__ in ACTIVATION_MODULES:
                setattr(module, name, FrameActivation(child))
    return model.eval().requires_grad_(requires_grad=False)


__all__ = ["count_writes", "load_model", "num_updates", "own_memory", "tracked_tensors", "wrap_modules"]
