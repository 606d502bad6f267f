"""Counters of draft trees."""

from samewise.counters import Counters
from samewise.types import MAX_TREE_DEPTH


def test_drafts_are_counted_by_drafter_and_by_accepted_depth():
    counters = Counters()
    for nodes, depth in ((8, 0), (8, 3), (1, 1), (16, 3)):
        counters.add_draft("ngram", nodes, depth)
    counters.add_draft("model", 4, 4)
    assert counters.drafts == 5
    assert (counters.guessed, counters.accepted, counters.rolled_back) == (37, 11, 26)
    ngram = counters.drafters["ngram"]
    assert (ngram.drafts, ngram.guessed, ngram.accepted, ngram.depths) == (4, 33, 7, [1, 1, 0, 2])
    assert counters.drafters["model"].depths == [0, 0, 0, 0, 1]


def test_the_histogram_of_depths_is_bounded():
    counters = Counters()
    counters.add_draft("recorded", 500, 400)
    depths = counters.drafters["recorded"].depths
    assert (len(depths), depths[MAX_TREE_DEPTH], counters.accepted) == (MAX_TREE_DEPTH + 1, 1, 400)
