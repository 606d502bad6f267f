"""min-p, top-k and top-p, as one limit per row: how far below the row's largest logit a token may lie.

A gap is (largest logit - logit) / temperature, so it is never negative. Probability masses are exp(-gap) as
integers, scaled by the largest power of two with which V of them fit an int64. Sums are then exact in any
order, and tokens of equal logits stay or go together.
"""

from __future__ import annotations

import functools
import math
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samewise.kernels.cpu_sampling import RowMath
from samewise.types import Sampling


def min_p_gap(sampling: Sampling) -> float:
    """The gap at which a token's probability is min_p times the largest; infinite without min_p."""
    return _min_p_gap(min(sampling.min_p, 1.0)) if sampling.min_p > 0.0 else math.inf


DECIMAL = Context(prec=28, rounding=ROUND_HALF_EVEN, Emin=-999_999, Emax=999_999, traps=[])
"""For logarithms that are the same on every machine; the caller's own decimal context is not used."""


@functools.lru_cache(maxsize=256)
def _min_p_gap(min_p: float) -> float:
    with localcontext(DECIMAL):
        return 0.0 - float(Decimal(min_p).ln())  # a C library's logarithm may be a bit off


def max_gap(gap: npt.NDArray[np.float32], sampling: Sampling, row_math: RowMath) -> float:
    """The largest gap of [V] that min-p, top-k and top-p keep. For one row on a CPU."""
    vocab = gap.shape[0]
    by_min_p = float(np.float32(min_p_gap(sampling)))
    if not 0 < sampling.top_k < vocab and sampling.top_p >= 1.0:
        return by_min_p
    ordered = np.sort(gap)
    num_kept = max(1, int(np.searchsorted(ordered, np.float32(by_min_p), side="right")))
    if 0 < sampling.top_k < num_kept:
        num_kept = int(np.searchsorted(ordered, ordered[sampling.top_k - 1], side="right"))
    if sampling.top_p < 1.0:
        mass = row_math.masses(ordered[:num_kept], _mass_bits(vocab)).cumsum()
        limit = max(1, math.ceil(float(mass[-1]) * sampling.top_p))
        num_kept = min(num_kept, int(np.searchsorted(mass, limit)) + 1)
    return float(ordered[num_kept - 1])


def max_gaps(gap: Tensor, by_min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`max_gap` of rows [K, V], with limits [K, 1]; a top_p of 1 or more is no limit. Off the CPU.

    Exact but for the exponential, which off the CPU is the same function of every element at any shape. So
    only the rows that have a filter are sorted.
    """
    ordered = gap.sort(-1).values
    num_kept = (ordered <= by_min_p).sum(-1, keepdim=True).clamp_(min=1)
    kth = ordered.gather(1, torch.minimum(num_kept, top_k) - 1)
    num_kept = (ordered <= kth).sum(-1, keepdim=True).clamp_(min=1)
    mass = masses(ordered).cumsum(-1)
    limit = (mass.gather(1, num_kept - 1).to(torch.float64) * top_p).ceil().to(torch.int64).clamp_(min=1)
    last = torch.where(top_p < 1.0, (mass < limit).sum(-1, keepdim=True), num_kept - 1)
    return ordered.gather(1, torch.minimum(last, num_kept - 1))


def gaps(logits: Tensor, temperature: Tensor) -> Tensor:
    """[R, V] logits and [R, 1] temperatures (0: as 1) → gaps. No temperature can overflow them."""
    return (logits.amax(-1, keepdim=True) - logits) / torch.where(temperature > 0, temperature, 1.0)


def masses(gap: Tensor) -> Tensor:
    """exp(-gap) as int64, in units of 2**-mass_bits."""
    return (gap.neg().exp_() * 2.0 ** mass_bits(gap)).to(torch.int64)


def mass_bits(row: Tensor) -> int:
    """Fraction bits of a mass, such that a sum over the last dimension stays below 2**62."""
    return _mass_bits(row.shape[-1])


def _mass_bits(vocab: int) -> int:
    return 62 - vocab.bit_length()


__all__ = ["gaps", "mass_bits", "masses", "max_gap", "max_gaps", "min_p_gap"]
