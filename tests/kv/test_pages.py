"""PagePool against a model of three sets: every page is trash, free, held or evictable."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from samewise.errors import InvariantBroken
from samewise.kv.pages import TRASH, PagePool

NUM_PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.free = set(range(1, NUM_PAGES))
        self.held: dict[int, int] = {}
        self.evictable: set[int] = set()

    @rule()
    def take(self) -> None:
        page = self.pool.take()
        if not self.free:
            assert page is None
            return
        assert page in self.free
        self.free.remove(page)
        self.held[page] = 1

    @precondition(lambda self: self.held or self.evictable)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({*self.held, *self.evictable})))
        self.pool.hold(page)
        self.evictable.discard(page)
        self.held[page] = self.held.get(page, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.held[page] -= 1
        assert self.pool.release(page) == self.held[page]
        if not self.held[page]:
            del self.held[page]
            self.evictable.add(page)

    @precondition(lambda self: self.evictable)
    @rule(data=st.data())
    def free_a_page(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.evictable)))
        self.pool.free(page)
        self.evictable.remove(page)
        self.free.add(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def freeing_a_held_page_is_refused(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        with pytest.raises(InvariantBroken, match=f"page {page}"):
            self.pool.free(page)

    @invariant()
    def no_page_is_lost(self) -> None:
        self.pool.check(self.held, self.evictable)
        assert self.pool.num_free == len(self.free)
        assert all(self.pool.refs(page) == self.held.get(page, 0) for page in range(NUM_PAGES))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_trash_page_is_never_allocated() -> None:
    pool = PagePool(4)
    assert TRASH not in [pool.take() for _ in range(3)]
    assert pool.take() is None
    with pytest.raises(InvariantBroken):
        pool.free(TRASH)


def test_releasing_a_page_without_holders_breaks_an_invariant() -> None:
    pool = PagePool(3)
    page = pool.take()
    assert page is not None
    pool.release(page)
    with pytest.raises(InvariantBroken, match="more often than held"):
        pool.release(page)


@pytest.mark.parametrize("num", [-1, 0, 1])
def test_pool_without_allocatable_pages_breaks_an_invariant(num: int) -> None:
    with pytest.raises(InvariantBroken, match=f"{num} pages"):
        PagePool(num)


def test_check_detects_lost_pages_wrong_holder_counts_and_pages_in_two_states() -> None:
    pool = PagePool(4)
    page = pool.take()
    assert page is not None
    pool.check({page: 1}, set())
    for held, evictable in ({}, set()), ({page: 2}, set()), ({page: 1}, {page}), ({page: 1}, {2, 3}):
        with pytest.raises(InvariantBroken, match="page"):
            pool.check(held, evictable)


def test_check_detects_a_page_freed_twice() -> None:
    pool = PagePool(4)
    page = pool.take()
    assert page is not None
    pool.release(page)
    pool.free(page)
    pool.free(page)
    with pytest.raises(InvariantBroken, match="twice"):
        pool.check({}, set())
