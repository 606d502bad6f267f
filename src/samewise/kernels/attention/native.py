"""Canonical attention on the CPU in C++ (``kernels/native/attention.cpp``)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from samewise.errors import InvariantBroken, MachineError
from samewise.kernels.attention.base import NUM_TABLES, PAGE, AttentionKernel, Heads, LayerKV, Rows
from samewise.kernels.native import build as native_build
from samewise.kernels.native.calls import DTYPE_CODES, AttentionCall, LayerPages, Move


def entry_of(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    """The attention function of a loaded library."""
    entry = library.samewise_attend
    entry.argtypes = [ctypes.POINTER(AttentionCall)]
    entry.restype = ctypes.c_int
    return entry


@functools.cache
def _entry() -> ctypes._NamedFuncPointer:
    return entry_of(native_build.library())


@functools.cache
def _move_entry() -> ctypes._NamedFuncPointer:
    entry = native_build.library().samewise_move
    entry.argtypes = [ctypes.POINTER(Move)]
    entry.restype = ctypes.c_int
    return entry


def attend(
    entry: ctypes._NamedFuncPointer,
    q: torch.Tensor,  # [R, Hq, D]
    k: torch.Tensor,  # [R, Hkv, D]
    v: torch.Tensor,  # [R, Hkv, D]
    k_cache: torch.Tensor,  # [P, Hkv, D, PAGE]
    v_cache: torch.Tensor,  # [P, Hkv, PAGE, D]
    lengths: torch.Tensor,
    slots: torch.Tensor,
    page_start: torch.Tensor,
    tail_start: torch.Tensor,
    tail: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:  # [R, Hq, D]
    """Write K and V and attend, by the function `entry` of a loaded library."""
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    num_rows, num_heads, head_dim = q.shape
    num_pages, num_kv_heads = k_cache.shape[:2]
    tables = lengths, slots, page_start, tail_start, tail, pages
    _check_inputs(q, k, v, k_cache, v_cache, tables)
    out = torch.empty(q.shape, dtype=q.dtype)
    call = AttentionCall(
        *(x.data_ptr() for x in (q, k, v, k_cache, v_cache, out, *tables)),
        *(num_rows, pages.shape[0], num_pages, num_heads, num_kv_heads, head_dim),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *(window or 0, DTYPE_CODES[q.dtype], torch.get_num_threads(), scale),
    )
    raise_if_failed(entry(call))
    return out


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    row_tables: tuple[torch.Tensor, ...],
) -> None:
    """Check what the C++ code assumes: shapes, dtypes, strides. It checks page numbers and slots itself."""
    num_pages, num_kv_heads, head_dim, _ = k_cache.shape
    if (
        k.shape != (q.shape[0], num_kv_heads, head_dim)
        or v.shape != k.shape
        or q.shape[2] != head_dim
        or q.shape[1] % num_kv_heads
        or v_cache.shape != (num_pages, num_kv_heads, PAGE, head_dim)
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, k_cache, v_cache))
        raise InvariantBroken(f"attention shapes do not match: q, k, v, k pages, v pages = {shapes}")
    if not (q.dtype == k.dtype == v.dtype == k_cache.dtype == v_cache.dtype and q.dtype in DTYPE_CODES):
        raise InvariantBroken(f"native attention got {q.dtype} queries and {k_cache.dtype} pages")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise InvariantBroken("K and V pages must be contiguous")
    for x in row_tables:
        if x.dtype != torch.int32 or not x.is_contiguous():
            raise InvariantBroken(f"row tables must be contiguous int32, got {x.dtype}")
    if any(x.shape[0] != q.shape[0] for x in row_tables[:-1]):
        raise InvariantBroken(f"row tables do not have the pass's {q.shape[0]} rows")


def raise_if_failed(status: int) -> None:
    """Raise the error that the kernel's return value stands for; 0 is success."""
    if status == 1:
        raise MachineError("Out of memory in attention: lower max_model_len or the number of threads.")
    if status == 2:
        raise InvariantBroken("a row's slot lies outside the K and V pages")
    if status == 3:
        raise InvariantBroken(
            "a row's pages or tail leave the table, or it names a page or slot that does not exist"
        )
    if status:
        raise InvariantBroken(f"native attention returned {status}")


_library = torch.library.Library("samewise", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor slots,"
    " Tensor page_start, Tensor tail_start, Tensor tail, Tensor pages, float scale, int? window) -> Tensor"
)


def register(name: str, function: Callable[..., torch.Tensor]) -> None:
    """Make `function` the operator ``torch.ops.samewise.<name>``, which a compiled layer may contain."""
    _library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
    _library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"samewise::{name}", lambda q, *_: q.new_empty(q.shape), lib=_library)


def _attend_native(*args: Any) -> torch.Tensor:
    return attend(_entry(), *args)


register("attend_native", _attend_native)


class NativeKernel(AttentionKernel):
    """Canonical attention on the CPU in C++. The constructor builds or loads it, or raises MachineError."""

    def __init__(self) -> None:
        _entry()

    @property
    def name(self) -> str:
        """For the contract. The bits are those that `kernels/native/expected.py` states."""
        return "native"

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """K pages [P, Hkv, D, PAGE], V pages [P, Hkv, PAGE, D]: the 16 keys of a page fill a vector."""
        return LayerKV(
            torch.empty(num_pages, num_kv_heads, head_dim, PAGE, dtype=dtype, device=device),
            torch.empty(num_pages, num_kv_heads, PAGE, head_dim, dtype=dtype, device=device),
        )

    def move_slots(self, layers: Sequence[LayerKV], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Move K and V of slots in all layers, in one call."""
        pages = (LayerPages * len(layers))(
            *(LayerPages(kv.k.data_ptr(), kv.v.data_ptr(), *kv.k.shape[1:3]) for kv in layers)
        )
        sources, targets = sources.contiguous(), targets.contiguous()
        move = Move(
            *(ctypes.addressof(pages), sources.data_ptr(), targets.data_ptr()),
            *(len(layers), len(sources), layers[0].k.shape[0], layers[0].k.itemsize),
        )
        status = _move_entry()(move)
        if status == 1:
            raise MachineError("Out of memory when K and V of a draft's tokens were moved.")
        if status:
            raise InvariantBroken(
                "K and V cannot be moved: a slot lies outside the pages, or their dtype is wrong"
            )

    def plan(self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int) -> None:
        """None: the C++ code keeps scratch of its own per thread."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKV,
        rows: Rows,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write this pass's K and V, then attend."""
        args = (q, k, v, kv.k, kv.v, *rows[:NUM_TABLES], scale, window)
        if not torch.compiler.is_compiling():
            return attend(_entry(), *args)  # without the dispatcher's overhead
        out: torch.Tensor = torch.ops.samewise.attend_native(*args)
        return out


__all__ = ["NativeKernel", "attend", "entry_of", "raise_if_failed", "register"]
