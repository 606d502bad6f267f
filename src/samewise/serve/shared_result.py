"""The result of work in the event loop, for all that ask for it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedResult(Generic[T]):
    """Does its work once at a time. Callers that come meanwhile wait for the next result and share it.

    So no result was begun before it was asked for, and a flood of callers costs two pieces of work.
    """

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The result. A caller that is cancelled ends no other one's work."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._run_after(self._running))
        return await asyncio.shield(self._next)

    async def _run_after(self, before: asyncio.Task[T] | None) -> T:
        if before is not None and not before.done():
            await asyncio.wait((before,))
        self._running, self._next = self._next, None
        return await self._work()


__all__ = ["SharedResult"]
