"""Carry chunks from the engine's thread to coroutines in other event loops, and bound what is not read."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable

from samewise.outputs import Chunk

Item = Chunk | BaseException | None
"""What a reader receives: a chunk, the error that ends its stream, or None at the stream's end."""

_LoopCall = tuple[asyncio.AbstractEventLoop, Callable[..., object], object]
"""An event loop, a function to call in it, and the function's argument."""


CHUNK_BYTES = 512
LOGPROB_BYTES = 192
"""Bytes of memory of a chunk, and of each log-probability in it with its dictionary entry. Found by measuring
20,000 chunks of 0, 1 and 21 log-probabilities (377, 777 and 3,425 bytes a chunk); rounded up."""


MAX_TAKEN = 128
"""Items that a reader gets at once: what it has taken is not counted as unread any more. Set by hand."""


def chunk_size(chunk: Chunk) -> int:
    """About how many bytes of memory a chunk takes."""
    size = CHUNK_BYTES + len(chunk.text) + 64 * len(chunk.token_ids)
    return size + LOGPROB_BYTES * sum(map(len, chunk.logprobs)) if chunk.logprobs else size


class UnreadBudget:
    """Bytes that wait to be read, over all readers of one event loop.

    Where they exceed the limit, the owner with the most unread bytes loses the largest of its answers: `drop`
    of that account is called. So an owner that does not read, in however many small parts, costs no other
    owner an answer; and of one owner's clients those that read have next to nothing unread.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._accounts: dict[UnreadAccount, None] = {}  # those above 0

    def account(self, drop: Callable[[], object], *, owner: bytes | None = None) -> UnreadAccount:
        """An account for one reader. Close it in the end."""
        return UnreadAccount(self, drop, owner)

    def change(self, account: UnreadAccount, size: int) -> None:
        """Note that an account has changed by `size` bytes."""
        account.size += size
        self.used += size
        if account.size:
            self._accounts[account] = None
        else:
            self._accounts.pop(account, None)
        while self.used > self.limit and self._accounts:
            largest = self._largest()
            largest.close()
            largest.drop()

    def _largest(self) -> UnreadAccount:
        """The largest account of the owner that has most in all."""
        totals: Counter[bytes | None] = Counter()
        for account in self._accounts:
            totals[account.owner] += account.size
        owner = max(totals, key=totals.__getitem__)
        return max((one for one in self._accounts if one.owner == owner), key=lambda one: one.size)


class UnreadAccount:
    """The unread bytes of one reader. Owned by an UnreadBudget; once closed it stays at 0."""

    def __init__(self, budget: UnreadBudget, drop: Callable[[], object], owner: bytes | None) -> None:
        self._budget, self.drop, self.owner = budget, drop, owner
        self.size = 0
        self.closed = False

    def add(self, size: int) -> None:
        """`size` more bytes wait."""
        if not self.closed:
            self._budget.change(self, size)

    def remove(self, size: int) -> None:
        """`size` bytes were read."""
        if not self.closed:
            self._budget.change(self, -min(size, self.size))

    def close(self) -> None:
        """Nothing waits any more. Closing twice is fine."""
        if not self.closed:
            self.closed = True
            self._budget.change(self, -self.size)


class Mailbox:
    """Items for one reader, put and taken in the reader's event loop. Cheaper than asyncio.Queue."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._pause = _PauseTimer()
        self._num_bytes = 0  # of the items, while there is an account
        self._account: UnreadAccount | None = None
        self._on_end: Callable[[], object] | None = None
        self._ended = False

    def put(self, item: Item) -> None:
        """Add an item and wake the reader."""
        self._items.append(item)
        if self._waiter is not None:
            _wake(self._waiter)
        if not isinstance(item, Chunk):
            self._end()
        elif self._account is not None:
            size = chunk_size(item)
            self._num_bytes += size
            self._account.add(size)

    async def take(self, pause: float | None = None) -> list[Item]:
        """The items there are, at most MAX_TAKEN of them; waits for the first, at most `pause` seconds."""
        if not self._items:
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            if pause is not None:
                self._pause.start(loop, waiter, pause)
            try:
                await waiter
            finally:
                self._pause.stop()
        if len(self._items) <= MAX_TAKEN:
            items, size = list(self._items), self._num_bytes
            self._items.clear()
        else:
            items = [self._items.popleft() for _ in range(MAX_TAKEN)]
            size = self._size_of(items)
        if self._account is not None:
            self._num_bytes -= size
            self._account.remove(size)
        return items

    def replace(self, error: BaseException) -> None:
        """Drop what is unread, and let the reader raise `error` next."""
        self._items.clear()
        self._num_bytes = 0
        self.put(error)

    def limit(self, budget: UnreadBudget, drop: Callable[[], object], *, owner: bytes | None = None) -> None:
        """Count the unread items in a budget; `drop` is called when they are too many."""
        self._account = budget.account(drop, owner=owner)
        self._num_bytes = self._size_of(self._items)
        self._account.add(self._num_bytes)

    def on_end(self, call: Callable[[], object]) -> None:
        """Call this once no further chunk will come, whether what came was read or not."""
        if self._ended:
            call()
        else:
            self._on_end = call

    def close(self) -> None:
        """The reader is gone."""
        self._items.clear()
        self._num_bytes = 0
        self._pause.close()
        if self._account is not None:
            self._account.close()

    @staticmethod
    def _size_of(items: Iterable[Item]) -> int:
        return sum(chunk_size(item) for item in items if isinstance(item, Chunk))

    def _end(self) -> None:
        self._ended = True
        call, self._on_end = self._on_end, None
        if call is not None:
            call()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _PauseTimer:
    """Wakes a waiter after a pause. Owned by a Mailbox.

    Nearly every waiter is woken by an item long before, and a timer of the event loop costs several
    microseconds to set and to cancel. So one timer is left to run, and set anew when it finds the waiter of
    its moment younger than its pause.
    """

    def __init__(self) -> None:
        self._timer: asyncio.Handle | None = None  # uvloop's has no `when` where that is now
        self._when = 0.0  # when it ends
        self._waiter: asyncio.Future[None] | None = None  # the one that waits now
        self._deadline = 0.0  # its end, in the loop's time

    def start(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None], pause: float) -> None:
        """Wake `waiter` after `pause` seconds, unless `stop` comes first."""
        self._waiter, self._deadline = waiter, loop.time() + pause
        if self._timer is not None and self._when > self._deadline:
            self.close()
        if self._timer is None:
            self._set(loop)

    def stop(self) -> None:
        """The waiter waits no more."""
        self._waiter = None

    def close(self) -> None:
        """End the timer too."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self._when = self._deadline
        self._timer = loop.call_at(self._when, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if loop.time() < self._deadline:
            self._set(loop)
        else:
            _wake(self._waiter)


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


__all__ = [
    "Item",
    "LoopWaker",
    "Mailbox",
    "UnreadAccount",
    "UnreadBudget",
    "call_in_loop",
    "chunk_size",
]
