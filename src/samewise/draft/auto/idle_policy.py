"""Whether to be asked at all, where the device runs beside the host.

A frame that waits for guesses starts after the one before it has landed; nobody's guesses are waited for when
frames follow one another. So asking has a price, a large one where frames are short, and it is measured here:
how long frames take that were asked for, and how long those that followed at once. While there is nothing to
guess, it rests. Whoever listens meanwhile learns what guesses would be worth, and wakes it when they are
worth their price.

Numbers in, numbers out; the clock is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samewise.draft.cost_model import Curve

FRAMES = 96  # of a rest that nobody ends
TWICE = 2.0  # prices of a guess: its frame waits for the one before, and the next one waits for its verdict
AHEAD = 0.5  # worth of a token where several sequences live: who gets ahead of the others ends before them


class Rest:
    """FrameCosts that are asked for, frames that are not, and what either takes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked_for, self._following = Curve(), Curve()  # seconds from landing to landing, by sequences
        self._last: tuple[float, int] | None = None  # when a frame landed, and of how many sequences
        self._asked = self._guessed = False  # of the frame in flight
        self._left = 0  # frames it still rests
        self._apart = 0.0  # seconds of the frame in flight that were not spent on guessing
        self._rests = self._calls = 0

    @property
    def resting(self) -> bool:
        """Whether nobody need ask."""
        return self._left > 0

    def asked(self, *, guessed: bool) -> None:
        """It was asked, and had guesses or not."""
        self._asked, self._guessed = True, self._guessed or guessed
        if not guessed:
            self._left = FRAMES
            self._rests += 1

    def apart(self, seconds: float) -> None:
        """So much of the time since it was asked went into something else than guesses."""
        self._apart += seconds

    def landed(self, live: int, *, mixed: bool = False) -> None:
        """A frame of so many sequences landed. `mixed`: it read a prompt too, and tells nothing of others."""
        now, last, asked = self._clock(), self._last, self._asked
        plain, self._asked, self._guessed = not self._guessed, False, False
        apart, self._apart = self._apart, 0.0
        self._last, self._left = (now, live), max(0, self._left - 1)
        if plain and live and last is not None and last[1] == live and not mixed:
            (self._asked_for if asked else self._following).observe(live, now - last[0] - apart)

    def end(self) -> None:
        """Ask again at the next chance."""
        self._left = 0

    def interrupted(self) -> None:
        """Everybody left; the next frame may come much later."""
        self._last = None

    def price(self, live: int) -> float:
        """Seconds that asking takes of a frame of so many sequences."""
        if not (self._asked_for.known and self._following.known):
            return 0.0
        return max(0.0, self._asked_for.at(live) - self._following.at(live))

    def call(self, live: int, expected: float) -> None:
        """So many right guesses can be expected if it is asked now."""
        worth = expected * self._following.at(live) / max(live, 1) * (AHEAD if live > 1 else 1.0)
        if expected > 0.0 and worth >= TWICE * self.price(live):
            self._calls += self._left > 0
            self._left = 0

    def stats(self, live: int) -> dict[str, Any]:
        """How often it rested, how often it was called, and what asking takes of a frame."""
        return {
            "resting": self.resting,
            "rests": self._rests,
            "calls": self._calls,
            "price_seconds": self.price(live),
        }


__all__ = ["FRAMES", "Rest"]
