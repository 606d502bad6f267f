"""The Triton functions of linears on CUDA. `triton.py` launches them and states the order of their sums.

The number of rows is an unspecialized argument: passes of every size run the same machine code.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are capitals, as is usual in Triton
# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _add_product(
    a: tl.tensor, b: tl.tensor, total: tl.tensor, SWAPPED: tl.constexpr, EXPLICIT_SUM: tl.constexpr
) -> tl.tensor:
    """Total + a b' for a [M, STEP] and b [N, STEP]; where SWAPPED, total + b a'."""
    if SWAPPED:
        first, second = b, a
    else:
        first, second = a, b
    if EXPLICIT_SUM:
        total += tl.sum(first.to(tl.float32)[:, None, :] * second.to(tl.float32)[None, :, :], axis=2)
    else:
        total = tl.dot(first, tl.trans(second), total, input_precision="ieee")
    return total


@triton.jit
def _load_tile(
    tensor: tl.tensor,  # [L, inputs]: a pointer, or a descriptor where DESCRIBED
    start: tl.tensor,  # [TILE] where the tile's lines begin, in elements from the pointer
    known: tl.tensor,  # [TILE] whether the line exists; read if MASKED
    first: tl.tensor,  # first line
    k: tl.tensor,
    inputs: tl.tensor,
    STEP: tl.constexpr,
    WHOLE: tl.constexpr,  # whether `inputs` is a multiple of STEP
    MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> tl.tensor:
    """[TILE, STEP] elements from input k on; zeros where there is no line or no input."""
    if DESCRIBED:
        values = tensor.load([first, k])
    else:
        offset = k + tl.arange(0, STEP)
        pointers = tensor + (start[:, None] + offset[None, :])
        if MASKED:
            mask = known[:, None] if WHOLE else known[:, None] & (offset < inputs)[None, :]
            values = tl.load(pointers, mask=mask, other=0.0)
        elif WHOLE:
            values = tl.load(pointers)
        else:
            values = tl.load(pointers, mask=(offset < inputs)[None, :], other=0.0)
    return values


@triton.jit
def _fetch_ahead(
    weight: tl.tensor,
    start: tl.tensor,  # [COLUMNS] where the tile's lines begin, in elements from the pointer
    inputs: tl.tensor,
    AHEAD: tl.constexpr,
) -> None:
    """Have the cache read the first AHEAD inputs of these lines. Nothing waits for it."""
    line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    offset = tl.minimum(tl.arange(0, AHEAD // line) * line, inputs - 1)
    address = (weight + (start[:, None] + offset[None, :])).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _rounded(value: tl.tensor, like: tl.tensor) -> tl.tensor:
    """A float32 value as an element of `like` would hold it."""
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def gated_product(gate: tl.tensor, up: tl.tensor, like: tl.tensor) -> tl.tensor:
    """silu(gate) * up for float32 values that elements of `like` could hold, rounded where modules round."""
    return _rounded(tl.div_rn(gate, 1.0 + tl.exp(-gate)), like) * up


@triton.jit(do_not_specialize=["num_rows"])
def linear_tile(  # noqa: C901, PLR0917 - straight, but for constants; Triton functions take plain values only
    x: tl.tensor,  # [R, inputs], strided by row; a descriptor where DESCRIBED
    weight: tl.tensor,  # [outputs, inputs], or [2 * outputs, inputs] where GATED; likewise
    weight_data: tl.tensor,  # the weight as a pointer; read if AHEAD
    bias: tl.tensor,  # [outputs], or [2 * outputs]; read if BIASED
    residual: tl.tensor,  # [R, outputs]; read if RESIDUAL
    out: tl.tensor,  # [R, outputs]
    num_rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_row: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,  # row tiles that programs next to each other go through first
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SWAPPED: tl.constexpr,  # the weight's columns are the rows of the matrix instruction
    DESCRIBED: tl.constexpr,
    AHEAD: tl.constexpr,  # inputs of the weight that the cache reads while the kernel before still runs
    DEPENDENT: tl.constexpr,  # launched while the kernel before it may still run
    EXPLICIT_SUM: tl.constexpr,
) -> None:
    """One tile of x W' and what follows it: bias, then the residual added, or silu(gate) * up."""
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(outputs, COLUMNS)
    tile = tl.program_id(0)
    in_group = GROUP * column_tiles
    group = tile // in_group
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    first_row = (group * GROUP + tile % in_group % group_rows) * ROWS
    first_column = tile % in_group // group_rows * COLUMNS
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    row_known, column_known = row < num_rows, column < outputs
    row_start = row.to(tl.int64) * x_row
    column_start = tl.minimum(column, outputs - 1).to(tl.int64) * inputs
    if DEPENDENT:
        if AHEAD:
            _fetch_ahead(weight_data, column_start, inputs, AHEAD)
            if GATED:
                _fetch_ahead(weight_data + outputs.to(tl.int64) * inputs, column_start, inputs, AHEAD)
        gdc_wait()
    total = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], tl.float32)
    up_total = total
    for k in tl.range(0, inputs, STEP):
        a = _load_tile(x, row_start, row_known, first_row, k, inputs, STEP, WHOLE, True, DESCRIBED)
        b = _load_tile(
            weight, column_start, column_known, first_column, k, inputs, STEP, WHOLE, False, DESCRIBED
        )
        total = _add_product(a, b, total, SWAPPED, EXPLICIT_SUM)
        if GATED:
            up = _load_tile(
                weight, column_start + outputs.to(tl.int64) * inputs, column_known, first_column + outputs, k,
                inputs, STEP, WHOLE, False, DESCRIBED,
            )  # fmt: skip
            up_total = _add_product(a, up, up_total, SWAPPED, EXPLICIT_SUM)
    if DEPENDENT:
        gdc_launch_dependents()
    if SWAPPED:
        total, up_total = tl.trans(total), tl.trans(up_total)
    if BIASED:
        total += tl.load(bias + column, mask=column_known, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_total += tl.load(bias + outputs + column, mask=column_known, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = gated_product(_rounded(total, out), _rounded(up_total, out), out)
    place = row.to(tl.int64)[:, None] * outputs + column[None, :]
    mask = row_known[:, None] & column_known[None, :]
    if RESIDUAL:
        total = _rounded(total, out) + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_rows(
    gate_up: tl.tensor,  # [R, 2 * outputs]
    out: tl.tensor,  # [R, outputs]
    outputs: tl.tensor,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """silu(gate) * up of some columns of one row, as `linear_tile` computes it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = column < outputs
    if DEPENDENT:
        gdc_wait()
    gate = tl.load(gate_up + row * 2 * outputs + column, mask=known, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * outputs + outputs + column, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + column, gated_product(gate, up, out).to(out.dtype.element_ty), mask=known)


__all__ = ["gate_rows", "gated_product", "linear_tile"]
