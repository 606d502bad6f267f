"""Draft trees: how they grow, what is cut, and estimates that follow what was verified."""

import itertools
import math
import random

import pytest

from samewise.draft.estimates import OWN, RECYCLED, RUNNERS_UP, STORED, Estimates, chance, context_class
from samewise.draft.suffix_counts import match_class
from samewise.draft.tree import DraftTree, GrownTree, Limit, Root, RowPrices, cut, grow
from samewise.types import ROOT

# Log-odds by path, so that the most probable paths are known.
TABLE = {(): [(2.0, 1), (0.0, 2)], (1,): [(0.0, 3)], (2,): [(3.0, 4)], (1, 3): [], (2, 4): []}


def expand(_, path, token):
    return (*path, token), TABLE[*path, token]


def grow_table(prices, *limits):
    return grow([Root(limit, (), TABLE[()]) for limit in limits], expand, prices)


def test_a_tree_is_grown_by_probability_and_stands_depth_first():
    prices = RowPrices.free(1, 4)
    (grown,) = grow_table(prices, Limit(0, 4, 9))
    assert set(grown.states.values()) >= {(), (1,), (2,)}
    (tree,), expected = cut([grown], prices)
    assert tree.tokens == (1, 3, 2, 4)
    assert tree.parents == (ROOT, 0, ROOT, 2)
    assert tree.probs == pytest.approx((0.881, 0.440, 0.5, 0.476), abs=1e-3)
    assert expected == pytest.approx(sum(tree.probs))
    assert grow([Root(Limit(0, 4, 9), (), [])], expand, prices)[0].tokens == []


def test_the_likeliest_nodes_are_kept_where_not_all_pay():
    """A node brings its probability in tokens; from the third on it costs half a frame."""
    prices = RowPrices(1, [1.0, 1.0, 1.0, 1.5, 2.0])
    (tree,), expected = cut(grow_table(prices, Limit(0, 4, 9)), prices)
    assert (tree.tokens, tree.parents) == ((1, 2), (ROOT, ROOT))
    assert expected == pytest.approx(1.381, abs=1e-3)


def test_nodes_that_never_pay_are_not_grown():
    prices = RowPrices(1, [1.0, 3.0, 4.0, 5.0])
    (grown,) = grow_table(prices, Limit(0, 3, 9))
    assert grown.tokens == []
    assert cut([grown], prices) == ([DraftTree()], 0.0)


def test_a_price_for_the_first_node_is_paid_by_several():
    prices = RowPrices(1, [1.0, 2.0, 2.0, 2.0, 2.0])
    (tree,), _ = cut(grow_table(prices, Limit(0, 4, 9)), prices)
    assert len(tree) == 4


def test_sequences_share_a_budget_by_probability():
    prices = RowPrices.free(2, 3)
    trees, _ = cut(grow_table(prices, Limit(0, 1, 9), Limit(1, 9, 9)), prices)
    assert [tree.tokens for tree in trees] == [(1,), (1, 2)]


def test_a_sequence_with_few_expected_tokens_comes_before_one_with_many():
    """The fourth node of the first tree is likelier (0.4) than the first one of the second (0.3)."""
    prices = RowPrices(2, [1.0] * 5 + [9.0])
    trees, expected = cut([tree_of(0.9, 0.8, 0.7, 0.4), tree_of(0.3)], prices)
    assert [len(tree) for tree in trees] == [3, 1]
    assert expected == pytest.approx(2.7)


def test_a_sequence_without_guesses_does_not_wait_for_long_for_another():
    """More nodes would bring more tokens per second in all, and slow down the three that have none."""
    seconds = [1.0, 1.0, 1.4, 1.4, 1.4, 1.4]
    probs = (0.9, 0.88, 0.86, 0.84, 0.82)
    assert (4 + sum(probs)) / 1.4 > (4 + probs[0]) / 1.0
    trees, _ = cut([tree_of(*probs), tree_of(), tree_of(), tree_of()], RowPrices(4, seconds))
    assert [len(tree) for tree in trees] == [1, 0, 0, 0]
    alone, _ = cut([tree_of(*probs)], RowPrices(1, seconds))
    assert len(alone[0]) == 5


def test_a_gap_between_frames_makes_a_longer_frame_weigh_less():
    trees, seconds = [tree_of(0.2, 0.2)], [1.0, 1.3, 1.3]
    for gap, num in ((0.0, 2), (1.0, 2)):
        assert len(cut(trees, RowPrices(1, seconds, gap=gap))[0][0]) == num
    seconds = [1.0, 1.5, 1.5]
    for gap, num in ((0.0, 0), (1.0, 2)):
        assert len(cut(trees, RowPrices(1, seconds, gap=gap))[0][0]) == num


def tree_of(*probs):
    """A chain whose nodes have these probabilities, which fall."""
    tree = GrownTree(Limit(0, 99, 99))
    tree.tokens, tree.parents, tree.probs = [*range(len(probs))], [*range(ROOT, len(probs) - 1)], [*probs]
    return tree


def random_trees(rng, num):
    return [
        tree_of(*sorted((rng.random() ** 2 for _ in range(rng.randrange(5))), reverse=True))
        for _ in range(num)
    ]


def random_prices(rng, live):
    step, slope, seconds = rng.choice([1, 4]), rng.choice([0.0, 0.02, 0.1]), 1.0
    times = [seconds := seconds + (i % step == 0) * slope * rng.random() for i in range(20)]
    return RowPrices(live, times, rng.choice([1.0, 0.8, 1.5]), rng.choice([0.0, 0.3]))


@pytest.mark.parametrize("seed", range(40))
def test_of_all_ways_to_cut_the_one_with_most_logarithms_of_pace_is_found(seed):
    rng = random.Random(seed)
    trees = random_trees(rng, 3)
    prices = random_prices(rng, live=4)

    def value(counts):
        tokens = [prices.own + sum(tree.probs[:num]) for tree, num in zip(trees, counts, strict=True)]
        frame = prices.seconds[sum(counts)] + prices.gap
        return sum(map(math.log, tokens)) - prices.live * math.log(frame)

    found = tuple(len(tree) for tree in cut(trees, prices)[0])
    ways = itertools.product(*[range(len(tree.probs) + 1) for tree in trees])
    assert value(found) == pytest.approx(max(map(value, ways)))


@pytest.mark.parametrize("seed", range(40))
def test_for_one_sequence_most_tokens_per_second_are_found(seed):
    rng = random.Random(seed)
    (tree,), prices = random_trees(rng, 1), random_prices(rng, live=1)
    sums = [prices.own + sum(tree.probs[:num]) for num in range(len(tree.probs) + 1)]
    paces = [tokens / (prices.seconds[num] + prices.gap) for num, tokens in enumerate(sums)]
    (found,), _ = cut([tree], prices)
    assert len(found) == paces.index(max(paces))


@pytest.mark.parametrize("seed", range(30))
def test_growing_ends_before_no_node_that_would_be_kept(seed):
    rng = random.Random(seed)
    odds = {}

    def siblings(path):
        if path not in odds:
            odds[path] = sorted(((rng.gauss(-1, 1.5), t) for t in range(rng.randrange(4))), reverse=True)
        return odds[path]

    def expand_random(i, path, token):
        return (*path, token), siblings((*path, token))

    num = rng.choice([1, 2, 5])
    roots = [Root(Limit(i, 8, 5), (i,), siblings((i,))) for i in range(num)]
    prices = random_prices(rng, num)
    free = RowPrices.free(num, len(prices.seconds) - 1, prices.own)
    whole = grow(roots, expand_random, free, patience=1.0)
    checked = grow(roots, expand_random, prices, patience=1.0, check_nodes=1)
    assert cut(checked, prices) == cut(whole, prices)


@pytest.mark.parametrize(("max_depth", "tokens"), [(0, ()), (1, (1, 2)), (2, (1, 3, 2, 4))])
def test_no_node_is_deeper_than_allowed(max_depth, tokens):
    prices = RowPrices.free(1, 9)
    (tree,), _ = cut(grow_table(prices, Limit(0, 9, max_depth)), prices)
    assert tree.tokens == tokens


def test_the_path_that_came_is_found():
    tree = DraftTree((5, 6, 7, 6), (ROOT, ROOT, 0, 2), (0.5, 0.4, 0.3, 0.2))
    assert tree.path([5, 7, 6, 9]) == [0, 2, 3]
    assert tree.path([6, 7]) == [1]
    assert tree.path([7]) == tree.path([]) == []


@pytest.mark.parametrize("source", [OWN, STORED, RECYCLED, RUNNERS_UP[0]])
def test_an_estimate_rises_with_hits_and_falls_with_misses(source):
    kind = match_class(2, 1, 1) if source in {OWN, STORED} else 1
    context = context_class(2, 0, recycled=True)
    named = [(source, [5], [kind])]

    def estimate(estimates):
        ((odds, token),) = estimates.rank(context, named, {})
        assert token == 5
        return chance(odds)

    first = estimate(Estimates())
    hits, misses, both = Estimates(), Estimates(), Estimates()
    for i in range(400):
        hits.learn(context, named, {}, 5)
        misses.learn(context, named, {}, 6)
        both.learn(context, named, {}, 5 if i % 4 == 0 else 6)
    assert estimate(misses) < first < estimate(hits)
    assert estimate(misses) < 0.05
    assert estimate(hits) > 0.95
    assert estimate(both) == pytest.approx(0.25, abs=0.1)


def test_a_token_named_by_two_sources_is_likelier():
    estimates, context = Estimates(), context_class(1, 0, recycled=True)
    named = [(OWN, [5, 6], [match_class(1, 1, 2)] * 2), (RECYCLED, [6], [0])]
    (best, token), (other, _) = estimates.rank(context, named, {})
    assert token == 6
    assert best > other
