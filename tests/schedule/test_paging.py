"""Paging: a sequence's pages are matched, taken and released, and none is lost."""

from typing import Any

import pytest
from fake_engine import PAGE, make_limits
from hypothesis import given, settings
from hypothesis import strategies as st

from samewise.errors import InvariantBroken
from samewise.schedule.paging import Paging
from samewise.types import Request, Sampling, Sequence

PROMPT = (1, 2, 3, 4, 0, 1, 2, 3, 1)  # two pages and a token


def make_paging(num_pages: int = 10, **limits: Any) -> Paging:
    return Paging(make_limits(num_pages=num_pages, **limits))


def make_sequence(request_id: int = 0, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Sequence:
    request = Request(request_id, prompt, Sampling(), 8, **fields)
    return Sequence(request, list(prompt), len(prompt) + 8, score_next=request.first_scored)


def start_read(paging: Paging, seq: Sequence, kv_len: int) -> None:
    """Start a sequence and give it pages up to `kv_len`, as if their KV had been computed."""
    assert paging.start(seq, force=False)
    assert paging.grow(seq, kv_len)
    seq.kv_len = kv_len


def test_pages_are_counted_in_whole_pages() -> None:
    assert [make_paging().pages_for(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]


def test_a_sequence_starts_without_pages_and_grows() -> None:
    paging, seq = make_paging(), make_sequence()
    assert paging.start(seq, force=False)
    assert (list(seq.pages), seq.kv_len, paging.index.num_available) == ([], 0, 9)
    assert paging.grow(seq, PAGE + 1)
    assert (len(seq.pages), paging.room(seq), paging.index.num_available) == (2, 2 * PAGE, 7)
    assert paging.grow(seq, 2 * PAGE)  # it has these pages already
    assert paging.index.num_available == 7
    paging.check([seq], [])
    paging.release(seq)
    assert (list(seq.pages), paging.index.num_available) == ([], 9)
    paging.check([], [seq])


def test_growing_beyond_the_pool_keeps_the_pages_taken_so_far() -> None:
    paging, seq = make_paging(num_pages=4), make_sequence()
    assert paging.start(seq, force=False)
    assert not paging.grow(seq, 4 * PAGE)
    assert (len(seq.pages), paging.index.num_available) == (3, 0)
    paging.check([seq], [])


def test_a_sequence_whose_tokens_do_not_fit_starts_only_by_force() -> None:
    paging, seq = make_paging(num_pages=3), make_sequence()
    assert not paging.start(seq, force=False)
    paging.check([], [seq])
    assert paging.start(seq, force=True)
    paging.check([seq], [])


@pytest.mark.parametrize(
    ("caching", "fields", "cached_pages"),
    [
        (True, {}, 2),
        (True, {"prompt": PROMPT[:8]}, 1),  # the last token is computed again
        (True, {"prompt": (1, 2, 3, 4, 5, 1, 2, 3, 1)}, 1),
        (True, {"salt": b"other"}, 0),
        (True, {"score_from": 6}, 1),  # the row before position 6 gives its score
        (True, {"prompt_logprobs": 0}, 0),
        (False, {}, 0),
    ],
)
def test_a_sequence_starts_with_the_shared_pages_of_its_prefix(
    caching: bool, fields: dict[str, Any], cached_pages: int
) -> None:
    paging, first, second = make_paging(prefix_caching=caching), make_sequence(), make_sequence(1, **fields)
    start_read(paging, first, 2 * PAGE)
    paging.share(first)
    assert paging.start(second, force=False)
    assert second.pages == first.pages[:cached_pages]
    assert (second.kv_len, second.num_indexed) == (cached_pages * PAGE, cached_pages)
    paging.check([first, second], [])
    for seq in (first, second):
        paging.release(seq)
    assert paging.index.num_available == 9


def test_a_refused_start_releases_the_matched_pages() -> None:
    paging, first, second = make_paging(num_pages=4), make_sequence(), make_sequence(1)
    start_read(paging, first, 2 * PAGE)
    paging.share(first)
    assert paging.grow(first, 3 * PAGE)
    assert not paging.start(second, force=False)
    paging.check([first], [second])


def test_moves_bring_the_accepted_path_of_a_tree_to_its_positions() -> None:
    paging, seq = make_paging(), make_sequence()
    start_read(paging, seq, PAGE)
    assert paging.grow(seq, 3 * PAGE)
    slots = [page * PAGE + i for page in seq.pages for i in range(PAGE)]
    first = PAGE + 1
    assert paging.moves(seq, first, (0, 2, 5)) == [
        (slots[first + 2], slots[first + 1]),
        (slots[first + 5], slots[first + 2]),
    ]
    assert paging.moves(seq, first, (0, 1)) == []


def test_check_detects_pages_of_a_waiting_sequence_and_lost_pages() -> None:
    paging, seq = make_paging(), make_sequence()
    start_read(paging, seq, PAGE)
    with pytest.raises(InvariantBroken, match="waits but holds pages"):
        paging.check([], [seq])
    with pytest.raises(InvariantBroken):
        paging.check([], [])


OPERATIONS = ("start", "grow", "share", "release")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2), st.integers(1, 16)), max_size=40))
def test_any_order_of_operations_conserves_pages(operations: list[tuple[str, int, int]]) -> None:
    paging, sequences = make_paging(num_pages=8), [make_sequence(i) for i in range(3)]
    running: dict[int, Sequence] = {}
    for operation, i, num_tokens in operations:
        seq = sequences[i]
        if operation == "start":
            if i not in running and paging.start(seq, force=not running):
                running[i] = seq
        elif i not in running:
            continue
        elif operation == "grow":
            if paging.grow(seq, num_tokens):
                seq.kv_len = max(seq.kv_len, min(num_tokens, len(seq.tokens) - 1))
        elif operation == "release":
            paging.release(running.pop(i))
            seq.kv_len = seq.num_indexed = 0
        else:
            getattr(paging, operation)(seq)
        paging.check(running.values(), [seq for i, seq in enumerate(sequences) if i not in running])
    for seq in running.values():
        paging.release(seq)
    assert paging.index.num_available == 7
