"""The frame after the one in flight, planned by one call of C++: what that call is given, and what it gives.

A frame with drafts can be planned only when the frame before it has landed, and meanwhile the device waits.
So all that can be known before is gathered while the device computes (`FrameToFollow`). From the frame's
outputs one call makes the numbers of the next frame (`FollowUp`), which starts at once. The engine's loop
then judges, commits and plans as ever, and must come to the same frame. Host only.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple, Protocol

import numpy as np

Numbers = np.ndarray[tuple[int], np.dtype[np.int32]]


class FollowedSequence(NamedTuple):
    """A sequence of the frame in flight, and what its next draft may use. FollowedSequence of drafter.cpp."""

    seq_id: int
    num_rows: int  # in the frame: the last known token, then guesses
    num_parents: int  # 0: the guesses are a chain
    start: int  # position of the first row
    max_len: int  # tokens at which it ends
    num_pages: int
    num_stop_ids: int


class FrameToFollow(NamedTuple):
    """The frame in flight, its sequences' numbers one after another. Valid until a sequence of it changes."""

    seq_ids: list[int]
    sequences: array[int]  # int64: the fields of a FollowedSequence of each
    inputs: array[int]  # int32, as the following ones
    parents: array[int]
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
    """The next frame, as the packer takes it."""

    num_spans: int
    numbers: Numbers  # valid until the next follow-up
    num_rows: int
    num_moves: int  # pairs of slots at the end of `numbers`
    pages: bytes  # all page tables


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


def moves_of(follow_up: FollowUp) -> list[tuple[int, int]]:
    """The slots (from, to) whose K and V have to be moved before the frame."""
    numbers: Any = follow_up.numbers
    pairs = numbers[len(numbers) - 2 * follow_up.num_moves :].reshape(-1, 2).tolist()
    return [(source, target) for source, target in pairs]


__all__ = [
    "FollowUp",
    "FollowUpPlan",
    "FollowedSequence",
    "FrameOutputs",
    "FrameToFollow",
    "moves_of",
]
