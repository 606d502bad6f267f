"""How soon the search for a layer set finds what there is to gain, on losses that are known. Last line: JSON.

    python bench/search.py                     # beside Optuna's TPE, where it is installed

Every sublayer loses some agreement when it is left out: `few`: one in five matters and the others hardly, or
`even`: all alike, give or take. A score is how often a set was right on some tokens, so it is as noisy as in
an engine. `hinted` is told each loss, wrong by up to a factor of two either way, as the hidden states would.
Shares of the gain that is possible over skipping nothing, mean over seeds. Host only, nothing is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from samewise.draft.skip.search import Prices, Search
from samewise.types import LayerSet

AFTER = (5, 10, 20, 40)
FRAMES = tuple(1 + 0.02 * k for k in range(17))


class World:
    """A model of so many layers whose losses are known, and what scoring a set on some tokens says of it."""

    def __init__(self, kind: str, layers: int, tokens: int, seed: int) -> None:
        self.layers, self.tokens, self.random = layers, tokens, np.random.default_rng(seed)
        self.prices = Prices(1, 0.1, 0.9 / layers * 0.35, 0.9 / layers * 0.65, FRAMES)
        places = [(i, sublayer) for i in range(1, layers - 1) for sublayer in (0, 1)]
        self.loss = {place: self._loss(kind) for place in places}

    def _loss(self, kind: str) -> float:
        if kind == "even":
            return float(self.random.uniform(0.0, 0.03))
        hardly = self.random.random() < 0.8
        return float(self.random.exponential(0.02) if hardly else self.random.uniform(0.5, 2.0))

    def hints(self) -> list[tuple[float, float]]:
        """Each loss, off by up to a factor of two."""
        off = {place: loss * 2.0 ** self.random.uniform(-1, 1) for place, loss in self.loss.items()}
        return [(off.get((i, 0), 1.0), off.get((i, 1), 1.0)) for i in range(self.layers)]

    def rate(self, skipped: LayerSet) -> float:
        """How often it is right in truth."""
        lost = sum(self.loss[i, 0] for i in skipped.attention) + sum(self.loss[i, 1] for i in skipped.mlp)
        return math.exp(-lost)

    def seen(self, skipped: LayerSet) -> float:
        """How often it was right on some tokens."""
        return float(self.random.binomial(self.tokens, self.rate(skipped))) / self.tokens

    def pace(self, skipped: LayerSet, rate: float) -> float:
        """Tokens per second at this rate."""
        kept = self.layers - len(skipped.attention), self.layers - len(skipped.mlp)
        return self.prices.pace(rate, self.prices.draft(*kept))

    def gained(self, skipped: LayerSet) -> float:
        """Of what is possible over skipping nothing."""
        plain = self.prices.plain
        return (self.pace(skipped, self.rate(skipped)) - plain) / (self._possible() - plain)

    def _possible(self) -> float:
        """Leaving out what loses least per second saved, as much of it as pays."""
        saved = (self.prices.attention, self.prices.mlp)
        parts: tuple[set[int], set[int]] = (set(), set())
        best = self.prices.plain
        for i, sublayer in sorted(self.loss, key=lambda place: self.loss[place] / saved[place[1]]):
            parts[sublayer].add(i)
            skipped = LayerSet(frozenset(parts[0]), frozenset(parts[1]))
            best = max(best, self.pace(skipped, self.rate(skipped)))
        return best


def own(world: World, seed: int, *, hinted: bool) -> Iterator[float]:
    """The gain after every round of the engine's search."""
    search = Search(world.layers, seed=seed, rounds=AFTER[-1], patience=AFTER[-1])
    if hinted:
        search.inform(world.hints())
    for _ in range(AFTER[-1]):
        if search.open:
            candidate = search.suggest(world.prices)
            trial, before = world.seen(candidate), world.seen(search.best.skipped)
            search.score(candidate, trial, before, world.tokens, world.prices)
        yield world.gained(search.best.skipped)


def tpe(world: World, seed: int) -> Iterator[float]:
    """The same with Optuna: one yes or no for every sublayer, the incumbent scored on the same text."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
    study, best = optuna.create_study(direction="maximize", sampler=sampler), LayerSet()
    for _ in range(AFTER[-1]):
        trial = study.ask()
        chosen = [p for p in world.loss if trial.suggest_categorical(f"{p[0]} {p[1]}", [False, True])]
        skipped = LayerSet(*(frozenset(i for i, part in chosen if part == one) for one in (0, 1)))
        pace = world.pace(skipped, world.seen(skipped))
        study.tell(trial, pace)
        if pace > world.pace(best, world.seen(best) if best else 1.0):
            best = skipped
        yield world.gained(best)


def main() -> None:
    """Look, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48, help="that a score is of")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    ways: dict[str, Callable[[World, int], Iterator[float]]] = {
        "hinted": lambda world, seed: own(world, seed, hinted=True),
        "unhinted": lambda world, seed: own(world, seed, hinted=False),
    }
    if importlib.util.find_spec("optuna"):
        ways["Optuna's TPE"] = tpe
    shown = Table(
        "losses", "search", *(f"after {rounds}" for rounds in AFTER), title="share of the possible gain"
    )
    found: list[dict[str, Any]] = []
    for kind in ("few", "even"):
        for name, way in ways.items():
            worlds = [(World(kind, args.layers, args.tokens, seed), seed) for seed in range(args.seeds)]
            gains = np.array([list(way(world, seed)) for world, seed in worlds])
            means = {rounds: float(gains[:, rounds - 1].mean()) for rounds in AFTER}
            shown.add_row(kind, name, *(f"{mean:.0%}" for mean in means.values()))
            found.append({"losses": kind, "search": name, "gain": means})
    Console().print(shown)
    print(json.dumps({"layers": args.layers, "tokens": args.tokens, "seeds": args.seeds, "found": found}))


if __name__ == "__main__":
    main()
