"""Owners that share the engine: whether one of them crowds it, and how short its frames are then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from samewise.types import Sequence

CROWD = 4
"""An owner with more than this many times the sequences of another one is a crowd. Set by hand."""

RECENT = 64
"""Steps for which an owner counts after its last sequence has ended: its next request finds short frames.
Set by hand: about 2 s of a small model on a CPU, where frames are longest."""

SHORT = 4.0
"""A short frame takes at most this many times as long as a frame of one row, by what was measured. Set by
hand: on a CPU a newcomer's first token takes twice the time of a quiet server, and a crowd keeps 9/10 of its
pace; with 3, 1.5 times and 4/5."""

SLOW = 0.001
"""Seconds a token above which a grammar is slow. Ordinary ones take 0.0002."""

SLOW_SECONDS = 0.01
"""Seconds that the masks of slow grammars take in one frame, about, where owners share the engine; one of
them has its row in any case. Set by hand: about a frame of a small model on a CPU."""

LEAST_ROWS = 4
"""Rows of a short frame, at least."""


class Owners:
    """When the sequences of each owner ended. Owned by the Scheduler."""

    def __init__(self) -> None:
        self._left: dict[bytes, int] = {}  # owner → the last step in which one of its sequences ended

    def left(self, owner: bytes, step: int) -> None:
        """A sequence of this owner has ended."""
        self._left = {other: last for other, last in self._left.items() if last >= step - RECENT}
        if owner:
            self._left[owner] = step

    def shared(self, running: Collection[Sequence], step: int) -> bool:
        """Whether there are sequences of several owners, or were lately."""
        return len({*self._recent(step), *(seq.request.owner for seq in running)}) > 1

    def _recent(self, step: int) -> list[bytes]:
        return [owner for owner, last in self._left.items() if last >= step - RECENT]

    def crowded(self, running: Collection[Sequence], step: int) -> bool:
        """Whether an owner has many more sequences than another one has, or had lately."""
        counts = Counter([seq.request.owner for seq in running])
        if len(counts) < 2 and not self._left:
            return False
        recent = [1 for owner in self._recent(step) if owner not in counts]
        return max(counts.values(), default=0) > CROWD * min([*counts.values(), *recent], default=1)


def without_crowds(running: list[Sequence], step: int) -> list[Sequence]:
    """The sequences without those that stand back for another owner's first token.

    The fewer rows a frame has, the sooner it ends: while an owner with few sequences waits for a first token,
    a crowd has rows in one frame of three only. A token is returned after the frame behind its own was
    launched, so that frame is short too.
    """
    if len({seq.request.owner for seq in running}) < 2:
        return running
    counts = Counter(seq.request.owner for seq in running)
    starting = [counts[seq.request.owner] for seq in running if len(seq.tokens) <= seq.prompt_len + 1]
    most = CROWD * min(starting, default=len(running))
    served = [seq.last_served for seq in running if counts[seq.request.owner] > most]
    if not served or max(served) < step - 2:
        return running
    return [seq for seq in running if counts[seq.request.owner] <= most]


def without_slow_grammars(running: list[Sequence]) -> list[Sequence]:
    """The sequences without those whose masks would make the frame late for other owners.

    The thread that serves all sequences computes masks. Where a text can be read in many ways one takes
    milliseconds; only so many are computed for a frame, for the sequences that waited longest.
    """
    # Unverified ones that generate have rows of their own, and their wait is not kept.
    slow = [
        seq
        for seq in running
        if seq.guide is not None and seq.guide.pace > SLOW and (seq.request.verify or seq.prefilling)
    ]
    if len(slow) < 2:
        return running
    left, standing_back = SLOW_SECONDS, set[int]()
    for number, seq in enumerate(sorted(slow, key=lambda seq: (seq.last_served, seq.place))):
        assert seq.guide is not None
        left -= seq.guide.pace
        if number and left < 0:
            standing_back.add(seq.request.id)
    return [seq for seq in running if seq.request.id not in standing_back]


def short_frame(max_rows: int, seconds: Callable[[int], float]) -> int:
    """Rows of the widest short frame. `seconds`: of a frame of so many rows; 0.0 where that is not known."""
    most = SHORT * seconds(1)
    rows = max_rows
    while most and rows > LEAST_ROWS and seconds(rows) > most:
        rows -= 1
    return rows


__all__ = [
    "CROWD",
    "LEAST_ROWS",
    "RECENT",
    "SHORT",
    "Owners",
    "short_frame",
    "without_crowds",
    "without_slow_grammars",
]
