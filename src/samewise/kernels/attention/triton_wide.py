"""The Triton function of canonical attention for wide tiles: long runs of rows of prompts, in 16 bits.

It does to every row what `paged_attend` of `triton_kernels.py` does, and knows less: a tile is uncut and one
chain, so the registers of the rest are free. Full blocks are walked two at a time: a block's weights are
computed while the matrix unit works on the other.
"""

# ruff: noqa: N803, N806 - compile-time constants of a kernel are capitals, as is usual in Triton
# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from samewise.kernels.attention.triton_steps import (
    add_values,
    fold,
    load_kv,
    masked_block,
    normalize,
    page_numbers,
    scores,
    start_split,
    sum_weights,
)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["pages", "work_list"],
)
def attend_wide(  # noqa: C901, PLR0915, PLR0917 - long but straight; plain values only
    q: tl.tensor,  # [R, KV_HEADS * GROUP, DIM], strided
    k_cache: tl.tensor,  # [P, KV_HEADS, PAGE, DIM]
    v_cache: tl.tensor,
    pages: tl.tensor,
    work_list: tl.tensor,  # of tiles without tails, all uncut
    out: tl.tensor,  # [R, KV_HEADS * GROUP, DIM]
    q_row: tl.tensor,
    q_head: tl.tensor,
    scale: tl.tensor,  # times log2(e), as weights are powers of two
    num_rows: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,  # a multiple of two blocks
    BLOCK: tl.constexpr,
    HEADER_LEN: tl.constexpr,
    STAGES: tl.constexpr,  # pairs of blocks in flight
    DEPENDENT: tl.constexpr,  # launched while the kernel before it may still run
    EXPLICIT_SUM: tl.constexpr,
) -> None:
    """Attend the head group of a tile to all its keys, item by item. An item is a tile and a KV head."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    PAIR: tl.constexpr = 2 * BLOCK
    lane = tl.arange(0, TILE)
    tile_row = lane // GROUP
    dim = tl.arange(0, DIM_PAD)
    offset = tl.arange(0, BLOCK)
    num_tiles = tl.load(work_list)
    columns = work_list + HEADER_LEN

    if DEPENDENT:
        gdc_launch_dependents()
    for item in tl.range(tl.program_id(0), num_tiles * KV_HEADS, tl.num_programs(0)):
        tile = item // KV_HEADS  # those with the most keys come first
        kv_head = item % KV_HEADS
        row = tl.load(columns + tile)
        count = tl.load(columns + num_rows + tile)
        shortest = tl.load(columns + 3 * num_rows + tile)
        longest = tl.load(columns + 6 * num_rows + tile)
        row_pages = pages + tl.load(columns + 8 * num_rows + tile)

        # Each row of the tile sees the keys [first, length). All rows see [full_begin, full_end).
        used = tile_row < count
        length = tl.where(used, shortest + tile_row, 0)
        first = tl.zeros([TILE], tl.int32)
        low = shortest * 0
        if WINDOW > 0:
            first = tl.maximum(length - WINDOW, 0)
            low = tl.maximum(shortest - WINDOW, 0)
        begin = low // BLOCK * BLOCK
        full_end = tl.maximum(begin, shortest // BLOCK * BLOCK)
        full_begin = begin
        if WINDOW > 0:  # a pair of blocks begins at a multiple of its size: no split begins within one
            full_begin = tl.maximum(begin, (tl.maximum(longest - WINDOW, 0) + PAIR - 1) // PAIR * PAIR)
            full_begin = tl.minimum(full_begin, full_end)

        head = kv_head * GROUP + lane % GROUP
        in_tile = used[:, None] & (dim < DIM)[None, :]
        q_offsets = q + (row + tile_row)[:, None] * q_row + head[:, None] * q_head + dim[None, :]
        if DEPENDENT:  # the work list and the page numbers were there before the first kernel
            gdc_wait()
        q_tile = tl.load(q_offsets, mask=in_tile, other=0.0)
        top = tl.full([TILE], float("-inf"), tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE, DIM_PAD], tl.float32)
        all_top = tl.full([TILE], float("-inf"), tl.float32)
        all_weight = tl.zeros([TILE], tl.float32)
        all_total = tl.zeros([TILE, DIM_PAD], tl.float32)

        if WINDOW > 0:
            for block in tl.range(begin, full_begin, BLOCK, num_stages=1):
                top, weight, total, all_top, all_weight, all_total = start_split(
                    block, begin, first, length, top, weight, total, all_top, all_weight, all_total, SPLIT
                )
                key = block + offset
                slots = page_numbers(row_pages, key, low, longest, PAGE) * PAGE + key % PAGE
                top, weight, total = masked_block(
                    q_tile, k_cache, v_cache, slots, kv_head, block, tile_row, first, length, low, longest,
                    0, count, top, weight, total, scale, KV_HEADS, DIM, DIM_PAD, PAGE, BLOCK, EXPLICIT_SUM,
                )  # fmt: skip
        # Page numbers are read a pair ahead, so that loads of K and V can start STAGES pairs early.
        pairs_end = full_begin + (full_end - full_begin) // PAIR * PAIR
        page = page_numbers(row_pages, full_begin + offset, full_begin, pairs_end, PAGE)
        next_page = page_numbers(row_pages, full_begin + BLOCK + offset, full_begin, pairs_end, PAGE)
        for block in tl.range(full_begin, pairs_end, PAIR, num_stages=STAGES):
            top, weight, total, all_top, all_weight, all_total = start_split(
                block, begin, first, length, top, weight, total, all_top, all_weight, all_total, SPLIT
            )
            key = block + offset
            k_tile, v_tile = load_kv(
                k_cache, v_cache, page, kv_head, key, key, KV_HEADS, DIM, DIM_PAD, PAGE, MASKED=False
            )
            next_k, next_v = load_kv(
                k_cache, v_cache, next_page, kv_head, key, key, KV_HEADS, DIM, DIM_PAD, PAGE, MASKED=False
            )
            page = page_numbers(row_pages, key + PAIR, full_begin, pairs_end, PAGE)
            next_page = page_numbers(row_pages, key + PAIR + BLOCK, full_begin, pairs_end, PAGE)
            score = scores(q_tile, k_tile, scale, EXPLICIT_SUM)
            next_score = scores(q_tile, next_k, scale, EXPLICIT_SUM)
            new_top = tl.maximum(top, tl.max(score, axis=1))
            next_top = tl.maximum(new_top, tl.max(next_score, axis=1))
            shrink = tl.exp2(top - new_top)
            next_shrink = tl.exp2(new_top - next_top)
            p = tl.exp2(score - new_top[:, None])
            next_p = tl.exp2(next_score - next_top[:, None])
            weight = (weight * shrink + sum_weights(p)) * next_shrink + sum_weights(next_p)
            total = add_values(p, v_tile, total * shrink[:, None], EXPLICIT_SUM)
            total = add_values(next_p, next_v, total * next_shrink[:, None], EXPLICIT_SUM)
            top = next_top
        for block in tl.range(pairs_end, full_end, BLOCK, num_stages=1, disable_licm=True):
            top, weight, total, all_top, all_weight, all_total = start_split(
                block, begin, first, length, top, weight, total, all_top, all_weight, all_total, SPLIT
            )
            key = block + offset
            page = page_numbers(row_pages, key, block, full_end, PAGE)
            k_tile, v_tile = load_kv(
                k_cache, v_cache, page, kv_head, key, key, KV_HEADS, DIM, DIM_PAD, PAGE, MASKED=False
            )
            score = scores(q_tile, k_tile, scale, EXPLICIT_SUM)
            new_top = tl.maximum(top, tl.max(score, axis=1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(score - new_top[:, None])
            weight = weight * shrink + sum_weights(p)
            total = add_values(p, v_tile, total * shrink[:, None], EXPLICIT_SUM)
            top = new_top
        # Nothing is moved out of this loop: it would take registers from those above.
        for block in tl.range(full_end, longest, BLOCK, num_stages=1, disable_licm=True):
            top, weight, total, all_top, all_weight, all_total = start_split(
                block, begin, first, length, top, weight, total, all_top, all_weight, all_total, SPLIT
            )
            key = block + offset
            slots = page_numbers(row_pages, key, low, longest, PAGE) * PAGE + key % PAGE
            top, weight, total = masked_block(
                q_tile, k_cache, v_cache, slots, kv_head, block, tile_row, first, length, low, longest,
                0, count, top, weight, total, scale, KV_HEADS, DIM, DIM_PAD, PAGE, BLOCK, EXPLICIT_SUM,
            )  # fmt: skip
        all_top, all_weight, all_total = fold(all_top, all_weight, all_total, top, weight, total, length > 0)
        result = normalize(all_total, all_weight, length).to(out.dtype.element_ty)
        row_start = (row + tile_row).to(tl.int64) * (HEADS * DIM)
        tl.store(out + row_start[:, None] + head[:, None] * DIM + dim[None, :], result, mask=in_tile)
    if DEPENDENT:  # programs without an item wait too: when this kernel has ended, so have those before it
        gdc_wait()


__all__ = ["attend_wide"]
