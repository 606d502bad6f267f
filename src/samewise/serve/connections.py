"""Connections: how many there may be, how long each may take, and which is closed where there are too many.

uvicorn's protocols have a timeout between requests and no other one. `guarded` derives a protocol that also
has a deadline for a request's head, one for the client to read, and a place among a limited number: a new
connection that finds no place takes that of the connection that has waited longest for its client. So silent
connections cannot keep others out, however many there are, nor end uploads.

A connection has one request at a time: one that is sent before the answer of the one before (HTTP pipelining)
is refused. uvicorn would queue all that a read holds, which are thousands, and know only the last of them
when the client leaves.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from enum import Enum
from typing import Any, cast

import uvicorn

from samewise.serve.limits import ServeLimits

log = logging.getLogger("samewise.serve")

ACCEPTED_AT_ONCE = 16
"""Connections accepted before other work of the event loop gets its turn. Set by hand."""

ACCEPT_RETRY_SECONDS = 0.1
"""Pause after an accept that failed. Set by hand: a place is free as soon as a connection was closed."""


class Phase(Enum):
    """What a connection is waiting for, in the order in which connections are closed for new ones."""

    CLIENT = "client"  # the head of a request; or the rest of one that was refused
    BODY = "body"  # the rest of a request that was let in
    READER = "reader"  # the client to read its answer
    SERVER = "server"  # its answer; such a connection is not closed for another one


class Connections:
    """The open connections of one event loop, and their number's limit."""

    def __init__(self, limits: ServeLimits) -> None:
        self.limits = limits
        self.max_open = limits.connections()
        # By phase, the connection that entered it first in front.
        self._open: dict[Phase, dict[GuardedProtocol, None]] = {phase: {} for phase in Phase}
        self._warned = RateLimitedWarning()

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def add(self, connection: GuardedProtocol) -> bool:
        """Register a connection that waits for its client. False: there is no place for it."""
        if len(self) >= self.max_open and not self.close_one():
            return False
        self._open[Phase.CLIENT][connection] = None
        return True

    def move(self, connection: GuardedProtocol, phase: Phase) -> None:
        """Note what a registered connection is waiting for now."""
        if connection not in self._open[phase] and self.remove(connection):
            self._open[phase][connection] = None

    def remove(self, connection: GuardedProtocol) -> bool:
        """Forget a connection; returns whether it was there."""
        return any(phase.pop(connection, self) is None for phase in self._open.values())

    def close_one(self) -> bool:
        """Close the connection that has waited longest for its client. False: all wait for the server.

        Those that have sent no complete head go first, so that silent connections do not end an upload.
        """
        for phase in (Phase.CLIENT, Phase.BODY, Phase.READER):
            for connection in self._open[phase]:
                self._warned("there are %d connections, the most allowed; the idlest is closed", len(self))
                self.remove(connection)
                connection.abort()
                return True
        self._warned("%d connections wait for answers, the most allowed; others are refused", len(self))
        return False

    def close_all(self) -> None:
        """Close every connection at once."""
        for phase in self._open.values():
            for connection in list(phase):
                self.remove(connection)
                connection.abort()


class RateLimitedWarning:
    """Logs at most one warning a second; the next one says how many were left out."""

    def __init__(self, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._next, self._left_out = float("-inf"), 0

    def __call__(self, message: str, *args: object) -> None:
        """Log a warning, or count it."""
        if self._clock() < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} such messages were left out)" if self._left_out else ""
        self._next, self._left_out = self._clock() + self._seconds, 0
        log.warning(message + more, *args)


class GuardedProtocol(asyncio.Protocol):
    """A mixin for uvicorn's HTTP protocols, which have `cycle`: the request being answered, or None."""

    registry: Connections
    cycle: Any
    loop: asyncio.AbstractEventLoop

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._wire: asyncio.Transport | None = None
        self._connecting: asyncio.Future[None] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unwritten = 0  # bytes, when the timer was set

    def begin(self, connecting: asyncio.Future[None]) -> None:
        """The socket was accepted. TLS, if there is any, and the first request's head share a deadline."""
        self._connecting = connecting
        self._expect_head()

    def abort(self) -> None:
        """Close the connection without waiting for its client."""
        self._stop_head_timer()
        self._stop_write_timer()
        if self._wire is not None:
            self._wire.abort()
        elif self._connecting is not None:
            self._connecting.cancel()

    # ---- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS is set up."""
        self._wire = cast("asyncio.Transport", transport)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._stop_head_timer()
        self._stop_write_timer()
        self.registry.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        super().data_received(data)
        self._follow()

    def pause_writing(self) -> None:
        """The client reads more slowly than the server writes."""
        super().pause_writing()
        self._expect_progress()
        self._follow()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._stop_write_timer()
        self._follow()

    # ---- called by uvicorn

    def on_response_complete(self) -> None:
        """An answer was handed to the transport, which may still have to send it."""
        super().on_response_complete()  # type: ignore[misc]
        if self._write_timer is None and self._wire is not None and self._wire.get_write_buffer_size():
            self._expect_progress()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the client sent. A request that is being answered ends, as if its client had left."""
        wire = cast("asyncio.Transport", self._wire)
        if wire.is_closing():
            return
        if self.is_answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:  # a second head would be read as a part of the first answer
                wire.close()
                return
        super().send_400_response(msg)  # type: ignore[misc]

    # ---- inside

    def is_answering(self) -> bool:
        """Whether there is a request whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _follow(self) -> None:
        """Set phase and deadlines by what the connection is waiting for."""
        between = not self.is_answering()
        if not between:
            self._stop_head_timer()
        elif self._head_timer is None:  # from here on, whatever the client sends
            self._expect_head()
        if self._write_timer is not None:
            self.registry.move(self, Phase.READER)
        else:
            phase = Phase.BODY if not between and self.cycle.more_body else Phase.SERVER
            self.registry.move(self, Phase.CLIENT if between else phase)

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.registry.limits.head_timeout, self._no_head)

    def _no_head(self) -> None:
        """The deadline of a request's head is over."""
        self._head_timer = None
        if self._write_timer is None:
            self.abort()
        else:
            self._expect_head()  # the answer before is still being sent, and has a deadline of its own

    def _expect_progress(self) -> None:
        if self._wire is not None:
            self._stop_write_timer()
            self._unwritten = self._wire.get_write_buffer_size()
            self._write_timer = self.loop.call_later(self.registry.limits.write_timeout, self._check_progress)

    def _check_progress(self) -> None:
        """The client must have read something since the timer was set."""
        self._write_timer = None
        left = self._wire.get_write_buffer_size() if self._wire is not None else 0
        if left == 0:
            self._follow()
        elif left < self._unwritten:
            self._expect_progress()
        else:
            log.info("a client did not read for %g seconds; closed", self.registry.limits.write_timeout)
            self.abort()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


PIPELINED = "A request was sent before the answer of the one before; send one at a time."


class PipelinedRequestError(Exception):
    """A request begins while the one before is unanswered. Ends httptools' parsing of what was received."""


class HttptoolsLimits(GuardedProtocol):
    """GuardedProtocol for httptools, which bounds neither a request's head nor the number of requests."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0  # received that are not a body's
        self._pipelined = False

    def data_received(self, data: bytes) -> None:
        """Count what the client sends; `on_body` and the end of a request start the count again."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self.registry.limits.max_head:
            self._head_bytes = 0
            self.send_400_response("The head of the request is too large.")

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for every error of the parser."""
        super().send_400_response(PIPELINED if self._pipelined else msg)

    def on_message_begin(self) -> None:
        """Called by httptools."""
        if self.is_answering():
            self._pipelined = True
            raise PipelinedRequestError
        super().on_message_begin()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        """Called by httptools."""
        self._head_bytes = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        """Called by httptools."""
        self._head_bytes = 0
        super().on_message_complete()  # type: ignore[misc]


class H11Limits(GuardedProtocol):
    """GuardedProtocol for h11, which keeps what follows a request and stops reading until it is answered."""

    conn: Any

    def handle_events(self) -> None:
        """Called by uvicorn after it has received something, and after an answer."""
        super().handle_events()  # type: ignore[misc]
        if self.is_answering() and not self.cycle.more_body and self.conn.trailing_data[0].strip():
            self.send_400_response(PIPELINED)


def guarded(base: type[Any], registry: Connections) -> type[GuardedProtocol]:
    """A protocol like `base`, one of uvicorn's, whose connections are registered and have deadlines."""
    limits = HttptoolsLimits if hasattr(base, "on_body") else H11Limits
    return type("Guarded" + base.__name__, (limits, base), {"registry": registry})


class GuardedServer(uvicorn.Server):
    """uvicorn with limited connections. It accepts them itself, one at a time, and knows them before TLS."""

    def __init__(self, config: uvicorn.Config, limits: ServeLimits) -> None:
        super().__init__(config)
        self.connections = Connections(limits)
        self._accepting: list[asyncio.Future[None]] = []
        self._warned = RateLimitedWarning()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections. (uvicorn's own would accept thousands before it looks at one.)"""
        await self.lifespan.startup()
        self.servers = []
        protocol = guarded(cast("type[Any]", self.config.http_protocol_class), self.connections)
        for listening in sockets or []:
            listening.setblocking(False)
            self._accepting.append(asyncio.ensure_future(self._accept_all(listening, protocol)))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, let answers be sent, close every connection."""
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)
        self.connections.close_all()

    async def _accept_all(self, listening: socket.socket, protocol: type[GuardedProtocol]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
                self._begin(connection, protocol)
                for _ in range(ACCEPTED_AT_ONCE - 1):  # uvloop would accept one in each of its turns
                    connection, _ = listening.accept()
                    self._begin(connection, protocol)
            except BlockingIOError:  # there are no more
                continue
            except OSError as error:
                self._warned("a connection could not be accepted: %s", error.strerror or error)
                self.connections.close_one()
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            await asyncio.sleep(0)

    def _begin(self, connection: socket.socket, protocol: type[GuardedProtocol]) -> None:
        """Serve an accepted socket, or close it where there is no place for it."""
        made = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )  # fmt: skip
        if not self.connections.add(made):
            connection.close()
            return
        connecting = asyncio.ensure_future(self._connect(connection, made))
        connecting.add_done_callback(lambda done: self._connected(done, connection, made))
        made.begin(connecting)

    async def _connect(self, connection: socket.socket, protocol: GuardedProtocol) -> None:
        timeout = self.connections.limits.head_timeout if self.config.is_ssl else None
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol, connection, ssl=self.config.ssl, ssl_handshake_timeout=timeout
        )

    def _connected(
        self, done: asyncio.Future[None], connection: socket.socket, protocol: GuardedProtocol
    ) -> None:
        """TLS is set up, or will not be: the client does not speak it, took too long, or was closed."""
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or error is not None:
            protocol.abort()
            self.connections.remove(protocol)
            connection.close()
        if error is not None and not isinstance(error, OSError | ssl.SSLError | ConnectionError):
            self._warned("a connection could not be set up: %r", error)


__all__ = [
    "Connections",
    "GuardedProtocol",
    "GuardedServer",
    "H11Limits",
    "HttptoolsLimits",
    "Phase",
    "PipelinedRequestError",
    "RateLimitedWarning",
    "guarded",
]
