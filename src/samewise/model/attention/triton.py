"""Canonical attention on CUDA: store, attend split by split, combine.

A row's keys are cut at absolute multiples of SPLIT; each piece is walked in absolute blocks of BLOCK keys,
in order, by one program; the pieces are then combined in order. A split has a fixed *size*, so what is
computed for a row follows from its length alone. How many programs share the work, which of them takes a
piece, and how many rows the pass has decide only when a number is computed, never which number.

The work list (row and split of each item) is read on the device: one launch, or one captured graph, serves
contexts of every length and costs what the contexts at hand cost. `splits` makes the list.

Pages are `[P, Hkv, PAGE, D]` for both K and V. Runs on CPU tensors under Triton's interpreter.

Knows tensors; has never heard of a request or a model.
"""

# ruff: noqa: N803, N806 - what a kernel is compiled for is written in capitals, as a constant is elsewhere
# mypy: allow-untyped-decorators
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from samewise.errors import InvariantBroken
from samewise.model.attention import PAGE, SPLIT, LayerKV, Rows

BLOCK = 64
"""Keys per step of the online softmax. Bits depend on it."""

CHUNK = 8
"""Splits combined per step. Bits depend on it."""

WARPS = 4
"""Per program, for 16-bit tiles; twice as many for float32, which needs the registers."""
COMBINE_WARPS = 1
STAGES = 3
"""Blocks in flight. One less for tiles so wide that they would not fit in shared memory."""

FP_FUSION = False
"""Whether the compiler may fuse a product into a sum. It may not: its choice is nobody's contract."""

ROWS = 256
"""Rows looked at per step when searching the work list. Bits do not depend on it."""

PROGRAMS_PER_PROCESSOR = 8
"""Enough to keep memory busy while a program turns to its next item. Bits do not depend on it."""


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
def _row_of(split: tl.tensor, split_start: tl.tensor, num_rows: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Row that owns a split: the last one that starts at or before it. Rows without splits own none."""
    count = 0
    for base in tl.range(0, num_rows, ROWS):
        row = base + tl.arange(0, ROWS)
        start = tl.load(split_start + row, mask=row < num_rows, other=0x7FFFFFFF)
        count += tl.sum((start <= split).to(tl.int32), axis=0)
    return count - 1


@triton.jit(do_not_specialize=["num_rows"])
def _attend(  # noqa: PLR0915, PLR0917 - long because it is straight: a kernel has no objects to hide in
    q: tl.tensor,  # [R, KV_HEADS * GROUP, DIM], strided
    k_cache: tl.tensor,  # [P, KV_HEADS, PAGE, DIM]
    v_cache: tl.tensor,
    lengths: tl.tensor,
    page_start: tl.tensor,
    pages: tl.tensor,
    split_start: tl.tensor,
    workspace: tl.tensor,  # [splits, KV_HEADS * GROUP * (DIM + 2)]: sums, then maxima, then weights
    q_row: tl.tensor,
    q_head: tl.tensor,
    scale: tl.tensor,  # times log2(e)
    num_rows: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Attend one row's head group to one split, for every item of this program's share.

    Leaves, per split and query head, the largest score, the sum of weights relative to it, and the sum of
    weighted values, in float32. A split that ends before the row's window is left unwritten.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    offset = tl.arange(0, BLOCK)
    in_tile = (group < GROUP)[:, None] & (dim < DIM)[None, :]

    num_items = tl.load(split_start + num_rows) * KV_HEADS
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = item // KV_HEADS
        kv_head = item % KV_HEADS
        row = _row_of(split, split_start, num_rows, ROWS)
        length = tl.load(lengths + row)
        begin = (split - tl.load(split_start + row)) * SPLIT
        end = tl.minimum(begin + SPLIT, length)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(length - WINDOW, 0)
            begin = tl.maximum(begin, first // BLOCK * BLOCK)
        if begin < end:
            head = kv_head * GROUP + group
            q_at = q + row * q_row + head[:, None] * q_head + dim[None, :]
            q_tile = tl.load(q_at, mask=in_tile, other=0.0)
            if WIDEN:
                q_tile = q_tile.to(tl.float32)
            row_pages = pages + tl.load(page_start + row)
            top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
            weight = tl.zeros([GROUP_PAD], tl.float32)
            total = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
            # Every block from the window's first to the row's last holds a key the row may see, so `top` is
            # finite after each step.
            for block in tl.range(begin, end, BLOCK, num_stages=STAGES):
                key = block + offset
                live = (key >= first) & (key < end)
                page = tl.load(row_pages + key // PAGE, mask=live, other=0)
                at = page.to(tl.int64) * (KV_HEADS * PAGE * DIM) + (kv_head * (PAGE * DIM) + key % PAGE * DIM)
                at_tile = at[:, None] + dim[None, :]
                # Memory behind a masked key may hold NaN: neither K nor V is read there.
                mask = live[:, None] & (dim < DIM)[None, :]
                k_tile = tl.load(k_cache + at_tile, mask=mask, other=0.0)
                v_tile = tl.load(v_cache + at_tile, mask=mask, other=0.0)
                if WIDEN:
                    k_tile = k_tile.to(tl.float32)
                score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
                score = tl.where(live[None, :], score, float("-inf"))
                new_top = tl.maximum(top, tl.max(score, axis=1))
                shrink = tl.exp2(top - new_top)
                p = tl.exp2(score - new_top[:, None])
                weight = weight * shrink + tl.sum(p, axis=1)
                p_tile = p.to(v_tile.dtype)
                if WIDEN:
                    p_tile = p_tile.to(tl.float32)
                    v_tile = v_tile.to(tl.float32)
                total = tl.dot(p_tile, v_tile, total * shrink[:, None], input_precision="ieee")
                top = new_top
            to = workspace + split.to(tl.int64) * (HEADS * (DIM + 2))
            tl.store(to + head[:, None] * DIM + dim[None, :], total, mask=in_tile)
            tl.store(to + HEADS * DIM + head, top, mask=group < GROUP)
            tl.store(to + HEADS * (DIM + 1) + head, weight, mask=group < GROUP)


@triton.jit
def _combine(
    lengths: tl.tensor,
    split_start: tl.tensor,
    workspace: tl.tensor,  # [splits, HEADS * (DIM + 2)]
    out: tl.tensor,  # [R, HEADS, DIM]
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Combine one row's splits for one query head, in order. A row without splits becomes zeros."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_PAD)
    row_start = tl.load(split_start + row)
    num_splits = tl.load(split_start + row + 1) - row_start
    first = 0
    if WINDOW > 0:
        # Splits before the window were left unwritten.
        first = tl.maximum(tl.load(lengths + row) - WINDOW, 0) // SPLIT
    top = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    total = tl.zeros([DIM_PAD], tl.float32)
    # Every step starts at a written split, so `top` is finite after each.
    for base in tl.range(first, num_splits, CHUNK):
        split = base + tl.arange(0, CHUNK)
        live = split < num_splits
        at = workspace + (row_start + split).to(tl.int64) * (HEADS * (DIM + 2))
        tops = tl.load(at + (HEADS * DIM + head), mask=live, other=float("-inf"))
        weights = tl.load(at + (HEADS * (DIM + 1) + head), mask=live, other=0.0)
        mask = live[:, None] & (dim < DIM)[None, :]
        totals = tl.load(at[:, None] + (head * DIM + dim)[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        shrink = tl.exp2(top - new_top)
        share = tl.exp2(tops - new_top)
        weight = weight * shrink + tl.sum(share * weights, axis=0)
        total = total * shrink + tl.sum(share[:, None] * totals, axis=0)
        top = new_top
    # Only a row without splits has no weight; a NaN must stay one.
    weight = tl.where(num_splits > 0, weight, 1.0)
    result = (total / weight).to(out.dtype.element_ty)
    tl.store(out + (row * HEADS + head) * DIM + dim, result, mask=dim < DIM)


@torch.library.custom_op("samewise::attend_triton", mutates_args=("k_cache", "v_cache", "workspace"))
def attend_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    page_start: torch.Tensor,
    pages: torch.Tensor,
    split_start: torch.Tensor,
    workspace: torch.Tensor,
    scale: float,
    window: int,
    num_programs: int,
) -> torch.Tensor:
    """Launch the three kernels. `window` 0 means none, as an operator's arguments must be plain."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    dim_pad = _pad(head_dim)
    _check(q, k, v, k_cache, v_cache, workspace)
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
    _attend[(num_programs,)](
        q,
        k_cache,
        v_cache,
        lengths,
        page_start,
        pages,
        split_start,
        workspace,
        *q.stride()[:2],
        scale * math.log2(math.e),
        num_rows,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=_pad(group),
        DIM=head_dim,
        DIM_PAD=dim_pad,
        WINDOW=window,
        PAGE=PAGE,
        SPLIT=SPLIT,
        BLOCK=BLOCK,
        ROWS=ROWS,
        STAGES=STAGES if dim_pad * q.element_size() <= 512 else STAGES - 1,
        WIDEN=INTERPRETED,
        num_warps=WARPS if q.element_size() == 2 else 2 * WARPS,
        enable_fp_fusion=FP_FUSION,
    )
    _combine[(num_rows, num_heads)](
        lengths,
        split_start,
        workspace,
        out,
        HEADS=num_heads,
        DIM=head_dim,
        DIM_PAD=dim_pad,
        WINDOW=window,
        SPLIT=SPLIT,
        CHUNK=CHUNK,
        num_warps=COMBINE_WARPS,
        enable_fp_fusion=FP_FUSION,
    )
    return out


@attend_triton.register_fake
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


INTERPRETED = not isinstance(_attend, triton.JITFunction)
"""The interpreter multiplies float32 only, so there 16-bit tiles are widened first, which is exact."""


def _pad(size: int) -> int:
    """Size of the tile that holds `size`: tiles are powers of two, and matrix units take no less than 16."""
    return max(16, int(triton.next_power_of_2(size)))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *dense: torch.Tensor) -> None:
    """The kernels trust their pointers, so what they take for granted is looked at here."""
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        raise InvariantBroken("q, k and v must have unit stride within a head")
    if not all(t.is_contiguous() for t in dense):
        raise InvariantBroken("K and V pages and the workspace must be contiguous")


def splits(lengths: np.ndarray) -> np.ndarray:
    """`Rows.split_start` for rows of these lengths ([R], 0 for padding): [R + 1], int32, starting at 0."""
    return np.concatenate(([0], np.cumsum(-(-lengths // SPLIT)))).astype(np.int32)


@dataclass(frozen=True)
class TritonKernel:
    """Canonical attention on CUDA. `num_programs` share the work; bits do not depend on it."""

    num_programs: int

    @classmethod
    def on(cls, device: torch.device) -> TritonKernel:
        """A kernel with as many programs as keep this CUDA device busy."""
        return cls(PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)

    @property
    def name(self) -> str:
        """Name, version and every constant the bits may depend on."""
        sizes = f"split {SPLIT} block {BLOCK} chunk {CHUNK}"
        return f"triton-1 {sizes} warps {WARPS}+{COMBINE_WARPS} stages {STAGES}"

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """Uninitialised pages, `[P, Hkv, PAGE, D]` each: one head's share of a page is one run of memory."""
        shape = (num_pages, num_kv_heads, PAGE, head_dim)
        return LayerKV(
            torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
        )

    def workspace_len(self, num_rows: int, max_len: int, num_heads: int, head_dim: int) -> int:
        """Per row, split and head: a weighted sum of values, the largest score, the sum of weights."""
        return num_rows * -(-max_len // SPLIT) * num_heads * (head_dim + 2)

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
            rows.lengths,
            rows.slots,
            rows.page_start,
            rows.pages,
            rows.split_start,
            rows.workspace,
            scale,
            0 if window is None else window,
            self.num_programs,
        )
        return out


__all__ = ["BLOCK", "SPLIT", "TritonKernel", "attend_triton", "splits"]
