"""Tokens on their way from replicas to a router: one connection for each pair, one message for each step.

Ray Serve decides where a request runs and counts it; a stream of Ray's own for every request would cost half
a millisecond of a core for every token (docs/scale.md). A message is a length and msgpack, which carries
floats exactly and runs no code. Both sides prove that they were told the replica's secrets by Ray.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

from samewise.scale.records import JobKey, Progress
from samewise.types import Delta, Finish

log = logging.getLogger("samewise.scale")

LENGTH = struct.Struct("!I")
ENDED = struct.Struct("!QI")  # a job whose rest is not wanted: number and attempt
ROUTER_BYTES, SECRET_BYTES = 16, 32
KEPT_SECONDS = 60.0
"""How long a replica keeps what a router that is not connected has not read. Set by hand: a router connects
within milliseconds of the first job."""


class Address(NamedTuple):
    """Where a replica is reached, and what proves it. Travels over Ray."""

    host: str
    port: int
    router_secret: bytes  # of the router, sent to the replica
    replica_secret: bytes  # of the replica, sent to the router


class ReplicaServer:
    """The replica's side. Used in one event loop.

    `on_end` is called with a job whose rest is not wanted, `on_router_gone` with a router that disconnected.
    """

    def __init__(self, on_end: Callable[[JobKey], None], on_router_gone: Callable[[bytes], None]) -> None:
        self._on_end, self._on_router_gone = on_end, on_router_gone
        self._writers: dict[bytes, asyncio.StreamWriter] = {}
        self._unsent: dict[bytes, list[bytes]] = {}  # by router that is not connected
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> Address:
        """Listen on a free port of this address."""
        self._address = Address(host, 0, secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES))
        self._server = await asyncio.start_server(self._serve, host, 0)
        self._address = self._address._replace(port=self._server.sockets[0].getsockname()[1])
        return self._address

    def send(self, progress: list[Progress]) -> None:
        """Send what a step has committed to the routers that asked for it."""
        by_router: dict[bytes, list[Progress]] = {}
        for one in progress:
            by_router.setdefault(one.key.router, []).append(one)
        for router, news in by_router.items():
            message = encode(news)
            writer = self._writers.get(router)
            if writer is not None:
                writer.write(message)
            else:
                if router not in self._unsent:
                    asyncio.get_running_loop().call_later(KEPT_SECONDS, self._unsent.pop, router, None)
                self._unsent.setdefault(router, []).append(message)

    async def close(self) -> None:
        """Stop listening, and disconnect all routers."""
        for writer in list(self._writers.values()):
            writer.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        router: bytes | None = None
        try:
            hello = await reader.readexactly(ROUTER_BYTES + SECRET_BYTES)
            if not hmac.compare_digest(hello[ROUTER_BYTES:], self._address.router_secret):
                log.warning("a connection that does not know this replica's secret is closed")
                return
            router = hello[:ROUTER_BYTES]
            writer.write(self._address.replica_secret)
            self._writers[router] = writer
            for message in self._unsent.pop(router, []):
                writer.write(message)
            while True:
                number, attempt = ENDED.unpack(await reader.readexactly(ENDED.size))
                self._on_end(JobKey(router, number, attempt))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the router is gone
        finally:
            writer.close()
            if router is not None and self._writers.get(router) is writer:
                del self._writers[router]
                self._on_router_gone(router)


class RouterConnection:
    """The router's side of one connection. Used in one event loop.

    `on_progress` is called with every message; `on_close` once, when nothing more will come.
    """

    def __init__(self, router: bytes, on_progress: Callable[[list[Progress]], None]) -> None:
        self._router, self._on_progress = router, on_progress
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, address: Address, on_close: Callable[[str], None]) -> None:
        """Connect. Raises ConnectionError where that fails."""
        try:
            reader, writer = await asyncio.open_connection(address.host, address.port)
        except OSError as error:
            raise ConnectionError(
                f"no connection to a replica at {address.host}:{address.port}: {error}; may this machine "
                "reach that one on any port, as Ray needs it?"
            ) from error
        try:
            writer.write(self._router + address.router_secret)
            answer = await reader.readexactly(SECRET_BYTES)
        except (OSError, asyncio.IncompleteReadError):
            answer = b""
        if not hmac.compare_digest(answer, address.replica_secret):
            writer.close()
            raise ConnectionError(f"{address.host}:{address.port} is not the replica any more")
        # A machine that loses its power says nothing: the system finds out, in time.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._writer = writer
        self._reading = asyncio.ensure_future(self._read(reader, on_close))

    def end(self, key: JobKey) -> None:
        """Nothing more is wanted of a job."""
        if self._writer is not None:
            self._writer.write(ENDED.pack(key.number, key.attempt))

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
        except (asyncio.IncompleteReadError, ConnectionError) as closed:
            error = f"the connection was closed: {closed}"
        finally:
            with suppress(RuntimeError):  # the event loop is being closed
                self.close()
            on_close(error)


def encode(news: list[Progress]) -> bytes:
    """A message: for each job its number, its attempt and the fields of its delta."""
    import msgpack

    content: bytes = msgpack.packb(
        [
            (key.number, key.attempt, delta[1:4], delta.finish and delta.finish.value, delta[5:])
            for key, delta in news
        ]
    )
    return LENGTH.pack(len(content)) + content


def decode(router: bytes, content: bytes) -> list[Progress]:
    """The inverse of `encode`, without the length."""
    import msgpack

    rows: Any = msgpack.unpackb(content, use_list=False)
    return [
        Progress(
            JobKey(router, number, attempt),
            Delta._make((number, *said, None if finish is None else Finish(finish), *rest)),
        )
        for number, attempt, said, finish, rest in rows
    ]


async def every(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    """Do something again and again; what it raises is logged."""
    while True:
        try:
            await work()
        except Exception as error:
            log.debug("%s failed: %s", work, error)
        await asyncio.sleep(seconds)


__all__ = ["Address", "ReplicaServer", "RouterConnection", "decode", "encode", "every"]
