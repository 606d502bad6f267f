"""The layer-set search as a pure state machine, on simulated losses."""

import math
from itertools import pairwise

import numpy as np
import pytest

from samewise.draft.skip.search import ATTENTION, MLP, Prices, Search
from samewise.draft.tuning import SearchTuning
from samewise.types import LayerSet

LAYERS = 16
PRICES = Prices(1, 0.1, 0.9 / LAYERS * 0.35, 0.9 / LAYERS * 0.65, tuple(1 + 0.02 * k for k in range(17)))
NEEDED = {(5, ATTENTION), (3, MLP), (8, MLP)}
INNER = [(i, kind) for i in range(1, LAYERS - 1) for kind in (ATTENTION, MLP)]


def few_needed():
    """Losses of a model in which a few sublayers are needed and the others hardly matter."""
    return {sublayer: 1.5 if sublayer in NEEDED else 0.002 for sublayer in INNER}


class SimulatedText:
    """Text on which a set predicts tokens as often as the losses of its sublayers say."""

    def __init__(self, losses, num_targets=64, seed=0, noisy=True):
        self.losses, self.num_targets, self.noisy = losses, num_targets, noisy
        self.random = np.random.default_rng(seed)

    def chance(self, skipped):
        sublayers = [(i, ATTENTION) for i in skipped.attention] + [(i, MLP) for i in skipped.mlp]
        return math.exp(-sum(self.losses[sublayer] for sublayer in sublayers))

    def rate(self, skipped):
        chance = self.chance(skipped)
        return self.random.binomial(self.num_targets, chance) / self.num_targets if self.noisy else chance

    def throughput(self, skipped):
        draft_pass = PRICES.draft_pass(LAYERS - len(skipped.attention), LAYERS - len(skipped.mlp))
        return PRICES.throughput(self.chance(skipped), draft_pass)

    def best_set(self):
        inner = frozenset(range(1, LAYERS - 1))
        needed = [{i for i, kind in NEEDED if kind == one} for one in (ATTENTION, MLP)]
        return LayerSet(inner - needed[ATTENTION], inner - needed[MLP])

    def run(self, search, max_rounds=200):
        """Search until it ends; the incumbent after each round."""
        incumbents = []
        while search.open and len(incumbents) < max_rounds:
            candidate = search.suggest(PRICES)
            rate, own_rate = self.rate(candidate), self.rate(search.best.skipped)
            search.score(candidate, rate, own_rate, self.num_targets, PRICES)
            incumbents.append(search.best.skipped)
        return incumbents


def search_of(seed=0, num_layers=LAYERS, **tuning):
    return Search(num_layers, seed=seed, tuning=SearchTuning(**tuning))


def hints(losses):
    return [(losses.get((i, ATTENTION), 1.0), losses.get((i, MLP), 1.0)) for i in range(LAYERS)]


@pytest.mark.parametrize("seed", range(6))
def test_needed_sublayers_are_kept_and_most_others_skipped(seed):
    text = SimulatedText(few_needed(), seed=seed)
    search = search_of(seed)
    search.inform(hints(text.losses))
    text.run(search)
    skipped = search.best.skipped
    assert not skipped.attention & {5}
    assert not skipped.mlp & {3, 8}
    assert text.throughput(skipped) > 0.9 * text.throughput(text.best_set())


def test_without_a_hint_the_search_learns_from_scores_alone():
    text = SimulatedText(few_needed(), seed=1)
    gains = []
    for seed in range(5):
        search = search_of(seed, rounds=200, patience=200)
        text.run(search)
        gains.append(text.throughput(search.best.skipped))
    assert np.mean(gains) > 1.1  # skipping nothing gives 1.0


def test_a_wrong_hint_is_overruled_by_scores():
    text = SimulatedText(few_needed(), seed=2)
    wrong = [(1.0 - a, 1.0 - b) for a, b in hints({k: min(v, 1.0) for k, v in text.losses.items()})]
    search = search_of(3, rounds=300, patience=300)
    search.inform(wrong)
    text.run(search, 300)
    assert text.throughput(search.best.skipped) >= 1.0


@pytest.mark.parametrize("seed", range(4))
def test_the_same_seed_gives_the_same_search(seed):
    first, second = (SimulatedText(few_needed(), seed=7).run(search_of(seed)) for _ in range(2))
    assert first == second
    assert len(first) > 4


@pytest.mark.parametrize("seed", range(4))
def test_without_noise_the_incumbent_only_gets_better(seed):
    text = SimulatedText(few_needed(), seed=seed, noisy=False)
    incumbents = text.run(search_of(seed, rounds=60, patience=60))
    throughputs = [text.throughput(skipped) for skipped in incumbents]
    assert all(b >= a for a, b in pairwise(throughputs))


def test_candidate_and_incumbent_are_compared_on_the_same_text():
    """A text that is easy for all sets does not replace the incumbent."""
    search = Search(LAYERS)
    good = SimulatedText(few_needed()).best_set()
    assert search.start_from(good)
    other = LayerSet(good.attention, good.mlp - {7})
    assert not search.score(other, 0.85, 0.9, 64, PRICES)
    assert search.best.rate == 0.9
    assert not search.score(other, 0.97, 1.0, 64, PRICES)  # more than 0.9, but on another text
    assert (search.best.skipped, search.best.rate) == (good, 1.0)


def test_an_incumbent_that_does_not_pay_any_more_is_dropped():
    search = Search(LAYERS)
    assert search.start_from(SimulatedText(few_needed()).best_set())
    for _ in range(5):
        search.score(LayerSet(mlp=frozenset({6})), 0.1, 0.1, 64, PRICES)
    assert search.best.skipped == LayerSet()
    assert search.best.throughput == PRICES.plain_throughput


def test_the_empty_set_counts_as_no_drafts_even_where_a_full_pass_is_cheap():
    """A full pass at 0.3 of a frame would pay as a drafter, but the empty set does not draft."""
    cheap = Prices(1, 0.02, 0.3 / LAYERS * 0.35, 0.3 / LAYERS * 0.65, (1.0,) * 17)
    text = SimulatedText(dict.fromkeys(INNER, 0.01), noisy=False)
    search = Search(LAYERS)
    search.inform([(0.02, 0.02)] * LAYERS)
    while search.open:
        candidate = search.suggest(cheap)
        search.score(candidate, text.rate(candidate), text.rate(search.best.skipped), 64, cheap)
    assert search.best.throughput > 2.0


def test_the_search_ends_once_nothing_better_is_believed_possible():
    text = SimulatedText(few_needed(), noisy=False)
    search = search_of(rounds=500, patience=500)
    search.inform(hints(text.losses))
    assert len(text.run(search)) == SearchTuning().min_rounds
    assert search.ended == "no clearly better set is believed possible"
    assert text.throughput(search.best.skipped) > 0.95 * text.throughput(text.best_set())


def test_the_search_ends_after_its_rounds_or_without_progress():
    text = SimulatedText(few_needed())
    assert len(text.run(search_of(rounds=5, patience=99))) == 5
    search = search_of(rounds=99, patience=5)
    text.run(search)
    assert search.num_stale == 5
    assert not search.open


def test_a_reopened_search_adapts_to_other_losses():
    before, after = few_needed(), few_needed()
    after[6, ATTENTION] = after[10, MLP] = 2.0
    search = search_of(1)
    search.inform(hints(before))
    SimulatedText(before, seed=1).run(search)
    assert 6 in search.best.skipped.attention
    search.reopen()
    assert search.open
    search.inform(hints(after))
    SimulatedText(after, seed=2).run(search)
    assert 6 not in search.best.skipped.attention
    assert 10 not in search.best.skipped.mlp


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_model_without_inner_layers_has_nothing_to_search(num_layers):
    search = Search(num_layers)
    assert not search.open
    assert search.suggest(PRICES) == LayerSet()


@pytest.mark.parametrize(
    "skipped", [LayerSet(frozenset({0})), LayerSet(mlp=frozenset({15})), LayerSet(frozenset({99}))]
)
def test_a_set_of_another_model_is_not_taken(skipped):
    search = Search(LAYERS)
    assert not search.start_from(skipped)
    assert search.best.skipped == LayerSet()


def test_the_first_and_last_layers_are_never_skipped():
    search = search_of(3, num_layers=6, rounds=50, patience=50)
    num_candidates = 0
    while search.open:
        candidate = search.suggest(PRICES)
        assert not {0, 5} & (candidate.attention | candidate.mlp)
        search.score(candidate, 1.0, 1.0, 64, PRICES)
        num_candidates += 1
    assert num_candidates > 0


def test_throughput_rises_with_match_rate_and_falls_with_the_cost_of_a_pass():
    assert PRICES.throughput(0.0, 0.5) == pytest.approx(1.0)  # nothing is accepted: no drafts
    assert PRICES.throughput(1.0, 0.1) > 5
    assert PRICES.throughput(0.9, 0.3) > PRICES.throughput(0.9, 0.6) > PRICES.throughput(0.5, 0.6)


def test_a_layer_set_prints_as_ranges():
    assert str(LayerSet(frozenset({1, 2, 3, 7}), frozenset({9}))) == "attention 1-3, 7; mlp 9"
    assert str(LayerSet()) == "nothing"
    assert len(LayerSet(frozenset({1}), frozenset({2, 3}))) == 3
