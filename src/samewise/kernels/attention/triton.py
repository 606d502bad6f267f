"""Canonical attention on CUDA: store, then attend tile by tile.

What is computed for a row: its keys are cut at absolute multiples of SPLIT; each piece is walked in
absolute blocks of BLOCK keys, in order, with an online softmax begun afresh; the pieces are folded one after
the other, in order. All of it follows from the row's length alone.

How it is computed: rows at consecutive positions of one sequence share a *tile*, whose keys are read once
(`work.py` says which). A program walks all pieces of its tile and folds them as it goes, or walks one piece
and the last to arrive folds them: the same operations in the same order. A row's place in its tile, the
rows beside it, how many programs there are and how many rows the pass has decide only when and where a number
is computed, never which number: matrix units treat rows alike, a tile of one row has the shape of a full one,
and where a row sees nothing its state is kept by selection, not by arithmetic.

The work list is read on the device: one launch, or one captured graph, serves contexts of every length.

Pages are `[P, Hkv, PAGE, D]` for both K and V. Runs on CPU tensors under Triton's interpreter.

Knows tensors; has never heard of a request or a model.
"""

# ruff: noqa: N803, N806 - what a kernel is compiled for is written in capitals, as a constant is elsewhere
# mypy: allow-untyped-decorators
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from samewise.errors import InvariantBroken
from samewise.kernels.attention.base import PAGE, Heads, LayerKV, Rows
from samewise.kernels.attention.tiles import COLUMNS, HEAD, Plan

TILE = 16
"""Query rows of a matrix tile: rows of the pass times query heads of a KV head."""

WIDE = 64
"""The same for long runs of rows in passes of many, in 16 bits. float32, which the matrix units do not take,
would not fit in registers. Matrix units of one device give a row the same bits in a tile of any size, and no
other operation here adds across a tile; the proof at start-up reads the same rows in both."""

WIDE_FROM = 129
"""Rows of a pass from which on long runs of them are read in wide tiles. Bits do not depend on it."""

SPLIT = 256
"""Keys in one split of a context: a fixed size at fixed absolute borders. Bits depend on it."""

BLOCK = 32
"""Keys per step of the online softmax. Bits depend on it."""

WARPS = 4
"""Per program; twice as many where a head is wider than 256 bytes, which needs the registers."""

BUSY_FROM = 64
"""Rows of a pass from which on programs of narrow tiles have half as many warps: less waiting for others,
and twice as many find room. Fewer rows make too few programs for that. Bits do not depend on it."""

STAGES = 3
"""Blocks in flight, as far as shared memory goes."""
FOLD_STAGES = 4
"""Partial results in flight."""

FP_FUSION = False
"""Whether the compiler may fuse a product into a sum. It may not: its choice is nobody's contract."""

TILES = 256
"""Tiles looked at per step when searching the work list. Bits do not depend on it."""

PROGRAMS_PER_PROCESSOR = 8
"""Enough to keep memory busy while a program turns to its next item. Bits do not depend on it."""

AT_ONCE_PER_PROCESSOR = 2
"""How many of them find room on a processor at the same time, about. Bits do not depend on it."""

WORKSPACE_BYTES = 128 * 2**20
"""For partial results, at most; tiles that find no room are walked whole. Bits do not depend on it."""


# Kernels. The number of rows and of programs are plain, unspecialised arguments: passes of every size run the
# same machine code.


@triton.jit
def _store(
    k: tl.tensor,  # [R, HEADS, DIM], strided
    v: tl.tensor,
    k_cache: tl.tensor,  # [P, HEADS, PAGE, DIM]
    v_cache: tl.tensor,
    slots: tl.tensor,  # [R]
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    """Copy one row's K and V to its slot. Padding rows race for the trash page, which nobody reads."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    there = (head < HEADS) & (dim < DIM)
    to = (slot // PAGE).to(tl.int64) * (HEADS * PAGE * DIM) + (slot % PAGE) * DIM
    to += head * (PAGE * DIM) + dim
    tl.store(k_cache + to, tl.load(k + row * k_row + head * k_head + dim, mask=there), mask=there)
    tl.store(v_cache + to, tl.load(v + row * v_row + head * v_head + dim, mask=there), mask=there)


@triton.jit
def _tile_of(piece: tl.tensor, tile_piece: tl.tensor, num_tiles: tl.tensor, TILES: tl.constexpr) -> tl.tensor:
    """Tile that owns a piece of work: the last of the first `num_tiles` that starts at or before it."""
    count = 0
    for base in tl.range(0, num_tiles, TILES):
        tile = base + tl.arange(0, TILES)
        start = tl.load(tile_piece + tile, mask=tile < num_tiles, other=0x7FFFFFFF)
        count += tl.sum((start <= piece).to(tl.int32), axis=0)
    return count - 1


@triton.jit
def _fold(
    all_top: tl.tensor,  # [M], of the splits before
    all_weight: tl.tensor,
    all_total: tl.tensor,  # [M, DIM_PAD]
    top: tl.tensor,  # of the next split
    weight: tl.tensor,
    total: tl.tensor,
    seen: tl.tensor,  # [M] whether the row sees anything of it; if not, nothing changes
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add one split to those before it. The one place where splits meet, in and out of registers."""
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
def _quotient(total: tl.tensor, weight: tl.tensor, length: tl.tensor) -> tl.tensor:
    """The row's result. A row without keys has no weight and becomes zeros; a NaN must stay one.

    The sign of a zero sum may come from values behind a mask, and is dropped.
    """
    total = tl.where(total == 0.0, 0.0, total)
    share = tl.div_rn(tl.full(weight.shape, 1.0, tl.float32), tl.where(length > 0, weight, 1.0))
    return total * share[:, None]


@triton.jit
def _read(
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page: tl.tensor,  # [BLOCK]
    kv_head: tl.tensor,
    key: tl.tensor,  # [BLOCK]
    live: tl.tensor,  # [BLOCK], used if MASKED
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """K and V of a block. What lies behind a masked key may be NaN, and is not read."""
    dim = tl.arange(0, DIM_PAD)
    at = page.to(tl.int64) * (KV_HEADS * PAGE * DIM) + (kv_head * (PAGE * DIM) + key % PAGE * DIM)
    at_tile = at[:, None] + dim[None, :]
    if MASKED:
        mask = live[:, None] & (dim < DIM)[None, :]
        k_tile = tl.load(k_cache + at_tile, mask=mask, other=0.0)
        v_tile = tl.load(v_cache + at_tile, mask=mask, other=0.0)
    elif DIM < DIM_PAD:
        mask = tl.broadcast_to((dim < DIM)[None, :], at_tile.shape)
        k_tile = tl.load(k_cache + at_tile, mask=mask, other=0.0)
        v_tile = tl.load(v_cache + at_tile, mask=mask, other=0.0)
    else:
        k_tile = tl.load(k_cache + at_tile)
        v_tile = tl.load(v_cache + at_tile)
    return k_tile, v_tile


@triton.jit
def _score(q_tile: tl.tensor, k_tile: tl.tensor, scale: tl.tensor, SPELT: tl.constexpr) -> tl.tensor:
    if SPELT:
        return tl.sum(q_tile.to(tl.float32)[:, None, :] * k_tile.to(tl.float32)[None, :, :], axis=2) * scale
    return tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale


@triton.jit
def _add(p: tl.tensor, v_tile: tl.tensor, total: tl.tensor, SPELT: tl.constexpr) -> tl.tensor:
    p_tile = p.to(v_tile.dtype)
    if SPELT:
        return total + tl.sum(p_tile.to(tl.float32)[:, :, None] * v_tile.to(tl.float32)[None, :, :], axis=1)
    return tl.dot(p_tile, v_tile, total, input_precision="ieee")


@triton.jit
def _weigh(p: tl.tensor) -> tl.tensor:
    """The sum of every row's weights, none above 1: as integers, so that no order of summation shows, however
    threads share a tile."""
    # The bits of 1 + p less those of 1 count 2**-23rds: as good as a conversion, and cheaper.
    parts = (p + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
    return tl.sum(parts, axis=1).to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def _border(
    block: tl.tensor,
    begin: tl.tensor,  # where the walk began
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
    """Where a block opens a new split: fold the one before, begin afresh."""
    if (block % SPLIT == 0) & (block > begin):
        seen = (first < block) & (length > block - SPLIT)
        all_top, all_weight, all_total = _fold(all_top, all_weight, all_total, top, weight, total, seen)
        top = tl.full(top.shape, float("-inf"), tl.float32)
        weight = tl.zeros(weight.shape, tl.float32)
        total = tl.zeros(total.shape, tl.float32)
    return top, weight, total, all_top, all_weight, all_total


@triton.jit
def _page_numbers(
    pages: tl.tensor, key: tl.tensor, low: tl.tensor, high: tl.tensor, PAGE: tl.constexpr
) -> tl.tensor:
    """The pages of a block's keys, as far as they lie in [low, high)."""
    return tl.load(pages + key // PAGE, mask=(key >= low) & (key < high), other=0)


@triton.jit
def _mixed(  # noqa: PLR0917 - a kernel has no objects to hide in
    q_tile: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page: tl.tensor,  # [BLOCK]
    kv_head: tl.tensor,
    block: tl.tensor,
    within: tl.tensor,  # [TILE] which of the tile's rows
    first: tl.tensor,  # [TILE] the keys [first, length) are the row's
    length: tl.tensor,
    low: tl.tensor,  # the keys [low, high) are somebody's
    high: tl.tensor,
    count: tl.tensor,
    top: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPELT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax over a block that not every row of the tile sees wholly.

    For a row that does, the same operations as in a block that all rows see.
    """
    key = block + tl.arange(0, BLOCK)
    live = (key >= low) & (key < high)
    k_tile, v_tile = _read(
        k_cache, v_cache, page, kv_head, key, live, KV_HEADS, DIM, DIM_PAD, PAGE, MASKED=True
    )
    sees = (first < block + BLOCK) & (length > block)
    may = (key[None, :] >= first[:, None]) & (key[None, :] < length[:, None])
    score = tl.where(may, _score(q_tile, k_tile, scale, SPELT), float("-inf"))
    # A row that sees nothing here gets a top that makes no NaN on the way to being dropped.
    new_top = tl.where(sees, tl.maximum(top, tl.max(score, axis=1)), tl.maximum(top, 0.0))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(score - new_top[:, None])
    new_weight = weight * shrink + _weigh(p)
    shrunk = total * shrink[:, None]
    # A weight of zero does not silence an infinity: values that only some rows may see are looked at first.
    alike = count == 1
    if count > 1:
        calm = tl.abs(v_tile.to(tl.float32)) < float("inf")
        alike = tl.min(tl.min(calm.to(tl.int32), axis=1), axis=0) == 1
    if alike:
        total = tl.where(sees[:, None], _add(p, v_tile, shrunk, SPELT), total)
    else:
        for row in tl.range(0, count):
            mine = within == row
            begin = tl.max(tl.where(mine, first, 0), axis=0)
            end = tl.max(tl.where(mine, length, 0), axis=0)
            its = tl.where(((key >= begin) & (key < end))[:, None], v_tile, 0.0)
            total = tl.where((mine & sees)[:, None], _add(p, its, shrunk, SPELT), total)
    return tl.where(sees, new_top, top), tl.where(sees, new_weight, weight), total


@triton.jit(
    do_not_specialize=["num_rows", "workspace_len"],
    do_not_specialize_on_alignment=["pages", "work"],
)
def _attend(  # noqa: C901, PLR0912, PLR0915, PLR0917 - long because it is straight; likewise
    q: tl.tensor,  # [R, KV_HEADS * GROUP, DIM], strided
    k_cache: tl.tensor,  # [P, KV_HEADS, PAGE, DIM]
    v_cache: tl.tensor,
    pages: tl.tensor,
    work: tl.tensor,
    workspace: tl.tensor,  # [slots, KV_HEADS * GROUP * (DIM + 2)]: sums, maxima, weights; then arrivals
    out: tl.tensor,  # [R, KV_HEADS * GROUP, DIM]
    q_row: tl.tensor,
    q_head: tl.tensor,
    scale: tl.tensor,  # times log2(e)
    num_rows: tl.tensor,
    workspace_len: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    FOLD_STAGES: tl.constexpr,
    SPELT: tl.constexpr,
) -> None:
    """Attend a tile's head group to all of its keys, or to one split, for every item of this program's share.

    A split leaves, per row and query head, the largest score, the sum of weights relative to it, and the sum
    of weighted values, in float32 (nothing if it ends before the window); the last of a tile to arrive folds
    them.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    RESULT: tl.constexpr = HEADS * (DIM + 2)
    place = tl.arange(0, TILE)
    within = place // GROUP
    dim = tl.arange(0, DIM_PAD)
    offset = tl.arange(0, BLOCK)
    num_items = tl.load(work) * KV_HEADS
    cut_tiles = tl.load(work + 1)
    cut_pieces = tl.load(work + 2)
    columns = work + HEAD

    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        piece = item // KV_HEADS
        kv_head = item % KV_HEADS
        # Behind the last cut tile each is one piece.
        tile = piece - cut_pieces + cut_tiles
        if piece < cut_pieces:
            tile = _tile_of(piece, columns + 6 * num_rows, cut_tiles, TILES)
        row = tl.load(columns + tile)
        count = tl.load(columns + num_rows + tile)
        shortest = tl.load(columns + 2 * num_rows + tile)
        row_pages = pages + tl.load(columns + 3 * num_rows + tile)
        planned = tl.load(columns + 4 * num_rows + tile)
        slot = tl.load(columns + 5 * num_rows + tile)
        longest = tl.where(shortest > 0, shortest + count - 1, 0)

        # Of each row of the tile: the keys [first, length).
        used = within < count
        length = tl.where(used & (shortest > 0), shortest + within, 0)
        first = tl.zeros([TILE], tl.int32)
        low = shortest * 0
        if WINDOW > 0:
            first = tl.maximum(length - WINDOW, 0)
            low = tl.maximum(shortest - WINDOW, 0)
        # Of the walk: the keys [low, high), in blocks from `begin`; all rows see the blocks [clear, mixed).
        high = longest
        begin = low // BLOCK * BLOCK
        if slot >= 0:
            split = planned + piece - tl.load(columns + 6 * num_rows + tile)
            begin = tl.maximum(begin, split * SPLIT)
            high = tl.minimum(high, split * SPLIT + SPLIT)
        clear = begin
        if WINDOW > 0:
            clear = tl.maximum(begin, (tl.maximum(longest - WINDOW, 0) + BLOCK - 1) // BLOCK * BLOCK)
        mixed = tl.maximum(clear, tl.minimum(shortest // BLOCK * BLOCK, high))

        head = kv_head * GROUP + place % GROUP
        in_tile = used[:, None] & (dim < DIM)[None, :]
        q_at = q + (row + within)[:, None] * q_row + head[:, None] * q_head + dim[None, :]
        q_tile = tl.load(q_at, mask=in_tile, other=0.0)
        top = tl.full([TILE], float("-inf"), tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE, DIM_PAD], tl.float32)
        all_top = tl.full([TILE], float("-inf"), tl.float32)
        all_weight = tl.zeros([TILE], tl.float32)
        all_total = tl.zeros([TILE, DIM_PAD], tl.float32)

        if WINDOW > 0:
            for block in tl.range(begin, tl.minimum(clear, high), BLOCK, num_stages=1):
                top, weight, total, all_top, all_weight, all_total = _border(
                    block, begin, first, length, top, weight, total, all_top, all_weight, all_total, SPLIT
                )
                page = _page_numbers(row_pages, block + offset, low, high, PAGE)
                top, weight, total = _mixed(
                    q_tile, k_cache, v_cache, page, kv_head, block, within, first, length, low, high,
                    count, top, weight, total, scale, KV_HEADS, DIM, DIM_PAD, PAGE, BLOCK, SPELT,
                )  # fmt: skip
        # Page numbers are read one block ahead, so that K and V can be fetched as early as STAGES allows.
        page = _page_numbers(row_pages, clear + offset, clear, mixed, PAGE)
        behind = _page_numbers(row_pages, mixed + offset, low, high, PAGE)
        for block in tl.range(clear, mixed, BLOCK, num_stages=STAGES):
            top, weight, total, all_top, all_weight, all_total = _border(
                block, begin, first, length, top, weight, total, all_top, all_weight, all_total, SPLIT
            )
            key = block + offset
            k_tile, v_tile = _read(
                k_cache, v_cache, page, kv_head, key, key, KV_HEADS, DIM, DIM_PAD, PAGE, MASKED=False
            )
            page = _page_numbers(row_pages, key + BLOCK, clear, mixed, PAGE)
            score = _score(q_tile, k_tile, scale, SPELT)
            new_top = tl.maximum(top, tl.max(score, axis=1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(score - new_top[:, None])
            weight = weight * shrink + _weigh(p)
            total = _add(p, v_tile, total * shrink[:, None], SPELT)
            top = new_top
        for block in tl.range(mixed, high, BLOCK, num_stages=1):
            top, weight, total, all_top, all_weight, all_total = _border(
                block, begin, first, length, top, weight, total, all_top, all_weight, all_total, SPLIT
            )
            top, weight, total = _mixed(
                q_tile, k_cache, v_cache, behind, kv_head, block, within, first, length, low, high,
                count, top, weight, total, scale, KV_HEADS, DIM, DIM_PAD, PAGE, BLOCK, SPELT,
            )  # fmt: skip
            behind = _page_numbers(row_pages, block + BLOCK + offset, low, high, PAGE)

        done = slot < 0
        if slot < 0:
            last = (high - 1) // SPLIT * SPLIT
            seen = (first < high) & (length > last)
            all_top, all_weight, all_total = _fold(all_top, all_weight, all_total, top, weight, total, seen)
        else:
            end = (longest + SPLIT - 1) // SPLIT
            at = workspace + (slot + within).to(tl.int64) * RESULT
            if begin < high:
                to = at + ((high - 1) // SPLIT - planned) * count * RESULT
                tl.store(to[:, None] + head[:, None] * DIM + dim[None, :], total, mask=in_tile)
                tl.store(to + HEADS * DIM + head, top, mask=used)
                tl.store(to + HEADS * (DIM + 1) + head, weight, mask=used)
            # Whoever comes last finds what the others left, and folds it; where, is all that chance decides.
            tl.debug_barrier()
            arrivals = workspace + (workspace_len - 1 - (tile * KV_HEADS + kv_head))
            done = tl.atomic_add(arrivals, 1.0, sem="acq_rel", scope="gpu") == (end - planned - 1).to(
                tl.float32
            )
            if done:
                tl.store(arrivals, 0.0)
                for split in tl.range(low // SPLIT, end, num_stages=FOLD_STAGES):
                    of = at + (split - planned) * count * RESULT
                    total = tl.load(of[:, None] + head[:, None] * DIM + dim[None, :], mask=in_tile, other=0.0)
                    top = tl.load(of + HEADS * DIM + head, mask=used, other=0.0)
                    weight = tl.load(of + HEADS * (DIM + 1) + head, mask=used, other=0.0)
                    seen = (first < (split + 1) * SPLIT) & (length > split * SPLIT)
                    all_top, all_weight, all_total = _fold(
                        all_top, all_weight, all_total, top, weight, total, seen
                    )
        if done:
            result = _quotient(all_total, all_weight, length).to(out.dtype.element_ty)
            to_row = (row + within).to(tl.int64) * (HEADS * DIM)
            tl.store(out + to_row[:, None] + head[:, None] * DIM + dim[None, :], result, mask=in_tile)


@torch.library.custom_op("samewise::attend_triton", mutates_args=("k_cache", "v_cache", "workspace"))
def attend_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    work: torch.Tensor,
    workspace: torch.Tensor,
    scale: float,
    window: int,
    num_programs: int,
) -> torch.Tensor:
    """Launch the kernels. `window` 0 means none, as an operator's arguments must be plain."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    dim_pad = _pad(head_dim)
    _check(q, k, v, k_cache, v_cache, workspace)
    lists = torch.split(work, HEAD + len(COLUMNS) * num_rows)
    if not lists or len(lists) > 2 or len(lists[-1]) != len(lists[0]):
        raise InvariantBroken(f"work lists of {len(work)} for {num_rows} rows")
    _store[(num_rows,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        *k.stride()[:2],
        *v.stride()[:2],
        HEADS=num_kv_heads,
        HEADS_PAD=triton.next_power_of_2(num_kv_heads),
        DIM=head_dim,
        DIM_PAD=dim_pad,
        PAGE=PAGE,
        num_warps=WARPS,
        enable_fp_fusion=FP_FUSION,
    )
    if len(workspace) < num_rows * num_kv_heads:
        raise InvariantBroken(f"a workspace of {len(workspace)} for {num_rows} rows")
    tiles = _tile(group, TILE), _tile(group, WIDE)
    for tile, items, whole in zip(tiles, lists, (False, True), strict=False):
        warps = WARPS // 2 if num_rows >= BUSY_FROM and tile < WIDE and not whole else WARPS
        _attend[(num_programs,)](
            q,
            k_cache,
            v_cache,
            pages,
            items,
            workspace,
            out,
            *q.stride()[:2],
            scale * math.log2(math.e),
            num_rows,
            len(workspace),
            KV_HEADS=num_kv_heads,
            GROUP=group,
            TILE=tile,
            DIM=head_dim,
            DIM_PAD=dim_pad,
            WINDOW=window,
            PAGE=PAGE,
            SPLIT=SPLIT,
            BLOCK=BLOCK,
            HEAD=HEAD,
            TILES=TILES,
            STAGES=_stages(tile, dim_pad * q.element_size(), q.device),
            FOLD_STAGES=1 if whole else FOLD_STAGES,
            SPELT=INTERPRETED,
            num_warps=warps if dim_pad * q.element_size() <= 256 else 2 * warps,
            enable_fp_fusion=FP_FUSION,
        )
    return out


@attend_triton.register_fake
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


INTERPRETED = not isinstance(_attend, triton.JITFunction)
"""The interpreter leaves matrix products to a BLAS, whose rows are not alike: there they are spelt out."""


def _pad(size: int) -> int:
    """Size of the tile that holds `size`: tiles are powers of two, and matrix units take no less than 16."""
    return max(16, int(triton.next_power_of_2(size)))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *dense: torch.Tensor) -> None:
    """The kernels trust their pointers, so what they take for granted is looked at here."""
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        raise InvariantBroken("q, k and v must have unit stride within a head")
    if not all(t.is_contiguous() for t in dense):
        raise InvariantBroken("K and V pages and the workspace must be contiguous")


def _tile(group: int, least: int) -> int:
    """Query rows of a matrix tile for a head group of this size."""
    return max(least, int(triton.next_power_of_2(group)))


def _stages(tile: int, head_bytes: int, device: torch.device) -> int:
    """How many blocks of K and V fit in shared memory beside the queries and one tile more."""
    shared, held = _shared(device)
    room = shared - (tile + BLOCK) * head_bytes
    return max(1, min(STAGES, room // (2 * BLOCK * head_bytes) + (0 if held else 1)))


@functools.cache
def _shared(device: torch.device) -> tuple[int, bool]:
    """Bytes of shared memory a program may have, and whether matrix units hold on to what they work on."""
    if device.type != "cuda":
        return 227 * 1024, True
    at = device.index or 0
    most = triton.runtime.driver.active.utils.get_device_properties(at)["max_shared_mem"]
    return int(most), torch.cuda.get_device_capability(at)[0] in {9, 10}


@dataclass(frozen=True)
class TritonKernel:
    """Canonical attention on CUDA. `num_programs` share the work, about `at_once` of them at a time; bits
    depend on neither."""

    num_programs: int
    at_once: int

    @classmethod
    def on(cls, device: torch.device) -> TritonKernel:
        """A kernel with as many programs as keep this CUDA device busy."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(PROGRAMS_PER_PROCESSOR * processors, AT_ONCE_PER_PROCESSOR * processors)

    @property
    def name(self) -> str:
        """Name, version and every constant the bits may depend on."""
        return f"triton-2 tile {TILE} and {WIDE} split {SPLIT} block {BLOCK} warps {WARPS} stages {STAGES}"

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """Uninitialised pages, `[P, Hkv, PAGE, D]` each: one head's share of a page is one run of memory."""
        shape = (num_pages, num_kv_heads, PAGE, head_dim)
        return LayerKV(
            torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
        )

    def plan(self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int) -> Plan:
        """Tiles that fit the largest head group; per partial result a sum of values, a maximum, a weight."""
        windows = [layer.window for layer in layers if layer.window is not None]
        groups = [layer.num_heads // layer.num_kv_heads for layer in layers]
        slot_len = max(layer.num_heads * (layer.head_dim + 2) for layer in layers)
        most = max_rows * -(-max_len // SPLIT)
        return Plan(
            tile_rows=min(_tile(group, TILE) // group for group in groups),
            wide_rows=min(_tile(group, WIDE) // group for group in groups) if dtype.itemsize == 2 else 0,
            wide_from=WIDE_FROM,
            split=SPLIT,
            window=max(windows) if len(windows) == len(layers) else None,
            kv_heads=min(layer.num_kv_heads for layer in layers),
            num_slots=min(most, WORKSPACE_BYTES // (4 * slot_len)),
            slot_len=slot_len,
            num_arrivals=max_rows * max(layer.num_kv_heads for layer in layers),
            at_once=self.at_once,
            busy_from=BUSY_FROM,
        )

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
        out: torch.Tensor = attend_triton(
            q,
            k,
            v,
            kv.k,
            kv.v,
            rows.slots,
            rows.pages,
            rows.work,
            rows.workspace,
            scale,
            0 if window is None else window,
            self.num_programs,
        )
        return out


__all__ = ["BLOCK", "SPLIT", "TILE", "TritonKernel", "attend_triton"]
