"""What survives a failure: the requests, and how much of each its caller has received. Host only.

An exception, or a signal, may cut a call short anywhere and leave queues, pages and drafts half changed. Bits
are a function of the request alone, so all of these can be dropped and computed again. What cannot be
computed again is what the caller already has: those tokens are kept, and only tokens after them are given out
from then on.

What is noted here changes by a single store, so that there is no moment at which it is half true.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from samewise.errors import InvariantBroken
from samewise.types import Finish, Received, Sequence

MAX_FAILURES = 2
"""Failed steps in a row, without a token between them, that end a request. The first may have been the fault
of another request in the frame; in the second it ran alone."""


@dataclass(slots=True)
class Delivery:
    """The sequences, and what was committed since the caller received deltas last.

    Replaced as a whole when the deltas are returned, and by a recovery.
    """

    sequences: dict[int, Sequence] = field(default_factory=dict)  # by id
    before: dict[int, Received] = field(default_factory=dict)  # what the caller had, by sequence
    ended: list[int] = field(default_factory=list)  # sequences that ended in this delivery
    received_ends: list[int] = field(default_factory=list)  # those of the delivery before
    unfinished: bool = False  # whether a call has begun that did not come to its end


class Registry:
    """The sequences of an engine, from `add` until their last delta was received. Owned by the Scheduler."""

    def __init__(self) -> None:
        self.delivery = Delivery()

    @property
    def sequences(self) -> dict[int, Sequence]:
        """By id, the sequences that have not ended, and those whose last delta may not have been received."""
        return self.delivery.sequences

    def add(self, seq: Sequence) -> None:
        """Register a request."""
        self.sequences[seq.request.id] = seq

    def drop(self, seq_id: int) -> None:
        """Forget a request: nothing more is wanted of it."""
        self.sequences.pop(seq_id, None)

    def will_commit(self, seq: Sequence) -> None:
        """Note what the caller has of a sequence, before the first change since the last delivery."""
        if seq.request.id not in self.delivery.before:
            self.delivery.before[seq.request.id] = seq.committed

    def will_end(self, seq: Sequence) -> None:
        """Note that the sequence ends in this delivery. It is kept until its last delta was received."""
        self.delivery.ended.append(seq.request.id)

    def forget_received(self) -> None:
        """Drop the sequences whose last delta the caller has: it asks for the next ones."""
        for seq_id in self.delivery.received_ends:
            self.sequences.pop(seq_id, None)

    def deliver(self) -> None:
        """The caller gets all that was committed, and the call is finished."""
        self.delivery = Delivery(self.delivery.sequences, received_ends=self.delivery.ended)

    def has_progressed(self, seq: Sequence) -> bool:
        """Whether the caller has received more of a sequence since the last failed step it was part of."""
        return self.delivery.before.get(seq.request.id, seq.committed) != seq.failed_at

    # ---- after a failure

    def recover(
        self, received: Mapping[int, Received | None], blamed: Collection[int]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences that start again from what their callers have, by arrival, and those that end in error.

        `received`: what the callers of some sequences really have (None: the sequence is not wanted any
        more). Of the others it is all that was returned. `blamed`: sequences that were part of a failed step.
        """
        going_on: list[Sequence] = []
        failed: list[Sequence] = []
        for seq_id in sorted(self.sequences):
            seq = self.sequences[seq_id]
            has = received[seq_id] if seq_id in received else self._received(seq)
            if has is None:
                continue
            again = _restarted(seq, has)
            if seq_id in blamed:
                again.num_failures = 1 if has != seq.failed_at else seq.num_failures + 1
                again.failed_at = has
            (failed if again.num_failures >= MAX_FAILURES else going_on).append(again)
        for seq in failed:
            seq.finish = Finish.ERROR
        before = {seq.request.id: seq.committed for seq in failed}
        kept = {seq.request.id: seq for seq in (*going_on, *failed)}
        self.delivery = Delivery(kept, before, ended=list(before), unfinished=True)
        return going_on, failed

    def _received(self, seq: Sequence) -> Received | None:
        """What the caller has of a sequence if every delivery reached it; None: all there is."""
        before = self.delivery.before.get(seq.request.id)
        if before is not None:
            return before
        return seq.committed if seq.finish is None else None


def _restarted(seq: Sequence, has: Received) -> Sequence:
    """The sequence as it was when its caller had received so much, without KV."""
    request, committed = seq.request, seq.committed
    if has.tokens > committed.tokens or has.scores > committed.scores:
        raise InvariantBroken(f"request {request.id}: {has} were received of {committed}")
    first = request.first_scored
    return Sequence(
        request,
        seq.tokens[: seq.prompt_len + has.tokens],
        seq.max_len,
        score_next=None if first is None else first + has.scores,
        num_cached=seq.num_cached,
        guide=seq.guide,
        guide_moved=True,
        num_failures=seq.num_failures,
        failed_at=seq.failed_at,
    )


__all__ = ["MAX_FAILURES", "Delivery", "Registry"]
