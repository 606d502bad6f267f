"""Canonical attention on the CPU in C++ (``model/native/attention.cpp``).

Knows tensors; has never heard of a request or a model.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from samewise.errors import InvariantBroken, MachineError
from samewise.kernels import native
from samewise.kernels.attention.base import PAGE, Heads, LayerKV, Rows

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Call(ctypes.Structure):
    """Mirrors ``Call`` in calls.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_pages", "v_pages", "out")),
        *((name, ctypes.c_void_p) for name in ("lengths", "slots", "page_start", "pages")),
        *((name, ctypes.c_int64) for name in ("rows", "listed_pages", "num_pages")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        *((name, ctypes.c_int64) for name in ("window", "dtype", "threads")),
        ("parallel", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


def entry_of(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    """The kernel in a built library."""
    entry = library.samewise_attend
    entry.argtypes = [ctypes.POINTER(_Call)]
    entry.restype = ctypes.c_int
    return entry


@functools.cache
def _entry() -> ctypes._NamedFuncPointer:
    return entry_of(native.library())


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


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
    pages: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:  # [R, Hq, D]
    """One call of the kernel `entry` of a loaded library."""
    q, k, v = _unit(q), _unit(k), _unit(v)
    num_rows, num_heads, head_dim = q.shape
    num_pages, num_kv_heads = k_cache.shape[:2]
    _check(q, k, v, k_cache, v_cache, (lengths, slots, page_start, pages))
    out = torch.empty(q.shape, dtype=q.dtype)
    call = _Call(
        *(x.data_ptr() for x in (q, k, v, k_cache, v_cache, out, lengths, slots, page_start, pages)),
        *(num_rows, pages.shape[0], num_pages, num_heads, num_kv_heads, head_dim),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *(window or 0, _DTYPES[q.dtype], torch.get_num_threads(), native.parallel(), scale),
    )
    raise_if_failed(entry(call))
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    integers: tuple[torch.Tensor, ...],
) -> None:
    """What the kernel takes on trust. Page numbers and slots it checks itself."""
    num_pages, num_kv_heads, head_dim, _ = k_cache.shape
    if (
        k.shape != (q.shape[0], num_kv_heads, head_dim)
        or v.shape != k.shape
        or q.shape[2] != head_dim
        or q.shape[1] % num_kv_heads
        or v_cache.shape != (num_pages, num_kv_heads, PAGE, head_dim)
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, k_cache, v_cache))
        raise InvariantBroken(f"attention shapes do not fit together: q, k, v, k pages, v pages = {shapes}")
    if not (q.dtype == k.dtype == v.dtype == k_cache.dtype == v_cache.dtype and q.dtype in _DTYPES):
        raise InvariantBroken(f"native attention got {q.dtype} queries and {k_cache.dtype} pages")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise InvariantBroken("K and V pages must be contiguous")
    for x in integers:
        if x.dtype != torch.int32 or not x.is_contiguous():
            raise InvariantBroken(f"row tables must be contiguous int32, got {x.dtype}")
    if any(x.shape[0] != q.shape[0] for x in integers[:3]):
        raise InvariantBroken(f"row tables do not have the pass's {q.shape[0]} rows")


def raise_if_failed(result: int) -> None:
    """What the kernel answered, as an error if it is one."""
    if result == 1:
        raise MachineError("Out of memory in attention: lower max_model_len or the number of threads.")
    if result == 2:
        raise InvariantBroken("a row's slot lies outside the K and V pages")
    if result == 3:
        raise InvariantBroken("a row's page list leaves the table, or names a page that is not there")
    if result:
        raise InvariantBroken(f"native attention answered {result}")


_library = torch.library.Library("samewise", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor slots,"
    " Tensor page_start, Tensor pages, float scale, int? window) -> Tensor"
)


def register(name: str, function: Callable[..., torch.Tensor]) -> None:
    """Make `function` the operator ``torch.ops.samewise.<name>``, which a compiled layer may contain."""
    _library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
    _library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"samewise::{name}", lambda q, *_: q.new_empty(q.shape), lib=_library)


def _attend_native(*args: Any) -> torch.Tensor:
    return attend(_entry(), *args)


register("attend_native", _attend_native)


class NativeKernel:
    """Canonical attention on the CPU in C++. Making one builds or loads it: MachineError if that fails."""

    def __init__(self) -> None:
        _entry()
        native.parallel()

    @property
    def name(self) -> str:
        """Version and source digest: one digest, one set of bits."""
        return f"native-1 ({native.source_digest()})"

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """K pages [P, Hkv, D, PAGE], V pages [P, Hkv, PAGE, D]: 16 keys are the lanes of a vector."""
        return LayerKV(
            torch.empty(num_pages, num_kv_heads, head_dim, PAGE, dtype=dtype, device=device),
            torch.empty(num_pages, num_kv_heads, PAGE, head_dim, dtype=dtype, device=device),
        )

    def plan(self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int) -> None:
        """None: the kernel keeps its own scratch per thread."""

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
        if not torch.compiler.is_compiling():
            tables = (rows.lengths, rows.slots, rows.page_start, rows.pages)
            return attend(_entry(), q, k, v, kv.k, kv.v, *tables, scale, window)
        out: torch.Tensor = torch.ops.samewise.attend_native(
            q, k, v, kv.k, kv.v, rows.lengths, rows.slots, rows.page_start, rows.pages, scale, window
        )
        return out


__all__ = ["NativeKernel", "attend", "entry_of", "raise_if_failed", "register"]
