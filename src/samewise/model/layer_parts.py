"""What a decoder layer of transformers consists of, read from its modules: the same for every family.

Families differ in which norms they have and where, in whether projections are one linear or several, in what
turns and how far, in the activation and in how much of a sublayer's result is added to the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers.activations import ACT2FN

from samewise.kernels.native.calls import GELU_TANH, SILU
from samewise.model.activation import FrameActivation
from samewise.model.linear import FrameLinear

ACTIVATIONS = {
    nn.SiLU: SILU,
    type(ACT2FN["silu"]): SILU,
    type(ACT2FN["gelu_pytorch_tanh"]): GELU_TANH,
}
"""By class, the kernel's code."""

NORMS: dict[frozenset[str], tuple[str | None, ...]] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): (
        "input_layernorm", None, "post_attention_layernorm", None,
    ),
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): (
        None, "post_attention_layernorm", None, "post_feedforward_layernorm",
    ),
    frozenset({
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    }): (
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip
"""By the norms a layer has: those before and after attention, before and after the MLP."""


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The modules of attention, and how its heads are normed and turned."""

    qkv: tuple[FrameLinear, ...]
    o: FrameLinear
    before: Any  # norms; None: there is none
    after: Any
    q_norm: Any
    k_norm: Any
    over_heads: bool  # q_norm and k_norm are of all heads together
    rotary: int  # elements of a head that turn


@dataclass(frozen=True, slots=True)
class MLPParts:
    """The modules of an MLP."""

    gate_up: tuple[FrameLinear, ...]
    down: FrameLinear
    before: Any  # norms; None: there is none
    after: Any
    activation: Any


def attention_of(layer: Any) -> Any:
    """The layer's attention; None in a view without it."""
    return layer.self_attn if hasattr(layer.self_attn, "o_proj") else None


def mlp_of(layer: Any) -> Any:
    """The layer's MLP; None in a view without it."""
    return layer.mlp if hasattr(layer.mlp, "down_proj") else None


def has_known_norms(layer: nn.Module) -> bool:
    """Whether the layer has norms in places that are known here."""
    return _norm_names(layer) in NORMS


def adds_down_product(layer: Any) -> bool:
    """Whether the layer's last step adds the product of `mlp.down_proj`, times a number, to the stream.

    Of layers of known families, with modules of any class.
    """
    names = _norm_names(layer)
    return names in NORMS and NORMS[names][3] is None and mlp_of(layer) is not None


def attention_parts(layer: Any) -> AttentionParts | None:
    """None in a view without attention."""
    attention = attention_of(layer)
    if attention is None:
        return None
    before, after, _, _ = _norms(layer)
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    dim = attention.binding.facts.head_dim
    return AttentionParts(
        _linears(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")), attention.o_proj, before, after,
        q_norm, k_norm, q_norm is not None and q_norm.weight.shape[0] != dim, _rotary(attention, dim),
    )  # fmt: skip


def mlp_parts(layer: Any) -> MLPParts | None:
    """None in a view without an MLP."""
    mlp = mlp_of(layer)
    if mlp is None:
        return None
    _, _, before, after = _norms(layer)
    activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    return MLPParts(
        _linears(mlp, "gate_up_proj", ("gate_proj", "up_proj")), mlp.down_proj, before, after, activation
    )


def activation_code(activation: Any) -> int | None:
    """The kernel's code for an activation; None where it has none."""
    return ACTIVATIONS.get(type(activation.inner)) if type(activation) is FrameActivation else None


def added_share(layer: Any) -> float:
    """What a sublayer's result is multiplied with before it is added to the stream."""
    return float(getattr(layer, "residual_multiplier", 1.0))


def norm_epsilon(norm: Any) -> float:
    """The number that is added to the mean of squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


@torch.inference_mode()
def adds_one(norm: Any) -> bool:
    """Whether a norm adds 1 to its weights; found by norming ones with weights of 0."""
    ones = torch.ones(1, norm.weight.shape[0], dtype=torch.float32, device="cpu")
    normed: torch.Tensor = functional_call(norm, {"weight": torch.zeros_like(ones[0])}, (ones,))
    return bool(normed[0, 0] > 0.5)  # 0, or 1 but for the epsilon


def _norm_names(layer: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in layer.named_children() if name.endswith("layernorm"))


def _norms(layer: nn.Module) -> Iterator[Any]:
    """Before and after attention, before and after the MLP; None where there is none."""
    for name in NORMS[_norm_names(layer)]:
        yield None if name is None else getattr(layer, name)


def _linears(sublayer: Any, one: str, several: tuple[str, ...]) -> tuple[FrameLinear, ...]:
    names = (one,) if hasattr(sublayer, one) else several
    return tuple(getattr(sublayer, name) for name in names)


def _rotary(attention: Any, dim: int) -> int:
    if not getattr(attention, "use_rope", True):
        return 0
    parameters = getattr(attention.config, "rope_parameters", None) or {}
    return int(dim * parameters.get("partial_rotary_factor", 1.0))


__all__ = [
    "ACTIVATIONS",
    "NORMS",
    "AttentionParts",
    "MLPParts",
    "activation_code",
    "added_share",
    "adds_down_product",
    "adds_one",
    "attention_of",
    "attention_parts",
    "has_known_norms",
    "mlp_of",
    "mlp_parts",
    "norm_epsilon",
]
