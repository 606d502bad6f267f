"""When to stop asking `auto` for drafts, where the device runs beside the host.

A frame that may hold drafts can only be launched after the frame before it has landed; without drafts, frames
follow one another on the device. So asking has a price, a large one where frames are short: the time from a
landing until the next frame is launched, during which the device waits. Whether it is worth its price is an
average over frames: one position has a good guess, the next has none. Where it is not, asking pauses.
Meanwhile trees are grown every few frames, while the device computes, and asking resumes when they would pay.

Numbers in, numbers out; the clock is an argument. Host only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samewise.draft.cost_model import CostCurve
from samewise.draft.tuning import DEFAULTS, Tuning


class IdlePolicy:
    """Measures the price of asking and what asking brings, and keeps the length of the current pause."""

    def __init__(self, clock: Callable[[], float], tuning: Tuning = DEFAULTS) -> None:
        self._clock, self._tuning = clock, tuning.auto
        self._gaps = CostCurve(tuning.cost_model)  # seconds from a landing to the launch, by sequences
        self._last_landing: tuple[float, int] | None = None  # time, number of sequences
        self._asked = False  # for the frame in flight
        self._frames_left = 0  # of the pause
        self._excluded = 0.0  # seconds since the last landing that are no part of the price of asking
        # Moving averages: tokens and seconds of a frame that was asked for, in those of a frame that was not.
        self._tokens = self._seconds = 1.0
        self._num_pauses = self._num_wakes = 0

    @property
    def pausing(self) -> bool:
        """Whether asking is off."""
        return self._frames_left > 0

    @property
    def due(self) -> bool:
        """Whether trees should be grown in this frame of the pause."""
        return self.pausing and self._frames_left % self._tuning.probe_frames == 0

    @property
    def advantage(self) -> float:
        """Tokens per second with asking over those without, lately."""
        return self._tokens / self._seconds

    def weigh(self, tokens: float, seconds: float) -> None:
        """Add what asking brings for a frame, in tokens and seconds of a frame without drafts."""
        weight = self._tuning.advantage_weight
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
        if self.pausing and self.advantage > self._tuning.wake_advantage:
            self.wake()

    def asked(self, *, busy: bool) -> None:
        """`propose` was called. A pause begins where asking does not pay, unless a drafter is `busy`."""
        self._asked = True
        if not busy and self.advantage <= 1.0:
            self._frames_left = self._tuning.pause_frames
            self._num_pauses += 1

    def exclude(self, seconds: float) -> None:
        """Time that is no part of the price of asking: a drafter's own work and its passes."""
        self._excluded += seconds

    def landed(self, live: int, seconds: float, *, prefill: bool = False) -> None:
        """A frame of so many sequences landed, which took so long. With a prompt it is not measured."""
        now, last, asked = self._clock(), self._last_landing, self._asked
        excluded, self._excluded, self._asked = self._excluded, 0.0, False
        self._last_landing, self._frames_left = (now, live), max(0, self._frames_left - 1)
        if asked and live and last is not None and last[1] == live and not prefill:
            self._gaps.observe(live, max(0.0, now - last[0] - excluded - seconds))

    def wake(self) -> None:
        """End the pause."""
        self._num_wakes += self._frames_left > 0
        self._frames_left = 0

    def interrupted(self) -> None:
        """No sequence is left: the time until the next frame says nothing."""
        self._last_landing = None

    def price(self, live: int) -> float:
        """Seconds that asking adds to a frame of so many sequences; 0.0 until it was measured."""
        return self._gaps.at(live)

    def stats(self, live: int) -> dict[str, Any]:
        """Pauses, those that were ended early, the price of asking, and what it brings."""
        return {
            "pausing": self.pausing,
            "begun": self._num_pauses,
            "woken": self._num_wakes,
            "price_seconds": self.price(live),
            "advantage": self.advantage,
        }


__all__ = ["IdlePolicy"]
