"""The Triton functions of canonical attention on CUDA. `triton.py` launches them and states the arithmetic.

A *chain* is a run of a tile's rows, each one key longer than the one before, that find every key in the same
slot: all rows of a tile without tails, or nodes of a draft tree of which each is the next one's parent.

The number of rows and the number of programs are unspecialized arguments: passes of every size run the same
machine code.
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


@triton.jit
def paged_store(
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
    """Copy one row's K and V to its slot. Padding rows race for the trash page, which is never read."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    mask = (head < HEADS) & (dim < DIM)
    target = (slot // PAGE).to(tl.int64) * (HEADS * PAGE * DIM) + (slot % PAGE) * DIM
    target += head * (PAGE * DIM) + dim
    tl.store(k_cache + target, tl.load(k + row * k_row + head * k_head + dim, mask=mask), mask=mask)
    tl.store(v_cache + target, tl.load(v + row * v_row + head * v_head + dim, mask=mask), mask=mask)


@triton.jit
def _move_elements(
    cache: tl.tensor,
    pairs: tl.tensor,  # [2 * num_pairs]
    num_pairs: tl.tensor,
    element: tl.tensor,  # [E] elements of a slot, over all heads
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PAIRS: tl.constexpr,  # num_pairs at most
) -> None:
    """Move some elements of all pairs of slots of one cache, all read before any is written."""
    pair = tl.arange(0, PAIRS)
    known = pair < num_pairs
    source = tl.load(pairs + 2 * pair, mask=known, other=0).to(tl.int64)[:, None]
    target = tl.load(pairs + 2 * pair + 1, mask=known, other=0).to(tl.int64)[:, None]
    offset = (element // DIM * (PAGE * DIM) + element % DIM)[None, :]
    mask = known[:, None] & (element < HEADS * DIM)[None, :]
    values = tl.load(
        cache + (source // PAGE * (HEADS * PAGE * DIM) + source % PAGE * DIM + offset), mask=mask, other=0
    )
    tl.debug_barrier()
    tl.store(
        cache + (target // PAGE * (HEADS * PAGE * DIM) + target % PAGE * DIM + offset), values, mask=mask
    )


@triton.jit(do_not_specialize_on_alignment=["moves"])
def move_pairs(
    caches: tl.tensor,  # [N] int64, addresses of caches [P, HEADS, PAGE, DIM]
    moves: tl.tensor,  # [1 + 2 * MANY] number of pairs, then slots (from, to)
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FEW: tl.constexpr,  # numbers of pairs
    SOME: tl.constexpr,
    MANY: tl.constexpr,
    SHARE: tl.constexpr,
    ELEMENT: tl.constexpr,  # an integer type as wide as the elements
) -> None:
    """Move SHARE elements of every pair of slots of one cache. Ends at once where there are no pairs."""
    num_pairs = tl.load(moves)
    if num_pairs > 0:
        cache = tl.load(caches + tl.program_id(0)).to(tl.pointer_type(ELEMENT))
        first = tl.program_id(1) * SHARE
        pairs = moves + 1
        if num_pairs <= FEW:
            _move_elements(cache, pairs, num_pairs, first + tl.arange(0, SHARE), HEADS, DIM, PAGE, FEW)
        elif num_pairs <= SOME:
            _move_elements(cache, pairs, num_pairs, first + tl.arange(0, SHARE), HEADS, DIM, PAGE, SOME)
        else:
            STEP: tl.constexpr = SHARE * SOME // MANY
            for part in tl.range(0, SHARE, STEP):
                element = first + part + tl.arange(0, STEP)
                _move_elements(cache, pairs, num_pairs, element, HEADS, DIM, PAGE, MANY)


@triton.jit
def _find_tile(
    piece: tl.tensor, tile_piece: tl.tensor, num_tiles: tl.tensor, SEARCH_TILES: tl.constexpr
) -> tl.tensor:
    """The tile that owns a piece: the last of the first `num_tiles` that starts at or before it."""
    count = 0
    for first in tl.range(0, num_tiles, SEARCH_TILES):
        tile = first + tl.arange(0, SEARCH_TILES)
        start = tl.load(tile_piece + tile, mask=tile < num_tiles, other=0x7FFFFFFF)
        count += tl.sum((start <= piece).to(tl.int32), axis=0)
    return count - 1


@triton.jit
def _slots(
    pages: tl.tensor,
    key: tl.tensor,  # [BLOCK]
    low: tl.tensor,
    high: tl.tensor,
    page_start: tl.tensor,  # index of the sequence's first page number
    tail_start: tl.tensor,  # the keys from here on are found through the tail
    tail: tl.tensor,  # index of the slot of key `tail_start`
    PAGE: tl.constexpr,
) -> tl.tensor:
    """The slots of a block's keys that lie in [low, high)."""
    in_pages = key < tail_start
    index = tl.where(in_pages, page_start + key // PAGE, tail + (key - tail_start))
    number = tl.load(pages + index, mask=(key >= low) & (key < high), other=0)
    return tl.where(in_pages, number * PAGE + key % PAGE, number)


@triton.jit(
    do_not_specialize=["num_rows", "workspace_len"],
    do_not_specialize_on_alignment=["lengths", "pages", "work_list"],
)
def paged_attend(  # noqa: C901, PLR0912, PLR0915, PLR0917 - long but straight; plain values only
    q: tl.tensor,  # [R, KV_HEADS * GROUP, DIM], strided
    k_cache: tl.tensor,  # [P, KV_HEADS, PAGE, DIM]
    v_cache: tl.tensor,
    lengths: tl.tensor,  # [R]
    pages: tl.tensor,
    work_list: tl.tensor,
    workspace: tl.tensor,  # [slots, KV_HEADS * GROUP * (DIM + 2)]: sums, maxima, weights; then arrivals
    out: tl.tensor,  # [R, KV_HEADS * GROUP, DIM]
    q_row: tl.tensor,
    q_head: tl.tensor,
    scale: tl.tensor,  # times log2(e), as weights are powers of two
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
    HEADER_LEN: tl.constexpr,
    SEARCH_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    FOLD_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,  # launched while the kernel before it may still run
    EXPLICIT_SUM: tl.constexpr,
) -> None:
    """Attend the head group of an uncut tile to all its keys, or of a cut tile to one split, item by item.

    An item is a piece of the work list and a KV head. A split leaves `top`, `weight` and `total` per row and
    query head in the workspace, in float32 (nothing if it ends before the window); the tile's last program
    to finish folds them.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    RESULT: tl.constexpr = HEADS * (DIM + 2)
    lane = tl.arange(0, TILE)
    tile_row = lane // GROUP
    dim = tl.arange(0, DIM_PAD)
    offset = tl.arange(0, BLOCK)
    num_pieces = tl.load(work_list)
    cut_tiles = tl.load(work_list + 1)
    cut_pieces = tl.load(work_list + 2)
    columns = work_list + HEADER_LEN

    if DEPENDENT:
        gdc_launch_dependents()
    for item in tl.range(tl.program_id(0), num_pieces * KV_HEADS, tl.num_programs(0)):
        piece = (
            num_pieces - 1 - item // KV_HEADS
        )  # the last rows of a prompt see the most keys: they go first
        kv_head = item % KV_HEADS
        # After the last cut tile, each tile is one piece.
        tile = piece - cut_pieces + cut_tiles
        if piece < cut_pieces:
            tile = _find_tile(piece, columns + 11 * num_rows, cut_tiles, SEARCH_TILES)
        row = tl.load(columns + tile)
        count = tl.load(columns + num_rows + tile)
        chain_count = tl.load(columns + 2 * num_rows + tile)
        shortest = tl.load(columns + 3 * num_rows + tile)
        shared = tl.load(columns + 4 * num_rows + tile)
        chain_length = tl.load(columns + 5 * num_rows + tile)
        longest = tl.load(columns + 6 * num_rows + tile)
        tail_start = tl.load(columns + 7 * num_rows + tile)
        page_start = tl.load(columns + 8 * num_rows + tile)
        first_split = tl.load(columns + 9 * num_rows + tile)
        slot = tl.load(columns + 10 * num_rows + tile)
        chains = tl.load(columns + 12 * num_rows + tile)
        tail = tl.load(columns + 13 * num_rows + tile)
        row_pages = pages + page_start

        # Each row of the tile sees the keys [first, length).
        used = tile_row < count
        length = tl.load(lengths + row + tile_row, mask=used, other=0)
        first = tl.zeros([TILE], tl.int32)
        low = shortest * 0
        if WINDOW > 0:
            first = tl.maximum(length - WINDOW, 0)
            low = tl.maximum(shortest - WINDOW, 0)
        # The program walks the keys [low, high) in blocks from `begin`. All rows find the keys before
        # `common_end` through the pages, and see [full_begin, common_end).
        high = longest
        begin = low // BLOCK * BLOCK
        if slot >= 0:
            split = first_split + piece - tl.load(columns + 11 * num_rows + tile)
            begin = tl.maximum(begin, split * SPLIT)
            high = tl.minimum(high, split * SPLIT + SPLIT)
        common_end = tl.maximum(begin, tl.minimum(shared // BLOCK * BLOCK, high))
        full_begin = begin
        if WINDOW > 0:
            full_begin = tl.maximum(begin, (tl.maximum(longest - WINDOW, 0) + BLOCK - 1) // BLOCK * BLOCK)
            full_begin = tl.minimum(full_begin, common_end)

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
                key_slots = page_numbers(row_pages, key, low, high, PAGE) * PAGE + key % PAGE
                top, weight, total = masked_block(
                    q_tile, k_cache, v_cache, key_slots, kv_head, block, tile_row, first, length, low, high,
                    0, count, top, weight, total, scale, KV_HEADS, DIM, DIM_PAD, PAGE, BLOCK, EXPLICIT_SUM,
                )  # fmt: skip
        # Page numbers are read one block ahead, so that loads of K and V can start STAGES blocks early.
        page = page_numbers(row_pages, full_begin + offset, full_begin, common_end, PAGE)
        chain_high = tl.minimum(high, chain_length + chain_count - 1)
        key_slots = _slots(pages, common_end + offset, low, chain_high, page_start, tail_start, tail, PAGE)
        for block in tl.range(full_begin, common_end, BLOCK, num_stages=STAGES):
            top, weight, total, all_top, all_weight, all_total = start_split(
                block, begin, first, length, top, weight, total, all_top, all_weight, all_total, SPLIT
            )
            key = block + offset
            k_tile, v_tile = load_kv(
                k_cache, v_cache, page, kv_head, key, key, KV_HEADS, DIM, DIM_PAD, PAGE, MASKED=False
            )
            page = page_numbers(row_pages, key + BLOCK, full_begin, common_end, PAGE)
            score = scores(q_tile, k_tile, scale, EXPLICIT_SUM)
            new_top = tl.maximum(top, tl.max(score, axis=1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(score - new_top[:, None])
            weight = weight * shrink + sum_weights(p)
            total = add_values(p, v_tile, total * shrink[:, None], EXPLICIT_SUM)
            top = new_top
        # The rest of the keys is walked chain by chain; the other rows' states are kept meanwhile. Nothing is
        # moved out of these loops: it would take registers from the one above.
        chain_row = count * 0
        for _ in tl.range(0, tl.where(common_end < high, chains, 0), num_stages=1, disable_licm=True):
            # What the next chain needs is read ahead.
            chain_end = chain_row + chain_count
            next_row = row + chain_end
            more = chain_end < count
            next_length = tl.load(lengths + next_row, mask=more, other=0)
            next_count = tl.load(columns + 14 * num_rows + next_row, mask=more, other=0)
            next_start = tl.load(columns + 15 * num_rows + next_row, mask=more, other=0)
            next_tail = tl.load(columns + 16 * num_rows + next_row, mask=more, other=0)
            row_length = tl.where((tile_row >= chain_row) & (tile_row < chain_end), length, 0)
            chain_low = low
            if WINDOW > 0:
                chain_low = tl.maximum(chain_length - WINDOW, 0)
            for block in tl.range(common_end, chain_high, BLOCK, num_stages=1, disable_licm=True):
                top, weight, total, all_top, all_weight, all_total = start_split(
                    block, begin, first, row_length, top, weight, total, all_top, all_weight, all_total,
                    SPLIT,
                )  # fmt: skip
                top, weight, total = masked_block(
                    q_tile, k_cache, v_cache, key_slots, kv_head, block, tile_row, first, row_length,
                    chain_low, chain_high, chain_row, chain_end, top, weight, total, scale, KV_HEADS, DIM,
                    DIM_PAD, PAGE, BLOCK, EXPLICIT_SUM,
                )  # fmt: skip
                key = block + BLOCK + offset
                key_slots = _slots(pages, key, low, chain_high, page_start, tail_start, tail, PAGE)
            chain_row, chain_count, chain_length = chain_end, next_count, next_length
            tail_start, tail = next_start, next_tail
            if more:
                chain_high = tl.minimum(high, chain_length + chain_count - 1)
                key = common_end + offset
                key_slots = _slots(pages, key, low, chain_high, page_start, tail_start, tail, PAGE)

        complete = slot < 0
        if slot < 0:
            all_top, all_weight, all_total = fold(
                all_top, all_weight, all_total, top, weight, total, length > 0
            )
        else:
            end_split = (longest + SPLIT - 1) // SPLIT
            slot_start = workspace + (slot + tile_row).to(tl.int64) * RESULT
            if begin < high:
                target = slot_start + ((high - 1) // SPLIT - first_split) * count * RESULT
                tl.store(target[:, None] + head[:, None] * DIM + dim[None, :], total, mask=in_tile)
                tl.store(target + HEADS * DIM + head, top, mask=used)
                tl.store(target + HEADS * (DIM + 1) + head, weight, mask=used)
            # The last program to add its arrival folds the tile's results. Which one that is, is the only
            # thing timing decides.
            tl.debug_barrier()
            arrivals = workspace + (workspace_len - 1 - (tile * KV_HEADS + kv_head))
            complete = tl.atomic_add(arrivals, 1.0, sem="acq_rel", scope="gpu") == (
                end_split - first_split - 1
            ).to(tl.float32)
            if complete:
                tl.store(arrivals, 0.0)
                for split in tl.range(low // SPLIT, end_split, num_stages=FOLD_STAGES):
                    source = slot_start + (split - first_split) * count * RESULT
                    total = tl.load(
                        source[:, None] + head[:, None] * DIM + dim[None, :], mask=in_tile, other=0.0
                    )
                    top = tl.load(source + HEADS * DIM + head, mask=used, other=0.0)
                    weight = tl.load(source + HEADS * (DIM + 1) + head, mask=used, other=0.0)
                    seen = (first < (split + 1) * SPLIT) & (length > split * SPLIT)
                    all_top, all_weight, all_total = fold(
                        all_top, all_weight, all_total, top, weight, total, seen
                    )
        if complete:
            result = normalize(all_total, all_weight, length).to(out.dtype.element_ty)
            row_start = (row + tile_row).to(tl.int64) * (HEADS * DIM)
            tl.store(out + row_start[:, None] + head[:, None] * DIM + dim[None, :], result, mask=in_tile)
    if DEPENDENT:  # programs without an item wait too: when this kernel has ended, so have those before it
        gdc_wait()


__all__ = ["move_pairs", "paged_attend", "paged_store"]
