"""When to stop asking `auto` for drafts, where the device runs beside the host.

A frame that may hold drafts can only be launched after the frame before it has landed; without drafts, frames
follow one another on the device. So asking has a price, a large one where frames are short. It is measured as
the difference between frames launched after `propose` and frames launched ahead. When there was nothing to
propose, asking pauses. Meanwhile the committed text is still matched, and asking resumes as soon as a match
promises more than the price.

Numbers in, numbers out; the clock is an argument. Host only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samewise.draft.cost_model import CostCurve
from samewise.draft.tuning import DEFAULTS, Tuning


class IdlePolicy:
    """Measures frames with and without asking, and keeps the length of the current pause."""

    def __init__(self, clock: Callable[[], float], tuning: Tuning = DEFAULTS) -> None:
        self._clock, self._tuning = clock, tuning.auto
        # Seconds from landing to landing, by number of sequences.
        self._asked_frames, self._chained_frames = CostCurve(tuning.cost_model), CostCurve(tuning.cost_model)
        self._last_landing: tuple[float, int] | None = None  # time, number of sequences
        self._asked = self._drafted = False  # for the frame in flight
        self._frames_left = 0  # of the pause
        self._excluded = 0.0  # seconds since the last landing that were not spent on proposing
        self._num_pauses = self._num_wakes = 0

    @property
    def pausing(self) -> bool:
        """Whether asking is off."""
        return self._frames_left > 0

    def asked(self, *, drafted: bool) -> None:
        """`propose` was called; without a draft a pause begins."""
        self._asked, self._drafted = True, self._drafted or drafted
        if not drafted:
            self._frames_left = self._tuning.pause_frames
            self._num_pauses += 1

    def exclude(self, seconds: float) -> None:
        """Time that is no part of the price of asking: a drafter's own work."""
        self._excluded += seconds

    def landed(self, live: int, *, prefill: bool = False) -> None:
        """A frame of so many sequences landed. One that also read a prompt is not measured."""
        now, last, asked = self._clock(), self._last_landing, self._asked
        plain, self._asked, self._drafted = not self._drafted, False, False
        excluded, self._excluded = self._excluded, 0.0
        self._last_landing, self._frames_left = (now, live), max(0, self._frames_left - 1)
        if plain and live and last is not None and last[1] == live and not prefill:
            curve = self._asked_frames if asked else self._chained_frames
            curve.observe(live, now - last[0] - excluded)

    def wake(self) -> None:
        """End the pause."""
        self._frames_left = 0

    def interrupted(self) -> None:
        """No sequence is left: the time until the next frame says nothing."""
        self._last_landing = None

    def price(self, live: int) -> float:
        """Seconds that asking adds to a frame of so many sequences; 0.0 until both kinds were measured."""
        if not (self._asked_frames.known and self._chained_frames.known):
            return 0.0
        return max(0.0, self._asked_frames.at(live) - self._chained_frames.at(live))

    def wake_if_worth(self, live: int, expected: float) -> None:
        """End the pause if so many accepted tokens are worth more than asking."""
        tuning = self._tuning
        share = tuning.shared_token_worth if live > 1 else 1.0
        worth = expected * self._chained_frames.at(live) / max(live, 1) * share
        if expected > 0.0 and worth >= tuning.wake_factor * self.price(live):
            self._num_wakes += self._frames_left > 0
            self._frames_left = 0

    def stats(self, live: int) -> dict[str, Any]:
        """Pauses, how many a match ended, and the price of asking."""
        return {
            "resting": self.pausing,
            "rests": self._num_pauses,
            "calls": self._num_wakes,
            "price_seconds": self.price(live),
        }


__all__ = ["IdlePolicy"]
