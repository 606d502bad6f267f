"""Fix rotary positions at load: by no other row's position, and by no machine's library of powers.

transformers' `longrope` has two sets of frequencies and picks one in every forward pass, by the longest
position in the batch. Here the choice is made once, from `max_model_len`.

Frequencies are powers of a base, whose last bit differs between machines as torch computes them. The usual
kinds of RoPE get correctly rounded ones instead, the same everywhere. The contract names the bits of all.
"""

import hashlib
from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
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
    # Any: attributes of transformers' modules are not declared.
    modules: Iterator[Any] = iter(model.modules())
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


def fix_rope(model: "nn.Module", max_model_len: int) -> str | None:
    """Both: pinned and exact frequencies. Returns what `pin_rope` does."""
    choice = pin_rope(model, max_model_len)
    use_exact_frequencies(model)
    return choice


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


# ---------------------------------------------------------------------------------------- exact frequencies

DECIMAL = Context(prec=40, rounding=ROUND_HALF_EVEN, Emin=-999_999, Emax=999_999, traps=[])
"""For intermediate results, far beyond the digits of a float32; the caller's own context is not used."""
TOLERANCE = 1e-5  # relative: how far transformers' own frequencies may lie from the exact ones
PI = Decimal("3.1415926535897932384626433832795028841971693993751")


def use_exact_frequencies(model: "nn.Module") -> None:
    """Replace the frequencies of `default`, `linear` and `llama3` RoPE by correctly rounded ones.

    A module whose own frequencies lie elsewhere (a kind that is computed otherwise) keeps them.
    """
    modules: Iterator[Any] = iter(model.modules())
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        parameters = getattr(module.config, "rope_parameters", None) or {}
        if isinstance(kinds, str):
            _use_exact(module, "", kinds, parameters)
        elif isinstance(kinds, dict):  # by layer type
            for layer_type, kind in kinds.items():
                _use_exact(module, f"{layer_type}_", kind, parameters.get(layer_type) or {})


def _use_exact(module: Any, prefix: str, kind: str, parameters: Mapping[str, Any]) -> None:
    import torch

    own = getattr(module, f"{prefix}inv_freq", None)
    exact = exact_frequencies(kind, parameters, len(own)) if isinstance(own, torch.Tensor) else None
    if own is None or exact is None:
        return
    frequencies = torch.tensor(exact, dtype=torch.float64, device=own.device).to(torch.float32)
    if torch.allclose(frequencies, own.to(torch.float32), rtol=TOLERANCE, atol=0.0):
        for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
            if hasattr(module, name):
                setattr(module, name, frequencies)


def exact_frequencies(kind: str, parameters: Mapping[str, Any], count: int) -> list[float] | None:
    """`count` frequencies, each within a rounding of the exact value; None for a kind not known here."""
    theta = parameters.get("rope_theta")
    if kind not in {"default", "linear", "llama3"} or not theta:
        return None
    with localcontext(DECIMAL):
        log_theta = Decimal(theta).ln()
        plain = [(-log_theta * i / count).exp() for i in range(count)]
        if kind == "linear":
            plain = [frequency / Decimal(parameters["factor"]) for frequency in plain]
        if kind == "llama3":
            plain = [_llama3(frequency, parameters) for frequency in plain]
        return [float(frequency) for frequency in plain]


def _llama3(frequency: Decimal, parameters: Mapping[str, Any]) -> Decimal:
    """Slow frequencies divided by a factor, fast ones as they are, those between in proportion."""
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, trained_len = (Decimal(parameters[name]) for name in names)
    turns = trained_len * frequency / (2 * PI)  # over the context the model was first trained for
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    share = (turns - low) / (high - low)
    return (1 - share) * frequency / factor + share * frequency


def frequencies_digest(model: "nn.Module") -> str:
    """A digest of the bits of every frequency and of the scales of cosines and sines."""
    digest = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        for kind, tensor in sorted(module.named_buffers(recurse=False)):
            if kind.endswith("inv_freq") and not kind.endswith("original_inv_freq"):
                bits = tensor.detach().cpu().float().numpy().tobytes()  # exact: bfloat16 is not numpy's
                digest.update(f"{name}.{kind} {tensor.dtype} ".encode() + bits)
        scaling = getattr(module, "attention_scaling", None)
        if isinstance(scaling, int | float):
            digest.update(f"{name} {float(scaling).hex()} ".encode())
    return digest.hexdigest()[:16]


__all__ = ["exact_frequencies", "fix_rope", "frequencies_digest", "pin_rope", "use_exact_frequencies"]
