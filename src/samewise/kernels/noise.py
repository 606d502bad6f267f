"""Gumbel noise as a function of (seed, index, position, token id). Stateless.

There is no generator and nothing to advance: a draft and its replay ask for the same noise and get the
same bits, in any order, in any company. A token's noise is keyed by its id, never by its rank, so it
does not move when logits change places.

Knows nothing of logits, temperatures or requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_WIDE = 0xFFFFFFFFFFFFFFFF


def key(seed: int, index: int, position: int) -> tuple[int, int]:
    """Two 32-bit words that name a draw. Integers count modulo 2**64.

    Two positions of one choice never share a key.
    """
    state = 0
    for word in (seed, index, position):
        state = _splitmix((state ^ word) & _WIDE)
    return state >> 32, state & _WORD


def bits(keys: Tensor, vocab: int) -> Tensor:
    """Hash of every token id under every key: [R, 2] int64 -> [R, V] int64, each below 2**32.

    Exact integer arithmetic, so the same on every device and at every shape. Within a row no two ids
    collide: each step is a bijection of 32-bit words.
    """
    ids = torch.arange(vocab, dtype=torch.int64, device=keys.device)
    h = _scramble(ids ^ keys[:, :1])
    h += keys[:, 1:]
    h &= _WORD
    return _scramble(h)


def gumbel(keys: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise, [R, 2] int64 -> [R, V] float32, finite for every hash.

    The logarithms are only bit-stable at one shape on CPU: there, ask for one row at a time.
    """
    # The top of the Gumbel lies at w near 0, where float32 is finest: about 2**-33, hence 22.9 at most.
    # At the other end w must not round up to 1.
    w = ((bits(keys, vocab).to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()


def _splitmix(state: int) -> int:
    """The splitmix64 step: a bijection of 64-bit words in which every input bit reaches every output bit."""
    z = (state + 0x9E3779B97F4A7C15) & _WIDE
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WIDE
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WIDE
    return z ^ (z >> 31)


def _scramble(h: Tensor) -> Tensor:
    """Mix 32-bit words held in int64, in place. Multipliers below 2**31 keep products inside int64."""
    h ^= h >> 16
    h *= 0x21F0AAAD
    h &= _WORD
    h ^= h >> 15
    h *= 0x735A2D97
    h &= _WORD
    h ^= h >> 15
    return h


__all__ = ["bits", "gumbel", "key"]
