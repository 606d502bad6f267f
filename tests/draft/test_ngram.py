"""Suffix matching: the longest match wins, the store is bounded, text is shared only within a pool."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samewise.draft.ngram import Match, Ngram, TextIndex, TrackedMatch
from samewise.draft.tuning import NgramTuning
from samewise.types import Ask, Sampling

TOKENS = st.lists(st.integers(0, 4), min_size=2, max_size=60)
TUNING = NgramTuning()


def ask(seq_id, tokens, *, prompt_len=1, room=8, draft=(), pool=b""):
    return Ask(seq_id, tokens, prompt_len, list(draft), len(tokens) - 1, array("i"), Sampling(), room, pool)


def index_of(text):
    index = TextIndex()
    index.extend(text)
    return index


def longest_match(text):
    """By scanning: the length of the longest suffix that ends earlier in the text."""
    best = 0
    for end in range(1, len(text)):
        length = 0
        while length < min(end, TUNING.max_match) and text[end - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        best = max(best, length)
    return best


@given(TOKENS)
def test_the_longest_match_is_found(text):
    end, length = index_of(text).find(text, own=True)
    if length:
        assert text[end - length : end] == text[len(text) - length :]
    if len(text) <= TUNING.max_places + 1:  # every earlier place is compared
        assert length == (longest_match(text) if longest_match(text) >= 2 else 0)


@given(TOKENS, st.integers(1, 12))
def test_what_follows_a_match_repeats_with_its_period(text, num):
    index = index_of(text)
    end, length = index.find(text, own=True)
    if length:
        tokens = index.follow(end, num)
        assert len(tokens) == num
        extended = text + list(tokens)
        period = len(text) - end
        assert all(extended[i] == extended[i - period] for i in range(len(text), len(extended)))


@given(TOKENS, st.lists(st.integers(0, 4), max_size=20))
def test_an_index_built_token_by_token_equals_one_built_at_once(text, more):
    at_once, piecewise = index_of(text + more), index_of(text)
    for token in more:
        piecewise.extend([token])
    assert at_once.find(text + more, own=True) == piecewise.find(text + more, own=True)


def test_a_match_proposes_what_came_next():
    ngram = Ngram()
    assert ngram.find(ask(0, [1, 2, 3, 4, 5, 9, 1, 2, 3])) == Match((4, 5, 9, 1, 2, 3, 4, 5), 3, shared=False)
    assert ngram.find(ask(1, [1, 2, 3])) is None
    (proposal,) = ngram.propose([ask(0, [1, 2, 3, 4, 5, 9, 1, 2, 3]), ask(1, [1, 2, 3])])
    assert (proposal.seq_id, proposal.tokens, proposal.drafter) == (0, (4, 5, 9, 1, 2, 3), "ngram")


def test_the_latest_of_equal_matches_wins():
    assert Ngram().find(ask(0, [1, 2, 7, 1, 2, 8, 1, 2])).tokens[0] == 8


def test_a_draft_under_way_is_not_extended():
    assert Ngram().propose([ask(0, [1, 2, 3, 1, 2], draft=[3])]) == []


def test_answers_are_shared_within_a_pool_and_prompts_are_not():
    ngram = Ngram()
    ngram.find(ask(0, [50, 51, 52, 1, 2, 3, 4], prompt_len=3, pool=b"a"))
    ngram.forget(0)
    assert ngram.find(ask(1, [9, 1, 2, 3], pool=b"a")) == Match((4,), 3, shared=True)
    for pool in (b"b", b"", None):
        assert ngram.find(ask(2, [9, 1, 2, 3], pool=pool)) is None
    assert ngram.find(ask(3, [50, 51, 52], pool=b"a")) is None


def test_a_sequence_without_a_pool_neither_stores_nor_reads_answers():
    ngram = Ngram()
    ngram.find(ask(0, [5, 1, 2, 3, 4], pool=None))
    ngram.forget(0)
    assert ngram.find(ask(1, [9, 1, 2, 3])) is None
    ngram.find(ask(2, [5, 1, 2, 3, 4]))
    ngram.forget(2)
    assert ngram.find(ask(3, [9, 1, 2, 3], pool=None)) is None
    assert ngram.find(ask(4, [9, 1, 2, 3])) is not None


def test_a_match_does_not_run_from_one_stored_answer_into_the_next():
    ngram = Ngram()
    for seq_id, text in enumerate(([0, 1, 2, 3], [0, 7, 8, 9])):
        ngram.find(ask(seq_id, text))
        ngram.forget(seq_id)
    assert ngram.find(ask(9, [6, 1, 2, 3])) is None  # the stored answer ends there
    assert all(token >= 0 for token in ngram.find(ask(10, [1, 7, 8, 9, 1, 7, 8])).tokens)


def test_the_store_is_bounded():
    ngram = Ngram(replace(TUNING, store_tokens=100))
    for seq_id in range(50):
        ngram.find(ask(seq_id, [seq_id, *range(1000 + 10 * seq_id, 1010 + 10 * seq_id)]))
        ngram.forget(seq_id)
    assert ngram._num_stored() <= 100
    assert ngram.find(ask(99, [0, 1490, 1491, 1492])) is not None
    assert ngram.find(ask(98, [0, 1000, 1001, 1002])) is None
    for pool in range(200):
        ngram.find(ask(1000 + pool, [0, 1, 2, 3], pool=bytes([pool])))
        ngram.forget(1000 + pool)
    assert len(ngram._pools) <= 64
    assert ngram._num_stored() <= 100


@pytest.mark.parametrize("seq_id", [3, 10**9])
def test_forgetting_an_unknown_sequence_does_nothing(seq_id):
    Ngram().forget(seq_id)


def test_tracking_tells_whether_the_match_before_predicted_the_next_token():
    ngram = Ngram()
    assert ngram.track(0, (1,), 7) == TrackedMatch(0, None)  # its prompt was not indexed
    ngram.meet([ask(0, [1, 2, 3, 4, 9, 1])])
    assert ngram.track(0, (2,), 7) == TrackedMatch(2, None)  # predicts 3
    assert ngram.track(0, (3,), 8) == TrackedMatch(3, (2, True))  # predicts 4
    assert ngram.track(0, (8,), 9) == TrackedMatch(0, (3, False))
    assert ngram.track(0, (8,), 10) == TrackedMatch(0, None)
    ngram.track(0, (1,), 11)
    assert ngram.track(0, (2,), 12).length == 2
    assert ngram.track(0, (3,), 14) == TrackedMatch(0, None)  # a token was missed
    ngram.find(ask(0, [1, 2, 3, 4, 9, 1, 2, 3, 8, 8, 1, 2, 7]))  # a proposal ends the tracked prediction
    assert ngram.track(0, (3,), 14).previous is None


def test_a_text_that_was_tracked_wrongly_is_indexed_again():
    ngram = Ngram()
    ngram.meet([ask(0, [1, 2, 3, 4, 9, 1])])
    ngram.track(0, (5,), 7)
    assert ngram.find(ask(0, [1, 2, 3, 4, 9, 1, 2])).tokens[:2] == (3, 4)


def test_nothing_is_predicted_where_a_stored_answer_ends():
    ngram = Ngram()
    ngram.meet([ask(0, [9, 1, 2, 3, 4])])
    ngram.forget(0)  # the pool now holds 1, 2, 3, 4 and a separator
    ngram.meet([ask(1, [7, 1, 2, 3])])
    assert ngram.track(1, (4,), 5) == TrackedMatch(0, None)
    assert ngram.find(ask(1, [7, 1, 2, 3, 4])) is None
