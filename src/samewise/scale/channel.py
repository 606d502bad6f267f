"""Tokens on their way from replicas to a router: one connection for each pair, one message for each step.

Ray Serve decides where a request runs and counts it; a stream of Ray's own for every request would cost half
a millisecond of a core for every token (docs/scale.md). Both sides prove that they were told the replica's
secrets by Ray.

What an engine commits for a job is kept until the router asks for the job's tokens over its connection, and
is sent over that connection alone. A connection that closes ends the jobs of which tokens were asked for over
it, so no token is written to a connection that the router does not read.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from samewise.scale.records import Address, JobKey, Progress
from samewise.scale.wire import (
    LENGTH,
    LIMITS,
    ROUTER_BYTES,
    SECRET_BYTES,
    WANTED,
    ChannelLimits,
    decode,
    encode,
    watch_connection,
)

log = logging.getLogger("samewise.scale")


class JobDropped(RuntimeError):
    """A job ended without its answer: the router disconnected, or did not ask for the tokens."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A job whose tokens are sent. Owned by the ReplicaServer."""

    ended: asyncio.Future[None]
    unheard: asyncio.TimerHandle  # ends it unless its tokens are asked for
    writer: asyncio.StreamWriter | None = None  # of the connection over which the tokens were asked for
    unsent: list[Progress] = field(default_factory=list)  # before that


class ReplicaServer:
    """The replica's side. Used in one event loop."""

    def __init__(self, limits: ChannelLimits = LIMITS) -> None:
        self._limits = limits
        self._jobs: dict[JobKey, _Outgoing] = {}
        self._writers: dict[bytes, asyncio.StreamWriter] = {}  # by router
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> Address:
        """Listen on a free port of this address."""
        self._address = Address(host, 0, secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES))
        self._server = await asyncio.start_server(self._serve, host, 0)
        self._address = self._address._replace(port=self._server.sockets[0].getsockname()[1])
        return self._address

    def open(self, key: JobKey) -> asyncio.Future[None]:
        """Keep a job's tokens for its router, until `forget`.

        The future is done when the last one was sent, or none is wanted. It fails with JobDropped where the
        router is gone, or does not ask for the tokens.
        """
        loop = asyncio.get_running_loop()
        unheard = loop.call_later(self._limits.unheard, self._drop_unheard, key)
        job = self._jobs[key] = _Outgoing(loop.create_future(), unheard)
        return job.ended

    def forget(self, key: JobKey) -> None:
        """Nothing more is sent of a job."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        job.unheard.cancel()
        if not job.ended.cancel() and not job.ended.cancelled():
            job.ended.exception()  # else Python reports that nothing has waited for it

    def send(self, progress: list[Progress]) -> None:
        """Send what a step has committed to the routers that asked for it, or keep it."""
        by_writer: dict[asyncio.StreamWriter, list[Progress]] = {}
        for one in progress:
            job = self._jobs.get(one.key)
            if job is None or job.ended.done():
                continue
            if job.writer is None:
                job.unsent.append(one)
            else:
                by_writer.setdefault(job.writer, []).append(one)
        for writer, news in by_writer.items():
            self._write(writer, news)

    async def close(self) -> None:
        """Stop listening, and disconnect all routers."""
        for writer in list(self._writers.values()):
            writer.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def _write(self, writer: asyncio.StreamWriter, news: list[Progress]) -> None:
        writer.write(encode(news))
        for one in news:
            if one.delta.finish is not None:
                self._end(self._jobs[one.key])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        router: bytes | None = None
        try:
            hello = await asyncio.wait_for(
                reader.readexactly(ROUTER_BYTES + SECRET_BYTES), self._limits.connect
            )
            if not hmac.compare_digest(hello[ROUTER_BYTES:], self._address.router_secret):
                log.warning("a connection that does not know this replica's secret is closed")
                return
            watch_connection(writer, self._limits)
            router = hello[:ROUTER_BYTES]
            if router in self._writers:  # the router knows that it is closed, and this side does not yet
                self._drop(self._writers[router])
            self._writers[router] = writer
            writer.write(self._address.replica_secret)
            while True:
                wanted, number, attempt = WANTED.unpack(await reader.readexactly(WANTED.size))
                self._want(JobKey(router, number, attempt), writer, wanted=wanted)
        except (asyncio.IncompleteReadError, OSError):  # TimeoutError among them
            return  # the router is gone
        finally:
            self._drop(writer)
            if router is not None and self._writers.get(router) is writer:
                del self._writers[router]

    def _want(self, key: JobKey, writer: asyncio.StreamWriter, *, wanted: bool) -> None:
        job = self._jobs.get(key)
        if job is None:  # it has ended, and Ray says how
            return
        if not wanted:
            self._end(job)
            return
        job.unheard.cancel()
        job.writer = writer
        news, job.unsent = job.unsent, []
        if news:
            self._write(writer, news)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection, and end the jobs of which tokens were asked for over it."""
        writer.close()
        for job in self._jobs.values():
            if job.writer is writer:
                self._end(job, JobDropped("the router disconnected"))

    def _drop_unheard(self, key: JobKey) -> None:
        seconds = self._limits.unheard
        error = JobDropped(f"no connection of the router asked for the tokens in {seconds:g} s")
        self._end(self._jobs[key], error)

    def _end(self, job: _Outgoing, error: JobDropped | None = None) -> None:
        if job.ended.done():
            return
        if error is None:
            job.ended.set_result(None)
        else:
            job.ended.set_exception(error)


class RouterConnection:
    """The router's side of one connection. Used in one event loop.

    `on_progress` is called with every message; `on_close` once, when nothing more will come.
    """

    def __init__(
        self, router: bytes, on_progress: Callable[[list[Progress]], None], limits: ChannelLimits = LIMITS
    ) -> None:
        self._router, self._on_progress, self._limits = router, on_progress, limits
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, address: Address, on_close: Callable[[str], None]) -> None:
        """Connect. Raises ConnectionError where that fails."""
        try:
            async with asyncio.timeout(self._limits.connect):
                reader = await self._connect(address)
        except TimeoutError as error:
            raise ConnectionError(
                f"no connection in {self._limits.connect:g} s; {_advice(address)}"
            ) from error
        self._reading = asyncio.ensure_future(self._read(reader, on_close))

    async def _connect(self, address: Address) -> asyncio.StreamReader:
        try:
            reader, writer = await asyncio.open_connection(address.host, address.port)
        except OSError as error:
            raise ConnectionError(f"no connection: {error}; {_advice(address)}") from error
        try:
            watch_connection(writer, self._limits)
            writer.write(self._router + address.router_secret)
            answer = await reader.readexactly(SECRET_BYTES)
        except (OSError, asyncio.IncompleteReadError):
            answer = b""
        except asyncio.CancelledError:  # it took too long
            writer.close()
            raise
        if not hmac.compare_digest(answer, address.replica_secret):
            writer.close()
            raise ConnectionError(f"{address.host}:{address.port} is not the replica any more")
        self._writer = writer
        return reader

    def want(self, key: JobKey, *, wanted: bool = True) -> None:
        """Say that a job's tokens are wanted over this connection from now on, or no more."""
        if self._writer is not None:
            self._writer.write(WANTED.pack(wanted, key.number, key.attempt))

    def close(self) -> None:
        """Disconnect; the replica drops this router's jobs."""
        if self._writer is not None:
            self._writer.close()

    async def wait_closed(self) -> None:
        """Close, and wait until `on_close` was called."""
        self.close()
        if self._writer is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader, on_close: Callable[[str], None]) -> None:
        error = "the connection was closed"
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._on_progress(decode(self._router, await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError) as closed:  # TimeoutError among them: a silent network
            error = f"the connection was closed: {closed}"
        finally:
            with suppress(RuntimeError):  # the event loop is being closed
                self.close()
            on_close(error)


def _advice(address: Address) -> str:
    return f"may this machine reach a replica at {address.host}:{address.port}, on any port, as Ray needs it?"


async def every(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    """Do something again and again; what it raises is logged."""
    while True:
        try:
            await work()
        except Exception as error:
            log.debug("%s failed: %s", work, error)
        await asyncio.sleep(seconds)


__all__ = ["JobDropped", "ReplicaServer", "RouterConnection", "every"]
