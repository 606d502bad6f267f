"""Passes over a block of logits on CUDA: every row's best token, its scale, and its sampled choice.

A row is cut into chunks that are read by programs of their own and put together in order. Largest values
and sums of integers are exact in any order, and every element goes through the same arithmetic wherever it
stands: what a row gets depends on its own logits, at any number of rows. Nothing is compiled per size.

Knows tensors; has never heard of a request. Runs on CPU tensors under Triton's interpreter.
"""

# ruff: noqa: N803 - what a kernel is compiled for is written in capitals, as a constant is elsewhere
# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

CHUNK = 4096
"""Logits a program reads at once."""
WARPS = 8
FP_FUSION = False
"""Whether the compiler may fuse a product into a sum. It may not: its choice is nobody's contract."""


class Scale(NamedTuple):
    """Of every row: its best token (the lowest of equals), that logit, and log of the sum of exp above it."""

    tokens: torch.Tensor  # [R] int64
    top: torch.Tensor  # [R] float32
    log_sum: torch.Tensor  # [R] float32


@triton.jit
def _peaks(
    logits: tl.tensor,  # [R, V], strided by row
    values: tl.tensor,  # [R, C]
    places: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """The largest logit of one chunk of one row, and the lowest place where it stands."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < vocab, other=float("-inf")).to(
        tl.float32
    )
    top = tl.max(x, axis=0)
    # A NaN equals nothing: then the first place stands for it, and the sums below say NaN.
    place = tl.min(tl.where(x == top, at, vocab), axis=0)
    tl.store(values + row * tl.num_programs(1) + chunk, top)
    tl.store(places + row * tl.num_programs(1) + chunk, place)


@triton.jit
def _top(values: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNKS_PAD: tl.constexpr) -> tl.tensor:
    """The largest logit of a row, from the peaks of its chunks."""
    chunk = tl.arange(0, CHUNKS_PAD)
    return tl.max(tl.load(values + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), axis=0)


@triton.jit
def _masses(
    logits: tl.tensor,
    values: tl.tensor,  # [R, C] peaks
    sums: tl.tensor,  # [R, C] int64
    row_stride: tl.tensor,
    vocab: tl.tensor,
    unit: tl.tensor,  # 2**bits
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
) -> None:
    """The sum of exp(logit - largest) over one chunk, as an integer."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(1)
    top = _top(values, row, chunks, CHUNKS_PAD)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < vocab, other=float("-inf")).to(
        tl.float32
    )
    mass = (tl.exp(x - top).to(tl.float64) * unit).to(tl.int64)
    tl.store(sums + row * chunks + chunk, tl.sum(mass, axis=0))


@triton.jit
def _finish(
    values: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,  # [R] int64
    tops: tl.tensor,  # [R] float32
    log_sums: tl.tensor,  # [R] float32
    vocab: tl.tensor,
    unit: tl.tensor,
    chunks: tl.tensor,
    CHUNKS_PAD: tl.constexpr,
) -> None:
    """Put one row's chunks together."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PAD)
    there = chunk < chunks
    peaks = tl.load(values + row * chunks + chunk, mask=there, other=float("-inf"))
    top = tl.max(peaks, axis=0)
    place = tl.load(places + row * chunks + chunk, mask=there, other=vocab)
    token = tl.min(tl.where(peaks == top, place, vocab), axis=0)
    total = tl.sum(tl.load(sums + row * chunks + chunk, mask=there, other=0), axis=0)
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))
    tl.store(tops + row, top)
    tl.store(log_sums + row, tl.log(total.to(tl.float64) / unit).to(tl.float32))


@triton.jit
def _mix(h: tl.tensor) -> tl.tensor:
    """One scrambling of 32-bit words, as `noise` has it."""
    h = h ^ (h >> 16)
    h = h * 0x21F0AAAD
    h = h ^ (h >> 15)
    h = h * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def _noise(ids: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of token ids under a key of two words."""
    h = _mix(_mix(ids ^ first) + second)
    w = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # -log(1 - w), by its series where the subtraction would lose what is below.
    series = w * (1.0 + w * (0.5 + w * (0.33333334 + w * (0.25 + w * (0.2 + w * 0.16666667)))))
    return -tl.log(tl.where(w < 0.0625, series, -tl.log(1.0 - w)))


@triton.jit
def _draws(
    logits: tl.tensor,  # [R, V] float32
    values: tl.tensor,  # [R, C] peaks of the logits
    temperatures: tl.tensor,  # [R] float32; 0: greedy
    keys: tl.tensor,  # [R, 2] int64, each below 2**32
    scores: tl.tensor,  # [R, C] best of what is compared
    places: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
) -> None:
    """The best of one chunk after noise: plain logits where the temperature is 0."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(1)
    top = _top(values, row, chunks, CHUNKS_PAD)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < vocab, other=float("-inf"))
    warmth = tl.load(temperatures + row)
    compared = x
    if warmth > 0:
        first = tl.load(keys + row * 2).to(tl.uint32)
        second = tl.load(keys + row * 2 + 1).to(tl.uint32)
        compared = _noise(at.to(tl.uint32), first, second) - (top - x) / warmth
    best = tl.max(compared, axis=0)
    place = tl.min(tl.where((compared == best) & (at < vocab), at, vocab), axis=0)
    tl.store(scores + row * chunks + chunk, best)
    tl.store(places + row * chunks + chunk, place)


@triton.jit
def _best(
    scores: tl.tensor,
    places: tl.tensor,
    tokens: tl.tensor,  # [R] int64
    vocab: tl.tensor,
    chunks: tl.tensor,
    CHUNKS_PAD: tl.constexpr,
) -> None:
    """The best of one row's chunks; of equals the lowest."""
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PAD)
    there = chunk < chunks
    score = tl.load(scores + row * chunks + chunk, mask=there, other=float("-inf"))
    place = tl.load(places + row * chunks + chunk, mask=there, other=vocab)
    token = tl.min(tl.where(score == tl.max(score, axis=0), place, vocab), axis=0)
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))


def measure(logits: torch.Tensor, bits: int) -> Scale:
    """[R, V] in any float dtype → every row's best and scale; masses are counted in units of 2**-bits."""
    rows, vocab = logits.shape
    values, places, chunks = _peaks_of(logits)
    sums = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    pad, unit = triton.next_power_of_2(chunks), 2.0**bits
    said = {"CHUNK": CHUNK, "CHUNKS_PAD": pad, "num_warps": WARPS, "enable_fp_fusion": FP_FUSION}
    _masses[(rows, chunks)](logits, values, sums, logits.stride(0), vocab, unit, **said)
    found = Scale(
        torch.empty(rows, dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
    )
    said = {"CHUNKS_PAD": pad, "num_warps": 1, "enable_fp_fusion": FP_FUSION}
    _finish[(rows,)](values, places, sums, *found, vocab, unit, chunks, **said)
    return found


def choose(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[R, V] float32, [R, 1] temperatures and [R, 2] keys → the token chosen in every row, [R] int64."""
    rows, vocab = logits.shape
    values, places, chunks = _peaks_of(logits)
    scores = torch.empty_like(values)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    pad = triton.next_power_of_2(chunks)
    said = {"CHUNK": CHUNK, "CHUNKS_PAD": pad, "num_warps": WARPS, "enable_fp_fusion": FP_FUSION}
    _draws[(rows, chunks)](
        logits, values, temperatures, keys, scores, places, logits.stride(0), vocab, **said
    )
    said = {"CHUNKS_PAD": pad, "num_warps": 1, "enable_fp_fusion": FP_FUSION}
    _best[(rows,)](scores, places, tokens, vocab, chunks, **said)
    return tokens


def _peaks_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The largest logit of every chunk and where it stands, [R, C] each; and C."""
    rows, vocab = logits.shape
    chunks = -(-vocab // CHUNK)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    said = {"CHUNK": CHUNK, "num_warps": WARPS, "enable_fp_fusion": FP_FUSION}
    _peaks[(rows, chunks)](logits, values, places, logits.stride(0), vocab, **said)
    return values, places, chunks


__all__ = ["CHUNK", "Scale", "choose", "measure"]
