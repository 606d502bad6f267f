"""Draft trees: how they grow, what is cut, and estimates that follow what was verified."""

import pytest

from samewise.draft.estimates import OWN, RECYCLED, RUNNERS_UP, STORED, Estimates, chance, context_class
from samewise.draft.suffix_counts import match_class
from samewise.draft.tree import DraftTree, Limit, Root, RowPrices, cut, grow
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
