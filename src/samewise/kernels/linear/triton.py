"""x W' + b on CUDA, in a stated order: a row's bits depend on nothing but the row, by construction.

Inputs are taken in order, in steps of 16, from a sum of zero. One operation of a matrix unit adds a step's
products to the sum (float32: one multiply-add per input, in order). Then the bias is added, and the sum is
rounded. The order follows from nothing but the number of inputs. The number of rows, the tile's size, the
steps in flight and which operand comes first decide only when and where a number is computed. `pick_tile`
gives the first operand of the matrix instruction 64 lines at least, of x or of the weight: then a device has
one kind of instruction for every size (on Hopper, tiles of fewer lines take another kind; it adds a step in
the same way, but nobody has promised that). Start-up compares the sizes, and the tests all tiles.

What may follow the sum rounds as the modules it replaces would: the residual is added to the rounded
product, silu(gate) * up is computed from the rounded gate and up.

A part of the inputs is summed in the same way as the whole, so that a product divided over devices can be
the sum of its parts in order. Runs on CPU tensors under Triton's interpreter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from samewise.errors import InvariantBroken
from samewise.kernels.dependent import MIN_CAPABILITY, launch_options
from samewise.kernels.linear.triton_kernels import gate_rows, linear_tile

NAME = "triton-1 step 16"
"""Kernel and version, part of the contract: it changes whenever bits may change."""
MATRIX_STEP = 16
"""Inputs that one operation of a matrix unit adds in 16 bits. Part of the order."""
INTERPRETED = not isinstance(linear_tile, triton.JITFunction)
"""In Triton's interpreter tl.dot is a BLAS call, where a row's bits depend on its index; sums replace it."""
GATE_BLOCK = 1024  # columns per program


@dataclass(frozen=True, slots=True)
class LinearTile:
    """How a linear is launched. Bits do not depend on any of it."""

    rows: int = 16
    columns: int = 64
    step: int = 128  # inputs a program takes at a time
    stages: int = 6  # steps in flight
    warps: int = 4
    swapped: bool = True  # the weight's columns are the rows of the matrix instruction
    described: bool = True  # tiles are copied by the device's tensor copy unit (Hopper on)
    group: int = 8  # row tiles that share the weight's columns in the cache
    ahead: int = 0  # inputs of the weight that the cache reads before the program may start: a power of two


HOPPER_SHARED_BYTES = 227 * 1024
"""Shared memory of a program on an H200, at most."""
BARRIER_BYTES = 1024
"""Room in shared memory beside the steps in flight: more than barriers take."""
PROCESSORS = 132
"""Processors of an H200: as many programs as this, and no more, leave none idle and none waiting."""
AHEAD = 0
"""`LinearTile.ahead` for up to 64 rows, where a product's time is that of reading its weight. 0: not used, as
its gain was not measured; `bench/linear.py --ahead 0 512 1024` and `bench/h200.py --ahead 1024` do."""
WIDE_TILES = (
    LinearTile(rows=64, columns=32, step=128, stages=8, swapped=False),
    LinearTile(rows=64, columns=64, step=128, stages=6),
    LinearTile(rows=128, columns=64, step=64, stages=8),
    LinearTile(rows=128, columns=128, step=64, stages=6, warps=8, swapped=False),
)
"""For more than 64 rows. Each fills the shared memory of a processor with steps in flight; with half the
stages two programs run there at a time. Described, they take at most 114 registers a thread on an H200."""


def pick_tile(num_rows: int, outputs: int, element_bytes: int, *, gated: bool) -> LinearTile:
    """How to launch a linear of this shape: a rule, set by hand from `bench/linear.py` on an H200."""
    if element_bytes == 4:
        return LinearTile(rows=16, columns=32, step=32, stages=3, described=False, swapped=False)
    if num_rows > 64:
        return _wide_tile(num_rows, outputs, gated=gated)
    if outputs <= 2048:  # too few columns to give every processor 64
        stages = 4 if gated else 5
        return LinearTile(64, 16, step=256, stages=stages, swapped=False, described=False, ahead=AHEAD)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    if gated:
        return LinearTile(rows=rows, step=64, ahead=AHEAD)
    few_programs = outputs <= 64 * 2 * PROCESSORS
    stages = (8 if rows == 16 else 6) if few_programs else 4
    return LinearTile(rows=rows, stages=stages, ahead=AHEAD)


def _wide_tile(num_rows: int, outputs: int, *, gated: bool) -> LinearTile:
    """The tile whose busiest processor reads the fewest lines: large ones reuse more, small ones are more."""
    if gated and num_rows <= 128:
        return LinearTile(rows=128, columns=64, step=64, stages=3, warps=8)
    if gated:
        return LinearTile(rows=128, columns=128, step=64, stages=3, warps=8, swapped=False)

    def num_programs(tile: LinearTile) -> int:
        return -(-num_rows // tile.rows) * -(-outputs // tile.columns)

    def busiest(tile: LinearTile) -> int:
        return -(-num_programs(tile) // PROCESSORS) * (tile.rows + tile.columns)

    tile = min(WIDE_TILES, key=busiest)
    return tile if num_programs(tile) <= PROCESSORS else replace(tile, stages=tile.stages // 2)


def stages_that_fit(tile: LinearTile, element_bytes: int, shared_bytes: int, *, gated: bool) -> int:
    """The tile's stages, or as many of them as fit in a program's shared memory."""
    lines = tile.rows + tile.columns * (2 if gated else 1)
    return max(1, min(tile.stages, (shared_bytes - BARRIER_BYTES) // (lines * tile.step * element_bytes)))


@functools.cache
def _limits(device: torch.device) -> tuple[int, bool]:
    """Bytes of shared memory of a program, and whether the device has a tensor copy unit (Hopper on)."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES, True
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"]), torch.cuda.get_device_capability(index)[0] >= MIN_CAPABILITY


@torch.library.custom_op("samewise::ordered_linear", mutates_args=())
def ordered_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] times W' plus b, in the stated order."""
    return linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])


@ordered_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def linear(
    x: torch.Tensor,  # [R, K], unit stride within a row
    weight: torch.Tensor,  # [N, K], or [2 N, K] where gated
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,  # [R, N]
    gated: bool = False,
    tile: LinearTile | None = None,
) -> torch.Tensor:
    """x W' + b, then the residual added; or silu(gate) * up where the weight is a gate's and an up's."""
    num_rows, inputs = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    if weight.shape[1] != inputs or not weight.is_contiguous():
        raise InvariantBroken(f"a linear of {tuple(weight.shape)} was given {tuple(x.shape)}")
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = pick_tile(num_rows, outputs, x.element_size(), gated=gated) if tile is None else tile
    out = x.new_empty(num_rows, outputs)
    if not num_rows:
        return out
    step = MATRIX_STEP if INTERPRETED else tile.step
    shared_bytes, has_copy_unit = _limits(x.device)
    described = has_copy_unit and tile.described and _describable(x, weight)
    described = described and not (gated and outputs % tile.columns)
    linear_tile[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(outputs, tile.columns),)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tile.rows, step]) if described else x,
        TensorDescriptor(weight, list(weight.shape), [inputs, 1], [tile.columns, step])
        if described
        else weight,
        weight,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        num_rows,
        outputs,
        inputs,
        x.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEP=step,
        GROUP=tile.group,
        WHOLE=inputs % step == 0,
        BIASED=bias is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        SWAPPED=tile.swapped,
        DESCRIBED=described,
        AHEAD=tile.ahead,
        EXPLICIT_SUM=INTERPRETED,
        num_warps=tile.warps,
        num_stages=stages_that_fit(tile, x.element_size(), shared_bytes, gated=gated),
        enable_fp_fusion=False,
        **launch_options(x.device),
    )
    return out


def _describable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the tensor copy unit takes both: rows and first elements at multiples of 16 bytes."""
    places = (x.stride(0) * x.element_size(), weight.stride(0) * weight.element_size())
    return all(place % 16 == 0 for place in (*places, x.data_ptr(), weight.data_ptr()))


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of a product's halves [R, 2 N]: the bits that `linear` gives where it is gated."""
    num_rows, outputs = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, outputs)
    gate_rows[(num_rows, triton.cdiv(outputs, GATE_BLOCK))](
        gate_up,
        out,
        outputs,
        BLOCK=GATE_BLOCK,
        enable_fp_fusion=False,
        **launch_options(gate_up.device),
    )
    return out


__all__ = [
    "HOPPER_SHARED_BYTES",
    "INTERPRETED",
    "NAME",
    "PROCESSORS",
    "WIDE_TILES",
    "LinearTile",
    "gate",
    "linear",
    "ordered_linear",
    "pick_tile",
    "stages_that_fit",
]
