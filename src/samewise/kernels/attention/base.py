"""Canonical attention: the interface of its kernels, and the rule they all follow.

The rule: a row's result depends only on its absolute position and on the keys and values it may see; never on
the span it came in, the rows beside it, the page numbers used, or the content of memory it may not see (which
may be NaN).

A kernel first writes every row's K and V to its slot, then lets every row attend to the keys
``[max(0, length - window), length)`` of its sequence, reading them through the sequence's pages. A row of a
draft tree finds its last keys, its ancestors and itself, through a list of slots instead: the keys from
`tail_start` on. Its sums run over positions in the same order, blocks and splits as if its path stood alone,
so its bits are those of plain replay.
Kernels: ``native`` (CPU, C++), ``torch`` (CPU without a compiler), ``triton`` (CUDA). Each has its own name
and version in the contract; their bits differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

Ints = np.ndarray[Any, np.dtype[np.int32]]

PAGE = 16
"""Tokens in a KV page, on every device. Bits depend on it: a constant of the contract."""


class Heads(NamedTuple):
    """The head layout of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


class Rows(NamedTuple):
    """Positions and KV slots of a pass's R rows. int32 on the model's device unless stated otherwise."""

    lengths: torch.Tensor  # [R] keys the row may see, itself included (position + 1); 0 for padding
    slots: torch.Tensor  # [R] page * PAGE + offset where the row's K and V go (padding: the trash page 0)
    page_start: torch.Tensor  # [R] index in `pages` of the first page number of the row's sequence
    tail_start: torch.Tensor  # [R] first key that is found through the row's tail; its length: no tail
    tail: torch.Tensor  # [R] index in `pages` of the slot of key `tail_start`; those of the next keys follow
    pages: torch.Tensor  # [N] page numbers, each sequence's in order; then slots of tails
    work_list: torch.Tensor  # written by the kernel's plan (empty for kernels without one)
    workspace: torch.Tensor  # float32 scratch, zeros before the first pass (empty likewise)


NUM_TABLES: Final = 6
"""The first fields of `Rows`: int32 tables that every CPU kernel reads, all but `pages` of R elements."""


class LayerKV(NamedTuple):
    """One layer's K and V pages, in its kernel's layout."""

    k: torch.Tensor
    v: torch.Tensor


class AttentionPlan(Protocol):
    """Lays out the passes of one model for a kernel, on the host."""

    @property
    def workspace_len(self) -> int:
        """Float32 elements of scratch that suffice for every pass."""
        ...

    def work_list_len(self, num_rows: int) -> int:
        """Int32 elements of `Rows.work_list` for a pass of `num_rows` rows."""
        ...

    def write(self, lengths: Ints, page_start: Ints, tail_start: Ints, tail: Ints, work_list: Ints) -> None:
        """Write `Rows.work_list` for a pass's rows."""
        ...


class SlotMover(Protocol):
    """Moves K and V of slots as a tensor on the device says, so that a captured graph can begin with it."""

    @property
    def max_pairs(self) -> int:
        """Pairs of slots in one call, at most."""
        ...

    def __call__(self, moves: torch.Tensor) -> None:
        """Move slots as `AttentionKernel.move_slots` does.

        `moves` is int32 [1 + 2 * max_pairs] on the device: the number of pairs, then each pair (from, to).
        """
        ...


class AttentionKernel(ABC):
    """One implementation of canonical attention."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name and version, part of the contract: it changes whenever bits may change."""

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """Uninitialised K and V pages for one layer, both [P, Hkv, PAGE, D] unless the kernel overrides it.

        One head's share of a page is contiguous.
        """
        shape = (num_pages, num_kv_heads, PAGE, head_dim)
        k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return LayerKV(k, v)

    def move_slots(self, layers: Sequence[LayerKV], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Move K and V of the slots `sources` to `targets` (int64, on the device) in all layers, bit for bit.

        All are read before any is written; targets differ. Queued on the device's current stream.
        """
        source, target = ((slots // PAGE, slots % PAGE) for slots in (sources, targets))
        for layer in layers:
            for pages in layer:
                pages[target[0], :, target[1]] = pages[source[0], :, source[1]]

    def slot_mover(self, layers: Sequence[LayerKV]) -> SlotMover | None:  # noqa: ARG002 - see the docstring
        """A mover over these layers; None: the kernel has none."""
        return None

    @abstractmethod
    def plan(
        self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int
    ) -> AttentionPlan | None:
        """The plan for passes of up to `max_rows` rows and `max_len` keys; None if the kernel needs none."""

    @abstractmethod
    def __call__(
        self,
        q: torch.Tensor,  # [R, Hq, D]
        k: torch.Tensor,  # [R, Hkv, D]
        v: torch.Tensor,  # [R, Hkv, D]
        kv: LayerKV,
        rows: Rows,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:  # [R, Hq, D], contiguous, q's dtype; zeros for padding rows
        """Write this pass's K and V, then attend."""


__all__ = [
    "NUM_TABLES",
    "PAGE",
    "AttentionKernel",
    "AttentionPlan",
    "Heads",
    "LayerKV",
    "Rows",
    "SlotMover",
]
