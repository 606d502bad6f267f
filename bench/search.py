"""How soon the layer-set search reaches the possible gain, on simulated losses. The last line is JSON.

    python bench/search.py                     # beside Optuna's TPE, where it is installed

Each skipped sublayer loses some agreement. `few`: one sublayer in five matters and the others hardly; `even`:
all lose about alike. A score is the share of some tokens that a set predicts, so it is as noisy as in an
engine. `hinted` gets each loss as a hint, wrong by up to a factor of two either way.
Printed are shares of the possible gain over skipping nothing, mean over seeds. Nothing is timed.
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

from samewise.draft.skip.search import ATTENTION, MLP, Prices, Search
from samewise.draft.tuning import SearchTuning
from samewise.types import LayerSet

ROUNDS = (5, 10, 20, 40)
FRAMES = tuple(1 + 0.02 * k for k in range(17))


class SimulatedModel:
    """A model whose losses per sublayer are known, and the noisy score of a set on some tokens."""

    def __init__(self, losses: str, num_layers: int, num_targets: int, seed: int) -> None:
        self.num_layers, self.num_targets = num_layers, num_targets
        self.random = np.random.default_rng(seed)
        self.prices = Prices(1, 0.1, 0.9 / num_layers * 0.35, 0.9 / num_layers * 0.65, FRAMES)
        sublayers = [(i, kind) for i in range(1, num_layers - 1) for kind in (ATTENTION, MLP)]
        self.losses = {sublayer: self._loss(losses) for sublayer in sublayers}

    def _loss(self, losses: str) -> float:
        if losses == "even":
            return float(self.random.uniform(0.0, 0.03))
        small = self.random.random() < 0.8
        return float(self.random.exponential(0.02) if small else self.random.uniform(0.5, 2.0))

    def hints(self) -> list[tuple[float, float]]:
        """Each loss, wrong by up to a factor of two."""
        wrong = {sub: loss * 2.0 ** self.random.uniform(-1, 1) for sub, loss in self.losses.items()}
        return [(wrong.get((i, ATTENTION), 1.0), wrong.get((i, MLP), 1.0)) for i in range(self.num_layers)]

    def rate(self, skipped: LayerSet) -> float:
        """The true match rate."""
        loss = sum(self.losses[i, ATTENTION] for i in skipped.attention)
        loss += sum(self.losses[i, MLP] for i in skipped.mlp)
        return math.exp(-loss)

    def scored_rate(self, skipped: LayerSet) -> float:
        """The match rate on some tokens."""
        return float(self.random.binomial(self.num_targets, self.rate(skipped))) / self.num_targets

    def throughput(self, skipped: LayerSet, rate: float) -> float:
        """Tokens per second at this match rate."""
        left = self.num_layers - len(skipped.attention), self.num_layers - len(skipped.mlp)
        return self.prices.throughput(rate, self.prices.draft_pass(*left))

    def gain_share(self, skipped: LayerSet) -> float:
        """The gain over skipping nothing, as a share of the possible gain."""
        plain = self.prices.plain_throughput
        return (self.throughput(skipped, self.rate(skipped)) - plain) / (self._best_throughput() - plain)

    def _best_throughput(self) -> float:
        """Skipping the sublayers that lose least per second saved, as many as pay."""
        saved = (self.prices.attention, self.prices.mlp)
        parts: tuple[set[int], set[int]] = (set(), set())
        best = self.prices.plain_throughput
        for i, kind in sorted(self.losses, key=lambda sub: self.losses[sub] / saved[sub[1]]):
            parts[kind].add(i)
            skipped = LayerSet(frozenset(parts[ATTENTION]), frozenset(parts[MLP]))
            best = max(best, self.throughput(skipped, self.rate(skipped)))
        return best


def engine_search(model: SimulatedModel, seed: int, *, hinted: bool) -> Iterator[float]:
    """The gain after every round of the engine's search."""
    tuning = SearchTuning(rounds=ROUNDS[-1], patience=ROUNDS[-1])
    search = Search(model.num_layers, seed=seed, tuning=tuning)
    if hinted:
        search.inform(model.hints())
    for _ in range(ROUNDS[-1]):
        if search.open:
            candidate = search.suggest(model.prices)
            rate, own_rate = model.scored_rate(candidate), model.scored_rate(search.best.skipped)
            search.score(candidate, rate, own_rate, model.num_targets, model.prices)
        yield model.gain_share(search.best.skipped)


def optuna_tpe(model: SimulatedModel, seed: int) -> Iterator[float]:
    """The same with Optuna: one choice for every sublayer, the incumbent scored on the same text."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
    study, best = optuna.create_study(direction="maximize", sampler=sampler), LayerSet()
    for _ in range(ROUNDS[-1]):
        trial = study.ask()
        chosen = [s for s in model.losses if trial.suggest_categorical(f"{s[0]} {s[1]}", [False, True])]
        skipped = LayerSet(*(frozenset(i for i, kind in chosen if kind == one) for one in (ATTENTION, MLP)))
        throughput = model.throughput(skipped, model.scored_rate(skipped))
        study.tell(trial, throughput)
        if throughput > model.throughput(best, model.scored_rate(best) if best else 1.0):
            best = skipped
        yield model.gain_share(best)


def main() -> None:
    """Run every search on every kind of losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48, help="tokens per score")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    searches: dict[str, Callable[[SimulatedModel, int], Iterator[float]]] = {
        "hinted": lambda model, seed: engine_search(model, seed, hinted=True),
        "unhinted": lambda model, seed: engine_search(model, seed, hinted=False),
    }
    if importlib.util.find_spec("optuna"):
        searches["Optuna's TPE"] = optuna_tpe
    table = Table(
        "losses", "search", *(f"after {rounds}" for rounds in ROUNDS), title="share of the possible gain"
    )
    results: list[dict[str, Any]] = []
    for losses in ("few", "even"):
        for name, search in searches.items():
            models = [(SimulatedModel(losses, args.layers, args.tokens, s), s) for s in range(args.seeds)]
            gains = np.array([list(search(model, seed)) for model, seed in models])
            means = {rounds: float(gains[:, rounds - 1].mean()) for rounds in ROUNDS}
            table.add_row(losses, name, *(f"{mean:.0%}" for mean in means.values()))
            results.append({"losses": losses, "search": name, "gain": means})
    Console().print(table)
    print(json.dumps({"layers": args.layers, "tokens": args.tokens, "seeds": args.seeds, "found": results}))


if __name__ == "__main__":
    main()
