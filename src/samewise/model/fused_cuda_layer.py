"""A decoder layer as eight kernels on CUDA: a norm, q/k/v, positions and K and V, attention, and so on.

Between a layer's products stand many small operators, each a launch and a way through memory. A layer that is
Llama's (RMS norms, rotary positions over complete heads, SiLU) over ordered linears is run as norm, product
(with its bias), rotation and storing of K and V, attention, product with the residual added; norm, product
with silu(gate) * up, product with the residual added. Every result is rounded where the modules round it.
Any other layer runs as its modules, compiled. Families are those of `fused_layer`, and each layer's result is
compared with its modules' before the fused kernels are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from samewise.errors import GuaranteeLost
from samewise.kernels.attention.base import PAGE, Heads, Rows
from samewise.kernels.attention.triton import Reading, TritonKernel, attend_stored
from samewise.kernels.layer.triton import NAME, RmsNorm, rms_norm, rotate_and_keep
from samewise.kernels.linear.triton import INTERPRETED, gate, linear
from samewise.model.activation import FrameActivation
from samewise.model.arch import AttentionFacts
from samewise.model.attention_binding import AttentionBinding
from samewise.model.fp8 import Fp8Linear
from samewise.model.fused_layer import FAMILIES, SILU, changed_modules
from samewise.model.layer_parts import attention_of, mlp_of
from samewise.model.linear import FrameLinear
from samewise.model.surgery import with_forward
from samewise.model.views import without_attention, without_mlp

MAX_HEAD_DIM = 256
"""Elements of a head that a program of the rotating kernel holds, several heads at a time."""
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
KEPT_PRODUCTS = (QKV, OUTPUT, GATE_UP)
"""Products that a layer can hand out, by the paths of their linears in it."""
CHECK_ROWS = PAGE  # rows a layer is compared on with its modules: a whole KV page
CHECK_CONTEXT = 8192
"""Tokens before them, at most: a window up to this is reached. Set by hand; it takes memory for one page."""
CHECK_TOLERANCE = {
    torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 1e-1 if INTERPRETED else 4e-2
}  # fmt: skip
"""Of what a sublayer adds, the largest element: above the rounding between two orders of summation. Right
layers of tiny models came to 1e-6 in float32 and 1e-4 in float16, a tenth of its precision. bfloat16 has an
eighth of that precision; Triton's interpreter truncates it, where a device rounds, and came to 4e-2."""


Keep = Callable[[tuple[str, ...], torch.Tensor], None]
"""Given the paths of linears and their product [R, N], which is valid until it returns."""


class Product(NamedTuple):
    """Linears given the same input, as one product."""

    linears: list[FrameLinear | Fp8Linear]  # float8 in drafts only

    def __call__(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: bool = False
    ) -> torch.Tensor:
        """x W' + b, then the residual added; or silu(gate) * up."""
        first = self.linears[0]
        if any(isinstance(one, Fp8Linear) for one in self.linears):
            y = torch.cat([one(x) for one in self.linears], -1)
            return gate(y) if gated else y if residual is None else residual + y
        if any(type(one) is not FrameLinear or not one.ordered for one in self.linears):
            raise GuaranteeLost(f"a fused layer had its {first} replaced; build a new engine")
        assert isinstance(first, FrameLinear)
        weight, bias = (first.weight, first.bias) if first.stacked is None else first.stacked[:2]
        if x.shape[0] not in first.library_rows:
            return linear(x, weight, bias, residual=residual, gated=gated)
        y = F.linear(x, weight, bias)
        if gated:
            return gate(y)
        return y if residual is None else residual + y


class FusedForward:
    """A layer's `forward` as fused kernels; of a view without a sublayer, the other's."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = attention_of(layer), mlp_of(layer)
        self._has_attention, self._has_mlp = attention is not None, mlp is not None
        if attention:
            binding: AttentionBinding = attention.binding
            assert isinstance(binding.kernel, TritonKernel)
            self._kv, self._facts = binding.kv, binding.facts  # kept: the module may be bound anew
            self._programs, self._scale = binding.kernel.num_programs, float(attention.scaling)
            self._first = norm_of(layer.input_layernorm)
            q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
            self._head_norms = None if q_norm is None else (norm_of(q_norm), norm_of(k_norm))
            self._qkv = Product([attention.q_proj, attention.k_proj, attention.v_proj])
            self._o = Product([attention.o_proj])
        if mlp:
            self._second = norm_of(layer.post_attention_layernorm)
            self._gate_up = Product([mlp.gate_proj, mlp.up_proj])
            self._down = Product([mlp.down_proj])

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, R, H]
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        rows: Rows,
        keep: Keep | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """The layer's output for R rows. `keep` is given each of KEPT_PRODUCTS; no bit depends on that."""
        x = hidden_states[0].contiguous()
        if self._has_attention:
            cos, sin = (table[0].contiguous() for table in position_embeddings)
            x = self._attend(x, (cos, sin), rows, keep)
        if self._has_mlp:
            y = rms_norm(x, self._second)
            x = self._down(self._gate_up(y, gated=True) if keep is None else self._gated(y, keep), residual=x)
        return x.unsqueeze(0)

    def _gated(self, x: torch.Tensor, keep: Keep) -> torch.Tensor:
        gate_up = self._gate_up(x)
        keep(GATE_UP, gate_up)
        return gate(gate_up)

    def _attend(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], rows: Rows, keep: Keep | None
    ) -> torch.Tensor:
        facts, kv = self._facts, self._kv
        qkv = self._qkv(rms_norm(x, self._first))
        if keep is not None:
            keep(QKV, qkv)  # to be copied: it is changed in place
        q = rotate_and_keep(qkv, angles, self._head_norms, kv, rows.slots, facts.num_heads)
        reading = Reading(rows.lengths, rows.pages, rows.work_list, rows.workspace)
        out = attend_stored(q, kv, reading, self._scale, facts.window or 0, self._programs)
        y = self._o(out.flatten(1), residual=x)
        if keep is not None:
            keep(OUTPUT, y - x)  # the product, up to a rounding of the stream
        return y


class FusedNorm:
    """A norm's `forward` as one kernel."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm_of(norm)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The norm of every row."""
        y = rms_norm(hidden_states.flatten(0, -2).contiguous(), self._norm)
        return y.view(hidden_states.shape)


def norm_of(module: Any) -> RmsNorm:
    """What the kernel needs of transformers' RMS norm."""
    return RmsNorm(module.weight, float(module.variance_epsilon))


def fuse_layer(layer: nn.Module) -> nn.Module:
    """The layer, or a view of it without a sublayer, as fused kernels; where `unfusable_reason` is None."""
    return with_forward(layer, FusedForward(layer))


def fuse_norm(norm: nn.Module) -> nn.Module:
    """A norm outside of the layers, of the kind they have, as one kernel."""
    return with_forward(norm, FusedNorm(norm))


def unfusable_reason(layer: nn.Module) -> str | None:
    """Why a layer has to run as its modules; None for one that computes what the kernels compute.

    Writes to KV page 1, so call it before any page is in use.
    """
    package = type(layer).__module__.split(".")
    if package[:2] != ["transformers", "models"] or package[2] not in FAMILIES:
        return f"{type(layer).__name__} is not of {', '.join(sorted(FAMILIES))}"
    attention, mlp = attention_of(layer), mlp_of(layer)
    changed = changed_modules(layer)
    if attention is None or mlp is None or changed:
        return f"{', '.join(changed) or 'a sublayer'} was changed or has hooks"
    binding: AttentionBinding = attention.binding
    if not isinstance(binding.kernel, TritonKernel):
        return "attention is not Triton's"
    if binding.facts.head_dim > MAX_HEAD_DIM or binding.facts.head_dim % 2:
        return f"heads of {binding.facts.head_dim}"
    if type(mlp.act_fn) is not FrameActivation or type(mlp.act_fn.inner) not in SILU:
        return "its MLP has another activation than SiLU"
    siblings = [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
    linears = [*siblings, attention.o_proj, mlp.down_proj]
    if any(type(one) is not FrameLinear or not one.ordered for one in linears):
        return "a linear is not ordered"
    if any(one.stacked is None for one in siblings):
        return "linears with the same input are not stacked"
    return None if _agrees(layer) else "its modules give another result"


@torch.inference_mode()
def _agrees(layer: Any) -> bool:
    """Whether both sublayers add what their modules add to the residual stream, up to rounding.

    Each by itself: beside a large MLP's result an error of attention would not be seen.
    """
    facts, weight = layer.self_attn.binding.facts, layer.self_attn.q_proj.weight
    generator = torch.Generator("cpu").manual_seed(0)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    x = torch.randn(1, CHECK_ROWS, weight.shape[1], generator=generator, **floats).to(weight)
    angles = 8.0 * torch.rand(1, CHECK_ROWS, facts.head_dim // 2, generator=generator, **floats)
    cos, sin = (torch.cat([table, table], -1).to(weight) for table in (angles.cos(), angles.sin()))
    rows = _rows_behind_a_context(layer.self_attn.binding.kernel, facts, weight)
    inputs: dict[str, Any] = {"position_embeddings": (cos, sin), "rows": rows, "attention_mask": None}
    return all(
        _is_close(view(x, **inputs), fuse_layer(view)(x, **inputs), x)
        for view in (without_mlp(layer), without_attention(layer))
    )


def _is_close(one: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether two sums with the stream x are one result, rounded in other places."""
    dtype = x.dtype
    one, other, x = one.float(), other.float(), x.float()
    eps = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    rounding = eps * float(x.abs().max())  # of the stream
    largest = float((one - x).abs().max())
    return bool((one - other).abs().max() <= CHECK_TOLERANCE[dtype] * largest + rounding + 1e-6)


def _rows_behind_a_context(kernel: TritonKernel, facts: AttentionFacts, weight: torch.Tensor) -> Rows:
    """Rows at the end of a context that is longer than the window, laid out for one layer.

    Their K and V are those of KV page 1, and the pages before are this page again and again.
    """
    context = facts.window if facts.window is not None and facts.window <= CHECK_CONTEXT else CHECK_ROWS
    num_pages = -(-context // PAGE) + CHECK_ROWS // PAGE
    first = num_pages * PAGE - CHECK_ROWS
    heads = Heads(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.window)
    plan = kernel.plan([heads], weight.dtype, CHECK_ROWS, num_pages * PAGE)
    lengths = first + np.arange(1, CHECK_ROWS + 1, dtype=np.int32)
    slots = PAGE + np.arange(CHECK_ROWS, dtype=np.int32)
    zeros = np.zeros_like(lengths)
    work_list = np.zeros(plan.work_list_len(CHECK_ROWS), np.int32)
    plan.write(lengths, zeros, lengths, zeros, work_list)
    tables = (lengths, slots, zeros, lengths, zeros, np.ones(num_pages, np.int32), work_list)
    on_device = [torch.from_numpy(table).to(weight.device) for table in tables]
    on_device.append(torch.zeros(plan.workspace_len, dtype=torch.float32, device=weight.device))
    return Rows(*on_device)


__all__ = [
    "KEPT_PRODUCTS",
    "NAME",
    "FusedForward",
    "FusedNorm",
    "Product",
    "fuse_layer",
    "fuse_norm",
    "norm_of",
    "unfusable_reason",
]
