"""PassInputs, the device tensors of one pass, and StagingBuffer, the one buffer they lie in.

A pass of R rows needs eight int32 fields and the page numbers of its sequences. They lie one behind the other
in a single buffer, so that one small copy brings a pass to the device, and a graph captured over the
buffer's views can be replayed for every later pass.

Knows tensors and their layout, not requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from samewise.kernels.attention.base import AttentionPlan, Rows

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]

FIELDS = ("tokens", "source", "positions", "lengths", "slots", "page_start", "tail_start", "tail")


@dataclass(frozen=True, slots=True)
class PassInputs:
    """What a pass of R rows reads. Every tensor is int32 on the device, but `keep`, which indexes rows."""

    tokens: torch.Tensor  # [1, R]
    source: torch.Tensor  # [1, R] row of the previous pass whose sampled token is this row's token, or -1
    positions: torch.Tensor  # [1, R]
    rows: Rows
    keep: torch.Tensor | None = None  # [K] rows whose logits are computed; None: all

    @property
    def num_rows(self) -> int:
        """R."""
        return self.tokens.shape[1]


class StagingBuffer:
    """Host buffers to fill and a device buffer to run from, for passes of R rows. Owned by a Runner.

    The host buffers are filled in turn, one while others are still being copied. `send` waits until the next
    one's last copy is done, so a fast host cannot overwrite what the device has not read.
    """

    @torch.inference_mode(mode=False)  # written inside and outside of inference mode
    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        workspace: torch.Tensor,
        device: torch.device,
        num_buffers: int = 2,
        plan: AttentionPlan | None = None,
        num_kept: int = 0,
    ) -> None:
        self.num_rows, self.plan, self.num_kept = num_rows, plan, num_kept
        # The buffer: fields, then the attention plan's work list, rows to keep, page numbers.
        self._work_start = len(FIELDS) * num_rows
        self._keep_start = self._work_start + (0 if plan is None else plan.work_list_len(num_rows))
        self._pages_start = self._keep_start + num_kept
        size = self._pages_start + max_pages
        cuda = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(num_buffers)]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._current = 0
        self._copied: list[torch.cuda.Event] = []  # per host buffer: its last copy to the device
        if cuda:
            self._copied = [torch.cuda.Event() for _ in self._hosts]  # type: ignore[no-untyped-call]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self.inputs = self._views(self._device, workspace)
        self.inputs_with_keep = replace(self.inputs, keep=self._device[self._keep_start : self._pages_start])
        """The same pass with logits of `num_kept` rows only; `send` is given which."""

    @property
    def array(self) -> Ints:
        """The host buffer to fill next."""
        return self._arrays[self._current]

    def field(self, name: str) -> Ints:
        """The host side of one [R] field, to be written to."""
        i = FIELDS.index(name) * self.num_rows
        return self.array[i : i + self.num_rows]

    @property
    def work_list(self) -> Ints:
        """The host side of the work list, for the plan to write."""
        return self.array[self._work_start : self._keep_start]

    def send(self, pages: Ints, keep: list[int] | None = None) -> PassInputs:
        """Add the page numbers, and the `num_kept` rows to keep if given; start the copy to the device."""
        end = self._pages_start + len(pages)
        self.array[self._pages_start : end] = pages
        if keep is not None:
            self.array[self._keep_start : self._pages_start] = keep
        self._device[:end].copy_(self._hosts[self._current][:end], non_blocking=True)
        sent, self._current = self._current, (self._current + 1) % len(self._hosts)
        if self._copied:
            self._copied[sent].record()
            self._copied[self._current].synchronize()
        return self.inputs if keep is None else self.inputs_with_keep

    def _views(self, flat: torch.Tensor, workspace: torch.Tensor) -> PassInputs:
        num = self.num_rows
        tokens, source, positions, lengths, slots, starts, tail_starts, tails = (
            flat[i * num : (i + 1) * num] for i in range(len(FIELDS))
        )
        work = flat[self._work_start : self._keep_start]
        pages = flat[self._pages_start :]
        rows = Rows(lengths, slots, starts, tail_starts, tails, pages, work, workspace)
        return PassInputs(tokens.unsqueeze(0), source.unsqueeze(0), positions.unsqueeze(0), rows)


__all__ = ["FIELDS", "PassInputs", "StagingBuffer"]
