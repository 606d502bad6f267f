"""PagePool against a model that is three sets: every page is trash, free, held or resting."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from samewise.errors import InvariantBroken
from samewise.kv.pages import TRASH, PagePool

NUM = 7


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM)
        self.free = set(range(1, NUM))
        self.held: dict[int, int] = {}
        self.resting: set[int] = set()

    @rule()
    def take(self) -> None:
        page = self.pool.take()
        if not self.free:
            assert page is None
            return
        assert page in self.free
        self.free.remove(page)
        self.held[page] = 1

    @precondition(lambda self: self.held or self.resting)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({*self.held, *self.resting})))
        self.pool.hold(page)
        self.resting.discard(page)
        self.held[page] = self.held.get(page, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.held[page] -= 1
        assert self.pool.release(page) == self.held[page]
        if not self.held[page]:
            del self.held[page]
            self.resting.add(page)

    @precondition(lambda self: self.resting)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.resting)))
        self.pool.free(page)
        self.resting.remove(page)
        self.free.add(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_held_page_cannot_be_freed(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        with pytest.raises(InvariantBroken, match=f"page {page}"):
            self.pool.free(page)

    @invariant()
    def no_page_is_lost(self) -> None:
        self.pool.check(self.held, self.resting)
        assert self.pool.num_free == len(self.free)
        assert all(self.pool.refs(page) == self.held.get(page, 0) for page in range(NUM))


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase


def test_the_trash_page_is_never_handed_out() -> None:
    pool = PagePool(4)
    assert TRASH not in [pool.take() for _ in range(3)]
    assert pool.take() is None
    with pytest.raises(InvariantBroken):
        pool.free(TRASH)


def test_releasing_too_often_is_our_bug() -> None:
    pool = PagePool(3)
    page = pool.take()
    assert page is not None
    pool.release(page)
    with pytest.raises(InvariantBroken, match="more often than held"):
        pool.release(page)


@pytest.mark.parametrize("num", [-1, 0, 1])
def test_a_pool_without_pages_is_our_bug(num: int) -> None:
    with pytest.raises(InvariantBroken, match=f"{num} pages"):
        PagePool(num)


def test_check_sees_a_lost_page_a_stray_holder_and_a_page_in_two_homes() -> None:
    pool = PagePool(4)
    page = pool.take()
    assert page is not None
    pool.check({page: 1}, set())
    for held, resting in ({}, set()), ({page: 2}, set()), ({page: 1}, {page}), ({page: 1}, {2, 3}):
        with pytest.raises(InvariantBroken, match="page"):
            pool.check(held, resting)


def test_check_sees_a_page_freed_twice() -> None:
    pool = PagePool(4)
    page = pool.take()
    assert page is not None
    pool.release(page)
    pool.free(page)
    pool.free(page)
    with pytest.raises(InvariantBroken, match="twice"):
        pool.check({}, set())
