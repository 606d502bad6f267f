"""Replicas behind a handle of Ray Serve, for a RemoteEngine. An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from samewise.errors import CallerError
from samewise.scale.channel import RouterConnection, every
from samewise.scale.records import (
    EngineFacts,
    Job,
    JobKey,
    Listening,
    Lost,
    News,
    Progress,
    Refusal,
    Refused,
    ReplicaGone,
    Started,
)
from samewise.scale.roster import RosterLink
from samewise.scale.wire import LIMITS, ChannelLimits

T = TypeVar("T")

log = logging.getLogger("samewise.scale")

STATS_SECONDS = 1.0
"""Between two readings of the replicas' statistics. Set by hand: well below a scrape's period."""


class RayReplicas:
    """Owns the calls and the connections. `handle` and `roster` are those of the application's replicas.

    `kept`: the application's name, where its replicas are to be stopped when this process falls silent.
    """

    def __init__(
        self, handle: Any, roster: RosterLink, *, kept: str | None = None, limits: ChannelLimits = LIMITS
    ) -> None:
        self._handle, self._describe = handle.options(stream=True), handle
        self._roster, self._kept, self._limits = roster, kept, limits
        self._inbox: Callable[[News | None], None] = lambda _: None
        self._calls: dict[JobKey, asyncio.Task[None]] = {}
        self._connections: dict[str, asyncio.Future[RouterConnection]] = {}  # by replica
        self._stats: dict[str, dict[str, Any]] = {}
        self._refused: set[str] = set()  # replicas whose refusal was logged
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="samewise-replicas", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(self._read_stats_often)

    # ---- from the thread of a RemoteEngine

    def facts(self, timeout: float | None = None) -> EngineFacts:
        """What the first replica that answers says of its engine."""
        return self._wait(self._facts(), timeout)

    def connect(self, inbox: Callable[[News | None], None]) -> None:
        """Have news put there, by any thread."""
        self._inbox = inbox

    def start(self, job: Job, delay: float) -> None:
        """Give a job to a replica, after so many seconds."""
        self._loop.call_soon_threadsafe(self._begin, job, delay)

    def end(self, key: JobKey, replica: str | None) -> None:
        """Nothing more is wanted of a job; `replica`: where it began."""
        self._loop.call_soon_threadsafe(self._end, key, replica)

    def stats(self) -> dict[str, dict[str, Any]]:
        """What each replica last reported of its engine, by its name; at most about two seconds old."""
        return self._stats

    def close(self) -> None:
        """Drop all jobs, disconnect, and end the thread."""
        if self._thread.is_alive():
            self._wait(self._close(), None)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T], timeout: float | None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    # ---- in the event loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _facts(self) -> EngineFacts:
        facts: EngineFacts = await self._describe.describe.remote()
        return facts

    def _read_stats_often(self) -> None:
        self._reading = self._loop.create_task(every(STATS_SECONDS, self._read_stats))

    async def _read_stats(self) -> None:
        if self._kept is not None:
            await self._roster.call("keep", self._kept)
        self._stats = await self._roster.call("stats")
        refused = await self._roster.call("refused")
        for name in refused.keys() - self._refused:
            log.error("refused: %s", refused[name])
        self._refused = set(refused)

    def _begin(self, job: Job, delay: float) -> None:
        self._calls[job.key] = self._loop.create_task(self._answer(job, delay))

    async def _answer(self, job: Job, delay: float) -> None:
        """One call of Ray Serve, as long as the job takes: it counts for routing, limits and scaling."""
        key, stream = job.key, None
        listening: Listening | None = None
        connection: RouterConnection | None = None
        try:
            if delay:
                await asyncio.sleep(delay)
            stream = self._handle.generate.remote(job)
            async for said in stream:
                if isinstance(said, Refusal):
                    self._inbox(_news_of(key, said))
                    return
                listening = said
                connection = await self._connection(key.router, said)
                self._inbox(Started(key, said.replica, said.contract_id))
                connection.want(key)
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel()
            raise
        except Exception as error:
            replica = None if listening is None else listening.replica
            self._inbox(Lost(key, _in_short(error), started=connection is not None, replica=replica))
            if connection is not None:
                # The replica's process or its side of the connection has ended, or does not hear this side.
                connection.close()
            if stream is not None:
                stream.cancel()
        finally:
            self._calls.pop(key, None)

    async def _connection(self, router: bytes, listening: Listening) -> RouterConnection:
        """The connection to a replica, opened by the first job there. Raises ConnectionError."""
        name = listening.replica
        opening = self._connections.get(name)
        if opening is None:
            opening = self._connections[name] = asyncio.ensure_future(self._open(router, listening))
        try:
            connection = await asyncio.shield(opening)
        except ConnectionError:
            if self._connections.get(name) is opening:
                del self._connections[name]
            raise
        if self._connections.get(name) is not opening:  # closed since
            raise ConnectionError(f"the connection to replica {name} was closed")
        return connection

    async def _open(self, router: bytes, listening: Listening) -> RouterConnection:
        connection = RouterConnection(router, self._on_progress, self._limits)
        await connection.open(listening.address, lambda error: self._on_close(listening.replica, error))
        return connection

    def _on_progress(self, news: list[Progress]) -> None:
        for one in news:
            self._inbox(one)

    def _on_close(self, replica: str, error: str) -> None:
        self._connections.pop(replica, None)
        self._inbox(ReplicaGone(replica, f"replica {replica} is gone: {error}"))

    def _end(self, key: JobKey, replica: str | None) -> None:
        opening = None if replica is None else self._connections.get(replica)
        if opening is not None and opening.done() and opening.exception() is None:
            opening.result().want(key, wanted=False)
        elif (call := self._calls.get(key)) is not None:
            call.cancel()

    async def _close(self) -> None:
        self._reading.cancel()
        for call in list(self._calls.values()):
            call.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
        for opening in list(self._connections.values()):
            if opening.done() and opening.exception() is None:
                await opening.result().wait_closed()


def _news_of(key: JobKey, refusal: Refusal) -> News:
    """What a refusal means for a request: a mistake of its caller, or that its replica has failed."""
    error = refusal.error
    if isinstance(error, CallerError):
        return Refused(key, error, refusal.replica)
    return Lost(key, _in_short(error), started=False, replica=refusal.replica)


def _in_short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1] if text else ''}"


__all__ = ["RayReplicas"]
