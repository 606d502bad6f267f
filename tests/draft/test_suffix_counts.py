"""Suffix counts: they equal a count over the text, memory is bounded, private texts are not stored."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from samewise.draft.suffix_counts import (
    MAX_LENGTH,
    MAX_TOTAL,
    NUM_MATCH_CLASSES,
    NUM_SHARES,
    SEPARATOR,
    SuffixTrie,
    TextStore,
    match_class,
)
from samewise.draft.tuning import SuffixTuning

TUNING = SuffixTuning(max_context=4, max_successors=50)


def counted(text, context):
    """What followed `context` in `text`, counted by scanning."""
    size = len(context)
    return Counter(text[i + size] for i in range(len(text) - size) if text[i : i + size] == context)


def random_text(seed, length, vocab=6):
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def successors(trie, match):
    """(token, length, class) of each token that is named, after the longest context that it followed."""
    named, found = [], {}
    trie.name(match, 0, named)
    nodes, position, length = match
    lengths = [length] * (0 <= position < len(trie.tokens)) + list(range(len(nodes) - 1, 0, -1))
    for (_, tokens, classes), at in zip(named, lengths, strict=False):
        for token, kind in zip(tokens, classes, strict=True):
            if token != SEPARATOR:
                found.setdefault(token, (token, at, kind))
    return list(found.values())


@pytest.mark.parametrize("seed", range(3))
def test_counts_equal_those_of_a_scan(seed):
    text, trie, rng = [], SuffixTrie(TUNING), random.Random(seed)
    for token in random_text(seed, 200):
        trie.append(token)
        text.append(token)
        match, path = trie.match(), []
        for _ in range(3):
            for found, length, kind in successors(trie, match):
                counts = counted(text, (text + path)[-length:])
                assert kind == match_class(length, counts[found], counts.total())
            path.append(rng.randrange(6))
            match = trie.follow(match, path[-1])


@pytest.mark.parametrize("seed", range(3))
def test_every_token_that_followed_the_longest_context_is_named(seed):
    text, trie = random_text(seed, 300), SuffixTrie(TUNING)
    trie.extend(text)
    for suffix in (random_text(seed + i, 6) for i in range(9, 60)):
        found = successors(trie, trie.find(suffix))
        longest = max((n for n in range(1, 5) if counted(text, suffix[-n:])), default=0)
        assert {token for token, at, _ in found if at >= longest} >= set(counted(text, suffix[-longest:]))


def test_frequent_tokens_come_first_and_the_latest_of_equals():
    trie = SuffixTrie(replace(TUNING, max_successors=2))
    trie.extend([1, 5, 1, 6, 1, 7, 1, 6, 1])
    assert successors(trie, trie.find([1])) == [(6, 1, match_class(1, 2, 4)), (7, 1, match_class(1, 1, 4))]
    trie.extend([5, 1, 5, 1])
    assert successors(trie, trie.find([1])) == [(5, 1, match_class(1, 3, 6)), (6, 1, match_class(1, 2, 6))]


def test_a_match_in_one_place_is_followed_beyond_the_longest_context():
    trie = SuffixTrie(TUNING)
    trie.extend(list(range(40)))
    match = trie.find([3, 4, 5, 6])
    for token in range(7, 30):
        assert successors(trie, match)[0][0] == token
        match = trie.follow(match, token)
    assert match[2] == 4 + 23


def test_a_context_does_not_reach_from_one_text_into_the_next():
    trie = SuffixTrie(TUNING)
    for text in ([1, 2], [3, 4], [1, 2], [3, 4]):
        trie.extend(text)
        trie.separate()
    assert successors(trie, trie.find([2])) == []
    assert successors(trie, trie.find([9, 3])) == [(4, 1, match_class(1, 2, 2))]


def test_names_are_the_successors_with_their_classes():
    trie = SuffixTrie(TUNING)
    trie.extend([1, 2, 3, 1, 2, 4, 1, 2])
    named = []
    trie.name(trie.match(), 5, named)
    assert [(source, tokens) for source, tokens, _ in named] == [(5, (4, 3)), (5, (4, 3))]
    assert [classes for *_, classes in named] == [[match_class(n, 1, 2)] * 2 for n in (2, 1)]
    trie.append(4)
    named.clear()
    trie.name(trie.find([1, 2]), 5, named)
    assert named[0] == (5, (4, 3), [match_class(2, 2, 3), match_class(2, 1, 3)])


def test_classes_are_distinct_and_have_a_weight():
    classes = {
        match_class(length, times, total)
        for length in range(1, 2 * MAX_LENGTH)
        for total in range(1, 3 * MAX_TOTAL)
        for times in range(1, total + 1)
    }
    assert min(classes) >= 0
    assert max(classes) == NUM_MATCH_CLASSES - 1 == MAX_LENGTH * NUM_SHARES * MAX_TOTAL - 1
    assert match_class(3, 1, 1) != match_class(2, 1, 1)
    assert match_class(3, 1, 4) != match_class(3, 4, 4)


@pytest.mark.parametrize("vocab", [2, 6, 1000])
def test_the_store_is_bounded_and_keeps_the_newest_texts(vocab):
    store = TextStore(SuffixTuning(store_entries=4000, max_pools=4))
    for number in range(60):
        salt = b"a" if number % 3 else bytes([number])
        store.add(salt, random_text(number, 80, vocab))
        assert store.num_entries <= 4000
        assert sum(len(trie.tokens) for trie in store.tries(salt)) <= 4000
    newest = random_text(59, 80, vocab)
    trie = store.tries(b"a")[0]
    assert newest[7] in {token for token, *_ in successors(trie, trie.find(newest[:7]))}


def test_a_text_longer_than_the_store_keeps_its_end():
    store = TextStore(SuffixTuning(store_entries=400))
    text = random_text(1, 5000, 50)
    store.add(b"", text)
    assert store.num_entries <= 400
    (trie,) = store.tries(b"")
    assert successors(trie, trie.find(text[-3:-1]))[0][0] == text[-1]


def test_a_private_text_is_not_stored_and_salts_are_apart():
    store = TextStore(TUNING)
    store.add(None, [1, 2, 3, 4])
    assert store.num_entries == 0
    store.add(b"x", [1, 2, 3, 4])
    assert store.tries(None) == store.tries(b"") == []
    assert len(store.tries(b"x")) == 1
    store.clear()
    assert store.tries(b"x") == []
