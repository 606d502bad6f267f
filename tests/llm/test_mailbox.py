"""Mailbox and LoopWaker: items reach coroutines in other threads' event loops, in order."""

import asyncio
import threading

from samewise.llm.mailbox import MAX_TAKEN, LoopWaker, Mailbox, UnreadBudget, call_in_loop, chunk_size
from samewise.outputs import Chunk

CHUNK = Chunk(0, "a", [1], [-0.5], None, None, None, 0, 0, 0)


def test_take_returns_all_items_in_order() -> None:
    async def work() -> None:
        mailbox, error = Mailbox(), ValueError("planted")
        for item in (CHUNK, error, None):
            mailbox.put(item)
        assert await mailbox.take() == [CHUNK, error, None]
        mailbox.put(None)
        assert await mailbox.take() == [None]

    asyncio.run(work())


def test_take_waits_for_the_first_item() -> None:
    async def work() -> None:
        mailbox = Mailbox()
        taking = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        assert not taking.done()
        mailbox.put(CHUNK)
        mailbox.put(None)  # the reader was woken already
        assert await asyncio.wait_for(taking, 20) == [CHUNK, None]

    asyncio.run(work())


def test_take_waits_no_longer_than_a_pause() -> None:
    """And an item that comes later is taken by the next call; a timer that was not needed wakes none."""

    async def work() -> None:
        mailbox = Mailbox()
        assert await mailbox.take(0.01) == []
        mailbox.put(CHUNK)
        assert await mailbox.take(0.01) == [CHUNK]
        asyncio.get_running_loop().call_later(0.03, mailbox.put, None)
        assert await mailbox.take(60) == [None]
        taking = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0.03)
        assert not taking.done()
        taking.cancel()

    asyncio.run(work())


def test_an_item_put_after_a_cancelled_take_is_kept() -> None:
    async def work() -> None:
        mailbox = Mailbox()
        taking = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        mailbox.put(CHUNK)
        assert await mailbox.take() == [CHUNK]

    asyncio.run(work())


def test_the_waker_delivers_to_several_mailboxes_of_a_loop() -> None:
    async def work() -> None:
        waker, mailboxes = LoopWaker(), [Mailbox(), Mailbox()]
        loop = asyncio.get_running_loop()
        waker.deliver({loop: [(mailboxes[0], CHUNK), (mailboxes[1], None), (mailboxes[0], None)]})
        assert await asyncio.wait_for(mailboxes[0].take(), 20) == [CHUNK, None]
        assert await asyncio.wait_for(mailboxes[1].take(), 20) == [None]
        waker.stop()
        await asyncio.to_thread(waker.join)

    asyncio.run(work())


def test_functions_are_called_in_the_thread_of_their_loop() -> None:
    async def work() -> None:
        waker, threads = LoopWaker(), list[int]()
        done = asyncio.Event()

        def record(_: object) -> None:
            threads.append(threading.get_ident())
            done.set()

        waker.call(asyncio.get_running_loop(), record, None)
        await asyncio.wait_for(done.wait(), 20)
        assert threads == [threading.get_ident()]
        waker.stop()
        await asyncio.to_thread(waker.join)

    asyncio.run(work())


def test_a_call_in_a_closed_loop_does_nothing() -> None:
    loop, mailbox = asyncio.new_event_loop(), Mailbox()
    loop.close()
    call_in_loop(loop, mailbox.put, CHUNK)
    assert not mailbox._items


def test_a_pause_begins_anew_with_every_call() -> None:
    """One timer serves them all: it outlives items, and wakes only a call that has waited its whole pause."""

    async def work() -> None:
        mailbox, loop = Mailbox(), asyncio.get_running_loop()
        for _ in range(4):  # the first timer expires in the middle of a later call
            loop.call_later(0.03, mailbox.put, CHUNK)
            assert await mailbox.take(0.08) == [CHUNK]
        began = loop.time()
        assert await mailbox.take(0.08) == []
        assert loop.time() - began >= 0.07  # the clock's resolution is left out
        assert await mailbox.take(0.01) == []  # a shorter pause replaces the timer

    asyncio.run(work())


def test_unread_bytes_are_those_of_the_items_there() -> None:
    async def work() -> None:
        budget, mailbox = UnreadBudget(10**9), Mailbox()
        mailbox.put(CHUNK)  # before there is an account
        mailbox.limit(budget, lambda: None)
        for _ in range(2 * MAX_TAKEN):
            mailbox.put(CHUNK)
        left = 2 * MAX_TAKEN + 1
        while left:
            assert budget.used == left * chunk_size(CHUNK)
            left -= len(await mailbox.take())
        assert budget.used == 0
        mailbox.put(CHUNK)
        mailbox.close()
        assert budget.used == 0

    asyncio.run(work())
