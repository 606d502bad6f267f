"""Measured costs and measured acceptance, as running estimates. Numbers in, numbers out; no clock.

Host only.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from samewise.draft.tuning import DEFAULTS, CostModelTuning


@dataclass(slots=True)
class CostCurve:
    """Seconds as a function of a size: a moving average per size seen, straight lines between them."""

    tuning: CostModelTuning = DEFAULTS.cost_model
    _sizes: list[int] = field(default_factory=list)
    _seconds: dict[int, float] = field(default_factory=dict)
    _num_samples: dict[int, int] = field(default_factory=dict)

    def observe(self, size: int, seconds: float) -> None:
        """Add one measurement."""
        tuning, average = self.tuning, self._seconds.get(size)
        num_samples = self._num_samples[size] = self._num_samples.get(size, 0) + 1
        if average is None or (num_samples <= tuning.num_first_samples and seconds < average):
            self._seconds[size] = seconds
        else:
            outlier = seconds >= tuning.outlier_factor * average
            weight = tuning.outlier_weight if outlier else tuning.sample_weight
            self._seconds[size] = average + weight * (seconds - average)
        if len(self._sizes) < len(self._seconds):  # an interrupt leaves no size without its seconds
            self._sizes = sorted(self._seconds)

    @property
    def known(self) -> bool:
        """Whether there is any measurement."""
        return bool(self._sizes)

    def at(self, size: int) -> float:
        """The estimate for a size; beyond the largest size seen, the last slope goes on. 0.0 if unknown."""
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

    def measured(self, size: int) -> tuple[float, int]:
        """The average of this very size, and the number of measurements; (0.0, 0) if there is none."""
        return self._seconds.get(size, 0.0), self._num_samples.get(size, 0)

    def table(self) -> dict[int, float]:
        """Size → seconds, for the sizes seen."""
        return {size: self._seconds[size] for size in self._sizes}


@dataclass(slots=True)
class FrameCosts:
    """Seconds of a frame by its used rows: a line fitted to all measurements, base + seconds per row.

    The line keeps one disturbed measurement from making a row look expensive; the more often a size was
    measured, the more its own average counts. Frames that read prompts skip the head for most rows, which
    makes a row look too cheap: they only count until enough frames of other sizes were measured.
    """

    sizes: tuple[int, ...]
    tuning: CostModelTuning = DEFAULTS.cost_model
    curve: CostCurve = field(init=False)
    _prefill: CostCurve = field(init=False)
    last_seconds: float = 0.0  # of the latest frame
    version: int = 0  # rises when costs change
    _num_observed: int = 0
    _costs: dict[int, float] = field(default_factory=dict)  # by used rows, as asked for
    _line: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self.curve, self._prefill = CostCurve(self.tuning), CostCurve(self.tuning)

    def size(self, rows: int) -> int:
        """The rows that a frame of this many used rows is padded to."""
        return self.sizes[min(bisect_left(self.sizes, rows), len(self.sizes) - 1)]

    def observe(self, rows: int, seconds: float, *, prefill: bool = False) -> None:
        """Add one measurement. `prefill`: some of the rows only read a prompt."""
        (self._prefill if prefill else self.curve).observe(self.size(rows), seconds)
        self.last_seconds = seconds
        self._num_observed += 1
        if (
            self._num_observed <= self.tuning.quick_samples
            or self._num_observed % self.tuning.refit_every == 0
        ):
            self._line, self._costs = None, {}
            self.version += 1

    def cost(self, rows: int) -> float:
        """Seconds for this many used rows, in several frames if one does not hold them; 0.0 if unknown."""
        seconds = self._costs.get(rows)
        if seconds is None:
            if not self.known:
                return 0.0
            num_full, left = divmod(rows, self.sizes[-1])
            seconds = num_full * self._cost_of(self.sizes[-1]) if num_full else 0.0
            seconds = max(seconds + (self._cost_of(self.size(left)) if left else 0.0), 1e-9)
            self._costs[rows] = seconds
        return seconds

    def steps(self, rows: int, max_rows: int) -> list[tuple[float, int]]:
        """(seconds, how many) of frames of `rows` to `max_rows` used rows, equal ones together."""
        steps: list[tuple[float, int]] = []
        while rows <= max_rows:
            num = min(self.padding(rows), max_rows - rows) + 1
            steps.append((self.cost(rows), num))
            rows += num
        return steps

    def _cost_of(self, size: int) -> float:
        """Of one frame of this size: the line, drawn towards the size's own average."""
        if self._line is None:
            self._line = self._fit()
        base, per_row = self._line
        fitted, (average, num) = base + per_row * size, self.curve.measured(size)
        num = max(0, num - self.tuning.num_first_samples)
        return fitted + (average - fitted) * num / (num + self.tuning.line_samples)

    @property
    def known(self) -> bool:
        """Whether there is any measurement."""
        return self.curve.known or self._prefill.known

    def padding(self, rows: int) -> int:
        """Padding rows in the frames of this many used rows."""
        left = rows % self.sizes[-1]
        return self.size(left) - left if left else 0

    def _fit(self) -> tuple[float, float]:
        """Least squares of relative errors: decisions are about small frames."""
        points = list(self.curve.table().items())
        if len(points) < min(self.tuning.min_sizes_for_fit, len(self.sizes)):
            points += self._prefill.table().items()
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
        slope = min(max(slope, 0.0), y / max(x, 1.0))  # neither a negative row cost nor a negative base
        return y - slope * x, slope


@dataclass(slots=True)
class AcceptanceRate:
    """How often a drafted token is accepted, given that those before it were. Old trials fade."""

    hits: float
    trials: float
    memory: float = DEFAULTS.cost_model.rate_memory

    def observe(self, drafted: int, accepted: int) -> None:
        """Add a draft; tokens after the first rejected one were not tried."""
        trials = accepted + (accepted < drafted)
        self.hits += accepted
        self.trials += trials
        if self.trials > self.memory:
            shrink = self.memory / self.trials
            self.hits *= shrink
            self.trials = self.memory

    @property
    def value(self) -> float:
        """Hits per trial."""
        return self.hits / self.trials

    @property
    def smoothed(self) -> float:
        """With half a hit and half a miss added (Jeffreys' prior): never 0 or 1 after a few trials."""
        return (self.hits + 0.5) / (self.trials + 1.0)


@dataclass(slots=True)
class BroughtRatio:
    """Accepted nodes of trees over the number that was expected. Old ones fade."""

    brought: float = DEFAULTS.auto.brought_prior
    expected: float = DEFAULTS.auto.brought_prior
    memory: float = DEFAULTS.auto.brought_memory
    most: float = DEFAULTS.auto.max_brought

    def observe(self, expected: float, accepted: int) -> None:
        """Add a tree."""
        self.brought += accepted
        self.expected += expected
        if self.expected > self.memory:
            self.brought *= self.memory / self.expected
            self.expected = self.memory

    @property
    def value(self) -> float:
        """Above 0, also where nothing was accepted for long, and at most `most`."""
        return min(max(self.brought / self.expected, 0.01), self.most)


class Calibration:
    """Confidence → chance of acceptance, by the acceptance of earlier tokens of like confidence.

    A bin with few trials leans on its confidence and on the acceptance of all tokens, half each. `rate`: an
    acceptance that is known beforehand.
    """

    def __init__(self, rate: float | None = None, tuning: CostModelTuning = DEFAULTS.cost_model) -> None:
        memory, self._num_bins = tuning.calibration_memory, tuning.confidence_bins
        self._bins = [AcceptanceRate(0.0, 0.0, memory) for _ in range(self._num_bins)]
        self._all = AcceptanceRate(0.0, 0.0, memory)
        if rate is not None:
            self._all = AcceptanceRate(rate * self._num_bins, self._num_bins, memory)

    def observe(self, confidence: float, *, right: bool) -> None:
        """Add one token."""
        self._bins[self._bin(confidence)].observe(1, int(right))
        self._all.observe(1, int(right))

    def chance(self, confidence: float) -> float:
        """The chance that a token of this confidence is accepted."""
        return self._chance(self._bin(confidence))

    def min_confidence(self, chance: float) -> float:
        """The lowest confidence from which on tokens have this chance; 1.0 if none has."""
        below = [i for i in range(self._num_bins) if self._chance(i) < chance]
        return (below[-1] + 1) / self._num_bins if below else 0.0

    def _bin(self, confidence: float) -> int:
        return min(self._num_bins - 1, max(0, int(confidence * self._num_bins)))

    def _chance(self, i: int) -> float:
        rate, confidence = self._bins[i], (i + 0.5) / self._num_bins
        weight = self._all.trials / (self._all.trials + self._num_bins)
        prior = confidence + 0.5 * weight * (self._all.smoothed - confidence)
        return (rate.hits + prior) / (rate.trials + 1.0)


def expected_tokens(rate: float, drafted: int) -> float:
    """Tokens that verifying a draft commits on average: those before the first wrong one, and one more."""
    if rate >= 1.0:
        return drafted + 1.0
    return float((1.0 - rate ** (drafted + 1)) / (1.0 - rate))


__all__ = ["AcceptanceRate", "BroughtRatio", "Calibration", "CostCurve", "FrameCosts", "expected_tokens"]
