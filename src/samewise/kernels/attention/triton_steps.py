"""The steps of canonical attention on CUDA that its kernels share: each is written once, so is its order.

State of an online softmax, per query row: `top` is the largest score, `weight` the sum of the weights
exp2(score - top), `total` the sum of weighted values, all of the current split. `all_top`, `all_weight` and
`all_total` are the same over the splits folded so far.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are capitals, as is usual in Triton
# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(
    all_top: tl.tensor,  # [M], of the splits folded so far
    all_weight: tl.tensor,
    all_total: tl.tensor,  # [M, DIM_PAD]
    top: tl.tensor,  # of the next split
    weight: tl.tensor,
    total: tl.tensor,
    seen: tl.tensor,  # [M] whether the row sees a key of the next split; if not, its state is kept
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold the next split into the ones before it: the only way splits are added, in registers or memory."""
    new_top = tl.where(seen, tl.maximum(all_top, top), tl.maximum(all_top, 0.0))
    shrink = tl.exp2(all_top - new_top)
    share = tl.exp2(tl.where(seen, top - new_top, 0.0))
    new_weight = all_weight * shrink + weight * share
    new_total = all_total * shrink[:, None] + total * share[:, None]
    return (
        tl.where(seen, new_top, all_top),
        tl.where(seen, new_weight, all_weight),
        tl.where(seen[:, None], new_total, all_total),
    )


@triton.jit
def normalize(total: tl.tensor, weight: tl.tensor, length: tl.tensor) -> tl.tensor:
    """The row's result, total / weight. A row without keys becomes zeros; a NaN stays a NaN.

    A zero sum becomes +0: its sign may come from masked values.
    """
    total = tl.where(total == 0.0, 0.0, total)
    inverse = tl.div_rn(tl.full(weight.shape, 1.0, tl.float32), tl.where(length > 0, weight, 1.0))
    return total * inverse[:, None]


@triton.jit
def load_kv(
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page: tl.tensor,  # [BLOCK]
    kv_head: tl.tensor,
    slot: tl.tensor,  # [BLOCK], modulo PAGE
    visible: tl.tensor,  # [BLOCK], read only if MASKED
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """K and V of a block. Masked keys are not read, as they may be NaN; they become zeros."""
    dim = tl.arange(0, DIM_PAD)
    offset = page.to(tl.int64) * (KV_HEADS * PAGE * DIM) + (kv_head * (PAGE * DIM) + slot % PAGE * DIM)
    offsets = offset[:, None] + dim[None, :]
    if MASKED:
        mask = visible[:, None] & (dim < DIM)[None, :]
        k_tile = tl.load(k_cache + offsets, mask=mask, other=0.0)
        v_tile = tl.load(v_cache + offsets, mask=mask, other=0.0)
    elif DIM < DIM_PAD:
        mask = tl.broadcast_to((dim < DIM)[None, :], offsets.shape)
        k_tile = tl.load(k_cache + offsets, mask=mask, other=0.0)
        v_tile = tl.load(v_cache + offsets, mask=mask, other=0.0)
    else:
        k_tile = tl.load(k_cache + offsets)
        v_tile = tl.load(v_cache + offsets)
    return k_tile, v_tile


@triton.jit
def scores(q_tile: tl.tensor, k_tile: tl.tensor, scale: tl.tensor, EXPLICIT_SUM: tl.constexpr) -> tl.tensor:
    """q . k * scale for a tile and a block."""
    if EXPLICIT_SUM:
        return tl.sum(q_tile.to(tl.float32)[:, None, :] * k_tile.to(tl.float32)[None, :, :], axis=2) * scale
    return tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale


@triton.jit
def add_values(p: tl.tensor, v_tile: tl.tensor, total: tl.tensor, EXPLICIT_SUM: tl.constexpr) -> tl.tensor:
    """Total + p . v for a tile and a block."""
    p_tile = p.to(v_tile.dtype)
    if EXPLICIT_SUM:
        return total + tl.sum(p_tile.to(tl.float32)[:, :, None] * v_tile.to(tl.float32)[None, :, :], axis=1)
    return tl.dot(p_tile, v_tile, total, input_precision="ieee")


@triton.jit
def sum_weights(p: tl.tensor) -> tl.tensor:
    """The sum of every row's weights, none above 1, as integers: exact, so the order of summation is free."""
    # The bit pattern of 1 + p minus that of 1 is p in units of 2**-23: cheaper than a conversion.
    counts = (p + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
    return tl.sum(counts, axis=1).to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def start_split(
    block: tl.tensor,
    begin: tl.tensor,  # the program's first block
    first: tl.tensor,  # [TILE]
    length: tl.tensor,  # [TILE]
    top: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    all_top: tl.tensor,
    all_weight: tl.tensor,
    all_total: tl.tensor,
    SPLIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Where a block begins a new split: fold the split before it and reset the state, in rows that go on."""
    if (block % SPLIT == 0) & (block > begin):
        goes_on = length > block
        seen = (first < block) & goes_on
        all_top, all_weight, all_total = fold(all_top, all_weight, all_total, top, weight, total, seen)
        top = tl.where(goes_on, float("-inf"), top)
        weight = tl.where(goes_on, 0.0, weight)
        total = tl.where(goes_on[:, None], 0.0, total)
    return top, weight, total, all_top, all_weight, all_total


@triton.jit
def page_numbers(
    pages: tl.tensor, key: tl.tensor, low: tl.tensor, high: tl.tensor, PAGE: tl.constexpr
) -> tl.tensor:
    """The page numbers of a block's keys that lie in [low, high); 0 for the others."""
    return tl.load(pages + key // PAGE, mask=(key >= low) & (key < high), other=0)


@triton.jit
def masked_block(  # noqa: PLR0917 - Triton functions take plain values only
    q_tile: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot: tl.tensor,  # [BLOCK]
    kv_head: tl.tensor,
    block: tl.tensor,
    tile_row: tl.tensor,  # [TILE] index of the row within the tile
    first: tl.tensor,  # [TILE] the row sees the keys [first, length)
    length: tl.tensor,  # [TILE] 0: the row's state is kept
    low: tl.tensor,  # the keys [low, high) are seen by some row of these
    high: tl.tensor,
    begin_row: tl.tensor,  # rows with another length than 0: the tile's [begin_row, end_row)
    end_row: tl.tensor,
    top: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPLICIT_SUM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax over a block of which some row sees only a part.

    A row that sees all of it goes through the same operations as in an unmasked block.
    """
    key = block + tl.arange(0, BLOCK)
    in_range = (key >= low) & (key < high)
    k_tile, v_tile = load_kv(
        k_cache, v_cache, slot // PAGE, kv_head, slot, in_range, KV_HEADS, DIM, DIM_PAD, PAGE, MASKED=True
    )
    sees_block = (first < block + BLOCK) & (length > block)
    visible = (key[None, :] >= first[:, None]) & (key[None, :] < length[:, None])
    score = tl.where(visible, scores(q_tile, k_tile, scale, EXPLICIT_SUM), float("-inf"))
    # A row that sees nothing of the block gets a finite maximum, so that its unused results are not NaN.
    new_top = tl.where(sees_block, tl.maximum(top, tl.max(score, axis=1)), tl.maximum(top, 0.0))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(score - new_top[:, None])
    new_weight = weight * shrink + sum_weights(p)
    scaled_total = total * shrink[:, None]
    # 0 * inf is NaN: where a value that only some rows see is not finite, each row gets its own values.
    all_finite = end_row - begin_row == 1
    if end_row - begin_row > 1:
        finite = tl.abs(v_tile.to(tl.float32)) < float("inf")
        all_finite = tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 1
    if all_finite:
        total = tl.where(sees_block[:, None], add_values(p, v_tile, scaled_total, EXPLICIT_SUM), total)
    else:
        for row in tl.range(begin_row, end_row, disable_licm=True):
            is_row = tile_row == row
            begin = tl.max(tl.where(is_row, first, 0), axis=0)
            end = tl.max(tl.where(is_row, length, 0), axis=0)
            row_values = tl.where(((key >= begin) & (key < end))[:, None], v_tile, 0.0)
            total = tl.where(
                (is_row & sees_block)[:, None], add_values(p, row_values, scaled_total, EXPLICIT_SUM), total
            )
    return tl.where(sees_block, new_top, top), tl.where(sees_block, new_weight, weight), total


__all__ = [
    "add_values",
    "fold",
    "load_kv",
    "masked_block",
    "normalize",
    "page_numbers",
    "scores",
    "start_split",
    "sum_weights",
]
