"""Passes over a block of logits on CUDA: argmax, log of the sum of exp, sampled token, top ids of every row.

A row is read in chunks by one program each, and the chunks' results are combined in order. Maxima and sums of
integers are exact in any order, and every element goes through the same arithmetic at any index: a row's
result depends on its own logits alone, at any number of rows. No kernel is specialized to that number.

Runs on CPU tensors under Triton's interpreter.
"""

# ruff: noqa: N803 - compile-time constants of a kernel are capitals, as is usual in Triton
# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from samewise.types import NUM_CANDIDATES

CHUNK = 4096
"""Logits that one program reads. Bits do not depend on it."""
WARPS = 8
"""Per program that reads a chunk: 16 logits a thread. Bits do not depend on it."""
TOP_CHUNK = 1024
"""Logits of which one program of one warp finds the best candidates, at most 2**10: a token's place in its
chunk takes the low 10 bits of a key."""
TOP_WARPS = 4
"""Per program that merges the candidates of a row's chunks."""
FP_FUSION = False
"""Whether the compiler may fuse a product and a sum: no, because bits would depend on its choice."""


class RowStats(NamedTuple):
    """Of every row: its argmax (the lowest id of equals), that logit, and log(sum(exp(logit - top)))."""

    tokens: torch.Tensor  # [R] int64
    top: torch.Tensor  # [R] float32
    log_sum: torch.Tensor  # [R] float32


@triton.jit
def _chunk_max(
    logits: tl.tensor,  # [R, V], strided by row
    maxima: tl.tensor,  # [R, C]
    argmaxes: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """The largest logit of one chunk of one row, and the lowest token id that has it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab, other=float("-inf")).to(
        tl.float32
    )
    top = tl.max(x, axis=0)
    # No logit equals a NaN maximum: then `vocab` is stored.
    argmax = tl.min(tl.where(x == top, token, vocab), axis=0)
    tl.store(maxima + row * tl.num_programs(1) + chunk, top)
    tl.store(argmaxes + row * tl.num_programs(1) + chunk, argmax)


@triton.jit
def _row_max(maxima: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNKS_PAD: tl.constexpr) -> tl.tensor:
    """The largest logit of a row, from the maxima of its chunks."""
    chunk = tl.arange(0, CHUNKS_PAD)
    return tl.max(tl.load(maxima + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), axis=0)


@triton.jit
def _chunk_exp_sum(
    logits: tl.tensor,
    maxima: tl.tensor,  # [R, C]
    sums: tl.tensor,  # [R, C] int64
    row_stride: tl.tensor,
    vocab: tl.tensor,
    unit: tl.tensor,  # integers per 1.0
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
) -> None:
    """The sum of exp(logit - largest) over one chunk, as an integer."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(1)
    top = _row_max(maxima, row, chunks, CHUNKS_PAD)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab, other=float("-inf")).to(
        tl.float32
    )
    mass = (tl.exp(x - top).to(tl.float64) * unit).to(tl.int64)
    tl.store(sums + row * chunks + chunk, tl.sum(mass, axis=0))


@triton.jit
def _combine_stats(
    maxima: tl.tensor,
    argmaxes: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,  # [R] int64
    tops: tl.tensor,  # [R] float32
    log_sums: tl.tensor,  # [R] float32
    vocab: tl.tensor,
    unit: tl.tensor,
    chunks: tl.tensor,
    CHUNKS_PAD: tl.constexpr,
) -> None:
    """Combine the results of one row's chunks."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PAD)
    mask = chunk < chunks
    chunk_tops = tl.load(maxima + row * chunks + chunk, mask=mask, other=float("-inf"))
    top = tl.max(chunk_tops, axis=0)
    argmax = tl.load(argmaxes + row * chunks + chunk, mask=mask, other=vocab)
    token = tl.min(tl.where(chunk_tops == top, argmax, vocab), axis=0)
    total = tl.sum(tl.load(sums + row * chunks + chunk, mask=mask, other=0), axis=0)
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))
    tl.store(tops + row, top)
    tl.store(log_sums + row, tl.log(total.to(tl.float64) / unit).to(tl.float32))


@triton.jit
def _scramble(h: tl.tensor) -> tl.tensor:
    """Mix 32-bit words, as `noise._scramble` does."""
    h = h ^ (h >> 16)
    h = h * 0x21F0AAAD
    h = h ^ (h >> 15)
    h = h * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def _gumbel(ids: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of token ids under a key of two words."""
    h = _scramble(_scramble(ids ^ first) + second)
    w = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # -log(1 - w), by its series where the subtraction would lose the low bits of w.
    series = w * (1.0 + w * (0.5 + w * (0.33333334 + w * (0.25 + w * (0.2 + w * 0.16666667)))))
    return -tl.log(tl.where(w < 0.0625, series, -tl.log(1.0 - w)))


@triton.jit
def _sample_chunk(
    logits: tl.tensor,  # [R, V] float32
    maxima: tl.tensor,  # [R, C] of the logits
    temperatures: tl.tensor,  # [R] float32; 0: greedy
    keys: tl.tensor,  # [R, 2] int64, each below 2**32
    best_scores: tl.tensor,  # [R, C]
    best_tokens: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
) -> None:
    """The best score of one chunk, and its token: logit / temperature + noise; plain logits if greedy."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(1)
    top = _row_max(maxima, row, chunks, CHUNKS_PAD)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    score = x
    if temperature > 0:
        first = tl.load(keys + row * 2).to(tl.uint32)
        second = tl.load(keys + row * 2 + 1).to(tl.uint32)
        score = _gumbel(token.to(tl.uint32), first, second) - (top - x) / temperature
    best = tl.max(score, axis=0)
    best_token = tl.min(tl.where((score == best) & (token < vocab), token, vocab), axis=0)
    tl.store(best_scores + row * chunks + chunk, best)
    tl.store(best_tokens + row * chunks + chunk, best_token)


@triton.jit
def _combine_samples(
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    tokens: tl.tensor,  # [R] int64
    vocab: tl.tensor,
    chunks: tl.tensor,
    CHUNKS_PAD: tl.constexpr,
) -> None:
    """The token with the best score of one row's chunks; of equal scores the lowest id."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PAD)
    mask = chunk < chunks
    score = tl.load(best_scores + row * chunks + chunk, mask=mask, other=float("-inf"))
    best_token = tl.load(best_tokens + row * chunks + chunk, mask=mask, other=vocab)
    token = tl.min(tl.where(score == tl.max(score, axis=0), best_token, vocab), axis=0)
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))


@triton.jit
def _chunk_top(
    logits: tl.tensor,  # [R, V], strided by row
    keys: tl.tensor,  # [R, C, NUM] int64
    row_stride: tl.tensor,
    vocab: tl.tensor,
    TOP_CHUNK: tl.constexpr,
    NUM: tl.constexpr,
) -> None:
    """The NUM largest logits of one chunk, each as a key: the logit without its last 10 bits, then the id.

    A float's bits, those of a negative one inverted, have the order of the floats as integers.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, TOP_CHUNK)
    token = chunk * TOP_CHUNK + place
    x = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab, other=float("-inf"))
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered & -1024) | (1023 - place)
    rank = tl.arange(0, NUM)
    best = tl.full([NUM], -0x80000000, tl.int32)
    last = tl.full([], 0x7FFFFFFF, tl.int32)
    for i in tl.static_range(NUM):
        last = tl.max(tl.where(key < last, key, -0x80000000), axis=0)
        best = tl.where(rank == i, last, best)
    best_token = chunk * TOP_CHUNK + 1023 - (best & 1023)
    wide_key = ((best & -1024).to(tl.int64) << 32) | (0x7FFFFFFF - best_token).to(tl.int64)
    tl.store(keys + (row.to(tl.int64) * tl.num_programs(1) + chunk) * NUM + rank, wide_key)


@triton.jit
def _merge_top(
    keys: tl.tensor,  # [R, num_keys] int64
    ids: tl.tensor,  # [R, NUM] int32
    num_keys: tl.tensor,
    KEYS_PAD: tl.constexpr,
    NUM: tl.constexpr,
) -> None:
    """The ids of a row's NUM largest keys, the largest first; -1 where a logit is not above -inf."""
    row = tl.program_id(0)
    index = tl.arange(0, KEYS_PAD)
    lowest: tl.constexpr = -0x8000000000000000
    key = tl.load(keys + row.to(tl.int64) * num_keys + index, mask=index < num_keys, other=lowest)
    rank = tl.arange(0, NUM)
    best = tl.full([NUM], lowest, tl.int64)
    last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for i in tl.static_range(NUM):
        last = tl.max(tl.where(key < last, key, lowest), axis=0)
        best = tl.where(rank == i, last, best)
    token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    minus_infinity: tl.constexpr = -0x7F800400  # as a key: its bits in order, without the last 10
    tl.store(ids + row * NUM + rank, tl.where((best >> 32) > minus_infinity, token, -1))


def row_stats(logits: torch.Tensor, fraction_bits: int) -> RowStats:
    """[R, V] in any float dtype → RowStats. exp(logit - top) is rounded down to 2**-fraction_bits."""
    num_rows, vocab = logits.shape
    maxima, argmaxes, chunks = _chunk_maxima(logits)
    sums = torch.empty(num_rows, chunks, dtype=torch.int64, device=logits.device)
    pad, unit = triton.next_power_of_2(chunks), 2.0**fraction_bits
    options = {"CHUNK": CHUNK, "CHUNKS_PAD": pad, "num_warps": WARPS, "enable_fp_fusion": FP_FUSION}
    _chunk_exp_sum[(num_rows, chunks)](logits, maxima, sums, logits.stride(0), vocab, unit, **options)
    stats = RowStats(
        torch.empty(num_rows, dtype=torch.int64, device=logits.device),
        torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows, dtype=torch.float32, device=logits.device),
    )
    options = {"CHUNKS_PAD": pad, "num_warps": 1, "enable_fp_fusion": FP_FUSION}
    _combine_stats[(num_rows,)](maxima, argmaxes, sums, *stats, vocab, unit, chunks, **options)
    return stats


def sample_tokens(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[R, V] float32, [R, 1] temperatures and [R, 2] noise keys → the sampled tokens, [R] int64."""
    num_rows, vocab = logits.shape
    maxima, best_tokens, chunks = _chunk_maxima(logits)
    best_scores = torch.empty_like(maxima)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    pad = triton.next_power_of_2(chunks)
    options = {"CHUNK": CHUNK, "CHUNKS_PAD": pad, "num_warps": WARPS, "enable_fp_fusion": FP_FUSION}
    _sample_chunk[(num_rows, chunks)](
        logits, maxima, temperatures, keys, best_scores, best_tokens, logits.stride(0), vocab, **options
    )
    options = {"CHUNKS_PAD": pad, "num_warps": 1, "enable_fp_fusion": FP_FUSION}
    _combine_samples[(num_rows,)](best_scores, best_tokens, tokens, vocab, chunks, **options)
    return tokens


def top_candidates(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] in any float dtype → the most probable ids, the first of them first: int32 [R, NUM_CANDIDATES].

    For drafts: logits that differ by less than 2**-12 of their size may change places. -1 where there are
    fewer logits above -inf.
    """
    num_rows, vocab = logits.shape
    chunks = -(-vocab // TOP_CHUNK)
    keys = torch.empty(num_rows, chunks * NUM_CANDIDATES, dtype=torch.int64, device=logits.device)
    ids = torch.empty(num_rows, NUM_CANDIDATES, dtype=torch.int32, device=logits.device)
    options = {"NUM": NUM_CANDIDATES, "enable_fp_fusion": FP_FUSION}
    _chunk_top[(num_rows, chunks)](
        logits, keys, logits.stride(0), vocab, TOP_CHUNK=TOP_CHUNK, num_warps=1, **options
    )
    pad = triton.next_power_of_2(keys.shape[1])
    _merge_top[(num_rows,)](keys, ids, keys.shape[1], KEYS_PAD=pad, num_warps=TOP_WARPS, **options)
    return ids


def _chunk_maxima(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The largest logit of every chunk and its token id, [R, C] each; and C."""
    num_rows, vocab = logits.shape
    chunks = -(-vocab // CHUNK)
    maxima = torch.empty(num_rows, chunks, dtype=torch.float32, device=logits.device)
    argmaxes = torch.empty(num_rows, chunks, dtype=torch.int32, device=logits.device)
    options = {"CHUNK": CHUNK, "num_warps": WARPS, "enable_fp_fusion": FP_FUSION}
    _chunk_max[(num_rows, chunks)](logits, maxima, argmaxes, logits.stride(0), vocab, **options)
    return maxima, argmaxes, chunks


__all__ = ["CHUNK", "RowStats", "row_stats", "sample_tokens", "top_candidates"]
