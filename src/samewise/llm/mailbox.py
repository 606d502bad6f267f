"""Carry chunks from the engine's thread to coroutines in other event loops."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from samewise.outputs import Chunk

Item = Chunk | BaseException | None
"""What a reader receives: a chunk, the error that ends its stream, or None at the stream's end."""

_LoopCall = tuple[asyncio.AbstractEventLoop, Callable[..., object], object]
"""An event loop, a function to call in it, and the function's argument."""


class Mailbox:
    """Items for one reader, put and taken in the reader's event loop. Cheaper than asyncio.Queue."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Add an item and wake the reader."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Item]:
        """All items there are; waits for the first."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return items


class LoopWaker:
    """A thread that calls functions in event loops on behalf of the engine's thread.

    Waking a loop is a system call that releases the interpreter lock, and the caller gets the lock back only
    after the loop has done its work: with eight readers a millisecond in which the engine would not step.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_LoopCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="samewise-wake", daemon=True)
        self._thread.start()

    def call(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., object], argument: object
    ) -> None:
        """Have `function(argument)` called in `loop`, soon."""
        self._calls.put((loop, function, argument))

    def deliver(self, mail: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Item]]]) -> None:
        """Put items into mailboxes; each loop is woken once, however many mailboxes it has."""
        for loop, items in mail.items():
            self.call(loop, _put_all, items)

    def stop(self) -> None:
        """End the thread after the calls that were made so far."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call_in_loop(*call)


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], argument: object) -> None:
    """Call a function in an event loop of another thread; does nothing if that loop is closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:  # the loop is closed, so no coroutine is waiting there
        return


def _put_all(items: list[tuple[Mailbox, Item]]) -> None:
    for mailbox, item in items:
        mailbox.put(item)


__all__ = ["Item", "LoopWaker", "Mailbox", "call_in_loop"]
