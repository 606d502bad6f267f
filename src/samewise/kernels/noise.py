"""Gumbel noise as a function of (seed, index, position, token id). Stateless.

There is no generator and nothing to advance: a draft and its verification compute the same noise, bit for
bit, in any order and beside any other rows. A token's noise is keyed by its id, never by its rank, so it does
not change when the order of the logits does.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def key(seed: int, index: int, position: int) -> tuple[int, int]:
    """The noise key of a row: two 32-bit words. The arguments count modulo 2**64.

    Two positions of one (seed, index) never share a key.
    """
    state = 0
    for word in (seed, index, position):
        state = _splitmix((state ^ word) & _MASK64)
    return state >> 32, state & _MASK32


def token_hashes(keys: Tensor, vocab: int) -> Tensor:
    """Hash of every token id under every key: [R, 2] int64 -> [R, V] int64, each below 2**32.

    Exact integer arithmetic, so the same on every device and at every shape. Within a row no two ids
    collide: each step is a bijection of 32-bit words.
    """
    ids = torch.arange(vocab, dtype=torch.int64, device=keys.device)
    h = _scramble(ids ^ keys[:, :1])
    h += keys[:, 1:]
    h &= _MASK32
    return _scramble(h)


def gumbel(keys: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise, [R, 2] int64 -> [R, V] float32, finite for every hash.

    On CPU the bits of the logarithms depend on the shape: there, call it with one row at a time.
    """
    # Large noise comes from w near 0, where float32 is finest: w is at least 2**-33, the noise at most 22.9.
    # At the other end w must not round up to 1.
    w = ((token_hashes(keys, vocab).to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()


def _splitmix(state: int) -> int:
    """The splitmix64 step: a bijection of 64-bit words in which every input bit reaches every output bit."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _scramble(h: Tensor) -> Tensor:
    """Mix 32-bit words held in int64, in place. Multipliers below 2**31 keep products inside int64."""
    h ^= h >> 16
    h *= 0x21F0AAAD
    h &= _MASK32
    h ^= h >> 15
    h *= 0x735A2D97
    h &= _MASK32
    h ^= h >> 15
    return h


__all__ = ["gumbel", "key", "token_hashes"]
