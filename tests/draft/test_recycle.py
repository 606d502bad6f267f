"""Recycled candidates: the last row of each token, in memory that does not grow."""

import numpy as np
import pytest

from samewise.draft.recycle import NUM_LEVELS, NUM_ROW_CLASSES, WIDTH, RecycleTable, row_classes


def row(first):
    """Eight candidates, the first given."""
    return [first + i for i in range(WIDTH)]


def test_a_token_has_the_candidates_of_the_last_row_that_followed_it():
    table = RecycleTable(100)
    assert table.candidates(7)[0] == [-1] * WIDTH
    table.remember([7, 9], [row(10), row(20)])
    table.remember([7], [row(30)])
    assert table.candidates(7)[0] == row(30)
    assert table.candidates(9)[0] == row(20)
    assert table.num_known == 2


def test_of_equal_tokens_in_one_call_the_last_row_stays():
    table = RecycleTable(100)
    table.remember([3, 4, 3], [row(10), row(20), row(30)], np.full((3, WIDTH), 0.5))
    assert table.candidates(3)[0] == row(30)


def test_memory_is_fixed_when_the_table_is_made():
    table = RecycleTable(1000)
    before = table.nbytes
    assert before == 1000 * 40
    for start in range(0, 1000, 100):
        tokens = list(range(start, start + 100))
        table.remember(tokens, [row(token) for token in tokens], np.full((100, WIDTH), 0.1))
    assert table.nbytes == before
    assert table.num_known == 1000


def test_a_cleared_table_has_no_candidates():
    table = RecycleTable(10)
    table.remember([1], [row(1)], [[0.5] * WIDTH])
    table.clear()
    assert table.num_known == 0
    assert table.candidates(1) == ([-1] * WIDTH, [0] * WIDTH)


def test_remembering_nothing_changes_nothing():
    table = RecycleTable(10)
    table.remember([], [], [])
    assert table.num_known == 0


def test_classes_are_ranks_without_probabilities_and_levels_with_them():
    assert row_classes(None, 2).tolist() == [list(range(WIDTH))] * 2
    probs = [[0.9, 0.3, 0.15, 0.01, 1e-9, 0.0, -1.0, float("nan")]]
    first, *others, zero, negative, nan = row_classes(probs)[0].tolist()
    assert first == WIDTH
    assert others == [WIDTH + NUM_LEVELS + level for level in (1, 2, 6, NUM_LEVELS - 1)]
    assert [zero, negative, nan] == [5, 6, 7]


@pytest.mark.parametrize("prob", [1.0, 0.7, 1e-3, 1e-30])
def test_every_class_has_a_weight(prob):
    assert 0 <= row_classes([[prob] * WIDTH]).max() < NUM_ROW_CLASSES
