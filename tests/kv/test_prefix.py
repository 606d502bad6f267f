"""PrefixIndex against a model of plain dicts; digests against the prefixes they identify."""

from array import array
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from samewise.kv.pages import PagePool
from samewise.kv.prefix import PrefixIndex, extend_digests

PAGE_SIZE, NUM_PAGES = 2, 9
SALTS = (b"", b"a", b"b")


def digests(tokens: list[int], salt: bytes = b"", page_size: int = PAGE_SIZE) -> list[bytes]:
    result: list[bytes] = []
    extend_digests(result, tokens, salt, page_size, len(tokens) // page_size)
    return result


class IndexMachine(RuleBasedStateMachine):
    """Sequences start, share indexed pages, add their full pages, and finish."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(PagePool(NUM_PAGES), enabled=True)
        self.live: list[tuple[list[bytes], list[int]]] = []
        self.indexed: dict[bytes, int] = {}
        self.evictable: list[int] = []  # least recently used first

    @property
    def held(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for _, pages in self.live:
            for page in pages:
                counts[page] = counts.get(page, 0) + 1
        return counts

    @rule(units=st.lists(st.integers(0, 1), min_size=1, max_size=4), salt=st.sampled_from(SALTS))
    def start(self, units: list[int], salt: bytes) -> None:
        names = digests([unit for unit in units for _ in range(PAGE_SIZE)], salt)
        expected = []
        for name in names:
            if name not in self.indexed:
                break
            expected.append(self.indexed[name])
        pages = self.index.match(names)
        assert pages == expected
        for page in pages:
            self.index.hold(page)
            if page in self.evictable:
                self.evictable.remove(page)
        self.live.append((names, pages))
        while len(pages) < len(names) and (page := self._take()) is not None:
            pages.append(page)

    def _take(self) -> int | None:
        available, free = self.index.num_available, self.index.pool.num_free
        oldest = self.evictable[0] if self.evictable else None
        page = self.index.take()
        assert (page is None) == (available == 0)
        if page is not None and not free:
            assert page == oldest, "the least recently used page is evicted first"
            self.evictable.remove(page)
            self.indexed = {name: other for name, other in self.indexed.items() if other != page}
        return page

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def add_pages(self, data: st.DataObject) -> None:
        names, pages = data.draw(st.sampled_from(self.live))
        for name, page in zip(names, pages, strict=False):
            self.index.add(name, page)
            self.indexed.setdefault(name, page)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        _, pages = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        held = self.held
        self.index.release(pages)
        self.evictable += [p for p in reversed(pages) if p not in held and p in self.indexed.values()]

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.indexed, self.evictable = {}, []

    @invariant()
    def no_page_is_lost(self) -> None:
        self.index.check(self.held)
        assert self.index.num_available == NUM_PAGES - 1 - len(self.held)
        assert self.index.num_indexed == len(self.indexed)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase


def finished(index: PrefixIndex, tokens: list[int]) -> list[bytes]:
    """Digests of a finished sequence with all its pages indexed."""
    names = digests(tokens)
    pages = [page for _ in names if (page := index.take()) is not None]
    for name, page in zip(names, pages, strict=True):
        index.add(name, page)
    index.release(pages)
    return names


def test_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    index = PrefixIndex(PagePool(5), enabled=True)
    names = finished(index, [1, 1, 2, 2, 3, 3, 4, 4])
    for num_indexed in (3, 2, 1, 0):
        assert index.take() is not None
        assert len(index.match(names)) == num_indexed


def test_prefix_used_again_is_evicted_later() -> None:
    index = PrefixIndex(PagePool(4), enabled=True)
    first, second = finished(index, [1, 1]), finished(index, [2, 2])
    pages = index.match(first)
    index.hold(pages[0])
    index.release(pages)
    index.take(), index.take()
    assert index.match(first)
    assert not index.match(second)


def test_match_stops_at_the_first_unknown_digest() -> None:
    index = PrefixIndex(PagePool(9), enabled=True)
    names = finished(index, [1, 1, 2, 2, 3, 3])
    assert index.match(names[1:]) != []  # indexed by itself
    assert index.match([b"unknown", *names]) == []  # but not after an unknown page


def test_second_page_of_a_prefix_is_not_indexed_and_freed_on_release() -> None:
    index = PrefixIndex(PagePool(4), enabled=True)
    (name,) = digests([1, 1])
    one, two = index.take(), index.take()
    assert one is not None
    assert two is not None
    index.add(name, one)
    index.add(name, two)
    assert index.match([name]) == [one]
    index.release([two])
    assert index.pool.num_free == 2
    index.release([one])
    index.check({})


def test_disabled_index_indexes_nothing() -> None:
    index = PrefixIndex(PagePool(4), enabled=False)
    names = finished(index, [1, 1, 2, 2])
    assert index.match(names) == []
    assert index.pool.num_free == index.num_available == 3
    index.check({})


def test_pages_held_while_the_index_is_cleared_are_freed_on_release() -> None:
    index = PrefixIndex(PagePool(4), enabled=True)
    (name,) = digests([1, 1])
    page = index.take()
    assert page is not None
    index.add(name, page)
    index.clear()
    assert index.match([name]) == []
    index.release([page])
    assert index.pool.num_free == 3


def test_digests_differ_between_prefixes_and_salts() -> None:
    prefixes: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
    for salt in SALTS:
        for tokens in product(range(3), repeat=6):
            for i, name in enumerate(digests(list(tokens), salt)):
                prefix = (salt, tokens[: (i + 1) * PAGE_SIZE])
                assert prefixes.setdefault(name, prefix) == prefix
    assert len(prefixes) == len(SALTS) * (9 + 81 + 729)


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**20), max_size=24),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    salt=st.binary(max_size=4),
)
def test_digests_do_not_depend_on_the_steps_they_were_extended_in(
    tokens: list[int], cuts: list[int], salt: bytes
) -> None:
    full, extended = len(tokens) // PAGE_SIZE, []
    for cut in [*sorted(min(cut, full) for cut in cuts), full]:
        extend_digests(extended, tokens, salt, PAGE_SIZE, cut)
    assert extended == digests(tokens, salt)


@settings(deadline=None)
@given(
    one=st.lists(st.integers(0, 300), min_size=2, max_size=12),
    two=st.lists(st.integers(0, 300), min_size=2, max_size=12),
)
def test_digests_are_equal_as_far_as_the_tokens_are(one: list[int], two: list[int]) -> None:
    num_equal = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        num_equal += 1
    names = list(zip(digests(one), digests(two), strict=False))
    assert [a == b for a, b in names] == [i < num_equal // PAGE_SIZE for i in range(len(names))]


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_tokens_have_a_fixed_width_in_the_digest(page_size: int) -> None:
    """The tokens 1, 23 and 12, 3 give different digests."""
    assert digests([1, 23, 1, 1], page_size=page_size)[0] != digests([12, 3, 1, 1], page_size=page_size)[0]
    assert array("q", [1]).itemsize == 8
