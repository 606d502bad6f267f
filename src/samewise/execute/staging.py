"""Batch: the tensors a pass eats, and the one buffer they travel in.

A pass of R rows needs a handful of int32 fields and the page numbers of its sequences. They lie one
behind the other in a single buffer, so that one small copy brings a pass to the device, and a graph
captured over the buffer's views can be replayed for ever.

Knows tensors and layout; has never heard of a request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from samewise.kernels.attention.base import Plan, Rows

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]

FIELDS = ("tokens", "source", "positions", "lengths", "slots", "page_start")


@dataclass(frozen=True, slots=True)
class Batch:
    """What a pass of R rows eats. Every field int32."""

    tokens: torch.Tensor  # [1, R]
    source: torch.Tensor  # [1, R] row of the pass before whose answer is this row's token, or -1
    positions: torch.Tensor  # [1, R]
    rows: Rows
    keep: torch.Tensor | None = None  # [K] rows whose logits are wanted; None: all

    @property
    def num_rows(self) -> int:
        """R."""
        return self.tokens.shape[1]


class StagingBuffer:
    """Staging for passes of R rows: a host buffer to fill, a device buffer to run from.

    Owned by a Runner. There are several host buffers, filled in turn: one may be filled while the others
    are still on their way to the device. Whoever fills faster than the device reads is made to wait.
    """

    @torch.inference_mode(mode=False)  # filled from anywhere, whoever asked for it first
    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        workspace: torch.Tensor,
        device: torch.device,
        num_buffers: int = 2,
        plan: Plan | None = None,
        num_kept: int = 0,
    ) -> None:
        self.num_rows, self.plan, self.num_kept = num_rows, plan, num_kept
        self._fields = len(FIELDS) * num_rows
        self._keep = self._fields + (0 if plan is None else plan.work_len(num_rows))
        self._head = self._keep + num_kept
        size = self._head + max_pages
        cuda = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(num_buffers)]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._turn = 0
        self._sent: list[torch.cuda.Event] = []  # of each host buffer, whether it has arrived
        if cuda:
            self._sent = [torch.cuda.Event() for _ in self._hosts]  # type: ignore[no-untyped-call]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self.batch = self._views(self._device, workspace)
        self.keeping = replace(self.batch, keep=self._device[self._keep : self._head])
        """The same pass, with logits of `num_kept` rows only: which, the staging says each time."""

    @property
    def array(self) -> Ints:
        """The host buffer whose turn it is."""
        return self._arrays[self._turn]

    def field(self, name: str) -> Ints:
        """The host side of one [R] field, to be written to."""
        i = FIELDS.index(name) * self.num_rows
        return self.array[i : i + self.num_rows]

    @property
    def work(self) -> Ints:
        """The host side of the work list, for the plan to write."""
        return self.array[self._fields : self._keep]

    def send(self, pages: Ints, keep: list[int] | None = None) -> Batch:
        """Add the page numbers, and `num_kept` rows to keep if any, and start the copy to the device."""
        end = self._head + len(pages)
        self.array[self._head : end] = pages
        if keep is not None:
            self.array[self._keep : self._head] = keep
        self._device[:end].copy_(self._hosts[self._turn][:end], non_blocking=True)
        sent, self._turn = self._turn, (self._turn + 1) % len(self._hosts)
        if self._sent:
            self._sent[sent].record()
            self._sent[self._turn].synchronize()
        return self.batch if keep is None else self.keeping

    def _views(self, flat: torch.Tensor, workspace: torch.Tensor) -> Batch:
        r = self.num_rows
        tokens, source, positions, lengths, slots, starts = (
            flat[i * r : (i + 1) * r] for i in range(len(FIELDS))
        )
        work = flat[self._fields : self._keep]
        rows = Rows(lengths, slots, starts, flat[self._head :], work, workspace)
        return Batch(tokens.unsqueeze(0), source.unsqueeze(0), positions.unsqueeze(0), rows)


__all__ = ["Batch", "StagingBuffer"]
