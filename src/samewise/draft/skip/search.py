"""SWIFT's layer-set search as a pure, seeded state machine: `suggest` a candidate, `score` it, read `best`.

Each skipped sublayer loses some agreement with the target model; to a first approximation the losses add up
on the scale of -log(agreement). So the losses are the weights of a Bayesian linear model, which each score
narrows. A guided candidate is the fastest set for the losses believed, or for losses drawn from the
posterior: sublayers that lose least per second saved are skipped first, as many as raise the throughput.
Random candidates alternate with guided ones, because the model may be wrong.

No tensor, no clock. Host only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from samewise.draft.cost_model import expected_tokens
from samewise.draft.tuning import DEFAULTS, SearchTuning
from samewise.types import LayerSet

Vector = npt.NDArray[np.float64]

NOTHING_TO_SKIP = "the model has no sublayer that may be skipped"

# The kinds of a sublayer.
ATTENTION = 0
MLP = 1


class Prices(NamedTuple):
    """Seconds, as measured lately for the sequences that are live."""

    live: int
    fixed: float  # of a draft pass: all that cannot be skipped
    attention: float  # of one attention sublayer in it
    mlp: float  # of one MLP sublayer in it
    frames: tuple[float, ...]  # of a frame with 0, 1, 2, … drafted tokens for each live sequence

    @property
    def plain_throughput(self) -> float:
        """Tokens per second without drafts."""
        return self.live / self.frames[0]

    def draft_pass(self, num_attention: int, num_mlp: int) -> float:
        """Seconds of a draft pass with so many sublayers of each kind."""
        return self.fixed + num_attention * self.attention + num_mlp * self.mlp

    def throughput(self, rate: float, draft_pass: float) -> float:
        """Tokens per second at the best draft length, which may be 0."""
        return max(
            self.live * expected_tokens(rate, k) / (k * draft_pass + frame)
            for k, frame in enumerate(self.frames)
        )

    def throughputs(self, rates: Vector, draft_passes: Vector) -> Vector:
        """`throughput` for several rates below 1 and draft passes at once."""
        num = np.arange(len(self.frames))[:, None]
        tokens = (1.0 - rates ** (num + 1)) / (1.0 - rates)
        seconds = num * draft_passes + np.array(self.frames)[:, None]
        return np.asarray((self.live * tokens / seconds).max(axis=0), dtype=np.float64)


@dataclass(slots=True)
class Incumbent:
    """The best set so far, and its last score."""

    skipped: LayerSet
    rate: float = 1.0  # how often it predicted committed tokens
    throughput: float = 0.0


class Search:
    """Finds the layer set with the highest throughput.

    `free`: the sublayers that may be skipped, as (layer, kind); by default all but the first and last
    layer's.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        seed: int = 0,
        free: Sequence[tuple[int, int]] | None = None,
        tuning: SearchTuning = DEFAULTS.search,
    ) -> None:
        self.num_layers, self._tuning = num_layers, tuning
        inner = [(i, kind) for i in range(1, num_layers - 1) for kind in (ATTENTION, MLP)]
        self._free = inner if free is None else list(free)
        self._random = np.random.default_rng(seed)
        num = len(self._free)
        self._prior = np.full(num, tuning.prior_loss), np.full(num, tuning.prior_loss_std**-2)
        self.best = Incumbent(LayerSet())
        self.round = self.num_stale = 0
        self.open = bool(self._free)
        self.ended = "" if self.open else NOTHING_TO_SKIP  # why the search is closed
        self._reset_beliefs()

    def _reset_beliefs(self) -> None:
        loss, precision = self._prior
        self._precision: npt.NDArray[np.float64] = np.diag(precision)
        self._weighted: Vector = precision * loss
        self._mean: Vector | None = None  # of the losses; None: to be computed

    def inform(self, shares: list[tuple[float, float]]) -> None:
        """A hint: what each layer's attention and MLP add to the residual stream, as a share of its norm.

        A sublayer that adds little loses little when it is skipped.
        """
        tuning = self._tuning
        share = np.array([min(1.0, max(0.0, shares[i][kind])) for i, kind in self._free])
        loss = tuning.hint_slope * share
        self._prior = loss + tuning.hint_loss_floor, (loss + tuning.hint_std_floor) ** -2.0
        if self.round == 0:
            self._reset_beliefs()

    # ---- suggest, score

    def suggest(self, prices: Prices) -> LayerSet:
        """The next candidate: guided and random ones in turn."""
        return self._suggest(self.round, prices) if self._free else LayerSet()

    def suggest_several(self, prices: Prices, num: int) -> list[LayerSet]:
        """The next candidates, to be scored together: all different, as far as chance finds others."""
        candidates: list[LayerSet] = []
        for number in range(self.round, self.round + num if self._free else self.round):
            candidate = self._suggest(number, prices)
            if num > 1 and candidate in (*candidates, self.best.skipped):
                candidate = self._drawn()
            candidates.append(candidate)
        return list(dict.fromkeys(candidates))

    def _suggest(self, number: int, prices: Prices) -> LayerSet:
        if number % 2 == 0:
            return self._guided(prices, sampled=number % 4 != 0)
        mutate = self._random.random() < self._tuning.mutation_chance
        return self._mutated() if mutate else self._drawn()

    def score(
        self, candidate: LayerSet, rate: float, incumbent_rate: float, trials: int, prices: Prices
    ) -> bool:
        """Both sets' match rates on the same tokens. True: the candidate is the new incumbent."""
        return self.score_several([(candidate, rate)], incumbent_rate, trials, prices)

    def score_several(
        self, scores: list[tuple[LayerSet, float]], incumbent_rate: float, trials: int, prices: Prices
    ) -> bool:
        """Candidates with their match rates, and the incumbent's, on the same tokens. True: a candidate won.

        A candidate must be better on these tokens and by all scores so far: one high score may be chance.
        """
        for candidate, rate in scores:
            self._learn(candidate, rate, trials)
        self._learn(self.best.skipped, incumbent_rate, trials)
        self.best.rate = incumbent_rate
        self.best.throughput = self._scored(self.best.skipped, incumbent_rate, trials, prices)
        won = sum(self._compare(candidate, rate, trials, prices) for candidate, rate in scores)
        if not won and self.best.skipped and not self._pays(prices):
            self.drop()
            self.best.throughput = prices.plain_throughput
        reason = self._reason_to_end(prices)
        if reason:
            self.close(reason)
        return won > 0

    def _compare(self, candidate: LayerSet, rate: float, trials: int, prices: Prices) -> bool:
        """Make the candidate the incumbent if it is better."""
        throughput = self._scored(candidate, rate, trials, prices)
        won = (
            candidate != self.best.skipped
            and throughput > self._tuning.min_gain * self.best.throughput
            and self._believed(candidate, prices) > self._believed(self.best.skipped, prices)
        )
        self.round += 1
        self.num_stale = 0 if won else self.num_stale + 1
        if won:
            self.best = Incumbent(candidate, rate, throughput)
        return won

    # ---- open and closed

    def fix(self, skipped: LayerSet, rate: float) -> None:
        """Take this set without a search."""
        self.best = Incumbent(skipped, rate)
        self.close("the set was given")

    def close(self, reason: str) -> None:
        """End the search for now."""
        self.open, self.ended = False, reason

    def reopen(self) -> None:
        """Search anew: the text has changed, and earlier scores are forgotten. Call `inform` again."""
        self._reset_beliefs()
        self.round = self.num_stale = 0
        self.open = bool(self._free)
        self.ended = "" if self.open else NOTHING_TO_SKIP

    def drop(self) -> None:
        """Skip nothing until something better is found."""
        self.best = Incumbent(LayerSet())

    def start_from(self, skipped: LayerSet, rate: float = 1.0) -> bool:
        """Take a set found before as incumbent, to be scored like any. False: it is of another model."""
        inner = set(range(1, self.num_layers - 1))
        if not skipped.attention <= inner or not skipped.mlp <= inner:
            return False
        self.best = Incumbent(skipped, rate)
        return True

    def _pays(self, prices: Prices) -> bool:
        """Whether the incumbent is faster than no drafts, by its last score or by all of them."""
        best = max(self.best.throughput, self._believed(self.best.skipped, prices))
        return best > prices.plain_throughput

    def _reason_to_end(self, prices: Prices) -> str:
        """Too many scores, too many without a better set, nothing better believed possible; or none: ""."""
        tuning = self._tuning
        if self.num_stale >= tuning.patience:
            return f"the last {self.num_stale} sets were no better"
        if self.round >= tuning.rounds:
            return f"{self.round} sets were scored"
        if self.round < tuning.min_rounds:
            return ""
        possible = self._believed(self._fastest(prices), prices)
        good_enough = self._believed(self.best.skipped, prices) >= tuning.good_enough * possible
        return "no clearly better set is believed possible" if good_enough else ""

    # ---- beliefs

    def _learn(self, candidate: LayerSet, rate: float, trials: int) -> None:
        chance, x = _smoothed(rate, trials), self._indicator(candidate)
        variance = (1.0 - chance) / (chance * max(1, trials)) + self._tuning.model_variance
        self._precision += np.outer(x, x) / variance
        self._weighted += x * (-math.log(chance) / variance)
        self._mean = None

    def _mean_losses(self) -> Vector:
        if self._mean is None:
            self._mean = np.asarray(np.linalg.solve(self._precision, self._weighted), dtype=np.float64)
        return self._mean

    def _scored(self, skipped: LayerSet, rate: float, trials: int, prices: Prices) -> float:
        """Throughput at a scored match rate."""
        return self._throughput(skipped, _smoothed(rate, trials), prices)

    def _believed(self, skipped: LayerSet, prices: Prices) -> float:
        """Throughput at the match rate that all scores together suggest."""
        losses = np.maximum(self._mean_losses(), 0.0)
        return self._throughput(skipped, math.exp(-float(self._indicator(skipped) @ losses)), prices)

    def _throughput(self, skipped: LayerSet, rate: float, prices: Prices) -> float:
        if not skipped:
            return prices.plain_throughput
        num_attention, num_mlp = self.num_layers - len(skipped.attention), self.num_layers - len(skipped.mlp)
        return prices.throughput(rate, prices.draft_pass(num_attention, num_mlp))

    def _indicator(self, skipped: LayerSet) -> Vector:
        return np.array([i in (skipped.attention, skipped.mlp)[kind] for i, kind in self._free], dtype=float)

    # ---- candidates

    def _guided(self, prices: Prices, *, sampled: bool) -> LayerSet:
        """The fastest set for the mean losses, or for losses drawn from the posterior."""
        if not sampled:
            return self._fastest(prices)
        factor = np.linalg.cholesky(self._precision)
        noise = np.linalg.solve(factor.T, self._random.standard_normal(len(self._free)))
        return self._fastest(prices, noise)

    def _fastest(self, prices: Prices, noise: Vector | float = 0.0) -> LayerSet:
        losses = np.maximum(self._mean_losses() + noise, 1e-4)
        saved = np.array([(prices.attention, prices.mlp)[kind] for _, kind in self._free])
        order = np.argsort(losses / np.maximum(saved, 1e-12), kind="stable")
        rates = np.exp(-np.cumsum(losses[order]))
        full_pass = prices.draft_pass(self.num_layers, self.num_layers)
        throughputs = prices.throughputs(rates, full_pass - np.cumsum(saved[order]))
        best = int(np.argmax(throughputs)) if len(order) else 0
        pays = len(order) > 0 and throughputs[best] > prices.plain_throughput
        return self._set_of([int(place) for place in order[: best + 1]] if pays else [])

    def _drawn(self) -> LayerSet:
        num = int(self._random.integers(1, len(self._free) + 1))
        return self._set_of(self._random.permutation(len(self._free))[:num].tolist())

    def _mutated(self) -> LayerSet:
        skipped = self.best.skipped
        chosen = {n for n, (i, kind) in enumerate(self._free) if i in (skipped.attention, skipped.mlp)[kind]}
        order = self._random.permutation(len(self._free))
        for place in order[: int(self._random.integers(1, self._tuning.max_flips + 1))]:
            chosen ^= {int(place)}
        return self._set_of(sorted(chosen))

    def _set_of(self, places: list[int]) -> LayerSet:
        parts: tuple[set[int], set[int]] = (set(), set())
        for place in places:
            layer, kind = self._free[place]
            parts[kind].add(layer)
        return LayerSet(frozenset(parts[ATTENTION]), frozenset(parts[MLP]))


def _smoothed(rate: float, trials: int) -> float:
    """With half a hit and half a miss added (Jeffreys' prior): never 0 or 1."""
    return (rate * trials + 0.5) / (trials + 1.0)


__all__ = ["ATTENTION", "MLP", "NOTHING_TO_SKIP", "Incumbent", "Prices", "Search"]
