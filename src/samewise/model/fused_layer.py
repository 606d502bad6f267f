"""A decoder layer as one call of the CPU's kernels (``model/native/layer.cpp``).

Between its products a layer does little, and on a CPU most of that is the price of asking for it. So a layer
whose modules do what the kernel does, in float32 over native linears and attention, is run as one call; any
other runs as its modules. What the kernel does is Llama's layer: RMS norms, rotary positions over whole
heads, SiLU. Families are named here, and each layer's result is compared with its modules' before it is used.

Knows layers and rows; has never heard of a request.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from samewise.errors import GuaranteeLost, InvariantBroken
from samewise.kernels import native
from samewise.kernels.attention.base import PAGE, Rows
from samewise.kernels.attention.native import NativeKernel
from samewise.kernels.attention.native import raise_if_failed as raise_for_attention
from samewise.kernels.linear.packed import Packed
from samewise.kernels.linear.packed import raise_if_failed as raise_for_linear
from samewise.model.activation import FrameActivation
from samewise.model.attention_binding import AttentionBinding
from samewise.model.linear import FrameLinear
from samewise.model.surgery import is_untouched, with_forward

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Of transformers, whose layers these are."""
LONGEST = 512  # of a head the kernel turns
SILU = (nn.SiLU, type(ACT2FN["silu"]))
TRIED = 5  # rows a layer is compared on
CLOSE = 1e-4  # of the largest element, between two orders of summation


class _Norm(ctypes.Structure):
    """Mirrors ``Norm`` in layer.cpp, field by field."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class _Side(ctypes.Structure):
    """Mirrors ``Side``."""

    _fields_ = (("weights", ctypes.c_void_p * 3), ("bias", ctypes.c_void_p * 3), ("count", ctypes.c_int64))


class _Layer(ctypes.Structure):
    """Mirrors ``Layer``."""

    _fields_ = (
        *((name, _Norm) for name in ("first", "second", "q_norm", "k_norm")),
        *((name, _Side) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("k_pages", "v_pages")),
        *((name, ctypes.c_int64) for name in ("num_pages", "heads", "kv_heads", "dim", "window")),
        *((name, ctypes.c_int64) for name in ("width", "inner")),
        ("scale", ctypes.c_float),
    )


class _Visit(ctypes.Structure):
    """Mirrors ``Visit``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "y")),
        *((name, ctypes.c_void_p) for name in ("lengths", "slots", "page_start", "pages")),
        *((name, ctypes.c_int64) for name in ("rows", "listed_pages", "threads")),
        ("parallel", ctypes.c_void_p),
    )


@functools.cache
def _entry() -> ctypes._NamedFuncPointer:
    entry = native.library().samewise_layer
    entry.argtypes = [ctypes.POINTER(_Layer), ctypes.POINTER(_Visit)]
    entry.restype = ctypes.c_int
    return entry


class Native:
    """What stands where a layer's `forward` stood."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = _attention(layer), _mlp(layer)
        self._layer = layer  # whose weights these fields point to
        self._attention, self._mlp, self._width = attention, mlp, _width(layer)
        self._held = [weight.detach() for weight in layer.parameters()]
        self._linears: list[FrameLinear] = []
        self._packed: list[Packed | None] = []
        self._entry, self._parallel = _entry(), native.parallel()
        self._fields = fields = _Layer(width=self._width)
        if attention:
            binding: AttentionBinding = attention.binding
            self._kv, facts = binding.kv, binding.facts  # another binding may be taken later
            self._dim = facts.head_dim
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
        self._look()

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, R, H]
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        rows: Rows,
        **__: Any,
    ) -> torch.Tensor:
        """The layer's answer for R rows."""
        if not all(linear.packed is known for linear, known in zip(self._linears, self._packed, strict=True)):
            self._look()  # weights were packed anew
        x = hidden_states.contiguous()
        cos, sin = (table.contiguous() for table in position_embeddings)
        num = x.shape[1]
        self._check(x, cos, sin, rows)
        y = torch.empty_like(x)
        visit = _Visit(
            *(tensor.data_ptr() for tensor in (x, cos, sin, y)),
            *(table.data_ptr() for table in (rows.lengths, rows.slots, rows.page_start, rows.pages)),
            *(num, rows.pages.shape[0], torch.get_num_threads(), self._parallel),
        )
        result = self._entry(self._fields, visit)
        if result:
            raise_for_linear(result) if result < 16 else raise_for_attention(result - 16)
        return y

    def _look(self) -> None:
        """Where the weights lie."""
        parts = [part for part in (self._attention, self._mlp) if part is not None]
        self._linears = [linear for part in parts for linear in _linears(part)]
        self._packed = [linear.packed for linear in self._linears]
        if part := self._attention:
            self._fields.qkv = _side([part.q_proj, part.k_proj, part.v_proj])
            self._fields.o = _side([part.o_proj])
        if part := self._mlp:
            self._fields.gate_up = _side([part.gate_proj, part.up_proj])
            self._fields.down = _side([part.down_proj])

    def _check(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: Rows) -> None:
        """What the kernel takes on trust. Page numbers and slots it checks itself."""
        num = x.shape[1]
        turns = (1, num, self._dim) if self._attention else cos.shape
        if (
            x.shape != (1, num, self._width)
            or x.dtype != torch.float32
            or not cos.shape == sin.shape == turns
            or not cos.dtype == sin.dtype == torch.float32
            or any(table.shape[0] != num for table in rows[:3])
            or not all(table.dtype == torch.int32 and table.is_contiguous() for table in rows[:4])
        ):
            shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (x, cos, sin, *rows[:4]))
            raise InvariantBroken(f"a native layer of width {self._width} was given {shapes}")


def _norm(module: Any) -> _Norm:
    if module is None:
        return _Norm(None, 0.0)
    return _Norm(module.weight.data_ptr(), module.variance_epsilon)


def _side(linears: list[FrameLinear]) -> _Side:
    """Linears given the same input: one product where they were packed as one."""
    made = _Side()
    packs: list[tuple[Packed, torch.Tensor | None]] = []
    for linear in linears:
        if type(linear) is not FrameLinear or linear.packed is None:
            raise GuaranteeLost(f"a layer that is one call had its {linear} replaced; build a new engine")
        if linear.group is None:
            packs.append((linear.packed, linear.bias))
        elif linear is linears[0]:
            packs.append((linear.packed, linear.group[0].bias))
    for i, (packed, bias) in enumerate(packs):
        made.weights[i] = ctypes.addressof(packed.weights)
        made.bias[i] = None if bias is None else bias.data_ptr()
    made.count = len(packs)
    return made


# Modules are transformers' own, and what they carry is not declared.


def _attention(layer: Any) -> Any:
    """Its attention, unless that is left out."""
    return layer.self_attn if hasattr(layer.self_attn, "q_proj") else None


def _mlp(layer: Any) -> Any:
    return layer.mlp if hasattr(layer.mlp, "gate_proj") else None


def _width(layer: Any) -> int:
    attention = _attention(layer)
    return int((attention.q_proj if attention else layer.mlp.gate_proj).in_features)


def _linears(part: nn.Module) -> list[FrameLinear]:
    return [module for module in part.modules() if isinstance(module, FrameLinear)]


def fused(layer: nn.Module) -> nn.Module:
    """A layer that may be (`why_not`), or one like it with a sublayer left out, as one call."""
    return with_forward(layer, Native(layer))


def why_not(layer: nn.Module) -> str | None:
    """Why a layer has to run as its modules; None for one that does what the kernel does.

    Writes to a page: nobody may hold one yet.
    """
    place = type(layer).__module__
    if place.split(".")[:2] != ["transformers", "models"] or place.split(".")[2] not in FAMILIES:
        return f"{type(layer).__name__} is not of {', '.join(sorted(FAMILIES))}"
    attention, mlp = _attention(layer), _mlp(layer)
    changed = [name or "it" for name, module in layer.named_modules() if not _untouched(module)]
    if attention is None or mlp is None or changed:
        return f"{', '.join(changed) or 'a sublayer'} was changed, or somebody listens to it"
    if any(weight.dtype != torch.float32 for weight in layer.parameters()):
        return "it is not in float32"
    binding: AttentionBinding = attention.binding
    if not isinstance(binding.kernel, NativeKernel):
        return "attention is not native"
    if binding.facts.head_dim > LONGEST or binding.facts.head_dim % 2:
        return f"heads of {binding.facts.head_dim}"
    if type(mlp.act_fn) is not FrameActivation or type(mlp.act_fn.inner) not in SILU:
        return "its MLP has another activation than SiLU"
    linears = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(linear) is not FrameLinear or linear.packed is None for linear in linears):
        return "a linear is not native"
    return None if _agrees(layer, fused(layer)) else "its modules answer otherwise"


def _untouched(module: nn.Module) -> bool:
    """Whether a module is as transformers made it, and nobody listens to it."""
    ours = type(module) in (FrameLinear, FrameActivation)
    known = ours or type(module).__module__.startswith(("transformers.", "torch.nn."))
    return known and is_untouched(module)


@torch.inference_mode()
def _agrees(layer: nn.Module, made: nn.Module) -> bool:
    """Whether both add the same to what they are given, up to the order of summation."""
    dim = _attention(layer).binding.facts.head_dim
    generator = torch.Generator("cpu").manual_seed(0)
    exact: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    x, cos, sin = (
        torch.randn(1, TRIED, size, generator=generator, **exact) for size in (_width(layer), dim, dim)
    )
    whole: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
    reach, page = torch.arange(1, TRIED + 1, **whole), torch.ones(1, **whole)
    none = torch.zeros(0, **exact)
    rows = Rows(reach, PAGE + reach - 1, torch.zeros_like(reach), page, none, none)
    given: dict[str, Any] = {"position_embeddings": (cos, sin), "rows": rows, "attention_mask": None}
    one, other = layer(x, **given) - x, made(x, **given) - x
    return bool((one - other).abs().max() <= CLOSE * one.abs().max() + 1e-6)


__all__ = ["Native", "fused", "why_not"]
