"""How much of an answer its caller's prediction would have guessed. Host only.

A function of the prediction and the answer alone: what was drafted, and how the load was, plays no part, so
that a request has the same usage each time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from samewise.types import RESYNC_TOKENS


class PredictionUsage(NamedTuple):
    """What became of a prediction, in tokens."""

    accepted: int = 0  # of the answer: guessed by the prediction
    rejected: int = 0  # of the prediction: not in the answer


class PredictionFollower:
    """Follows one answer through its prediction. Owned by the answer's choice.

    At a match the place in the prediction moves on. After a mismatch it is found again where the last
    `RESYNC_TOKENS` tokens of the answer occur in the prediction: at the first such place not yet passed, else
    at the first of all.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = tuple(prediction)
        self._seen = bytearray(len(self._prediction))  # 1: this token of the prediction is in the answer
        self._place: int | None = 0  # of the prediction's next token; None: lost
        self._passed = 0  # the last known place
        self._last: tuple[int, ...] = ()  # the answer's last RESYNC_TOKENS tokens
        self._ends: dict[
            tuple[int, ...], list[int]
        ] = {}  # where each run of RESYNC_TOKENS tokens ends, ascending
        for end in range(RESYNC_TOKENS, len(self._prediction) + 1):
            self._ends.setdefault(self._prediction[end - RESYNC_TOKENS : end], []).append(end)
        self.accepted = 0

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that the answer does not have so far."""
        return len(self._seen) - self._seen.count(1)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the answer."""
        if not self._prediction:
            return
        for token in tokens:
            self._last = (*self._last, token)[-RESYNC_TOKENS:]
            place = self._place
            if place is not None and place < len(self._prediction) and self._prediction[place] == token:
                self.accepted += 1
                self._seen[place] = 1
                self._place = self._passed = place + 1
            else:
                self._place = self._find()

    def _find(self) -> int | None:
        """The place after the answer's last tokens; None: they are not in the prediction."""
        ends = self._ends.get(self._last)
        if ends is None:
            return None
        later = bisect_left(ends, self._passed)
        end = self._passed = ends[later] if later < len(ends) else ends[0]
        self._seen[end - RESYNC_TOKENS : end] = b"\1" * RESYNC_TOKENS
        return end


def prediction_usage(prediction: Sequence[int], answer: Sequence[int]) -> PredictionUsage:
    """Tokens of the answer that following the prediction guesses, and those of the prediction not in it."""
    follower = PredictionFollower(prediction)
    follower.add(answer)
    return PredictionUsage(follower.accepted, follower.rejected)


__all__ = ["PredictionFollower", "PredictionUsage", "prediction_usage"]
