"""PassInputs, the device tensors of one pass, and StagingBuffer, the one buffer they lie in.

A pass of R rows needs eight int32 fields and the page numbers of its sequences. They lie one behind the other
in a single buffer, so that one small copy brings a pass to the device, and a graph captured over the
buffer's views can be replayed for every later pass.

Knows tensors and their layout, not requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from samewise.errors import InvariantBroken
from samewise.execute.native.packer import Layout, make_packer
from samewise.kernels.attention.base import AttentionPlan, Rows

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]

FIELDS = ("tokens", "source", "positions", "lengths", "slots", "page_start", "tail_start", "tail")

COPY_STEP = 1024
"""Elements by which copies to the device differ in size: few sizes, so that their views can be kept."""


@dataclass(frozen=True, slots=True)
class PassInputs:
    """What a pass of R rows reads. Every tensor is int32 on the device, but `keep`, which indexes rows."""

    tokens: torch.Tensor  # [1, R]
    source: torch.Tensor  # [1, R] row of the previous pass whose sampled token is this row's token, or -1
    positions: torch.Tensor  # [1, R]
    rows: Rows
    keep: torch.Tensor | None = None  # [K] rows whose logits are computed; None: all
    moves: torch.Tensor | None = None  # [1 + 2M] a number of pairs, then slots (from, to); None: M is 0

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
        max_moves: int = 0,
    ) -> None:
        self.num_rows, self.plan, self.num_kept, self.max_moves = num_rows, plan, num_kept, max_moves
        # The buffer: fields, then the attention plan's work list, slots to move, rows to keep, page numbers.
        work_start = len(FIELDS) * num_rows
        moves_start = work_start + (0 if plan is None else plan.work_list_len(num_rows))
        keep_start = moves_start + (1 + 2 * max_moves if max_moves else 0)
        pages_start = keep_start + num_kept
        size = pages_start + max_pages
        self._layout = Layout(num_rows, work_start, moves_start, keep_start, pages_start, size)
        cuda = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(num_buffers)]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._addresses = [host.data_ptr() for host in self._hosts]
        self._current = 0
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._copied: list[torch.cuda.Event] = []  # per host buffer: its last copy to the device
        if cuda:
            self._copied = [torch.cuda.Event() for _ in self._hosts]  # type: ignore[no-untyped-call]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self.packer = make_packer(self._layout, plan)
        """Fills the host buffer in C++; None: it is filled through `field` and `send`."""
        self.inputs = self._views(self._device, workspace)
        self.inputs_with_keep = replace(self.inputs, keep=self._device[keep_start:pages_start])
        """The same pass with logits of `num_kept` rows only; `send` is given which."""

    @property
    def array(self) -> Ints:
        """The host buffer to fill next."""
        return self._arrays[self._current]

    @property
    def address(self) -> int:
        """Of the host buffer to fill next."""
        return self._addresses[self._current]

    def field(self, name: str) -> Ints:
        """The host side of one [R] field, to be written to."""
        i = FIELDS.index(name) * self.num_rows
        return self.array[i : i + self.num_rows]

    @property
    def work_list(self) -> Ints:
        """The host side of the work list, for the plan to write."""
        return self.array[self._layout.work_start : self._layout.moves_start]

    def send(
        self, pages: Ints, keep: list[int] | None = None, moves: Sequence[tuple[int, int]] = ()
    ) -> PassInputs:
        """Add page numbers, slots to move, the `num_kept` rows to keep if given; start the copy."""
        layout = self._layout
        end = layout.pages_start + len(pages)
        self.array[layout.pages_start : end] = pages
        if keep is not None:
            self.array[layout.keep_start : layout.pages_start] = keep
        if len(moves) > self.max_moves:
            raise InvariantBroken(f"{len(moves)} slots to move in a pass that has room for {self.max_moves}")
        if self.max_moves:
            first = layout.moves_start
            self.array[first] = len(moves)
            self.array[first + 1 : first + 1 + 2 * len(moves)] = np.array(moves, np.int32).reshape(-1)
        return self.copy(end, with_keep=keep is not None)

    def copy(self, end: int, *, with_keep: bool) -> PassInputs:
        """Start the copy of the buffer's first `end` elements, or some more, to the device."""
        sent = self._current
        key = sent, -(-end // COPY_STEP)
        target, source = self._copies.get(key) or self._add_copy(*key)
        target.copy_(source, non_blocking=True)
        self._current = (sent + 1) % len(self._hosts)
        if self._copied:
            self._copied[sent].record()
            self._copied[self._current].synchronize()
        return self.inputs_with_keep if with_keep else self.inputs

    @torch.inference_mode(mode=False)
    def _add_copy(self, buffer: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        end = steps * COPY_STEP
        self._copies[buffer, steps] = views = self._device[:end], self._hosts[buffer][:end]
        return views

    def _views(self, flat: torch.Tensor, workspace: torch.Tensor) -> PassInputs:
        num = self.num_rows
        tokens, source, positions, lengths, slots, starts, tail_starts, tails = (
            flat[i * num : (i + 1) * num] for i in range(len(FIELDS))
        )
        layout = self._layout
        work = flat[layout.work_start : layout.moves_start]
        moves = flat[layout.moves_start : layout.keep_start] if self.max_moves else None
        pages = flat[layout.pages_start :]
        rows = Rows(lengths, slots, starts, tail_starts, tails, pages, work, workspace)
        return PassInputs(tokens.unsqueeze(0), source.unsqueeze(0), positions.unsqueeze(0), rows, moves=moves)


__all__ = ["FIELDS", "PassInputs", "StagingBuffer"]
