"""What tells a trainer's tensors from their earlier content, however they were written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

BLOCK = 2**15
"""Words of 8 bytes that are summed with multipliers of their own. Set by hand for a CPU, which sums one block
after the other: 256 KB stay in the cache, and torch does not split so few among threads, for which it would
wait."""

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
    contents = [tensor.detach() for tensor in tensors]
    if contents and all(content.is_cuda for content in contents):
        digests = _cuda_digests(contents)
    else:
        digests = torch.stack([_digest(content) for content in contents]).tolist()
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
def _cuda_digests(contents: Sequence[torch.Tensor]) -> list[int]:
    """The digest of each tensor, in one launch for each level: there are tens of thousands of blocks."""
    from samewise.kernels import digest  # needs triton, which only CUDA machines have

    raws = [_filled_up(_raw(content)) for content in contents]
    left = {i: digest.WordSpan(raw.data_ptr(), raw.numel() // 8) for i, raw in enumerate(raws)}
    places: dict[int, int] = {}  # of the tensors' digests, among the sums of all levels
    levels: list[torch.Tensor] = []
    first = 0
    for multipliers in _multipliers(raws[0].device):
        sums, num_blocks = digest.block_sums(list(left.values()), multipliers)
        more: dict[int, digest.WordSpan] = {}
        start = 0
        for i, num in zip(left, num_blocks, strict=True):
            if num == 1:
                places[i] = first + start
            elif num:
                more[i] = digest.WordSpan(sums.data_ptr() + 8 * start, num)
            start += num
        levels.append(sums)
        first += start
        left = more
    found = torch.cat(levels)[torch.tensor(list(places.values()), device=sums.device, dtype=torch.int64)]
    digests = dict(zip(places, found.tolist(), strict=True))
    return [digests.get(i, 0) for i in range(len(contents))]


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
    """The sums of blocks. `parts`: one block each, the last one maybe shorter.

    A word's upper bits are mixed into its lower ones first: changes that are multiples of 2**63, as those of
    signs are, would cancel each other.
    """
    sums: list[torch.Tensor] = []
    mixed = torch.empty_like(multipliers)
    for part in parts:
        num = part.numel()
        words = torch.bitwise_right_shift(part, 29, out=mixed[:num]).bitwise_xor_(part)
        sums.append(words.dot(multipliers[:num]))
    return torch.stack(sums) if sums else multipliers[:0]


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """[LEVELS, BLOCK] odd numbers, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (LEVELS, BLOCK), generator=generator)
    return (2 * numbers + 1).to(device)


def _raw(content: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes. Permuted dimensions, as of a transposed weight, are read in the order of memory."""
    order = sorted(range(content.dim()), key=content.stride, reverse=True)
    return content.permute(order).reshape(-1).contiguous().view(torch.uint8)


def _filled_up(raw: torch.Tensor) -> torch.Tensor:
    """Bytes in words of 8, at an address that is a multiple of 8: a copy with zeros at its end if need be."""
    fits = raw.storage_offset() % 8 == 0 and raw.data_ptr() % 8 == 0 and raw.numel() % 8 == 0
    return raw if fits else torch.nn.functional.pad(raw, (0, -raw.numel() % 8))


def _words(content: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's bytes as integers of 8 bytes, one block at a time; the last one is filled up with zeros."""
    return (_filled_up(part).view(torch.int64) for part in _pieces(_raw(content), 8 * BLOCK))


def _pieces(flat: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return (flat[start : start + size] for start in range(0, flat.numel(), size))


__all__ = ["TensorState", "state_of"]
