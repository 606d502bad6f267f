"""Draft trees: their shape, their order, and estimates that follow what was verified."""

import random

import pytest

from samewise.draft.estimates import OWN, RECYCLED, RUNNERS_UP, STORED, Estimates, chance, context_class
from samewise.draft.recycle import WIDTH
from samewise.draft.suffix_counts import match_class
from samewise.draft.tree import ROOT, DraftTree, grow
from samewise.draft.tree_drafter import TreeDrafter

VOCAB = 60


def random_rows(rng, choices):
    """A top 8 for each choice, which comes first."""
    return [[choice, *rng.sample([t for t in range(VOCAB) if t != choice], WIDTH - 1)] for choice in choices]


def drafter_after(seed, num_sequences=3, salt=b"", probs=None):
    """A drafter that has seen random sequences, and the id of one that goes on."""
    rng, drafter = random.Random(seed), TreeDrafter(VOCAB)
    for number in range(num_sequences):
        drafter.begin(number, [rng.randrange(VOCAB // 3) for _ in range(40)], salt)
        for _ in range(30):
            drafter.grow(number, 12)
            tokens = [rng.randrange(VOCAB // 3) for _ in range(rng.randrange(1, 4))]
            drafter.commit(number, tokens, random_rows(rng, tokens), probs and [probs] * len(tokens))
        if number + 1 < num_sequences:
            drafter.forget(number)
    return drafter, num_sequences - 1


def check_tree(tree, max_nodes):
    assert len(tree) <= max_nodes
    assert len(tree.tokens) == len(tree.parents) == len(tree.probs)
    for node, parent in enumerate(tree.parents):
        assert ROOT <= parent < node
        assert 0.0 < tree.probs[node] <= (1.0 if parent == ROOT else tree.probs[parent])
    assert list(tree.probs) == sorted(tree.probs, reverse=True)
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)
    assert all(0 <= token < VOCAB for token in tree.tokens)


@pytest.mark.parametrize("probs", [None, [0.6, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 0.0001]])
@pytest.mark.parametrize("max_nodes", [1, 4, 16, 64])
def test_parents_come_first_siblings_differ_and_the_budget_is_kept(max_nodes, probs):
    drafter, number = drafter_after(1, probs=probs)
    tree = drafter.grow(number, max_nodes)
    check_tree(tree, max_nodes)
    assert len(tree) == max_nodes
    for size in range(max_nodes):
        check_tree(tree.first(size), size)


def test_no_node_is_below_the_least_probability():
    drafter, number = drafter_after(2)
    tree = drafter.grow(number, 64)
    least = tree.probs[10]
    fewer = drafter.grow(number, 64, least)
    check_tree(fewer, 64)
    assert 0 < len(fewer) < 64
    assert min(fewer.probs) >= least
    assert len(drafter.grow(number, 64, 1.1)) == len(drafter.grow(number, 0)) == 0


def test_equal_histories_give_equal_trees():
    trees = [drafter.grow(number, 32) for drafter, number in (drafter_after(3), drafter_after(3))]
    assert trees[0] == trees[1]


def test_a_tree_is_grown_by_probability():
    """Log-odds by token and depth, so that the most probable paths are known."""
    table = {(): [(2.0, 1), (0.0, 2)], (1,): [(0.0, 3)], (2,): [(3.0, 4)], (1, 3): [], (2, 4): []}

    def expand(path, token):
        return (*path, token), table[*path, token]

    tree, states = grow((), table[()], expand, 4)
    assert tree.tokens == (1, 2, 4, 3)
    assert tree.parents == (ROOT, ROOT, 1, 0)
    assert tree.probs == pytest.approx((0.881, 0.5, 0.476, 0.440), abs=1e-3)
    assert {states[ROOT], states[0], states[1]} == {(), (1,), (2,)}
    assert tree.expected_tokens == pytest.approx(1 + sum(tree.probs))
    assert grow((), [], expand, 4) == (DraftTree(), {ROOT: ()})


def test_the_path_that_came_is_found():
    tree = DraftTree((5, 6, 7, 6), (ROOT, ROOT, 0, 2), (0.5, 0.4, 0.3, 0.2))
    assert tree.path([5, 7, 6, 9]) == [0, 2, 3]
    assert tree.path([6, 7]) == [1]
    assert tree.path([7]) == tree.path([]) == []


def test_text_that_repeats_is_drafted_as_a_chain():
    drafter, text = TreeDrafter(VOCAB), list(range(20))
    drafter.begin(0, text + text[:6])
    tree = drafter.grow(0, 16)
    assert len(tree.path(text[6:])) >= 8


def test_recycled_candidates_are_drafted_for_another_sequence():
    drafter, row = TreeDrafter(VOCAB), list(range(30, 38))
    drafter.begin(0, [1, 2])
    drafter.remember(0, [7], [row])
    drafter.begin(1, [4, 7])
    assert set(drafter.grow(1, 8).tokens) >= set(row[:4])


def test_runners_up_are_drafted_a_position_later():
    drafter = TreeDrafter(VOCAB)
    drafter.begin(0, [1, 2])
    drafter.commit(0, [3], [[3, 40, 41, 42, 43, 44, 45, 46]])
    tree = drafter.grow(0, 4)
    assert set(tree.tokens) <= {40, 41, 42, 43, 44, 45, 46}


@pytest.mark.parametrize("chosen", [42, 55])
def test_of_a_sampled_row_all_but_the_chosen_token_are_runners_up(chosen):
    drafter, row = TreeDrafter(VOCAB), list(range(40, 48))
    drafter.begin(0, [1, 2])
    drafter.commit(0, [chosen], [row])
    tree = drafter.grow(0, 64)
    firsts = {token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == ROOT}
    assert firsts == set(row) - {chosen}


def test_nothing_of_a_private_sequence_is_shared():
    drafter, number = drafter_after(4, num_sequences=1, salt=None)
    assert drafter.table.num_known == 0
    assert len(drafter.grow(number, 16)) == 16  # from its own text and rows
    drafter.forget(number)
    assert drafter.store.num_entries == 0
    drafter.begin(9, [1, 2, 3])
    assert len(drafter.grow(9, 16)) == 0


def test_after_new_weights_no_old_row_and_no_old_text_is_used():
    drafter, number = drafter_after(5)
    drafter.clear()
    assert (drafter.table.num_known, drafter.store.num_entries) == (0, 0)
    own = set(drafter._sequences[number].text.tokens)
    assert set(drafter.grow(number, 64).tokens) <= own
    drafter.forget(number)
    drafter.forget(number)


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


def test_learning_reaches_other_contexts_of_the_same_class():
    drafter, number = TreeDrafter(VOCAB), 0
    row = [30, 31, 32, 33, 34, 35, 36, 37]
    before = []
    for number in range(40):
        drafter.begin(number, [1, 2])
        drafter.remember(number, [2], [row])
        tree = drafter.grow(number, 8)
        before.append(tree.probs[tree.tokens.index(31)])
        drafter.commit(number, [31], [[31, *range(40, 47)]])
    assert before[-1] > before[0]
    drafter.begin(99, [5, 6])
    drafter.remember(99, [6], [[20, 21, 22, 23, 24, 25, 26, 27]])
    tree = drafter.grow(99, 8)
    assert tree.tokens[0] == 21  # second candidates were right, so they come before first ones


def test_a_token_named_by_two_sources_is_likelier():
    estimates, context = Estimates(), context_class(1, 0, recycled=True)
    named = [(OWN, [5, 6], [match_class(1, 1, 2)] * 2), (RECYCLED, [6], [0])]
    (best, token), (other, _) = estimates.rank(context, named, {})
    assert token == 6
    assert best > other
