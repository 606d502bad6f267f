"""What tells a trainer's tensors from their earlier content, however they were written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

BLOCK = 2**15
"""Words of 8 bytes that are summed with multipliers of their own, on a CPU one block after the other. Set by
hand: 256 KB stay in the cache, and torch does not split so few among threads, for which it would wait."""

CUDA_BLOCKS = 64
"""Blocks that a CUDA device reads at once: 16 MB, so that launches take little of the time. Set by hand."""

LEVELS = 3  # of blocks, then of their sums, and of those: enough for 2**45 words


class TensorState(NamedTuple):
    """Of one tensor."""

    place: int  # its address
    layout: tuple[torch.Size, tuple[int, ...]]  # shape and strides
    num_writes: int  # in place, as torch counts them: not those through `.data`
    digest: int


def state_of(tensors: Sequence[torch.Tensor]) -> list[TensorState]:
    """What tells tensors from earlier content.

    Writes through `.data` are not counted, so the content is looked at. The host waits for the device once,
    not for every tensor.
    """
    digests = torch.stack([_digest(tensor.detach()) for tensor in tensors]).tolist()
    return [
        TensorState(
            tensor.data_ptr(),
            (tensor.shape, tensor.stride()),
            tensor._version,  # noqa: SLF001 - it has no public name
            digest,
        )
        for tensor, digest in zip(tensors, digests, strict=True)
    ]


@torch.no_grad()
def _digest(content: torch.Tensor) -> torch.Tensor:
    """A sum of words, each times an odd number of its place, modulo 2**64: the same in any order of adding.

    Blocks are summed with the same multipliers, and their sums with others.
    """
    sums = _block_sums(_words(content), _multipliers(content.device)[0])
    for multipliers in _multipliers(content.device)[1:]:
        sums = sums if sums.numel() <= 1 else _block_sums(_pieces(sums, BLOCK), multipliers)
    return sums.sum()  # of one, or of none


def _block_sums(parts: Iterable[torch.Tensor], multipliers: torch.Tensor) -> torch.Tensor:
    """The sums of blocks. `parts`: of whole blocks, on a CPU of one, but for the last.

    A word's upper bits are mixed into its lower ones first: changes that are multiples of 2**63, as those of
    signs are, would cancel each other.
    """
    sums: list[torch.Tensor] = []
    mixed = torch.empty_like(multipliers)
    for part in parts:
        num = part.numel()
        mixed = mixed if mixed.numel() >= num else torch.empty_like(part)
        words = torch.bitwise_right_shift(part, 29, out=mixed[:num]).bitwise_xor_(part)
        if part.is_cuda:
            sums += _sums_without_dot(words, multipliers)
        else:
            sums.append(words.dot(multipliers[:num]))
    return torch.stack(sums) if sums else multipliers[:0]


def _sums_without_dot(words: torch.Tensor, multipliers: torch.Tensor) -> list[torch.Tensor]:
    """The sums of some blocks on CUDA, which has no dot product of integers. Overwrites the words."""
    rest = words.numel() % BLOCK
    whole, last = words[: words.numel() - rest].view(-1, BLOCK), words[words.numel() - rest :]
    sums = list(whole.mul_(multipliers).sum(1).unbind())
    return [*sums, last.mul_(multipliers[:rest]).sum()] if rest else sums


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """[LEVELS, BLOCK] odd numbers, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (LEVELS, BLOCK), generator=generator)
    return (2 * numbers + 1).to(device)


def _words(content: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's bytes as integers of 8 bytes, some blocks at once; the last one is filled up with zeros."""
    # Permuted dimensions, as of a transposed weight, are read in the order of memory.
    order = sorted(range(content.dim()), key=content.stride, reverse=True)
    raw = content.permute(order).reshape(-1).view(torch.uint8)
    num_blocks = CUDA_BLOCKS if content.is_cuda else 1
    for part in _pieces(raw, 8 * BLOCK * num_blocks):
        fits = part.storage_offset() % 8 == 0 and part.numel() % 8 == 0
        whole = part if fits else torch.nn.functional.pad(part, (0, -part.numel() % 8))
        yield whole.view(torch.int64)


def _pieces(flat: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return (flat[start : start + size] for start in range(0, flat.numel(), size))


__all__ = ["TensorState", "state_of"]
