"""x W' + b on the CPU in C++ (``kernels/native/linear.cpp``); a row's bits do not depend on other rows.

The bits do not depend on the storage form of the weights either, so every weight is stored in the smallest
form that holds it exactly: 4 or 8 bits where the checkpoint's values lie on such a grid, bfloat16 or float16
where every value fits, else as it is. A small batch spends most of its time reading weights.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from samewise.errors import InvariantBroken, MachineError, UnsupportedModel
from samewise.kernels.native import build as native_build
from samewise.kernels.native.calls import DTYPE_CODES, Product, Weights

FORM_CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int4": 3, "int8": 4}
"""`Form` in calls.h."""
GRID_BITS = {"int4": 4, "int8": 8}
"""Bits of a weight in the forms that are grids over groups."""
GROUP = 32
"""Inputs whose weights share a scale: GROUP in panels.h, the block size of GGUF's 4 and 8 bits."""
PANEL = 8
"""Outputs that stand together in memory: PANEL in panels.h."""
NO_GRID = 3
"""What packing returns where a weight does not lie on the grid."""
EXACT_FORMS = ("int4", "int8", "bfloat16", "float16")
"""Smaller forms of a float32 weight, tried in this order: the fewest bytes first."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weights [N, K] in one storage form."""

    form: str
    tensors: tuple[torch.Tensor, ...]  # the data, which `weights` points to
    outputs: int
    inputs: int
    weights: Weights

    @property
    def num_bytes(self) -> int:
        """Bytes that one product reads."""
        return sum(tensor.nbytes for tensor in self.tensors)


class _Entries(NamedTuple):
    linear: ctypes._NamedFuncPointer
    pack: ctypes._NamedFuncPointer
    arrange: ctypes._NamedFuncPointer


@functools.cache
def _entries() -> _Entries:
    library = native_build.library()
    linear, pack, arrange = library.samewise_linear, library.samewise_pack, library.samewise_arrange
    linear.argtypes, linear.restype = [ctypes.POINTER(Product)], ctypes.c_int
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    pack.argtypes = [pointer, *[int64] * 4, *[pointer] * 3, int64]
    pack.restype = ctypes.c_int
    arrange.argtypes = [*[pointer] * 3, *[int64] * 4, pointer, int64]
    arrange.restype = ctypes.c_int
    return _Entries(linear, pack, arrange)


def available() -> bool:
    """Whether the machine has a C++ compiler; builds or loads the kernel. MachineError if that fails."""
    if not native_build.compiler_available():
        return False
    _entries()
    return True


def pack(weight: torch.Tensor) -> PackedWeight:
    """The smallest form that holds these weights exactly, down to the sign of zero."""
    if weight.dtype == torch.float32:
        for form in EXACT_FORMS:
            packed = _pack(weight, form, lossy=False)
            if packed is not None:
                return packed
    return pack_as_is(weight)


def pack_as_is(weight: torch.Tensor) -> PackedWeight:
    """The weights in their own dtype, without a copy if they are contiguous."""
    form = str(weight.dtype).removeprefix("torch.")
    return _packed_weight(form, (weight.detach().contiguous(),), weight.shape)


def quantize(weight: torch.Tensor, form: str) -> PackedWeight | None:
    """Round to the nearest points of a grid, for drafts only. None if the inputs are no multiple of GROUP."""
    return _pack(weight.detach().float().contiguous(), form, lossy=True)


def _pack(weight: torch.Tensor, form: str, *, lossy: bool) -> PackedWeight | None:
    outputs, inputs = weight.shape
    weight = weight.detach().contiguous()
    if form in GRID_BITS:
        if inputs % GROUP:
            return None
        data = torch.empty(outputs, inputs * GRID_BITS[form] // 8, dtype=torch.uint8, device="cpu")
        grid = torch.empty(2, outputs, inputs // GROUP, dtype=torch.float32, device="cpu")
        if form == "int8":
            grid = grid[:1]  # scales without shifts
    else:
        data, grid = torch.empty(outputs, inputs, dtype=getattr(torch, form), device="cpu"), None
    pointers = [data.data_ptr(), *_grid_pointers(grid)]
    sizes, threads = (outputs, inputs, FORM_CODES[form]), torch.get_num_threads()
    status = _entries().pack(weight.data_ptr(), *sizes, lossy, *pointers, threads)
    if status == NO_GRID:
        return None
    _raise_if_not_packed(status)
    if grid is None:
        return _packed_weight(form, (data,), weight.shape)
    scale_bytes = 2 if torch.equal(grid.half().float(), grid) else 4
    panels = torch.empty(_panel_bytes(form, weight.shape, scale_bytes), dtype=torch.uint8, device="cpu")
    _raise_if_not_packed(_entries().arrange(*pointers, *sizes, scale_bytes, panels.data_ptr(), threads))
    return _packed_weight(form, (panels,), weight.shape)


def _raise_if_not_packed(status: int) -> None:
    if status == 1:
        raise MachineError("Out of memory when weights were packed: choose a smaller model or free memory.")
    if status:
        raise InvariantBroken(f"packing returned {status}")


def _grid_pointers(grid: torch.Tensor | None) -> list[int | None]:
    """Addresses of the scales and of the shifts."""
    pointers = [] if grid is None else [part.data_ptr() for part in grid]
    return [*pointers, *[None] * (2 - len(pointers))]


def _panel_bytes(form: str, shape: torch.Size, scale_bytes: int) -> int:
    """Bytes of weights [N, K] in the panels of panels.h."""
    outputs, inputs = shape
    bits = GRID_BITS[form]
    block = PANEL * (GROUP * bits // 8 + scale_bytes * (2 if bits == 4 else 1))
    return -(-outputs // PANEL) * (inputs // GROUP) * block


def _packed_weight(form: str, tensors: tuple[torch.Tensor, ...], shape: torch.Size) -> PackedWeight:
    (data,) = tensors
    outputs, inputs = shape
    half = form in GRID_BITS and data.nbytes == _panel_bytes(form, shape, 2)
    weights = Weights(data.data_ptr(), outputs, inputs, FORM_CODES[form], 2 if half else 4)
    return PackedWeight(form, tensors, outputs, inputs, weights)


def multiply(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x W' + b for x [..., K] and b [N] of x's dtype."""
    *lead, inputs = x.shape
    if inputs != packed.inputs or x.dtype not in DTYPE_CODES:
        raise InvariantBroken(f"a linear of {packed.inputs} inputs was given {tuple(x.shape)}, {x.dtype}")
    x = x.contiguous()
    if bias is not None:
        bias = _checked_bias(bias, x.dtype, packed.outputs)
    y = torch.empty(*lead, packed.outputs, dtype=x.dtype, device="cpu")
    num_rows = x.numel() // inputs
    product = Product(
        ctypes.addressof(packed.weights),
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        num_rows,
        packed.outputs,
        DTYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )
    raise_if_failed(_entries().linear(product) if num_rows else 0)
    return y


def _checked_bias(bias: torch.Tensor, dtype: torch.dtype, outputs: int) -> torch.Tensor:
    """The bias as the kernel reads it, elements side by side; refused where `F.linear` refuses it."""
    if bias.dtype != dtype:
        raise UnsupportedModel(
            f"a linear has a bias in {bias.dtype} and an input in {dtype}: convert the model to one dtype, "
            f"as model.to({dtype}) does"
        )
    if bias.shape != (outputs,):
        raise InvariantBroken(f"a linear of {outputs} outputs has a bias {tuple(bias.shape)}")
    return bias.contiguous()


def raise_if_failed(status: int) -> None:
    """Raise the error that the kernel's return value stands for; 0 is success."""
    if status == 1:
        raise MachineError("Out of memory in a linear: lower frame_rows or max_num_seqs.")
    if status:
        raise InvariantBroken(f"the native linear returned {status}")


_library = torch.library.Library("samewise", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor x, Tensor[] weights, Tensor? bias, str form, int outputs) -> Tensor")  # type: ignore[no-untyped-call]


def _linear(
    x: torch.Tensor, weights: list[torch.Tensor], bias: torch.Tensor | None, form: str, outputs: int
) -> torch.Tensor:
    packed = _packed_weight(form, tuple(weights), torch.Size((outputs, x.shape[-1])))
    return multiply(x, packed, bias)


_library.impl("linear", _linear, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "samewise::linear",
    lambda x, weights, bias, form, outputs: x.new_empty((*x.shape[:-1], outputs)),  # noqa: ARG005
    lib=_library,
)

__all__ = [
    "PackedWeight",
    "available",
    "multiply",
    "pack",
    "pack_as_is",
    "quantize",
    "raise_if_failed",
]
