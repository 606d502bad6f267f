"""x W' + b on the CPU in C++ (``model/native/linear.cpp``): one result per row, whatever stands beside it.

Its bits depend on neither the number of rows nor the form the weights are kept in, so every weight is kept
in the smallest form that holds it exactly: four or eight bits where the checkpoint was on such a grid,
bfloat16 where it came in that, else as it is. Fewer bytes to read is most of what a small batch costs.

Knows tensors; has never heard of a request or a model.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from samewise.errors import InvariantBroken, MachineError
from samewise.kernels import native

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMS = {"float32": 0, "bfloat16": 1, "float16": 2, "int4": 3, "int8": 4}
GROUP = 32
EXACT = ("int4", "int8", "bfloat16", "float16")  # tried in this order


class _Weights(ctypes.Structure):
    """Mirrors ``Weights`` in calls.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "scale", "shift")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "form")),
    )


class _Product(ctypes.Structure):
    """Mirrors ``Product`` in calls.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w", "x", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "y_row", "dtype", "threads")),
        ("parallel", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights [N, K] in some form."""

    form: str
    tensors: tuple[torch.Tensor, ...]  # data, and of a grid its scales and shifts: kept alive here
    outputs: int
    inputs: int
    weights: _Weights

    @property
    def num_bytes(self) -> int:
        """What one pass over it reads."""
        return sum(tensor.nbytes for tensor in self.tensors)


@functools.cache
def _entries() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]:
    library = native.library()
    linear, pack = library.samewise_linear, library.samewise_pack
    linear.argtypes, linear.restype = [ctypes.POINTER(_Product)], ctypes.c_int
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    pack.argtypes = [pointer, *[whole] * 4, *[pointer] * 3, whole, pointer]
    pack.restype = ctypes.c_int
    return linear, pack


def available() -> bool:
    """Whether the kernel can be had here. MachineError if there is a compiler and it fails."""
    if not native.available():
        return False
    _entries()
    return True


def name() -> str:
    """What the contract calls it."""
    return f"native-1 ({native.source_digest()})"


def pack(weight: torch.Tensor) -> Packed:
    """The smallest form that holds these weights exactly, down to the sign of zero."""
    if weight.dtype == torch.float32:
        for form in EXACT:
            packed = _pack(weight, form, lossy=False)
            if packed is not None:
                return packed
    return plain(weight)


def plain(weight: torch.Tensor) -> Packed:
    """The weights where they are."""
    return _made(str(weight.dtype).removeprefix("torch."), (weight.detach().contiguous(),), weight.shape)


def quantise(weight: torch.Tensor, form: str) -> Packed | None:
    """The nearest points of a grid: not the same weights, so only for guesses. None where it does not fit."""
    return _pack(weight.detach().float().contiguous(), form, lossy=True)


def _pack(weight: torch.Tensor, form: str, *, lossy: bool) -> Packed | None:
    outputs, inputs = weight.shape
    weight = weight.detach().contiguous()
    if form in ("int4", "int8"):
        if inputs % GROUP:
            return None
        bits = 4 if form == "int4" else 8
        data = torch.empty(outputs, inputs * bits // 8, dtype=torch.uint8)
        grid = [torch.empty(outputs, inputs // GROUP) for _ in range(2 if form == "int4" else 1)]
    else:
        data, grid = torch.empty(outputs, inputs, dtype=getattr(torch, form)), []
    pointers = [data.data_ptr(), *(x.data_ptr() for x in grid), *[None] * (2 - len(grid))]
    _, entry = _entries()
    threads = torch.get_num_threads()
    result = entry(
        weight.data_ptr(), outputs, inputs, FORMS[form], lossy, *pointers, threads, native.parallel()
    )
    return _made(form, (data, *grid), weight.shape) if result == 0 else None


def _made(form: str, tensors: tuple[torch.Tensor, ...], shape: torch.Size) -> Packed:
    pointers = [x.data_ptr() for x in tensors] + [None] * (3 - len(tensors))
    outputs, inputs = shape
    weights = _Weights(*pointers, outputs, inputs, FORMS[form])
    return Packed(form, tensors, outputs, inputs, weights)


def multiply(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """x W' + b for x [..., K]."""
    *lead, inputs = x.shape
    if inputs != packed.inputs or x.dtype not in DTYPES:
        raise InvariantBroken(f"a linear of {packed.inputs} inputs was given {tuple(x.shape)}, {x.dtype}")
    x = x.contiguous()
    y = torch.empty(*lead, packed.outputs, dtype=x.dtype)
    rows = x.numel() // inputs
    product = _Product(
        ctypes.addressof(packed.weights),
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        rows,
        packed.outputs,
        DTYPES[x.dtype],
        torch.get_num_threads(),
        native.parallel(),
    )
    raise_if_failed(_entries()[0](product) if rows else 0)
    return y


def raise_if_failed(result: int) -> None:
    """What the kernel answered, as an error if it is one."""
    if result == 1:
        raise MachineError("Out of memory in a linear: lower frame_rows or max_num_seqs.")
    if result:
        raise InvariantBroken(f"the native linear answered {result}")


_library = torch.library.Library("samewise", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor x, Tensor[] weights, Tensor? bias, str form, int outputs) -> Tensor")  # type: ignore[no-untyped-call]


def _linear(
    x: torch.Tensor, weights: list[torch.Tensor], bias: torch.Tensor | None, form: str, outputs: int
) -> torch.Tensor:
    packed = _made(form, tuple(weights), torch.Size((outputs, x.shape[-1])))
    return multiply(x, packed, bias)


_library.impl("linear", _linear, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "samewise::linear",
    lambda x, weights, bias, form, outputs: x.new_empty((*x.shape[:-1], outputs)),  # noqa: ARG005
    lib=_library,
)

__all__ = ["Packed", "available", "multiply", "name", "pack", "plain", "quantise", "raise_if_failed"]
