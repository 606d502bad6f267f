"""Work outside of the event loop, in a few threads that are shared fairly between the owners of requests.

Tokenising a long prompt and rendering a large answer take seconds. They run here, at most a few at a time,
and one owner's do not take every thread. Threads are daemons: none keeps the process alive.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from samewise.shares import FairQueue

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that does not keep the process alive. (asyncio.to_thread's would.)"""

    def give(job: Callable[[], None]) -> None:
        threading.Thread(target=job, name="samewise-work", daemon=True).start()

    return await _in_thread(work, lambda: None, give)


async def _in_thread(
    work: Callable[[], T], done: Callable[[], object], give: Callable[[Callable[[], None]], object]
) -> T:
    """The result of `work`, which a thread runs that is given it.

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

    give(run)
    return await future


class FairThreads:
    """At most `num_threads` pieces of work at once; the others wait. Used in one event loop.

    Threads start with the first pieces of work and stay, until this object is gone: starting one takes the
    event loop until the new thread has had the interpreter's lock.
    """

    def __init__(self, num_threads: int) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(num_threads)
        self._numbers = itertools.count()
        self._num_threads = num_threads
        self._num_started = 0
        self._num_running = 0  # pieces of work that have begun, and have not ended
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, _end_threads, self._jobs, num_threads)

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
        self._num_running += 1

        def give(job: Callable[[], None]) -> None:
            try:
                self._give(job)
            except RuntimeError:
                self._ended(number)
                raise

        return await _in_thread(work, lambda: self._ended(number), give)

    def _give(self, job: Callable[[], None]) -> None:
        """Have a thread run a job."""
        if self._num_started < min(self._num_running, self._num_threads):
            thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name="samewise-work", daemon=True)
            try:
                thread.start()
                self._num_started += 1
            except RuntimeError:  # the machine has no thread left: one of those that run takes the job
                if not self._num_started:
                    raise
        self._jobs.put(job)

    def _start(self) -> None:
        while (turn := self._queue.pop()) is not None:
            if not turn.done():
                turn.set_result(None)

    def _ended(self, number: int) -> None:
        self._num_running -= 1
        self._done(number)

    def _done(self, number: int) -> None:
        self._queue.forget(number)
        self._start()


def _run_jobs(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """A thread: jobs until there are no more."""
    while (job := jobs.get()) is not None:
        job()
        del job  # what it holds must not live until the next one


def _end_threads(jobs: SimpleQueue[Callable[[], None] | None], num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)


__all__ = ["FairThreads", "in_daemon_thread"]
