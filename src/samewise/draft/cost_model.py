"""Measured costs and measured acceptance, folded from observations. Numbers in, numbers out; no clock.

Host only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

FRESH = 0.2  # the weight of a new measurement of a cost
EARLY = 4  # measurements of a size of which the least is believed
ENOUGH = 3  # sizes of frames that make a line
SPIKE = 4.0  # a measurement this many times what is known is believed only a little: somebody disturbed us


@dataclass(slots=True)
class Curve:
    """Seconds as a function of a size: straight lines between averages at the sizes seen."""

    _sizes: list[int] = field(default_factory=list)
    _seconds: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)

    def observe(self, size: int, seconds: float) -> None:
        """One measurement."""
        known = self._seconds.get(size)
        seen = self._seen[size] = self._seen.get(size, 0) + 1
        if known is None:
            insort(self._sizes, size)
            self._seconds[size] = seconds
            return
        if seen <= EARLY and seconds < known:  # the first times something may have been built or read
            self._seconds[size] = seconds
            return
        weight = FRESH if seconds < SPIKE * known else FRESH / 20
        self._seconds[size] = known + weight * (seconds - known)

    @property
    def known(self) -> bool:
        """Whether anything was seen."""
        return bool(self._sizes)

    def at(self, size: int) -> float:
        """What to expect at a size; beyond those seen, as the nearest ones suggest."""
        sizes, seconds = self._sizes, self._seconds
        if size in seconds:
            return seconds[size]
        if not sizes:
            return 0.0
        i = bisect_left(sizes, size)
        if i == 0:
            return seconds[sizes[0]]
        low = sizes[i - 1]
        if i == len(sizes):
            if len(sizes) == 1:
                return seconds[low]
            before = sizes[-2]
            slope = max(0.0, (seconds[low] - seconds[before]) / (low - before))
            return seconds[low] + slope * (size - low)
        high = sizes[i]
        share = (size - low) / (high - low)
        return seconds[low] + share * (seconds[high] - seconds[low])

    def table(self) -> dict[int, float]:
        """Size → seconds."""
        return {size: self._seconds[size] for size in self._sizes}


@dataclass(slots=True)
class FrameCosts:
    """What a frame of some rows costs: so much for being a frame, and so much for every row it has.

    The line is fitted to all that was seen, so that no single disturbed measurement makes a row look dear.
    Rows that only read a prompt are spared the head, and say too little of what a guess costs: they count
    until enough else was seen.
    """

    sizes: tuple[int, ...]
    curve: Curve = field(default_factory=Curve)
    _reading: Curve = field(default_factory=Curve)
    _line: tuple[float, float] | None = None

    def size(self, rows: int) -> int:
        """The rows a frame of this many used rows really has."""
        return self.sizes[min(bisect_left(self.sizes, rows), len(self.sizes) - 1)]

    def observe(self, rows: int, seconds: float, *, reading: bool = False) -> None:
        """A frame of so many used rows took so long. `reading`: some of them only read a prompt."""
        (self._reading if reading else self.curve).observe(self.size(rows), seconds)
        self._line = None

    def cost(self, rows: int) -> float:
        """Seconds, also for more rows than one frame holds."""
        if self._line is None:
            self._line = self._fit()
        base, each = self._line
        most = self.sizes[-1]
        whole, rest = divmod(rows, most)
        found = whole * (base + each * most) + (base + each * self.size(rest) if rest else 0.0)
        return max(found, 1e-9) if self.known else 0.0

    @property
    def known(self) -> bool:
        """Whether anything was seen."""
        return self.curve.known or self._reading.known

    def padding(self, rows: int) -> int:
        """Rows that so many used ones bring with them, and that nobody uses yet."""
        rest = rows % self.sizes[-1]
        return self.size(rest) - rest if rest else 0

    def _fit(self) -> tuple[float, float]:
        """Least squares of relative errors: small frames are the ones decisions are about."""
        points = list(self.curve.table().items())
        if len(points) < min(ENOUGH, len(self.sizes)):
            points += self._reading.table().items()
        if not points:
            return 0.0, 0.0
        weights = [1.0 / max(seconds, 1e-9) ** 2 for _, seconds in points]
        total = sum(weights)
        x = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
        y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
        spread = sum(w * (size - x) ** 2 for w, (size, _) in zip(weights, points, strict=True))
        if spread <= 0.0:
            return y, 0.0
        slope = (
            sum(w * (size - x) * (seconds - y) for w, (size, seconds) in zip(weights, points, strict=True))
            / spread
        )
        slope = min(max(slope, 0.0), y / max(x, 1.0))  # no row is free below a size, and none costs less
        return y - slope * x, slope


@dataclass(slots=True)
class Rate:
    """How often a guess is right, given that those before it were. Old trials fade."""

    hits: float
    trials: float
    memory: float = 200.0

    def observe(self, guessed: int, accepted: int) -> None:
        """A draft of so many guesses, of which the first so many were right."""
        trials = accepted + (accepted < guessed)
        self.hits += accepted
        self.trials += trials
        if self.trials > self.memory:
            shrink = self.memory / self.trials
            self.hits *= shrink
            self.trials = self.memory

    @property
    def value(self) -> float:
        """Between 0 and 1."""
        return self.hits / self.trials

    @property
    def careful(self) -> float:
        """The same, as no handful of trials makes certain."""
        return (self.hits + 0.5) / (self.trials + 1.0)


CALM = 2.0  # misses that luck must exceed to count


@dataclass(slots=True)
class Luck:
    """How much more, or less, often one's guesses miss than those of others with the same chances."""

    missed: float = CALM
    expected: float = CALM
    memory: float = 12.0

    def observe(self, chance: float, *, right: bool) -> None:
        """A guess that others would have got right so often."""
        self.missed += not right
        self.expected += 1.0 - chance
        if self.expected > self.memory:
            self.missed *= self.memory / self.expected
            self.expected = self.memory

    def chance(self, others: float) -> float:
        """That a guess is right which others get right so often."""
        return max(0.0, 1.0 - (1.0 - others) * self.missed / self.expected)


BINS = 12


@dataclass(slots=True)
class Trust:
    """How often a guess of some confidence is right, by how often such guesses were.

    Of a confidence that was hardly seen, what it claims and how often guesses are right at all count alike.
    """

    _bins: list[Rate] = field(default_factory=lambda: [Rate(0.0, 0.0, memory=100.0) for _ in range(BINS)])
    _all: Rate = field(default_factory=lambda: Rate(0.0, 0.0, memory=100.0))

    @classmethod
    def after(cls, rate: float) -> Trust:
        """Where guesses are known to be right so often, and nothing of their confidence."""
        return cls(_all=Rate(rate * BINS, BINS, memory=100.0))

    def observe(self, confidence: float, *, right: bool) -> None:
        """One guess."""
        self._bins[_bin(confidence)].observe(1, int(right))
        self._all.observe(1, int(right))

    def chance(self, confidence: float) -> float:
        """That a guess of this confidence is right."""
        return self._chance(_bin(confidence))

    def least(self, chance: float) -> float:
        """The lowest confidence from which on guesses are right that often; 1.0 where none is."""
        below = [i for i in range(BINS) if self._chance(i) < chance]
        return (below[-1] + 1) / BINS if below else 0.0

    def _chance(self, place: int) -> float:
        rate, claimed = self._bins[place], (place + 0.5) / BINS
        known = self._all.trials / (self._all.trials + BINS)
        before = claimed + 0.5 * known * (self._all.careful - claimed)
        return (rate.hits + before) / (rate.trials + 1.0)


def _bin(confidence: float) -> int:
    return min(BINS - 1, max(0, int(confidence * BINS)))


def expected(rate: float, guesses: int) -> float:
    """Tokens a replay yields on average: the guesses before the first wrong one, and its own."""
    if rate >= 1.0:
        return guesses + 1.0
    return float((1.0 - rate ** (guesses + 1)) / (1.0 - rate))


__all__ = ["Curve", "FrameCosts", "Luck", "Rate", "Trust", "expected"]
