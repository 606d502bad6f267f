"""Work outside of the event loop, in a few threads that are shared fairly between the owners of requests.

Tokenising a long prompt and rendering a large answer take seconds. They run here, at most a few at a time,
and one owner's do not take every thread. Threads are daemons: none keeps the process alive.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from samewise.shares import FairQueue

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], done: Callable[[], object] = lambda: None) -> T:
    """Run `work` in a thread that does not keep the process alive. (asyncio.to_thread's would.)

    `done` is called in the event loop when the work has ended, also where the caller was cancelled before.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        done()
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        with suppress(RuntimeError):  # the event loop was closed meanwhile
            loop.call_soon_threadsafe(resolve, *outcome)

    threading.Thread(target=run, name="samewise-work", daemon=True).start()
    return await future


class FairThreads:
    """At most `num_threads` pieces of work at once; the others wait. Used in one event loop."""

    def __init__(self, num_threads: int) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(num_threads)
        self._numbers = itertools.count()

    async def run(self, work: Callable[[], T], *, owner: bytes | None = None) -> T:
        """The result of `work`. Without an owner it waits for its turn like that of any other.

        Where the caller is cancelled, work that has begun goes on, and keeps its thread until it ends.
        """
        number = next(self._numbers)
        turn = asyncio.get_running_loop().create_future()
        self._queue.push(b"%d" % number if owner is None else owner, number, turn)
        self._start()
        try:
            await turn
        except asyncio.CancelledError:
            self._done(number)
            raise
        return await in_daemon_thread(work, lambda: self._done(number))

    def _start(self) -> None:
        while (turn := self._queue.pop()) is not None:
            if not turn.done():
                turn.set_result(None)

    def _done(self, number: int) -> None:
        self._queue.forget(number)
        self._start()


__all__ = ["FairThreads", "in_daemon_thread"]
