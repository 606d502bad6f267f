"""Fix the rotary positions at load, so that no row's angles depend on another row's position.

transformers' `longrope` has two sets of frequencies and picks one in every forward pass, by the longest
position in the batch. Here the choice is made once, from the longest sequence the engine will take.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from samewise.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

PINNED = "pinned longrope"  # transformers acts on "longrope" itself, and on whatever has "dynamic" in it


def pin_rope(model: "nn.Module", max_model_len: int) -> str | None:
    """Make every longrope module of `model` use one set of frequencies for good: the long one iff needed.

    Afterwards its forward is a function of the positions alone, row by row, and replaces no buffer.
    May be called again, with another length. Returns the choice as a fact for the contract
    ("longrope:long"), or None where there was none to make.
    """
    choices: dict[str, str] = {}
    modules: Iterator[Any] = iter(model.modules())  # what they carry is transformers', and not declared
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            if choice := _pin(module, kinds, None, max_model_len):
                choices["all"] = choice
                module.rope_type = PINNED
        elif isinstance(kinds, dict):
            found = {t: c for t, kind in kinds.items() if (c := _pin(module, kind, t, max_model_len))}
            choices |= found
            module.rope_type = {t: PINNED if t in found else kind for t, kind in kinds.items()}
    if not choices:
        return None
    if len(set(choices.values())) == 1:
        return f"longrope:{next(iter(choices.values()))}"
    return "longrope:" + ",".join(f"{layer_type}={choices[layer_type]}" for layer_type in sorted(choices))


def _pin(module: Any, kind: str, layer_type: str | None, max_model_len: int) -> str | None:
    """Write the frequencies of one rotary setting; "long", "short", or None where it is not longrope."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if "dynamic" in kind:
        raise UnsupportedModel(
            f"RoPE type {kind!r} depends on the longest position in the batch; it cannot be pinned"
        )
    if kind not in {"longrope", PINNED}:
        return None
    parameters, prefix = module.config.rope_parameters, ""
    if layer_type is not None:
        parameters, prefix = parameters[layer_type], f"{layer_type}_"
    original: int = parameters["original_max_position_embeddings"]
    is_long = max_model_len > original
    named = {} if layer_type is None else {"layer_type": layer_type}
    # On the CPU, whatever the model runs on: powers differ by a bit between devices.
    inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, torch.device("cpu"), seq_len=original + 1 if is_long else None, **named
    )
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        setattr(module, name, inv_freq.to(getattr(module, name).device, copy=True))
    return "long" if is_long else "short"


__all__ = ["pin_rope"]
