"""Shares: one owner leaves room for another, and requests wait outside of the engine."""

import pytest

from samewise.shares import NO_OWNER, FairQueue, within_share


@pytest.mark.parametrize("total", [1, 2, 8, 128, 1000])
def test_one_owner_takes_three_quarters_and_another_finds_room(total: int) -> None:
    own = 0
    while within_share(own, own, total):
        own += 1
    assert max(1, total // 2) <= own <= max(1, 3 * total // 4)
    assert total == 1 or within_share(0, own, total)


def test_the_first_request_of_an_owner_may_take_what_is_free() -> None:
    assert within_share(0, 0, 100, 100)
    assert not within_share(0, 1, 100, 100)


def test_priority_orders_the_requests_of_one_owner_and_gains_nothing_over_another() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for number, priority in enumerate([0, 5, -1, 0]):
        queue.push(b"a", 2 * number, f"a{number}", priority=priority)
        queue.push(b"b", 2 * number + 1, f"b{number}", priority=-9)
    assert [queue.pop() for _ in range(9)] == ["a2", "b0", "a0", "b1", "a3", "b2", "a1", "b3", None]


def test_requests_are_admitted_by_the_fewest_running_then_by_age() -> None:
    queue: FairQueue[str] = FairQueue(8)
    for number in range(10):
        queue.push(b"many", number, f"many {number}")
    assert [queue.pop() for _ in range(7)] == [*(f"many {n}" for n in range(6)), None]
    queue.push(b"one", 10, "one 10")
    assert queue.pop() == "one 10"
    assert queue.num_waiting == 4
    assert not queue.forget(0)
    assert queue.forget(6)
    assert queue.waits(7)
    assert queue.pop() is None
    assert not queue.forget(10)
    assert queue.pop() == "many 7"
    for number in range(1, 10):
        queue.forget(number)
    assert (queue.num_waiting, queue._owners, queue._running, queue._waiting) == (0, {}, {}, {})
    assert not queue.forget(77)


def test_requests_without_an_owner_have_no_share_and_take_none() -> None:
    queue: FairQueue[str] = FairQueue(4, 6)
    for number in range(9):
        queue.push(NO_OWNER, number, f"none {number}", priority=-number)
    assert [queue.pop() for _ in range(7)] == [*(f"none {n}" for n in range(8, 2, -1)), None]
    queue.push(b"a", 9, "a")
    assert queue.pop() is None  # every place is taken
    queue.forget(8)
    assert queue.pop() == "a"
    queue.resize(4, 8)
    assert [queue.pop() for _ in range(3)] == ["none 2", "none 1", None]
