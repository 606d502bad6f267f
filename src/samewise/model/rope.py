"""Fix rotary positions at load, so that no row's angles depend on another row's position.

transformers' `longrope` has two sets of frequencies and picks one in every forward pass, by the longest
position in the batch. Here the choice is made once, from `max_model_len`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from samewise.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

PINNED = "pinned longrope"  # any name will do that is not "longrope" and has no "dynamic" in it


def pin_rope(model: "nn.Module", max_model_len: int) -> str | None:
    """Make longrope modules use one set of frequencies: the long one iff `max_model_len` needs it.

    Afterwards its forward is a function of the positions alone, row by row, and replaces no buffer.
    May be called again with another length. Returns the choice as a contract fact ("longrope:long"), or None
    for a model without longrope.
    """
    choices: dict[str, str] = {}
    modules: Iterator[Any] = iter(
        model.modules()
    )  # Any: attributes of transformers' modules are not declared
    for module in modules:
        rope_types = getattr(module, "rope_type", None)
        if isinstance(rope_types, str):
            if choice := _pin(module, rope_types, None, max_model_len):
                choices["all"] = choice
                module.rope_type = PINNED
        elif isinstance(rope_types, dict):  # by layer type
            pinned = {
                layer_type: choice
                for layer_type, rope_type in rope_types.items()
                if (choice := _pin(module, rope_type, layer_type, max_model_len))
            }
            choices |= pinned
            module.rope_type = rope_types | dict.fromkeys(pinned, PINNED)
    if not choices:
        return None
    if len(set(choices.values())) == 1:
        return f"longrope:{next(iter(choices.values()))}"
    return "longrope:" + ",".join(f"{layer_type}={choices[layer_type]}" for layer_type in sorted(choices))


def _pin(module: Any, rope_type: str, layer_type: str | None, max_model_len: int) -> str | None:
    """Write the frequencies of one rotary setting. Returns "long", "short", or None if it is not longrope."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if "dynamic" in rope_type:
        raise UnsupportedModel(
            f"RoPE type {rope_type!r} depends on the longest position in the batch; it cannot be pinned",
            param="model",
        )
    if rope_type not in {"longrope", PINNED}:
        return None
    parameters, prefix = module.config.rope_parameters, ""
    if layer_type is not None:
        parameters, prefix = parameters[layer_type], f"{layer_type}_"
    original: int = parameters["original_max_position_embeddings"]
    is_long = max_model_len > original
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    # Always on the CPU: powers differ by a bit between devices.
    inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, torch.device("cpu"), seq_len=original + 1 if is_long else None, **kwargs
    )
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        setattr(module, name, inv_freq.to(getattr(module, name).device, copy=True))
    return "long" if is_long else "short"


__all__ = ["pin_rope"]
