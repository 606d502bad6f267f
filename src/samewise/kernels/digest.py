"""Weighted sums of many tensors' words on CUDA, in one launch: for digests of all weights.

All is arithmetic of integers modulo 2**64, so the order of adding cannot show. Runs on CPU tensors under
Triton's interpreter.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are capitals, as is usual in Triton
# mypy: allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

WORD = 8
"""Bytes of a word."""
CHUNK = 512
"""Words of each block that a program reads at a time. Set by hand: a multiple of the threads of a program."""
BLOCKS = 4
"""Blocks of a program: they share the multipliers that it reads."""
WARPS = 8


class WordSpan(NamedTuple):
    """Words that stand one after the other in the device's memory."""

    address: int  # a multiple of 8
    num: int


@triton.jit
def _block_sums(
    addresses: tl.tensor,  # [B] int64, of each block's first word
    counts: tl.tensor,  # [B] int32, its words: BLOCK, or fewer
    multipliers: tl.tensor,  # [BLOCK] int64
    sums: tl.tensor,  # [B] int64
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """The sum of each block's words, mixed and multiplied."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    known = block < num_blocks
    words = tl.load(addresses + block, mask=known, other=0).to(tl.pointer_type(tl.int64))
    count = tl.load(counts + block, mask=known, other=0)
    total = tl.zeros([BLOCKS, CHUNK], tl.int64)
    for start in range(0, BLOCK, CHUNK):
        i = start + tl.arange(0, CHUNK)
        by = tl.load(multipliers + i, mask=i < BLOCK, other=0)
        word = tl.load(words[:, None] + i[None, :], mask=i[None, :] < count[:, None], other=0)
        total += (word ^ (word >> 29)) * by[None, :]
    tl.store(sums + block, tl.sum(total, axis=1), mask=known)


def block_sums(spans: Sequence[WordSpan], multipliers: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The sums of all blocks of all spans, and how many blocks each span has.

    A block has as many words as there are multipliers, a span's last one maybe fewer. A word w counts as
    w ^ (w >> 29), times the multiplier of its place in the block.
    """
    block = multipliers.numel()
    table = np.array(spans, dtype=np.int64).reshape(-1, 2)
    num_blocks = -(-table[:, 1] // block)
    first = np.cumsum(num_blocks) - num_blocks
    place = block * (np.arange(num_blocks.sum()) - np.repeat(first, num_blocks))  # in its span, in words
    addresses = np.repeat(table[:, 0], num_blocks) + WORD * place
    counts = np.minimum(block, np.repeat(table[:, 1], num_blocks) - place).astype(np.int32)
    sums = multipliers.new_empty(len(addresses))
    if len(addresses):
        _block_sums[(triton.cdiv(len(addresses), BLOCKS),)](
            torch.from_numpy(addresses).to(sums.device),
            torch.from_numpy(counts).to(sums.device),
            multipliers,
            sums,
            len(addresses),
            BLOCK=block,
            CHUNK=CHUNK,
            BLOCKS=BLOCKS,
            num_warps=WARPS,
        )
    return sums, num_blocks.tolist()


__all__ = ["WORD", "WordSpan", "block_sums"]
