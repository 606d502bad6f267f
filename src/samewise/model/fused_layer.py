"""A decoder layer as one call of the CPU's kernels (``kernels/native/layer.cpp``).

On a CPU, calling the small operators between a layer's products costs more than computing them. A layer that
is Llama's (RMS norms, rotary positions over complete heads, SiLU), in float32 over native linears and
attention, is therefore run as one call; any other layer runs as its modules. Families are listed here, and
each layer's result is compared with its modules' before the fused call is used.
"""

from __future__ import annotations

import ctypes
import functools
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
from samewise.kernels.native.calls import Layer, Norm, Side, Visit
from samewise.model.activation import FrameActivation
from samewise.model.attention_binding import AttentionBinding
from samewise.model.linear import FrameLinear
from samewise.model.surgery import runs_class_forward, with_forward

NAME = "native"  # in the contract
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""transformers' families whose layer is the kernel's."""
MAX_HEAD_DIM = 512  # elements; the kernel's buffer for rotating one head
SILU = (nn.SiLU, type(ACT2FN["silu"]))
CHECK_ROWS = 5  # rows a layer is compared on with its modules
CHECK_TOLERANCE = 1e-4  # of the largest element: above the rounding between two orders of summation


@functools.cache
def _entry() -> ctypes._NamedFuncPointer:
    entry = native_build.library().samewise_layer
    entry.argtypes = [ctypes.POINTER(Layer), ctypes.POINTER(Visit)]
    entry.restype = ctypes.c_int
    return entry


class FusedForward:
    """A layer's `forward` as one call. Keeps the tensors alive whose addresses it passes to the kernel."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = attention_of(layer), mlp_of(layer)
        self._layer = layer
        self._attention, self._mlp, self.width = attention, mlp, _width(layer)
        self._held = [weight.detach() for weight in layer.parameters()]
        self._linears: list[FrameLinear] = []
        self._packed: list[PackedWeight | None] = []
        self._entry, self._parallel = _entry(), native_build.gomp_parallel()
        self.head_dim = 0  # without attention
        self._fields = fields = Layer(width=self.width)
        if attention:
            binding: AttentionBinding = attention.binding
            self._kv, facts = binding.kv, binding.facts  # kept: the module may be bound anew
            self.head_dim = facts.head_dim
            fields.first = _norm(layer.input_layernorm)
            fields.q_norm = _norm(getattr(attention, "q_norm", None))
            fields.k_norm = _norm(getattr(attention, "k_norm", None))
            fields.k_pages, fields.v_pages = binding.kv.k.data_ptr(), binding.kv.v.data_ptr()
            fields.num_pages, fields.window = binding.kv.k.shape[0], facts.window or 0
            fields.heads, fields.kv_heads = facts.num_heads, facts.num_kv_heads
            fields.dim, fields.scale = facts.head_dim, attention.scaling
        if mlp:
            fields.second = _norm(layer.post_attention_layernorm)
            fields.inner = mlp.down_proj.in_features
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
        return y

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
        """What the kernel is told of a pass: tensors to keep alive, their addresses, the output's tensor."""
        x = hidden_states.contiguous()
        cos, sin = (table.contiguous() for table in angles)
        self._check(x, cos, sin, rows)
        y = torch.empty_like(x)
        visit = Visit(
            *(tensor.data_ptr() for tensor in (x, cos, sin, y)),
            *(table.data_ptr() for table in rows[:NUM_TABLES]),
            *(x.shape[1], rows.pages.shape[0], torch.get_num_threads(), self._parallel),
        )
        return (x, cos, sin), visit, y

    @staticmethod
    def raise_if_failed(status: int) -> None:
        """Raise the error that the kernel's return value stands for; 0 is success."""
        if status:
            raise_for_linear(status) if status < 16 else raise_for_attention(status - 16)

    def _read_weights(self) -> None:
        """Take the addresses of the packed weights."""
        attention, mlp = self._attention, self._mlp
        sublayers = [sublayer for sublayer in (attention, mlp) if sublayer is not None]
        self._linears = [
            module
            for sublayer in sublayers
            for module in sublayer.modules()
            if isinstance(module, FrameLinear)
        ]
        self._packed = [linear.packed for linear in self._linears]
        if attention:
            self._fields.qkv = _side([attention.q_proj, attention.k_proj, attention.v_proj])
            self._fields.o = _side([attention.o_proj])
        if mlp:
            self._fields.gate_up = _side([mlp.gate_proj, mlp.up_proj])
            self._fields.down = _side([mlp.down_proj])

    def _check(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: Rows) -> None:
        """Raise unless shapes and dtypes are the kernel's. Page numbers and slots it checks itself."""
        num_rows = x.shape[1]
        angles = (1, num_rows, self.head_dim) if self._attention else cos.shape
        if (
            x.shape != (1, num_rows, self.width)
            or x.dtype != torch.float32
            or not cos.shape == sin.shape == angles
            or not cos.dtype == sin.dtype == torch.float32
            or any(table.shape[0] != num_rows for table in rows[: NUM_TABLES - 1])
            or not all(table.dtype == torch.int32 and table.is_contiguous() for table in rows[:NUM_TABLES])
        ):
            shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (x, cos, sin, *rows[:NUM_TABLES]))
            raise InvariantBroken(f"a fused layer of width {self.width} was given {shapes}")


def _norm(module: Any) -> Norm:
    if module is None:
        return Norm(None, 0.0)
    return Norm(module.weight.data_ptr(), module.variance_epsilon)


def _side(linears: list[FrameLinear]) -> Side:
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
        side.bias[i] = None if bias is None else bias.data_ptr()
    side.count = len(products)
    return side


# Attributes of transformers' layers are not declared, hence Any.


def attention_of(layer: Any) -> Any:
    """The layer's attention; None in a view without it."""
    return layer.self_attn if hasattr(layer.self_attn, "q_proj") else None


def mlp_of(layer: Any) -> Any:
    """The layer's MLP; None in a view without it."""
    return layer.mlp if hasattr(layer.mlp, "gate_proj") else None


def _width(layer: Any) -> int:
    attention = attention_of(layer)
    return int((attention.q_proj if attention else layer.mlp.gate_proj).in_features)


def fuse_layer(layer: nn.Module) -> nn.Module:
    """The layer, or a view of it without a sublayer, as one call; only where `unfusable_reason` is None."""
    return with_forward(layer, FusedForward(layer))


def unfusable_reason(layer: nn.Module) -> str | None:
    """Why a layer has to run as its modules; None for one that computes what the kernel computes.

    Writes to KV page 1, so call it before any page is in use.
    """
    package = type(layer).__module__.split(".")
    if package[:2] != ["transformers", "models"] or package[2] not in FAMILIES:
        return f"{type(layer).__name__} is not of {', '.join(sorted(FAMILIES))}"
    attention, mlp = attention_of(layer), mlp_of(layer)
    changed = changed_modules(layer)
    if attention is None or mlp is None or changed:
        return f"{', '.join(changed) or 'a sublayer'} was changed or has hooks"
    if any(weight.dtype != torch.float32 for weight in layer.parameters()):
        return "it is not in float32"
    binding: AttentionBinding = attention.binding
    if not isinstance(binding.kernel, NativeKernel):
        return "attention is not native"
    if binding.facts.head_dim > MAX_HEAD_DIM or binding.facts.head_dim % 2:
        return f"heads of {binding.facts.head_dim}"
    if type(mlp.act_fn) is not FrameActivation or type(mlp.act_fn.inner) not in SILU:
        return "its MLP has another activation than SiLU"
    linears = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
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
    dim = attention_of(layer).binding.facts.head_dim
    generator = torch.Generator("cpu").manual_seed(0)
    # dtype and device are explicit: the process may have other defaults.
    floats: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    x, cos, sin = (
        torch.randn(1, CHECK_ROWS, size, generator=generator, **floats) for size in (_width(layer), dim, dim)
    )
    ints: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
    lengths, pages = torch.arange(1, CHECK_ROWS + 1, **ints), torch.ones(1, **ints)
    empty = torch.zeros(0, **floats)
    zeros = torch.zeros_like(lengths)
    rows = Rows(lengths, PAGE + lengths - 1, zeros, lengths, zeros, pages, empty, empty)
    inputs: dict[str, Any] = {"position_embeddings": (cos, sin), "rows": rows, "attention_mask": None}
    one, other = layer(x, **inputs) - x, fused(x, **inputs) - x
    return bool((one - other).abs().max() <= CHECK_TOLERANCE * one.abs().max() + 1e-6)


__all__ = [
    "FAMILIES",
    "NAME",
    "SILU",
    "FusedForward",
    "attention_of",
    "changed_modules",
    "fuse_layer",
    "mlp_of",
    "unfusable_reason",
]
