"""The search for a layer set, as a pure state machine."""

import math
from itertools import pairwise

import numpy as np
import pytest

from samewise.draft.skip.search import Prices, Search
from samewise.types import LayerSet

LAYERS = 16
PRICES = Prices(1, 0.1, 0.9 / LAYERS * 0.35, 0.9 / LAYERS * 0.65, tuple(1 + 0.02 * k for k in range(17)))
ESSENTIAL = {(5, 0), (3, 1), (8, 1)}


def losses(seed=0):
    """Most sublayers hardly matter; a few are everything."""
    return {(i, k): 1.5 if (i, k) in ESSENTIAL else 0.002 for i in range(1, LAYERS - 1) for k in (0, 1)}


class World:
    """Text on which a set is right as often as its losses say, give or take."""

    def __init__(self, loss, trials=64, seed=0, noisy=True):
        self.loss, self.trials, self.noisy = loss, trials, noisy
        self.random = np.random.default_rng(seed)

    def chance(self, skipped):
        parts = [(i, 0) for i in skipped.attention] + [(i, 1) for i in skipped.mlp]
        return math.exp(-sum(self.loss[part] for part in parts))

    def rate(self, skipped):
        chance = self.chance(skipped)
        return self.random.binomial(self.trials, chance) / self.trials if self.noisy else chance

    def pace(self, skipped):
        draft = PRICES.draft(LAYERS - len(skipped.attention), LAYERS - len(skipped.mlp))
        return PRICES.pace(self.chance(skipped), draft)

    def best(self):
        free = frozenset(i for i in range(1, LAYERS - 1))
        return LayerSet(
            free - {i for i, k in ESSENTIAL if k == 0}, free - {i for i, k in ESSENTIAL if k == 1}
        )

    def play(self, search, rounds=200):
        """The incumbents, one after each round."""
        found = []
        while search.open and len(found) < rounds:
            candidate = search.suggest(PRICES)
            rate, own = self.rate(candidate), self.rate(search.best.skipped)
            search.score(candidate, rate, own, self.trials, PRICES)
            found.append(search.best.skipped)
        return found


def hints(loss):
    return [(loss.get((i, 0), 1.0), loss.get((i, 1), 1.0)) for i in range(LAYERS)]


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_matters(seed):
    world = World(losses(), seed=seed)
    search = Search(LAYERS, seed=seed)
    search.inform(hints(world.loss))
    world.play(search)
    found = search.best.skipped
    assert not found.attention & {5}
    assert not found.mlp & {3, 8}
    assert world.pace(found) > 0.9 * world.pace(world.best())


def test_without_a_hint_it_learns_from_scores_alone():
    world = World(losses(), seed=1)
    gains = []
    for seed in range(5):
        search = Search(LAYERS, seed=seed, rounds=200, patience=200)
        world.play(search)
        gains.append(world.pace(search.best.skipped))
    assert np.mean(gains) > 1.1  # not skipping is 1.0


def test_a_wrong_hint_is_overruled():
    world = World(losses(), seed=2)
    misled = [(1.0 - a, 1.0 - b) for a, b in hints({k: min(v, 1.0) for k, v in world.loss.items()})]
    search = Search(LAYERS, seed=3, rounds=300, patience=300)
    search.inform(misled)
    world.play(search, 300)
    assert world.pace(search.best.skipped) >= 1.0


@pytest.mark.parametrize("seed", range(4))
def test_the_same_seed_gives_the_same_search(seed):
    runs = []
    for _ in range(2):
        search = Search(LAYERS, seed=seed)
        runs.append(World(losses(), seed=7).play(search))
    assert runs[0] == runs[1]
    assert len(runs[0]) > 4


@pytest.mark.parametrize("seed", range(4))
def test_on_fixed_text_the_incumbent_only_gets_better(seed):
    world = World(losses(), seed=seed, noisy=False)
    search = Search(LAYERS, seed=seed, rounds=60, patience=60)
    paces = [world.pace(skipped) for skipped in world.play(search)]
    assert all(b >= a for a, b in pairwise(paces))


def test_a_lucky_challenger_of_another_text_is_not_compared_with_an_old_score():
    """The incumbent is scored again with every challenger: a text that is easy for all changes nothing."""
    search = Search(LAYERS)
    good = World(losses()).best()
    assert search.start_from(good)
    other = LayerSet(good.attention, good.mlp - {7})
    assert not search.score(other, 0.85, 0.9, 64, PRICES)
    assert search.best.rate == 0.9
    assert not search.score(other, 0.97, 1.0, 64, PRICES)  # better than 0.9 was, on another text
    assert (search.best.skipped, search.best.rate) == (good, 1.0)


def test_a_set_that_does_not_pay_any_more_gives_way_to_nothing():
    search = Search(LAYERS)
    assert search.start_from(World(losses()).best())
    for _ in range(5):
        search.score(LayerSet(mlp=frozenset({6})), 0.1, 0.1, 64, PRICES)
    assert search.best.skipped == LayerSet()
    assert search.best.pace == PRICES.plain


def test_nothing_is_priced_as_nothing_even_where_a_whole_pass_is_cheap():
    """A whole pass at 0.3 of a frame would be a fine drafter, but it is not what an empty set does."""
    cheap = Prices(1, 0.02, 0.3 / LAYERS * 0.35, 0.3 / LAYERS * 0.65, (1.0,) * 17)
    world = World({(i, k): 0.01 for i in range(1, LAYERS - 1) for k in (0, 1)}, noisy=False)
    search = Search(LAYERS)
    search.inform([(0.02, 0.02)] * LAYERS)
    while search.open:
        candidate = search.suggest(cheap)
        search.score(candidate, world.rate(candidate), world.rate(search.best.skipped), 64, cheap)
    assert search.best.pace > 2.0


def test_good_enough_is_enough():
    world = World(losses(), noisy=False)
    search = Search(LAYERS, rounds=500, patience=500)
    search.inform(hints(world.loss))
    assert len(world.play(search)) < 20
    assert world.pace(search.best.skipped) > 0.95 * world.pace(world.best())


def test_it_ends_after_so_many_rounds_or_without_progress():
    world = World(losses())
    assert len(world.play(Search(LAYERS, rounds=5, patience=99))) == 5
    search = Search(LAYERS, rounds=99, patience=5)
    world.play(search)
    assert search.stale == 5
    assert not search.open


def test_reopened_it_believes_less_and_adapts():
    before, after = losses(), dict(losses())
    after[6, 0] = after[10, 1] = 2.0  # another topic needs what could be left out
    search = Search(LAYERS, seed=1)
    search.inform(hints(before))
    World(before, seed=1).play(search)
    assert 6 in search.best.skipped.attention
    search.reopen()
    assert search.open
    search.inform(hints(after))
    world = World(after, seed=2)
    world.play(search)
    assert 6 not in search.best.skipped.attention
    assert 10 not in search.best.skipped.mlp


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_with_nothing_between_its_ends(layers):
    search = Search(layers)
    assert not search.open
    assert search.suggest(PRICES) == LayerSet()


@pytest.mark.parametrize(
    "skipped", [LayerSet(frozenset({0})), LayerSet(mlp=frozenset({15})), LayerSet(frozenset({99}))]
)
def test_a_set_of_another_model_is_not_taken(skipped):
    search = Search(LAYERS)
    assert not search.start_from(skipped)
    assert search.best.skipped == LayerSet()


def test_first_and_last_layers_stay():
    search = Search(6, seed=3, rounds=50, patience=50)
    world = World({(i, k): 0.0 for i in range(6) for k in (0, 1)})
    while search.open:
        candidate = search.suggest(PRICES)
        assert not {0, 5} & (candidate.attention | candidate.mlp)
        search.score(candidate, 1.0, 1.0, 64, PRICES)
    assert world.loss


def test_paces():
    assert PRICES.pace(0.0, 0.5) == pytest.approx(1.0)  # nothing is ever right: do not guess
    assert PRICES.pace(1.0, 0.1) > 5
    assert PRICES.pace(0.9, 0.3) > PRICES.pace(0.9, 0.6) > PRICES.pace(0.5, 0.6)


def test_a_set_can_be_read():
    assert str(LayerSet(frozenset({1, 2, 3, 7}), frozenset({9}))) == "attention 1-3, 7; mlp 9"
    assert str(LayerSet()) == "nothing"
    assert len(LayerSet(frozenset({1}), frozenset({2, 3}))) == 3
