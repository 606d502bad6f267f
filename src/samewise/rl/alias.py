"""A trainer's model as the engine runs it: other modules over the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from samewise.errors import BadParameter
from samewise.model.arch import Arch, inspect_model
from samewise.model.attention_binding import ATTENTION
from samewise.model.load import wrap_modules
from samewise.model.surgery import alias_tensors, inner_forwards


def refuse_other_models(model: object) -> None:
    """Raise BadParameter for anything but a transformers model in one dtype on one device."""
    if not isinstance(model, PreTrainedModel):
        raise BadParameter(
            f"model is a {type(model).__name__}; give the transformers model itself, with adapters merged "
            "and wrappers removed",
            param="model",
        )
    if adapters := adapted_modules(model):
        raise BadParameter(
            f"model: {adapters[0]} has an adapter, which the engine would not see change; merge it (peft: "
            "merge_and_unload) or train without adapters",
            param="model",
        )
    if changed := inner_forwards(model):
        raise BadParameter(
            f"model: {changed[0]} has a forward of its own, which the engine has not; give the model as "
            "transformers loads it",
            param="model",
        )
    first = next(model.parameters())
    odd = [name for name, parameter in model.named_parameters() if parameter.dtype != first.dtype]
    if odd:
        raise BadParameter(
            f"model: {odd[0]} is not in {str(first.dtype).removeprefix('torch.')} as its first parameter; "
            "give all parameters one dtype, the engine's",
            param="model",
        )
    odd = [name for name, parameter in model.named_parameters() if parameter.device != first.device]
    if odd:
        raise BadParameter(
            f"model: {odd[0]} is not on {first.device} as its first parameter; an engine runs on one device",
            param="model",
        )
    refuse_other_card(first.device)


def adapted_modules(model: nn.Module) -> list[str]:
    """The names of modules that adapters have wrapped, as PEFT does: they hold what they wrap as a child."""
    wrapping = {"base_layer", "modules_to_save"}
    return [name for name, module in model.named_modules() if wrapping & dict(module.named_children()).keys()]


def refuse_other_card(device: torch.device) -> None:
    """Raise BadParameter for a CUDA device that is not torch's current one: an engine would run there."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise BadParameter(
            f"the model is on {device} and the engine would run on torch's current device, "
            f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device({device.index}) first",
            param="model",
        )


def architecture(model: PreTrainedModel) -> Arch:
    """What the engine has to know of it; UnsupportedModel where the engine cannot run it."""
    config = deepcopy(model.config)
    config.dtype = next(model.parameters()).dtype
    return inspect_model(config)


def alias_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model over the same memory, with the engine's attention and its modules wrapped."""
    aliases: Any = alias_tensors(model)
    set_attention(aliases, ATTENTION)
    return wrap_modules(aliases)


def set_attention(model: nn.Module, name: str, *, instead_of: str | None = None) -> None:
    """Give modules another attention, in configurations of their own."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        current = getattr(config, "_attn_implementation", None)
        if current is None or instead_of not in (None, current):
            continue
        if id(config) not in configs:
            configs[id(config)] = copied = deepcopy(config)
            copied._attn_implementation = name  # noqa: SLF001 - its only name
        module.config = configs[id(config)]


def weights_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, tied ones once, and the buffers of the state dict, by name."""
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


__all__ = [
    "adapted_modules",
    "alias_model",
    "architecture",
    "refuse_other_card",
    "refuse_other_models",
    "set_attention",
    "weights_of",
]
