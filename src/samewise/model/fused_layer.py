"""A decoder layer as one call of the CPU's kernels (``kernels/native/layer.cpp``).

On a CPU, calling the small operators between a layer's products costs more than computing them. A layer over
native linears and attention is therefore run as one call. Its parts are read from its modules
(``layer_parts.py``), and its result is compared with its modules' before the call is used; any other layer
runs as its modules. Families are listed here: the comparison is on a few rows only.

The kernel's numbers are float32. In bfloat16 and float16 it rounds them to the dtype where modules would, and
is given copies in float32 of what is small: the pass's input, rotary tables, biases and the weights of norms.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from samewise.errors import GuaranteeLost, InvariantBroken
from samewise.kernels.attention.base import NUM_TABLES, PAGE, Rows
from samewise.kernels.attention.native import NativeKernel
from samewise.kernels.attention.native import raise_if_failed as raise_for_attention
from samewise.kernels.linear.packed import PackedWeight
from samewise.kernels.linear.packed import raise_if_failed as raise_for_linear
from samewise.kernels.native import build as native_build
from samewise.kernels.native.calls import DTYPE_CODES, Layer, Norm, Side, Visit
from samewise.model.activation import FrameActivation
from samewise.model.attention_binding import AttentionBinding
from samewise.model.layer_parts import (
    AttentionParts,
    MLPParts,
    activation_code,
    added_share,
    adds_one,
    attention_of,
    attention_parts,
    has_known_norms,
    mlp_of,
    mlp_parts,
    norm_epsilon,
)
from samewise.model.linear import FrameLinear
from samewise.model.surgery import runs_class_forward, with_forward

NAME = "native"  # in the contract
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""transformers' families whose layer is Llama's, or its with norms over heads."""
NATIVE_FAMILIES = FAMILIES | {"gemma3", "granite", "olmo2", "phi3", "smollm3"}
"""Those whose layer the CPU's kernel computes."""
FLOAT32_FAMILIES = frozenset({"olmo2"})
"""Those of them whose layer it computes in float32 alone: in 16 bits their modules round elsewhere."""
MAX_HEAD_DIM = 512  # elements; the kernel's buffer for rotating one head
SILU = (nn.SiLU, type(ACT2FN["silu"]))
CHECK_ROWS = 5  # rows a layer is compared on with its modules
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Of the largest element: above the rounding between two orders of summation."""


@functools.cache
def _entry() -> ctypes._NamedFuncPointer:
    entry = native_build.library().samewise_layer
    entry.argtypes = [ctypes.POINTER(Layer), ctypes.POINTER(Visit)]
    entry.restype = ctypes.c_int
    return entry


class FusedForward:
    """A layer's `forward` as one call. Keeps the tensors alive whose addresses it passes to the kernel."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = attention_parts(layer), mlp_parts(layer)
        self._layer = layer
        self._attention, self._mlp, self.width = attention, mlp, _width(layer)
        self._held = [weight.detach() for weight in layer.parameters()]
        self._copies: list[torch.Tensor] = []
        self.dtype = self._held[0].dtype
        self._linears: list[FrameLinear] = []
        self._packed: list[PackedWeight | None] = []
        self._entry = _entry()
        self.head_dim = self.rotary = 0  # without attention
        self._fields = fields = Layer(
            width=self.width, share=added_share(layer), dtype=DTYPE_CODES[self.dtype]
        )
        if attention:
            binding: AttentionBinding = layer.self_attn.binding
            self._kv, facts = binding.kv, binding.facts  # kept: the module may be bound anew
            self.head_dim = facts.head_dim
            fields.over_heads, fields.rotary = attention.over_heads, attention.rotary
            self.rotary = attention.rotary
            fields.k_pages, fields.v_pages = binding.kv.k.data_ptr(), binding.kv.v.data_ptr()
            fields.num_pages, fields.window = binding.kv.k.shape[0], facts.window or 0
            fields.heads, fields.kv_heads = facts.num_heads, facts.num_kv_heads
            fields.dim, fields.scale = facts.head_dim, layer.self_attn.scaling
        if mlp:
            fields.inner, fields.activation = mlp.down.in_features, activation_code(mlp.activation)
        self._read_weights()

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, R, H]
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        rows: Rows,
        **__: Any,
    ) -> torch.Tensor:
        """The layer's output for R rows."""
        fields = self.fields()
        x, visit, y = self.visit(hidden_states, position_embeddings, rows)
        self.raise_if_failed(self._entry(fields, visit))
        del x  # its address is in `visit`
        return y.to(self.dtype)

    def fields(self) -> Layer:
        """What the kernel is told of the layer."""
        if any(
            linear.packed is not packed for linear, packed in zip(self._linears, self._packed, strict=True)
        ):
            self._read_weights()
        return self._fields

    def visit(
        self, hidden_states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], rows: Rows
    ) -> tuple[tuple[torch.Tensor, ...], Visit, torch.Tensor]:
        """What the kernel is told of a pass: tensors to keep alive, their addresses, the float32 output."""
        self._check(hidden_states, *angles, rows)
        x, cos, sin = (tensor.float().contiguous() for tensor in (hidden_states, *angles))
        y = torch.empty_like(x)
        visit = Visit(
            *(tensor.data_ptr() for tensor in (x, cos, sin, y)),
            *(table.data_ptr() for table in rows[:NUM_TABLES]),
            *(x.shape[1], rows.pages.shape[0], torch.get_num_threads()),
        )
        return (x, cos, sin), visit, y

    @staticmethod
    def raise_if_failed(status: int) -> None:
        """Raise the error that the kernel's return value stands for; 0 is success."""
        if status:
            raise_for_linear(status) if status < 16 else raise_for_attention(status - 16)

    def _read_weights(self) -> None:
        """Take the addresses of the weights."""
        attention, mlp, fields = self._attention, self._mlp, self._fields
        copies: list[torch.Tensor] = []
        linears = _linears_of(attention, mlp)
        if attention:
            fields.qkv, fields.o = _side(attention.qkv, copies), _side([attention.o], copies)
            fields.first = _norm(attention.before, copies)
            fields.after_attention = _norm(attention.after, copies)
            fields.q_norm, fields.k_norm = _norm(attention.q_norm, copies), _norm(attention.k_norm, copies)
        if mlp:
            fields.gate_up, fields.down = _side(mlp.gate_up, copies), _side([mlp.down], copies)
            fields.second, fields.after_mlp = _norm(mlp.before, copies), _norm(mlp.after, copies)
        self._copies, self._linears = copies, linears
        self._packed = [linear.packed for linear in linears]

    def _check(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: Rows) -> None:
        """Raise unless shapes and dtypes are the kernel's. Page numbers and slots it checks itself."""
        num_rows = x.shape[1]
        angles = (1, num_rows, self.rotary) if self.rotary else cos.shape
        if (
            x.shape != (1, num_rows, self.width)
            or x.dtype != self.dtype
            or not cos.shape == sin.shape == angles
            or not cos.dtype == sin.dtype == self.dtype
            or any(table.shape[0] != num_rows for table in rows[: NUM_TABLES - 1])
            or not all(table.dtype == torch.int32 and table.is_contiguous() for table in rows[:NUM_TABLES])
        ):
            shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (x, cos, sin, *rows[:NUM_TABLES]))
            raise InvariantBroken(f"a fused layer of width {self.width} was given {shapes}")


def _in_float32(tensor: torch.Tensor, copies: list[torch.Tensor]) -> int:
    """The address of the tensor, or of a contiguous copy in float32; that tensor is added to `copies`."""
    values = tensor.detach().float().contiguous()
    copies.append(values)
    return values.data_ptr()


def _norm(module: Any, copies: list[torch.Tensor]) -> Norm:
    if module is None:
        return Norm(None, 0.0)
    return Norm(_in_float32(module.weight, copies), norm_epsilon(module), adds_one(module))


def _side(linears: Sequence[FrameLinear], copies: list[torch.Tensor]) -> Side:
    """Linears given the same input: one product where they are packed as one."""
    side = Side()
    products: list[tuple[PackedWeight, torch.Tensor | None]] = []
    for linear in linears:
        if type(linear) is not FrameLinear or linear.packed is None:
            raise GuaranteeLost(f"a fused layer had its {linear} replaced; build a new engine")
        if linear.merged is None:
            products.append((linear.packed, linear.bias))
        elif linear is linears[0]:
            products.append((linear.packed, linear.merged[0].bias))
    for i, (packed, bias) in enumerate(products):
        side.weights[i] = ctypes.addressof(packed.weights)
        side.bias[i] = None if bias is None else _in_float32(bias, copies)
    side.count = len(products)
    return side


def _linears_of(attention: AttentionParts | None, mlp: MLPParts | None) -> list[FrameLinear]:
    linears = [] if attention is None else [*attention.qkv, attention.o]
    return linears if mlp is None else [*linears, *mlp.gate_up, mlp.down]


def _width(layer: Any) -> int:
    attention, mlp = attention_of(layer), mlp_of(layer)
    return int((attention.o_proj if attention else mlp.down_proj).out_features)


def fuse_layer(layer: nn.Module) -> nn.Module:
    """The layer, or a view of it without a sublayer, as one call; only where `unfusable_reason` is None."""
    return with_forward(layer, FusedForward(layer))


def unfusable_reason(layer: nn.Module) -> str | None:
    """Why a layer has to run as its modules; None for one that computes what the kernel computes.

    Writes to KV page 1, so call it before any page is in use.
    """
    package = type(layer).__module__.split(".")
    if package[:2] != ["transformers", "models"] or package[2] not in NATIVE_FAMILIES:
        return f"{type(layer).__name__} is not of {', '.join(sorted(NATIVE_FAMILIES))}"
    changed = changed_modules(layer)
    if attention_of(layer) is None or mlp_of(layer) is None or changed:
        return f"{', '.join(changed) or 'a sublayer'} was changed or has hooks"
    if not has_known_norms(layer):
        return "its norms are in other places"
    return _other_parts_reason(layer)


def _other_parts_reason(layer: Any) -> str | None:
    attention, mlp = attention_parts(layer), mlp_parts(layer)
    assert attention is not None  # the layer is whole
    assert mlp is not None
    dtypes = {weight.dtype for weight in layer.parameters()}
    if len(dtypes) > 1 or not dtypes <= DTYPE_CODES.keys():
        return f"it is in {', '.join(sorted(map(str, dtypes)))}"
    if dtypes != {torch.float32} and type(layer).__module__.split(".")[2] in FLOAT32_FAMILIES:
        return f"it rounds elsewhere in {dtypes.pop()}"
    binding: AttentionBinding = layer.self_attn.binding
    if not isinstance(binding.kernel, NativeKernel):
        return "attention is not native"
    if binding.facts.head_dim > MAX_HEAD_DIM or binding.facts.head_dim % 2 or attention.rotary % 2:
        return f"heads of {binding.facts.head_dim}"
    if activation_code(mlp.activation) is None:
        return "its MLP has another activation than SiLU and GELU by tanh"
    linears = _linears_of(attention, mlp)
    if any(type(linear) is not FrameLinear or linear.packed is None for linear in linears):
        return "a linear is not native"
    return None if _agrees(layer, fuse_layer(layer)) else "its modules give another result"


def changed_modules(layer: nn.Module) -> list[str]:
    """The names of modules that are not as transformers made them, up to what loading replaces."""
    return [name or "it" for name, module in layer.named_modules() if not _is_original(module)]


def _is_original(module: nn.Module) -> bool:
    """Whether a module is transformers' or wrapped at load, and runs nothing but its class's `forward`."""
    wrapped = type(module) in (FrameLinear, FrameActivation)
    known = wrapped or type(module).__module__.startswith(("transformers.", "torch.nn."))
    return known and runs_class_forward(module)


@torch.inference_mode()
def _agrees(layer: nn.Module, fused: nn.Module) -> bool:
    """Whether both add the same to the residual stream, up to the order of summation."""
    parts = attention_parts(layer)
    dim = 2 if parts is None else max(parts.rotary, 2)
    generator = torch.Generator("cpu").manual_seed(0)
    # dtype and device are explicit: the process may have other defaults.
    floats: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    dtype = next(layer.parameters()).dtype
    x, cos, sin = (
        torch.randn(1, CHECK_ROWS, size, generator=generator, **floats).to(dtype)
        for size in (_width(layer), dim, dim)
    )
    ints: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
    lengths, pages = torch.arange(1, CHECK_ROWS + 1, **ints), torch.ones(1, **ints)
    empty = torch.zeros(0, **floats)
    zeros = torch.zeros_like(lengths)
    rows = Rows(lengths, PAGE + lengths - 1, zeros, lengths, zeros, pages, empty, empty)
    inputs: dict[str, Any] = {"position_embeddings": (cos, sin), "rows": rows, "attention_mask": None}
    one, other = (module(x, **inputs).float() - x for module in (layer, fused))
    eps = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    rounding = eps * float(x.abs().max())  # of the stream
    return bool((one - other).abs().max() <= CHECK_TOLERANCE[dtype] * one.abs().max() + rounding + 1e-6)


__all__ = [
    "FAMILIES",
    "NAME",
    "NATIVE_FAMILIES",
    "SILU",
    "FusedForward",
    "changed_modules",
    "fuse_layer",
    "unfusable_reason",
]
