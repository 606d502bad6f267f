"""The frame after the one in flight, planned by one call of C++: what that call is given, and what it gives.

A frame with drafts can be planned only when the frame before it has landed, and meanwhile the device waits.
So all that can be known before is gathered while the device computes (`FrameToFollow`). From the frame's
outputs one call makes the numbers of the next frame (`FollowUp`), which starts at once. The engine's loop
then judges, commits and plans as ever, and must come to the same frame. Host only.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol

import numpy as np

Numbers = np.ndarray[tuple[int], np.dtype[np.int32]]

SPAN_LEN = 6
"""Numbers of a span: rows, given, start, source, pages, parents."""


class FollowedSequence(NamedTuple):
    """A sequence of the frame in flight, of the next one, or of both. FollowedSequence of interface.h.

    Where `next_given` is 0 the frame in flight brings its next tokens, and its next rows depend on them.
    Above 0 it has that many known tokens after those of the frame in flight, and `next_rows` of them are in
    the next frame.
    """

    seq_id: int
    num_rows: int  # in the frame in flight; 0: it is not part of it
    given: int  # known tokens from `start` on; further rows are guesses
    num_parents: int  # 0: the guesses are a chain
    start: int  # position of the first row
    next_given: int
    next_rows: int
    max_len: int  # tokens at which it ends
    num_pages: int
    num_stop_ids: int


class FrameToFollow(NamedTuple):
    """The sequences of the frame in flight and of the next one, their numbers one after another.

    First those of the frame in flight, in its order. Valid until one of them changes.
    """

    seq_ids: list[int]
    num_judged: int  # of them, those that the frame in flight brings tokens of
    sequences: array[int]  # int64: the fields of a FollowedSequence of each
    inputs: array[int]  # of the frame in flight; int32, as the following ones
    parents: array[int]
    next_inputs: array[int]  # of the next frame, where they are known
    pages: bytes  # all page tables
    stop_ids: array[int]
    page: int  # tokens of a page
    max_nodes: int  # of a sequence's next draft ...
    max_depth: int  # ... and its levels
    max_rows: int  # of the next frame

    def column(self, field: str) -> array[int]:
        """A field of all sequences."""
        fields = FollowedSequence._fields
        return self.sequences[fields.index(field) :: len(fields)]


class FollowUp(NamedTuple):
    """The next frame, as the packer takes it (see `Packer.pack`). Arrays are valid until the next one."""

    num_spans: int
    numbers: Numbers
    num_rows: int
    num_moves: int  # pairs of slots at the end of `numbers`
    pages: Numbers  # all page tables
    reads: bool  # whether some rows are of tokens that are known, and give no token

    def sampled_rows(self) -> list[int]:
        """The rows that tokens are sampled from."""
        rows: list[int] = []
        first = 0
        for num, given, *_ in self.numbers[: SPAN_LEN * self.num_spans].reshape(-1, SPAN_LEN).tolist():
            rows += range(first + given - 1, first + num)
            first += num
        return rows

    def moves(self) -> list[tuple[int, int]]:
        """The slots (from, to) whose K and V have to be moved before the frame."""
        if not self.num_moves:
            return []
        pairs = self.numbers[-2 * self.num_moves :].tolist()
        return list(zip(pairs[::2], pairs[1::2], strict=True))

    def without_moves(self) -> FollowUp:
        """The frame without its moves."""
        num = len(self.numbers) - 2 * self.num_moves
        return self._replace(numbers=self.numbers[:num], num_moves=0)

    def with_keep(self, keep: list[int]) -> FollowUp:
        """The frame with the rows whose logits are computed, which stand before the moves."""
        num = len(self.numbers) - 2 * self.num_moves
        kept = np.array(keep, np.int32)
        return self._replace(numbers=np.concatenate((self.numbers[:num], kept, self.numbers[num:])))


class FrameOutputs(NamedTuple):
    """Where a landed frame's outputs lie: int32, one row after another, the token first."""

    address: int
    row_len: int
    first_candidate: int  # where a row's candidates begin; 0: there are none


class FollowUpPlan(Protocol):
    """A proposer's way to draft the next frame as soon as the one in flight lands."""

    frame: FrameToFollow

    def run(self, outputs: FrameOutputs) -> FollowUp | None:
        """The next frame; None: it must be planned in the usual way, and nothing has changed.

        After a follow-up the proposer is told of the verdicts by `observe`, and `take_follow_up` gives its
        proposals.
        """
        ...


__all__ = [
    "SPAN_LEN",
    "FollowUp",
    "FollowUpPlan",
    "FollowedSequence",
    "FrameOutputs",
    "FrameToFollow",
]
