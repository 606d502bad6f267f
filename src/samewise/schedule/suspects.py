"""Sequences that were part of a failed step: one of them may be to blame, so they run one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from samewise.schedule.registry import Registry
from samewise.types import Sequence


class Suspects:
    """The suspects that have made no progress since, by arrival. Owned by the Scheduler."""

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        self._queue = deque(sequences)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def oldest(self, registry: Registry) -> Sequence | None:
        """The suspect that runs now. Those that ended or received a token are dropped; None: none is left."""
        while self._queue:
            seq = self._queue[0]
            known = registry.sequences.get(seq.request.id) is seq
            if known and seq.finish is None and not registry.has_progressed(seq):
                return seq
            self._queue.popleft()
        return None


__all__ = ["Suspects"]
