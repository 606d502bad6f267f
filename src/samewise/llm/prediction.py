"""How much of an answer its caller's prediction would have guessed. Host only.

A function of the prediction and the answer alone: what was drafted, and how the load was, plays no part, so
that a request has the same usage each time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from samewise.types import RESYNC_TOKENS

_ID_BITS = 63 // RESYNC_TOKENS
"""Bits of a token id where a run of tokens is one number: 31."""


class Prediction:
    """The tokens that an answer is expected to have, and where each run of RESYNC_TOKENS of them ends.

    Immutable, so that any thread may make it: 32,768 tokens take some milliseconds, which the engine's thread
    does not have. Takes 16 bytes per token beside the tokens.
    """

    __slots__ = ("_ends", "_runs", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = tuple(tokens)
        ids = np.array(self.tokens, np.int64)
        runs = np.zeros(max(0, len(ids) - RESYNC_TOKENS + 1), np.int64)
        for i in range(RESYNC_TOKENS):
            runs = (runs << _ID_BITS) + ids[i : i + len(runs)]
        order = np.argsort(runs, kind="stable")
        self._runs = array("q", runs[order].tobytes())  # ascending
        self._ends = array(
            "q", (order + RESYNC_TOKENS).tobytes()
        )  # of the same runs; of equal ones ascending

    def __len__(self) -> int:
        return len(self.tokens)

    def find(self, last: Sequence[int], passed: int) -> int | None:
        """The first place behind such a run from `passed` on, else the first of all; None: there is none."""
        if len(last) < RESYNC_TOKENS:
            return None
        run = 0
        for token in last[-RESYNC_TOKENS:]:
            run = (run << _ID_BITS) + token
        first = bisect_left(self._runs, run)
        behind = bisect_right(self._runs, run, first)
        if first == behind:
            return None
        later = bisect_left(self._ends, passed, first, behind)
        return self._ends[later if later < behind else first]


NO_PREDICTION = Prediction()


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

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._seen = bytearray(len(prediction))  # 1: this token of the prediction is in the answer
        self._place: int | None = 0  # of the prediction's next token; None: lost
        self._passed = 0  # the last known place
        self._last: tuple[int, ...] = ()  # the answer's last RESYNC_TOKENS tokens
        self.accepted = 0

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that the answer does not have so far."""
        return len(self._seen) - self._seen.count(1)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the answer."""
        predicted = self._prediction.tokens
        if not predicted:
            return
        for token in tokens:
            self._last = (*self._last, token)[-RESYNC_TOKENS:]
            place = self._place
            if place is not None and place < len(predicted) and predicted[place] == token:
                self.accepted += 1
                self._seen[place] = 1
                self._place = self._passed = place + 1
            else:
                self._place = self._find()

    def _find(self) -> int | None:
        """The place after the answer's last tokens; None: they are not in the prediction."""
        end = self._prediction.find(self._last, self._passed)
        if end is not None:
            self._passed = end
            self._seen[end - RESYNC_TOKENS : end] = b"\1" * RESYNC_TOKENS
        return end


def prediction_usage(prediction: Sequence[int], answer: Sequence[int]) -> PredictionUsage:
    """Tokens of the answer that following the prediction guesses, and those of the prediction not in it."""
    follower = PredictionFollower(Prediction(prediction))
    follower.add(answer)
    return PredictionUsage(follower.accepted, follower.rejected)


__all__ = ["NO_PREDICTION", "Prediction", "PredictionFollower", "PredictionUsage", "prediction_usage"]
