"""Tree drafters, in Python and in C++: what they draft from, what they share, and that both give one tree."""

import random

import numpy as np
import pytest
from tree_cases import DRAFTERS, VOCAB, chain, check_tree, drafter_after, grow, needs_compiler, random_rows

from samewise.draft.native.drafter import NativeDrafter
from samewise.draft.tree import Limit, RowPrices
from samewise.draft.tree_drafter import Committed, Sources, TreeDrafter
from samewise.draft.tuning import SuffixTuning, TreeTuning
from samewise.errors import InvariantBroken
from samewise.types import ROOT

BOTH = pytest.mark.parametrize("make", DRAFTERS)
REPEATING = [1, 2, 3, 4] * 6
TWO_TABLES = 2 * VOCAB * 32 + 31  # bytes


# ---- the form of trees


@BOTH
@pytest.mark.parametrize("max_nodes", [1, 4, 16, 64])
def test_parents_come_first_siblings_differ_and_the_budget_is_kept(make, max_nodes):
    drafter, number = drafter_after(make, 1)
    tree = grow(drafter, number, max_nodes)
    check_tree(tree, max_nodes)
    assert len(tree) == max_nodes


@BOTH
def test_no_node_is_below_the_least_probability(make):
    drafter, number = drafter_after(make, 2)
    least = sorted(grow(drafter, number, 64).probs)[-10]
    fewer = grow(drafter, number, 64, least)
    check_tree(fewer, 64)
    assert 0 < len(fewer) < 64
    assert min(fewer.probs) >= least
    assert len(grow(drafter, number, 64, 1.1)) == len(grow(drafter, number, 0)) == 0


@BOTH
def test_equal_histories_give_equal_trees(make):
    trees = [
        grow(drafter, number, 32) for drafter, number in (drafter_after(make, 3), drafter_after(make, 3))
    ]
    assert trees[0] == trees[1]


# ---- sources


@BOTH
def test_text_that_repeats_is_drafted_as_a_chain(make):
    drafter, text = make(VOCAB), list(range(20))
    drafter.begin(0, text + text[:6], b"")
    assert len(grow(drafter, 0, 16).path(text[6:])) >= 8


@BOTH
def test_recycled_candidates_are_drafted_for_another_sequence(make):
    drafter, row = make(VOCAB), list(range(30, 38))
    drafter.begin(0, [1, 7], b"")
    drafter.commit([chain(0, 7, [30], [row])])
    drafter.begin(1, [4, 7], b"")
    assert set(grow(drafter, 1, 8).tokens) >= set(row[:4])


@BOTH
def test_rows_of_rejected_nodes_are_recycled_but_those_of_committed_tokens_stay(make):
    drafter = make(VOCAB)
    drafter.begin(0, [1, 7], b"")
    rows = np.array([range(10, 18), range(20, 28), range(30, 38), range(40, 48)], np.int32)
    # Row 0 is the root's, row 1 that of node 9, which was right; rows 2 and 3 follow rejected nodes.
    drafter.commit([Committed(0, (9, 20), (0, 1), (7, 9, 9, 8), rows)])
    for token, first in ((7, 10), (9, 20), (8, 40)):
        drafter.begin(1, [5, token], b"")
        assert set(grow(drafter, 1, 4).tokens) <= set(range(first, first + 8))


@BOTH
@pytest.mark.parametrize("chosen", [42, 55])
def test_of_a_sampled_row_all_but_the_chosen_token_are_runners_up(make, chosen):
    drafter, row = make(VOCAB), list(range(40, 48))
    drafter.begin(0, [1, 2], b"")
    drafter.commit([chain(0, 2, [chosen], [row])])
    tree = grow(drafter, 0, 64)
    firsts = {token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == ROOT}
    assert firsts == set(row) - {chosen}


@BOTH
def test_without_rows_old_runners_up_are_forgotten(make):
    drafter = make(VOCAB)
    drafter.begin(0, [1, 2], b"")
    drafter.commit([chain(0, 2, [3], [range(40, 48)])])
    drafter.commit([Committed(0, (4,))])
    assert len(grow(drafter, 0, 8)) == 0


@BOTH
@pytest.mark.parametrize(
    ("sources", "expected"),
    [(Sources.SUFFIXES, {1, 5}), (Sources.ROWS, {*range(30, 38)}), (Sources.ALL, {1, 5, *range(30, 38)})],
)
def test_only_the_sources_asked_for_are_used(make, sources, expected):
    drafter = make(VOCAB, sources)
    drafter.begin(0, [5, 1, 5, 1], b"")
    drafter.commit([chain(0, 1, [5], [range(30, 38)])])
    assert set(grow(drafter, 0, 64, max_depth=3).tokens) == expected


# ---- predictions


@BOTH
def test_a_prediction_is_drafted_right_after_the_prompt(make):
    drafter, predicted = make(VOCAB), [30, 31, 32, 33, 34, 35]
    drafter.begin(0, [1, 2, 3], b"", predicted)
    assert len(grow(drafter, 0, 8).path(predicted)) == 6


@BOTH
def test_after_a_divergence_the_prediction_is_found_again(make):
    drafter, predicted = make(VOCAB), list(range(20, 50))
    drafter.begin(0, [1, 2, 3], b"", predicted)
    drafter.commit([Committed(0, (20, 21, 22, 7))])  # 7 in place of 23
    drafter.commit([Committed(0, (24, 25))])
    assert len(grow(drafter, 0, 8).path(predicted[6:])) == 8
    drafter.commit([Committed(0, (8, 9))])  # and two tokens more
    drafter.commit([Committed(0, (26, 27))])
    assert len(grow(drafter, 0, 8).path(predicted[8:])) == 8


@BOTH
def test_a_prediction_is_not_stored_for_other_requests(make):
    drafter = make(VOCAB)
    drafter.begin(0, [1, 2, 3], b"", [30, 31, 32, 33])
    assert drafter.index(0, 100) == 0
    drafter.forget(0)
    drafter.begin(1, [30, 31], b"")
    assert len(grow(drafter, 1, 8)) == 0


@BOTH
def test_a_text_is_indexed_in_pieces_of_any_size(make):
    rng = random.Random(3)
    text, predicted = ([rng.randrange(15) for _ in range(num)] for num in (80, 50))
    for sizes in ([1], [7, 1, 30], [131], [1000]):
        drafter, left = make(VOCAB), len(predicted) + 1 + len(text)
        drafter.begin(0, text, b"", predicted)
        drafter.begin(1, text, b"", predicted)  # `grow` indexes what is left
        for size in sizes * 140:
            left = max(0, left - size)
            assert drafter.index(0, size) == left
        assert grow(drafter, 0, 32) == grow(drafter, 1, 32)
    assert drafter.index(99, 5) == 0


@BOTH
def test_a_text_that_was_not_indexed_to_its_end_is_not_stored(make):
    drafter = make(VOCAB)
    drafter.begin(0, REPEATING, b"")
    drafter.index(0, 3)
    drafter.forget(0)
    assert drafter.memory().store == drafter.memory().sequences == 0


# ---- what is shared


@BOTH
def test_nothing_of_a_private_sequence_is_shared(make):
    drafter, number = drafter_after(make, 4, num_sequences=1, salt=None)
    assert len(grow(drafter, number, 16)) == 16  # from its own text and rows
    drafter.forget(number)
    memory = drafter.memory()
    assert memory.tables == memory.store == memory.sequences == 0
    drafter.begin(9, [1, 2, 3], b"")
    assert len(grow(drafter, 9, 16)) == 0


@BOTH
def test_salts_do_not_see_each_other(make):
    drafter = make(VOCAB)
    drafter.begin(0, [1, 7], b"a")
    drafter.commit([chain(0, 7, [30], [range(30, 38)])])
    drafter.forget(0)
    for salt, seen in ((b"a", True), (b"b", False), (None, False)):
        drafter.begin(1, [4, 7], salt)
        assert bool(len(grow(drafter, 1, 8))) is seen


@BOTH
def test_tables_of_few_salts_are_kept_and_memory_is_bounded(make):
    tuning = TreeTuning(table_bytes=TWO_TABLES, suffixes=SuffixTuning(store_entries=2000, max_pools=3))
    drafter, rng, largest = make(VOCAB, Sources.ALL, tuning), random.Random(1), 0
    for number in range(60):
        drafter.begin(number, [rng.randrange(VOCAB) for _ in range(50)], bytes([number % 5]))
        assert drafter.memory().tables <= 2 * VOCAB * 32
        drafter.index(number, 50)
        drafter.forget(number)
        largest = max(largest, drafter.memory().store)
    assert 0 < largest < 200 * 2000


def rows_are_recycled(drafter, seq_id, last):
    """Whether the next rows of a running sequence reach later requests of its salt."""
    drafter.commit([chain(seq_id, last, [9], [range(30, 38)])])
    return drafter.memory().tables > 0 and set(grow_after(drafter, seq_id, last)) >= {30, 31}


def grow_after(drafter, seq_id, last):
    """What a sequence is offered when its text ends with `last` again."""
    drafter.commit([Committed(seq_id, (last,))])
    return grow(drafter, seq_id, 8).tokens


@BOTH
def test_newer_salts_do_not_take_the_table_of_a_running_sequence(make):
    drafter = make(VOCAB, Sources.ROWS, TreeTuning(table_bytes=TWO_TABLES))
    drafter.begin(0, [1, 7], b"long")
    for number in range(1, 9):
        assert rows_are_recycled(drafter, 0, 7)
        drafter.begin(number, [1, 2], bytes([number]))
        drafter.forget(number)
    assert rows_are_recycled(drafter, 0, 7)


@BOTH
def test_a_table_that_was_dropped_is_made_again_when_another_is_idle(make):
    drafter = make(VOCAB, Sources.ROWS, TreeTuning(table_bytes=TWO_TABLES))
    for number in range(3):  # 1 and 2 take both tables
        drafter.begin(number, [1, 7], bytes([number]))
    for _ in range(4):  # all three run: tables do not change hands with every frame
        assert [rows_are_recycled(drafter, number, 7) for number in range(3)] == [False, True, True]
    drafter.forget(1)
    drafter.commit([chain(0, 7, [9], [range(30, 38)])])  # none is idle since its rows before these
    assert rows_are_recycled(drafter, 2, 7)
    assert rows_are_recycled(drafter, 0, 7)
    assert rows_are_recycled(drafter, 2, 7)


@BOTH
def test_after_new_weights_no_old_row_and_no_old_text_is_used(make):
    drafter, number = drafter_after(make, 5, num_sequences=1)
    drafter.forget(number)
    drafter.begin(7, [1, 2], b"")
    drafter.commit([chain(7, 2, [3], [range(40, 48)])])
    assert len(grow(drafter, 7, 16)) > 0
    drafter.clear()
    assert drafter.memory().store == 0
    assert len(grow(drafter, 7, 16)) == 0
    drafter.commit([chain(7, 3, [4], [range(40, 48)])])  # the table is open again
    assert len(grow(drafter, 7, 16)) > 0
    drafter.forget(7)
    drafter.forget(7)


@BOTH
def test_recovery_drops_all_sequences_and_the_drafter_goes_on(make):
    drafter, _ = drafter_after(make, 6)
    drafter.recover()
    assert drafter.memory().sequences == 0
    drafter.begin(50, [1, 2, 3], b"")
    check_tree(grow(drafter, 50, 16), 16)


@BOTH
def test_learning_reaches_other_contexts_of_the_same_class(make):
    drafter, before = make(VOCAB), []
    for number in range(40):
        drafter.begin(number, [1, 2], b"")
        drafter.commit([chain(number, 2, [2], [range(30, 38)])])
        tree = grow(drafter, number, 16)
        before.append(tree.probs[tree.tokens.index(31)])
        drafter.commit([Committed(number, (31,))])
        drafter.forget(number, store=False)
    assert before[-1] > before[0]


# ---- both


def compare(seed, num_steps, sources):
    """Both drafters over random texts, rows, predictions, limits and prices."""
    rng, live, next_id = random.Random(seed), [], 0
    tuning = TreeTuning(table_bytes=TWO_TABLES)
    drafters = [TreeDrafter(VOCAB, sources, tuning), NativeDrafter(VOCAB, sources, tuning)]
    for _ in range(num_steps):
        while len(live) < 3:
            prompt = [rng.randrange(20) for _ in range(rng.randrange(1, 40))]
            salt = rng.choice([b"", b"", b"x", b"y", b"z", None])
            predicted = [rng.randrange(20) for _ in range(rng.choice([0, 0, 30]))]
            for drafter in drafters:
                drafter.begin(next_id, prompt, salt, predicted)
            if rng.random() < 0.5:
                assert len({drafter.index(next_id, 11) for drafter in drafters}) == 1
            live.append(next_id)
            next_id += 1
        limits = [Limit(i, rng.choice([0, 4, 16, 64]), rng.choice([0, 1, 3, 20])) for i in live]
        slope = rng.choice([0.0, 0.02])
        seconds = [1.0 + slope * rng.random() * n for n in range(rng.choice([1, 8, 64, 200]) + 1)]
        own, gap = rng.choice([1.0, 0.7, 1.4]), rng.choice([0.0, 0.4])
        prices, min_prob = RowPrices(len(live) + rng.randrange(2), seconds, own, gap), rng.choice([0.0, 0.05])
        grown, other = (drafter.grow(limits, prices, min_prob) for drafter in drafters)
        assert grown == other
        frame = [random_verdict(rng, seq_id, tree) for seq_id, tree in zip(live, grown[0], strict=True)]
        for drafter in drafters:
            drafter.commit(frame)
        for seq_id in live[:]:
            if rng.random() < 0.05:
                for drafter in drafters:
                    drafter.forget(seq_id, store=seq_id % 5 > 0)
                live.remove(seq_id)
        if rng.random() < 0.01:
            for drafter in drafters:
                drafter.clear()
    assert drafters[0].estimates.weights == drafters[1].weights


def random_verdict(rng, seq_id, tree):
    """A random path through the tree, then another token; at times without rows."""
    tokens, path, node = [], [], ROOT
    while True:
        children = [i for i in range(len(tree)) if tree.parents[i] == node]
        if not children or rng.random() < 0.4:
            break
        node = rng.choice(children)
        tokens.append(tree.tokens[node])
        path.append(node)
    tokens.append(rng.randrange(20))
    if rng.random() < 0.1:
        return Committed(seq_id, tuple(tokens))
    inputs = (rng.randrange(20), *tree.tokens)
    rows = random_rows(rng, [rng.randrange(VOCAB) for _ in inputs])
    return Committed(seq_id, tuple(tokens), (0, *[i + 1 for i in path]), inputs, rows)


@needs_compiler
@pytest.mark.parametrize("sources", [Sources.ALL, Sources.SUFFIXES, Sources.ROWS])
@pytest.mark.parametrize("seed", range(2))
def test_the_native_drafter_gives_the_trees_of_the_reference(seed, sources):
    compare(seed, 150, sources)


@needs_compiler
def test_the_native_drafter_refuses_sequences_it_does_not_know():
    drafter = NativeDrafter(VOCAB)
    with pytest.raises(InvariantBroken, match="does not know"):
        grow(drafter, 3, 4)
    drafter.commit([Committed(3, (1,))])
    drafter.forget(3)


@needs_compiler
def test_the_native_drafter_refuses_a_tuning_beyond_its_arrays():
    with pytest.raises(InvariantBroken, match="tuning"):
        NativeDrafter(VOCAB, Sources.ALL, TreeTuning(suffixes=SuffixTuning(max_context=40)))
