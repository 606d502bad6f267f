"""The server as a process: it listens first, then loads; drains when told to end; dies with its engine.

Exit codes: 0 when it was told to end, 1 when the engine died. What cannot start raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from samewise.errors import BadParameter, MachineError
from samewise.llm.aio import AsyncLLM
from samewise.serve.app import make_app
from samewise.serve.settings import ServeSettings
from samewise.serve.worker import State, Worker

log = logging.getLogger("samewise.serve")

LAST_WORDS = 5  # seconds that responses may take to be written once nothing more is computed
WATCH = 0.1  # seconds between looks at whether the engine lives


@dataclass(frozen=True, kw_only=True, slots=True)
class Listen:
    """Where to be reached: an address and port (0: any), or a Unix socket; under TLS with a certificate."""

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadParameter(f"port={self.port}: give 0 (any) to 65535")
        if self.key is not None and self.certificate is None:
            raise BadParameter("ssl_keyfile needs ssl_certfile; give both, or neither")
        for file in (self.certificate, self.key):
            if file is not None and not file.is_file():
                raise BadParameter(f"{str(file)!r} is not a file; give a PEM file")
        if self.certificate is not None:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                    self.certificate, self.key
                )
            except (ssl.SSLError, OSError) as error:
                raise BadParameter(f"ssl_certfile={str(self.certificate)!r} will not do: {error}") from error

    def open(self) -> socket.socket:
        """The listening socket, or MachineError saying what is in the way."""
        if self.unix_socket is not None:
            return _open_unix(self.unix_socket)
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=2048)
        except OSError as error:
            raise MachineError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror or error}; "
                "choose another --host or --port"
            ) from error

    def address(self, listening: socket.socket) -> str:
        """How clients reach it."""
        if self.unix_socket is not None:
            return f"unix:{self.unix_socket}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certificate else 'http'}://{host}:{listening.getsockname()[1]}"


def run(load: Callable[[], AsyncLLM], settings: ServeSettings, listen: Listen, *, version: str) -> int:
    """Serve until told to end. Returns the exit code; raises what kept the model from loading."""
    listening = listen.open()
    try:
        with asyncio.Runner(loop_factory=_loops()) as runner:
            return runner.run(_Process(load, settings, listen, listening, version).serve())
    finally:
        listening.close()
        if listen.unix_socket is not None:
            listen.unix_socket.unlink(missing_ok=True)


def _loops() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loops where it is installed; httptools uvicorn finds by itself."""
    return uvicorn.Config("", log_config=None).get_loop_factory()


class _Server(uvicorn.Server):
    """uvicorn, but for signals: those are ours, because we drain first and then exit with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    """The server's life."""

    def __init__(
        self,
        load: Callable[[], AsyncLLM],
        settings: ServeSettings,
        listen: Listen,
        listening: socket.socket,
        version: str,
    ) -> None:
        self._settings, self._listen, self._listening = settings, listen, listening
        self._worker = Worker(load)
        app = make_app(self._worker, settings, version=version)
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=LAST_WORDS,
                ssl_certfile=listen.certificate,
                ssl_keyfile=listen.key,
            )
        )
        self._told = asyncio.Event()
        self._hurry = asyncio.Event()

    async def serve(self) -> int:
        """Listen, load, serve, drain."""
        self._catch_signals()
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listening]))
        log.info("listening on %s; loading the model", self._listen.address(self._listening))
        try:
            loading = asyncio.ensure_future(self._worker.load())
            if not await self._first(loading, serving):
                log.info("told to end while loading")
                os._exit(0)  # the loading thread is in the middle of things and cannot be asked to stop
            llm = loading.result()
            log.info("ready: %s, contract %s", llm.config.model, llm.contract)
            died = asyncio.ensure_future(self._death())
            if await self._first(died, serving):
                log.error("the engine died; the server ends", exc_info=self._worker.failure)
                return 1
            died.cancel()
            await self._drain()
            return 0
        finally:
            self._server.should_exit = True
            await serving
            await self._worker.close()
            log.info("ended")

    async def _first(self, event: asyncio.Future[Any], serving: asyncio.Future[None]) -> bool:
        """Whether something happens before we are told to end."""
        told = asyncio.ensure_future(self._told.wait())
        await asyncio.wait((event, told, serving), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        return event.done()

    async def _death(self) -> None:
        while self._worker.state is not State.STOPPED:
            await asyncio.sleep(WATCH)

    async def _drain(self) -> None:
        draining = asyncio.ensure_future(self._worker.drain(self._settings.shutdown_timeout))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait((draining, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not draining.done():
            draining.cancel()
            await self._worker.dismiss()

    def _catch_signals(self) -> None:
        """The first asks for an end, the second for a quick one."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, self._tell)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._tell))

    def _tell(self) -> None:
        (self._hurry if self._told.is_set() else self._told).set()


def _open_unix(path: Path) -> socket.socket:
    """A socket at a path; one that a dead server left behind is taken over, anything else is left alone."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise MachineError(f"{str(path)!r} is there already and not a socket; choose another path")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) == 0:
                    raise MachineError(f"another server listens on {str(path)!r}; choose another path")
            path.unlink()
        listening.bind(str(path))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise MachineError(f"cannot listen on {str(path)!r}: {error.strerror or error}") from error
    except MachineError:
        listening.close()
        raise
    return listening


__all__ = ["Listen", "run"]
