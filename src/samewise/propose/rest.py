"""Whether to be asked at all, where the device runs beside the host.

A frame that waits for guesses starts after the one before it has landed; nobody's guesses are waited for when
frames follow one another. So asking has a price, a large one where frames are short, and it is measured here:
how long frames take that were asked for, and how long those that followed at once. While there is nothing to
guess, it rests; whoever listens meanwhile may wake it. What guessing brings is measured too, in time saved:
where it has cost more than it brought, it rests for longer and longer, whatever is believed of guesses.

Numbers in, numbers out; the clock is handed in.
"""

from __future__ import annotations

from collections.abc import Callable

from samewise.costs import Curve

SHORTEST, LONGEST = 12, 96  # frames of a rest
FADE = 0.9  # per frame, of what guessing has brought so far
ALLOWED = 3.0  # asked frames whose price may be lost before it sleeps
SPIKE = 1.5  # times the price: no frame is held to have lost more, as something else was at work
LOUD = 4.0  # how many times its price a match must promise to wake it from sleep


class Rest:
    """Frames that are asked for, frames that are not, and what either takes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked_for, self._following = Curve(), Curve()  # seconds from landing to landing, by sequences
        self._last: tuple[float, int] | None = None  # when a frame landed, and of how many sequences
        self._asked = self._guessed = False  # of the frame in flight
        self._left = 0  # frames it still rests
        self._next = SHORTEST  # frames of the next rest
        self._resume = 0  # frames of the rest that a newcomer cut short
        self._deep = False  # whether it sleeps, and only much wakes it
        self._apart = 0.0  # seconds of the frame in flight that were not spent on guessing
        self._saved = 0.0  # seconds guessing has brought lately

    @property
    def resting(self) -> bool:
        """Whether nobody need ask."""
        return self._left > 0

    def asked(self, *, guessed: bool) -> None:
        """It was asked, and had guesses or not."""
        resume, self._resume = self._resume, 0
        self._asked, self._guessed = True, self._guessed or guessed
        if guessed:
            return
        if resume:
            self._left = resume
        else:
            self._rest(deep=False)

    def apart(self, seconds: float) -> None:
        """So much of the time since it was asked went into something else than guesses."""
        self._apart += seconds

    def landed(self, live: int, gained: int, *, drafted: bool = False, mixed: bool = False) -> None:
        """A frame of so many sequences landed, in which so many guesses were right.

        `drafted`: by a model; what drafters cost is weighed by those who choose them. `mixed`: it also read
        a prompt, and cannot be compared with others.
        """
        now, last, asked = self._clock(), self._last, self._asked
        plain, self._asked, self._guessed = not self._guessed, False, False
        apart, self._apart = self._apart, 0.0
        self._last, self._left = (now, live), max(0, self._left - 1)
        if last is None or last[1] != live or not live or mixed:
            return
        seconds = now - last[0] - apart
        if plain:
            (self._asked_for if asked else self._following).observe(live, seconds)
        if asked and not drafted and self._following.known and self._asked_for.known:
            self._weigh(live, gained, seconds)

    def _weigh(self, live: int, gained: int, seconds: float) -> None:
        alone, price = self._following.at(live), self.price(live)
        lost = min(seconds - alone, SPIKE * price)
        self._saved = FADE * self._saved + gained * alone / live - lost
        if self._saved > 0.0:
            self._next = SHORTEST
        elif self._saved < -ALLOWED * price:
            self._saved = 0.0
            self._rest(deep=True)

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
        worth = expected * self._following.at(live) / max(live, 1)
        if expected > 0.0 and worth >= self.price(live) * (LOUD if self._deep else 1.0):
            self._left = 0

    def wake(self) -> None:
        """Somebody is here of whom nothing is known yet, and who is listened to once asked."""
        self._left, self._resume = 0, self._left

    def _rest(self, *, deep: bool) -> None:
        self._left, self._deep = self._next, deep
        self._next = min(2 * self._next, LONGEST)


__all__ = ["Rest"]
