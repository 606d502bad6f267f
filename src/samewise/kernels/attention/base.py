"""Canonical attention: one signature, one law.

The law: a row's result depends only on its absolute position and on the keys and values it may see;
never on the span it came in, the rows beside it, the page numbers used, or what lies in memory it may
not see (which may be NaN).

A kernel first writes every row's K and V to its slot, then lets every row attend to the keys
``[max(0, length - window), length)`` of its sequence, reading them through the sequence's pages.
Kernels: ``native`` (CPU, C++ built once by the machine's compiler), ``torch`` (CPU, where there is no
compiler), ``triton`` (CUDA). Each has its own name and version in the contract; their bits differ.

Knows tensors; has never heard of a request or a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

Ints = np.ndarray[Any, np.dtype[np.int32]]

PAGE = 16
"""Tokens in a page, on every device: a constant of the contract."""


class Heads(NamedTuple):
    """What attention in one layer of a model looks like."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


class Rows(NamedTuple):
    """Where each of a pass's R rows stands. int32 on the model's device, unless said."""

    lengths: torch.Tensor  # [R] keys the row may see, itself included (position + 1); 0 for padding
    slots: torch.Tensor  # [R] page * PAGE + offset where the row's K and V go (padding: the trash page 0)
    page_start: torch.Tensor  # [R] where its sequence's page numbers begin in `pages`
    pages: torch.Tensor  # [N] page numbers, each sequence's in order
    work: torch.Tensor  # what the kernel's plan says of the pass (empty for kernels without one)
    workspace: torch.Tensor  # float32 scratch, zeros before the first pass (likewise)


class LayerKV(NamedTuple):
    """One layer's K and V pages, in the layout its kernel asked for."""

    k: torch.Tensor
    v: torch.Tensor


class Plan(Protocol):
    """How a kernel wants passes of one model laid out, made on the host."""

    @property
    def workspace_len(self) -> int:
        """Float32 elements of scratch any pass needs."""
        ...

    def work_len(self, num_rows: int) -> int:
        """Int32 elements of `Rows.work` for a pass of `num_rows` rows."""
        ...

    def write(self, lengths: Ints, page_start: Ints, work: Ints) -> None:
        """Write `Rows.work` for a pass's rows."""
        ...


class Kernel(Protocol):
    """One implementation of canonical attention."""

    @property
    def name(self) -> str:
        """Name and version, part of the contract: change it whenever bits may change."""
        ...

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """Uninitialised K and V pages for one layer, in this kernel's layout."""
        ...

    def plan(self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int) -> Plan | None:
        """What passes of a model's layers need, of so many rows and keys at most; None: nothing."""
        ...

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
        ...


__all__ = ["PAGE", "Heads", "Kernel", "LayerKV", "Plan", "Rows"]
