"""What tells a trainer's tensors from their earlier content, however they were written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class TensorState(NamedTuple):
    """Of one tensor."""

    place: int  # its address
    num_writes: int  # in place, as torch counts them: not those through `.data`
    hash: int
    sum: float


def state_of(tensors: Sequence[torch.Tensor]) -> list[TensorState]:
    """What tells tensors from earlier content.

    Writes through `.data` are not counted, so the content is looked at, at the speed of reading it twice. The
    hash is an exclusive or, to which pairs of equal changes are invisible; the sum sees those. The host waits
    for the device twice, not for every tensor.
    """
    contents = [tensor.detach() for tensor in tensors]
    hashes = torch.stack([torch.hash_tensor(content).view(torch.int64) for content in contents]).tolist()
    sums = torch.stack([content.sum(dtype=torch.float32) for content in contents]).tolist()
    return [
        TensorState(tensor.data_ptr(), tensor._version, hashed, total)  # noqa: SLF001 - it has no public name
        for tensor, hashed, total in zip(tensors, hashes, sums, strict=True)
    ]


__all__ = ["TensorState", "state_of"]
