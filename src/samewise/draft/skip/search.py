"""Which sublayers can be left out: a search that is told how candidates fared, and nothing else.

Every sublayer that is left out costs some agreement, and, to a first approximation, these losses add up on
the scale of -log(agreement). So the losses are the weights of a linear model, known up to a normal
distribution that each score narrows. A guided candidate is the best one for weights drawn from it: skip first
what loses least per second saved, and as much as makes tokens come fastest. Random candidates stand between,
because a model may be wrong.

A pure, seeded state machine (`suggest`, `score`, `best`): no tensor, no clock. Host only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from samewise.draft.cost_model import expected
from samewise.types import LayerSet

Vector = npt.NDArray[np.float64]

LOSS, DOUBT = 0.15, 0.3  # what a sublayer of which nothing is known is believed to lose, and how surely
SOME = 6  # rounds before which nothing is good enough
ENOUGH = 0.98  # of the pace that is believed possible
BETTER = 1.01  # a challenger must promise this much more: scores are estimates


class Prices(NamedTuple):
    """Seconds, as measured lately for the sequences that are live."""

    live: int
    rest: float  # of a draft pass: all that cannot be left out
    attention: float  # of one attention sublayer in it
    mlp: float  # of one MLP sublayer
    frames: tuple[float, ...]  # of a frame with 0, 1, 2, … guesses for each live sequence

    @property
    def plain(self) -> float:
        """Tokens per second when nobody guesses."""
        return self.live / self.frames[0]

    def draft(self, attention: int, mlp: int) -> float:
        """A draft pass with so many sublayers of each kind."""
        return self.rest + attention * self.attention + mlp * self.mlp

    def pace(self, rate: float, draft: float) -> float:
        """Tokens per second with the best draft length: also none, where guessing does not pay."""
        return max(self.live * expected(rate, k) / (k * draft + frame) for k, frame in enumerate(self.frames))


@dataclass(slots=True)
class Best:
    """The incumbent, and how it fared when it was last scored."""

    skipped: LayerSet
    rate: float = 1.0
    pace: float = 0.0


class Search:
    """Finds the layer set with which tokens come fastest. The first and the last layer always stay."""

    def __init__(self, layers: int, *, seed: int = 0, rounds: int = 64, patience: int = 16) -> None:
        self.layers, self._rounds, self._patience = layers, rounds, patience
        self._free = [(i, kind) for i in range(1, layers - 1) for kind in (0, 1)]  # 0: attention, 1: MLP
        self._random = np.random.default_rng(seed)
        self._before = np.full(len(self._free), LOSS), np.full(len(self._free), DOUBT**-2)
        self.best = Best(LayerSet())
        self.round = self.stale = 0
        self.open = bool(self._free)
        self._know()

    def _know(self) -> None:
        """What is believed before anything was scored."""
        loss, sureness = self._before
        self._precision: npt.NDArray[np.float64] = np.diag(sureness)
        self._weighted: Vector = sureness * loss

    def inform(self, shares: list[tuple[float, float]]) -> None:
        """How much each layer's attention and MLP change what passes through, as a share of it.

        A hint, seen in one pass: what hardly changes anything can hardly be missed.
        """
        told = np.array([min(1.0, max(0.0, shares[i][kind])) for i, kind in self._free])
        self._before = 0.5 * told + 0.001, (0.5 * told + 0.004) ** -2.0
        if self.round == 0:
            self._know()

    # ---- the three verbs

    def suggest(self, prices: Prices) -> LayerSet:
        """The next candidate: guided and random ones in turn."""
        if not self._free:
            return LayerSet()
        if self.round % 2 == 0:
            return self._guided(prices)
        return self._mutant() if self._random.random() < 0.5 else self._any()

    def score(self, candidate: LayerSet, rate: float, incumbent: float, trials: int, prices: Prices) -> bool:
        """How often both were right on the same tokens. True: the candidate is the best now."""
        self._learn(candidate, rate, trials)
        self._learn(self.best.skipped, incumbent, trials)
        self.best.rate = incumbent
        self.best.pace = self._pace(self.best.skipped, incumbent, trials, prices)
        pace = self._pace(candidate, rate, trials, prices)
        self.round += 1
        # Better on this text, and also by all that was seen before: luck alone does not make a best.
        won = (
            candidate != self.best.skipped
            and pace > BETTER * self.best.pace
            and self._believed(candidate, prices) > self._believed(self.best.skipped, prices)
        )
        self.stale = 0 if won else self.stale + 1
        if won:
            self.best = Best(candidate, rate, pace)
        elif (
            self.best.skipped
            and max(self.best.pace, self._believed(self.best.skipped, prices)) <= prices.plain
        ):
            self.drop()  # nothing is better than what does not pay
            self.best.pace = prices.plain
        if self.stale >= self._patience or self.round >= self._rounds or self._good_enough(prices):
            self.open = False
        return won

    def settle(self, skipped: LayerSet, rate: float) -> None:
        """Somebody knows the set: no search."""
        self.best, self.open = Best(skipped, rate), False

    def close(self) -> None:
        """Enough for now."""
        self.open = False

    def reopen(self) -> None:
        """The text has changed: scores of before were of another, and are forgotten. Inform it anew."""
        self._know()
        self.round = self.stale = 0
        self.open = bool(self._free)

    def drop(self) -> None:
        """The incumbent is no good: nothing is left out until something better is found."""
        self.best = Best(LayerSet())

    def start_from(self, skipped: LayerSet, rate: float = 1.0) -> bool:
        """Take a set found before as the incumbent, to be scored like any. False: not of this model."""
        inside = set(range(1, self.layers - 1))
        if not skipped.attention <= inside or not skipped.mlp <= inside:
            return False
        self.best = Best(skipped, rate)
        return True

    # ---- inside

    def _good_enough(self, prices: Prices) -> bool:
        """Whether, by all that is believed after some rounds, nothing better is to be found."""
        if self.round < SOME:
            return False
        return self._believed(self.best.skipped, prices) >= ENOUGH * self._believed(
            self._wish(prices), prices
        )

    def _pace(self, skipped: LayerSet, rate: float, trials: int, prices: Prices) -> float:
        if not skipped:
            return prices.plain
        draft = prices.draft(self.layers - len(skipped.attention), self.layers - len(skipped.mlp))
        return prices.pace(_careful(rate, trials), draft)

    def _believed(self, skipped: LayerSet, prices: Prices) -> float:
        if not skipped:
            return prices.plain
        losses = np.maximum(self._mean(), 0.0)
        draft = prices.draft(self.layers - len(skipped.attention), self.layers - len(skipped.mlp))
        return prices.pace(math.exp(-float(self._row(skipped) @ losses)), draft)

    def _row(self, skipped: LayerSet) -> Vector:
        return np.array([i in (skipped.attention, skipped.mlp)[kind] for i, kind in self._free], dtype=float)

    def _learn(self, candidate: LayerSet, rate: float, trials: int) -> None:
        chance, x = _careful(rate, trials), self._row(candidate)
        variance = (1.0 - chance) / (chance * max(1, trials)) + 0.01
        self._precision += np.outer(x, x) / variance
        self._weighted += x * (-math.log(chance) / variance)

    def _mean(self) -> Vector:
        return np.asarray(np.linalg.solve(self._precision, self._weighted), dtype=np.float64)

    def _guided(self, prices: Prices) -> LayerSet:
        """The best set by what is believed; every other time by what is merely possible."""
        if self.round % 4 == 0:
            return self._wish(prices)
        factor = np.linalg.cholesky(self._precision)
        noise = np.linalg.solve(factor.T, self._random.standard_normal(len(self._free)))
        return self._wish(prices, noise)

    def _wish(self, prices: Prices, noise: Vector | float = 0.0) -> LayerSet:
        """The set that would be fastest if the losses were what they are believed to be, give or take."""
        losses = np.maximum(self._mean() + noise, 1e-4)
        saved = np.array([(prices.attention, prices.mlp)[kind] for _, kind in self._free])
        order = np.argsort(losses / np.maximum(saved, 1e-12), kind="stable")
        counts, loss = [self.layers, self.layers], 0.0
        best, best_pace = 0, prices.plain
        for num, place in enumerate(order, 1):
            counts[self._free[place][1]] -= 1
            loss += float(losses[place])
            pace = prices.pace(math.exp(-loss), prices.draft(*counts))
            if pace > best_pace:
                best, best_pace = num, pace
        return self._of([int(place) for place in order[:best]])

    def _any(self) -> LayerSet:
        num = int(self._random.integers(1, len(self._free) + 1))
        return self._of(self._random.permutation(len(self._free))[:num].tolist())

    def _mutant(self) -> LayerSet:
        skipped = self.best.skipped
        chosen = {n for n, (i, kind) in enumerate(self._free) if i in (skipped.attention, skipped.mlp)[kind]}
        for place in self._random.permutation(len(self._free))[: int(self._random.integers(1, 4))]:
            chosen ^= {int(place)}
        return self._of(sorted(chosen))

    def _of(self, places: list[int]) -> LayerSet:
        parts: tuple[set[int], set[int]] = (set(), set())
        for place in places:
            layer, kind = self._free[place]
            parts[kind].add(layer)
        return LayerSet(frozenset(parts[0]), frozenset(parts[1]))


def _careful(rate: float, trials: int) -> float:
    """An estimate that no handful of trials makes certain."""
    return (rate * trials + 0.5) / (trials + 1.0)


__all__ = ["Best", "Prices", "Search"]
