"""Suffix matching: the longest suffix wins, the store is bounded, and nobody reads what is not theirs."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samewise.draft.ngram import LONGEST, PLACES, Heard, Match, Ngram, TextIndex
from samewise.types import Ask, Sampling

TOKENS = st.lists(st.integers(0, 4), min_size=2, max_size=60)


def ask(seq_id, tokens, *, prompt_len=1, room=8, draft=(), pool=b""):
    return Ask(seq_id, tokens, prompt_len, list(draft), len(tokens) - 1, array("i"), Sampling(), room, pool)


def longest(text):
    """By scanning: the longest suffix of a text that ends earlier in it."""
    best = 0
    for end in range(1, len(text)):
        length = 0
        while length < min(end, LONGEST) and text[end - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        best = max(best, length)
    return best


@given(TOKENS)
def test_the_longest_match_is_found(text):
    index = TextIndex()
    index.extend(text)
    end, length = index.find(text, LONGEST, own=True)
    if length:
        assert text[end - length : end] == text[len(text) - length :]
    if len(text) <= PLACES + 1:  # every earlier place is looked at
        assert length == (longest(text) if longest(text) >= 2 else 0)


@given(TOKENS, st.integers(1, 12))
def test_what_follows_repeats_with_the_period(text, num):
    index = TextIndex()
    index.extend(text)
    end, length = index.find(text, LONGEST, own=True)
    if length:
        found = index.follow(end, num)
        assert len(found) == num
        whole = text + list(found)
        period = len(text) - end
        assert all(whole[i] == whole[i - period] for i in range(len(text), len(whole)))


@given(TOKENS, st.lists(st.integers(0, 4), max_size=20))
def test_growing_piece_by_piece_is_growing_at_once(text, more):
    at_once, piecewise = TextIndex(), TextIndex()
    at_once.extend(text + more)
    piecewise.extend(text)
    for token in more:
        piecewise.extend([token])
    assert at_once.find(text + more, LONGEST, own=True) == piecewise.find(text + more, LONGEST, own=True)


def test_a_match_says_what_came_next():
    ngram = Ngram()
    assert ngram.find(ask(0, [1, 2, 3, 4, 5, 9, 1, 2, 3])) == Match((4, 5, 9, 1, 2, 3, 4, 5), 3, shared=False)
    assert ngram.find(ask(1, [1, 2, 3])) is None
    (proposal,) = ngram.propose([ask(0, [1, 2, 3, 4, 5, 9, 1, 2, 3]), ask(1, [1, 2, 3])])
    assert (proposal.seq_id, proposal.tokens, proposal.drafter) == (0, (4, 5, 9, 1, 2, 3), "ngram")


def test_the_latest_of_equal_matches_wins():
    assert Ngram().find(ask(0, [1, 2, 7, 1, 2, 8, 1, 2])).tokens[0] == 8


def test_a_draft_under_way_is_left_alone():
    assert Ngram().propose([ask(0, [1, 2, 3, 1, 2], draft=[3])]) == []


def test_answers_are_shared_within_a_pool_and_prompts_are_not():
    ngram = Ngram()
    ngram.find(ask(0, [50, 51, 52, 1, 2, 3, 4], prompt_len=3, pool=b"a"))
    ngram.forget(0)
    assert ngram.find(ask(1, [9, 1, 2, 3], pool=b"a")) == Match((4,), 3, shared=True)
    for pool in (b"b", b"", None):
        assert ngram.find(ask(2, [9, 1, 2, 3], pool=pool)) is None
    assert ngram.find(ask(3, [50, 51, 52], pool=b"a")) is None


def test_who_does_not_share_leaves_nothing_and_takes_nothing():
    ngram = Ngram()
    ngram.find(ask(0, [5, 1, 2, 3, 4], pool=None))
    ngram.forget(0)
    assert ngram.find(ask(1, [9, 1, 2, 3])) is None
    ngram.find(ask(2, [5, 1, 2, 3, 4]))
    ngram.forget(2)
    assert ngram.find(ask(3, [9, 1, 2, 3], pool=None)) is None
    assert ngram.find(ask(4, [9, 1, 2, 3])) is not None


def test_texts_are_not_followed_into_one_another():
    ngram = Ngram()
    for seq_id, text in enumerate(([0, 1, 2, 3], [0, 7, 8, 9])):
        ngram.find(ask(seq_id, text))
        ngram.forget(seq_id)
    assert ngram.find(ask(9, [6, 1, 2, 3])) is None  # nothing follows in its own text
    assert all(token >= 0 for token in ngram.find(ask(10, [1, 7, 8, 9, 1, 7, 8])).tokens)


def test_the_store_is_bounded():
    ngram = Ngram(store_tokens=100)
    for seq_id in range(50):
        ngram.find(ask(seq_id, [seq_id, *range(1000 + 10 * seq_id, 1010 + 10 * seq_id)]))
        ngram.forget(seq_id)
    kept = sum(len(half.tokens) for half in ngram._pools[b""].halves)
    assert kept <= 100
    assert ngram.find(ask(99, [0, 1490, 1491, 1492])) is not None
    assert ngram.find(ask(98, [0, 1000, 1001, 1002])) is None
    for pool in range(200):
        ngram.find(ask(1000 + pool, [0, 1, 2, 3], pool=bytes([pool])))
        ngram.forget(1000 + pool)
    assert len(ngram._pools) <= 64
    assert ngram._stored() <= 100


@pytest.mark.parametrize("seq_id", [3, 10**9])
def test_forgetting_a_stranger_is_fine(seq_id):
    Ngram().forget(seq_id)


def test_listening_tells_how_the_match_before_fared():
    ngram = Ngram()
    assert ngram.listen(0, (1,), 7) == Heard(0, None)  # its text is not known
    ngram.meet([ask(0, [1, 2, 3, 4, 9, 1])])
    assert ngram.listen(0, (2,), 7) == Heard(2, None)  # 3 followed
    assert ngram.listen(0, (3,), 8) == Heard(3, (2, True))  # then 4
    assert ngram.listen(0, (8,), 9) == Heard(0, (3, False))
    assert ngram.listen(0, (8,), 10) == Heard(0, None)
    ngram.listen(0, (1,), 11)
    assert ngram.listen(0, (2,), 12).length == 2
    assert ngram.listen(0, (3,), 14) == Heard(0, None)  # something was missed in between
    ngram.find(ask(0, [1, 2, 3, 4, 9, 1, 2, 3, 8, 8, 1, 2, 7]))  # asked: what was heard is forgotten
    assert ngram.listen(0, (3,), 14).fared is None


def test_nothing_is_foretold_where_a_stored_answer_ends():
    ngram = Ngram()
    ngram.meet([ask(0, [9, 1, 2, 3, 4])])
    ngram.forget(0)  # the pool now holds 1, 2, 3, 4 and an end
    ngram.meet([ask(1, [7, 1, 2, 3])])
    assert ngram.listen(1, (4,), 5) == Heard(0, None)
    assert ngram.find(ask(1, [7, 1, 2, 3, 4])) is None
