"""PrefixIndex against a model of plain dicts; digests against the prefixes they stand for."""

from array import array
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from samewise.kv.pages import PagePool
from samewise.kv.prefix import PrefixIndex, chain

PAGE, NUM = 2, 9
SALTS = (b"", b"a", b"b")


def digests(tokens: list[int], salt: bytes = b"", page: int = PAGE) -> list[bytes]:
    found: list[bytes] = []
    chain(found, tokens, salt, page, len(tokens) // page)
    return found


class Index(RuleBasedStateMachine):
    """Sequences come, share what is known, offer their full pages, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(PagePool(NUM), enabled=True)
        self.live: list[tuple[list[bytes], list[int]]] = []
        self.known: dict[bytes, int] = {}
        self.resting: list[int] = []  # least recently used first

    @property
    def held(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for _, pages in self.live:
            for page in pages:
                counts[page] = counts.get(page, 0) + 1
        return counts

    @rule(units=st.lists(st.integers(0, 1), min_size=1, max_size=4), salt=st.sampled_from(SALTS))
    def come(self, units: list[int], salt: bytes) -> None:
        names = digests([unit for unit in units for _ in range(PAGE)], salt)
        expected = []
        for name in names:
            if name not in self.known:
                break
            expected.append(self.known[name])
        pages = self.index.match(names)
        assert pages == expected
        for page in pages:
            self.index.hold(page)
            if page in self.resting:
                self.resting.remove(page)
        self.live.append((names, pages))
        while len(pages) < len(names) and (page := self._take()) is not None:
            pages.append(page)

    def _take(self) -> int | None:
        could, free = self.index.num_available, self.index.pool.num_free
        oldest = self.resting[0] if self.resting else None
        page = self.index.take()
        assert (page is None) == (could == 0)
        if page is not None and not free:
            assert page == oldest, "the least recently used goes first"
            self.resting.remove(page)
            self.known = {name: other for name, other in self.known.items() if other != page}
        return page

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        names, pages = data.draw(st.sampled_from(self.live))
        for name, page in zip(names, pages, strict=False):
            self.index.offer(name, page)
            self.known.setdefault(name, page)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        _, pages = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        held = self.held
        self.index.release(pages)
        self.resting += [p for p in reversed(pages) if p not in held and p in self.known.values()]

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.known, self.resting = {}, []

    @invariant()
    def no_page_is_lost(self) -> None:
        self.index.check(self.held)
        assert self.index.num_available == NUM - 1 - len(self.held)
        assert self.index.num_indexed == len(self.known)


Index.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = Index.TestCase


def rested(index: PrefixIndex, tokens: list[int]) -> list[bytes]:
    """A sequence that came, was offered whole, and went."""
    names = digests(tokens)
    pages = [page for _ in names if (page := index.take()) is not None]
    for name, page in zip(names, pages, strict=True):
        index.offer(name, page)
    index.release(pages)
    return names


def test_the_tail_of_a_prefix_is_forgotten_before_its_head() -> None:
    index = PrefixIndex(PagePool(5), enabled=True)
    names = rested(index, [1, 1, 2, 2, 3, 3, 4, 4])
    for left in (3, 2, 1, 0):
        assert index.take() is not None
        assert len(index.match(names)) == left


def test_using_a_prefix_again_keeps_it() -> None:
    index = PrefixIndex(PagePool(4), enabled=True)
    first, second = rested(index, [1, 1]), rested(index, [2, 2])
    pages = index.match(first)
    index.hold(pages[0])
    index.release(pages)
    index.take(), index.take()
    assert index.match(first)
    assert not index.match(second)


def test_a_match_needs_every_page_before_it() -> None:
    index = PrefixIndex(PagePool(9), enabled=True)
    names = rested(index, [1, 1, 2, 2, 3, 3])
    assert index.match(names[1:]) != []  # known by name
    assert index.match([b"unknown", *names]) == []  # but only reached through its head


def test_the_first_page_to_hold_a_prefix_keeps_it_and_a_twin_is_freed() -> None:
    index = PrefixIndex(PagePool(4), enabled=True)
    (name,) = digests([1, 1])
    one, two = index.take(), index.take()
    assert one is not None
    assert two is not None
    index.offer(name, one)
    index.offer(name, two)
    assert index.match([name]) == [one]
    index.release([two])
    assert index.pool.num_free == 2
    index.release([one])
    index.check({})


def test_switched_off_it_remembers_nothing() -> None:
    index = PrefixIndex(PagePool(4), enabled=False)
    names = rested(index, [1, 1, 2, 2])
    assert index.match(names) == []
    assert index.pool.num_free == index.num_available == 3
    index.check({})


def test_clearing_while_pages_are_held_lets_them_go_unremembered() -> None:
    index = PrefixIndex(PagePool(4), enabled=True)
    (name,) = digests([1, 1])
    page = index.take()
    assert page is not None
    index.offer(name, page)
    index.clear()
    assert index.match([name]) == []
    index.release([page])
    assert index.pool.num_free == 3


def test_no_two_prefixes_or_salts_share_a_digest() -> None:
    found: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
    for salt in SALTS:
        for tokens in product(range(3), repeat=6):
            for i, name in enumerate(digests(list(tokens), salt)):
                prefix = (salt, tokens[: (i + 1) * PAGE])
                assert found.setdefault(name, prefix) == prefix
    assert len(found) == len(SALTS) * (9 + 81 + 729)


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**20), max_size=24),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    salt=st.binary(max_size=4),
)
def test_a_chain_may_be_made_in_any_number_of_steps(tokens: list[int], cuts: list[int], salt: bytes) -> None:
    full, grown = len(tokens) // PAGE, []
    for cut in [*sorted(min(cut, full) for cut in cuts), full]:
        chain(grown, tokens, salt, PAGE, cut)
    assert grown == digests(tokens, salt)


@settings(deadline=None)
@given(
    one=st.lists(st.integers(0, 300), min_size=2, max_size=12),
    two=st.lists(st.integers(0, 300), min_size=2, max_size=12),
)
def test_digests_are_equal_exactly_as_far_as_prefixes_are(one: list[int], two: list[int]) -> None:
    same = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        same += 1
    names = list(zip(digests(one), digests(two), strict=False))
    assert [a == b for a, b in names] == [i < same // PAGE for i in range(len(names))]


@pytest.mark.parametrize("page", [1, 2, 4])
def test_a_page_border_is_part_of_no_token(page: int) -> None:
    """Tokens are fixed-width in the digest: 1, 23 is not 12, 3."""
    assert digests([1, 23, 1, 1], page=page)[0] != digests([12, 3, 1, 1], page=page)[0]
    assert array("q", [1]).itemsize == 8
