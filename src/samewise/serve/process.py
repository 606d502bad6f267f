"""The server as a process: it listens, loads the model, serves, drains on a signal, and ends with its engine.

Exit codes: 0 after a signal, 1 if the engine failed, also while draining. A server that cannot start raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from samewise.llm.aio import AsyncLLM
from samewise.openai.parse import takes_tools
from samewise.serve.app import make_app
from samewise.serve.connections import GuardedServer
from samewise.serve.listen import Listen
from samewise.serve.settings import ServeSettings
from samewise.serve.worker import State, Worker

log = logging.getLogger("samewise.serve")


NO_TOOLS = (
    "the model's chat template has no tool format that this server reads: requests with tools, as agents "
    "(Codex, Claude Code) send them, are refused"
)


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """Times in seconds, set by hand."""

    # For which a thread keeps the interpreter's lock while others wait for it. The event loop gives the lock
    # up with every system call, so 900 requests that arrive at once waited 900 times for Python's own 0.005.
    switch: float = 0.0005
    flush: int = 5  # for responses to be written after the engine has finished them
    poll: float = 0.1  # between checks whether the engine's thread is alive


TIMES = ProcessTimes()


def run(load: Callable[[], AsyncLLM], settings: ServeSettings, listen: Listen, *, version: str) -> int:
    """Serve until a signal or the engine's end. Returns the exit code; raises what loading raises."""
    listening = listen.open()
    bound = listen.file_id()
    if not settings.keys and not listen.is_local:
        log.warning(
            "%s has no key and is open to all that reach it: give --api-key-file, or --host 127.0.0.1",
            listen.address(listening),
        )
    switch = sys.getswitchinterval()
    sys.setswitchinterval(TIMES.switch)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_Process(load, settings, listen, listening, version).serve())
    finally:
        sys.setswitchinterval(switch)
        listening.close()
        if listen.unix_socket is not None and listen.file_id() == bound:  # else another server's by now
            listen.unix_socket.unlink(missing_ok=True)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed, as uvicorn chooses it."""
    return uvicorn.Config("", log_config=None).get_loop_factory()


class _Server(GuardedServer):
    """A server without signal handlers: _Process drains first, and exits with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    """Runs one server from start to exit."""

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
                timeout_keep_alive=settings.limits.idle_timeout,
                timeout_graceful_shutdown=TIMES.flush,
                ssl_certfile=listen.certificate,
                ssl_keyfile=listen.key,
            ),
            settings.limits,
        )
        self._stop = asyncio.Event()  # set by the first signal: drain
        self._stop_now = asyncio.Event()  # set by the second: abort what is still running

    async def serve(self) -> int:
        """Listen, load, serve, drain. Returns the exit code."""
        self._catch_signals()
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listening]))
        log.info("listening on %s; loading the model", self._listen.address(self._listening))
        try:
            loading = asyncio.ensure_future(self._worker.load())
            if not await self._before_stop(loading, serving):
                log.info("stopped by a signal while loading")
                os._exit(0)  # the loading thread cannot be interrupted
            llm = loading.result()
            if not takes_tools(llm.intake.template):
                log.info(NO_TOOLS)
            log.info("ready: %s, contract %s", llm.config.model, llm.contract)
            stopped = asyncio.ensure_future(self._engine_stopped())
            if await self._before_stop(stopped, serving):
                log.error("the server ends: it has no engine")
                return 1
            stopped.cancel()
            await self._drain()
            return 0 if self._worker.failure is None else 1
        finally:
            self._server.should_exit = True
            await serving
            await self._worker.close()
            log.info("ended")

    async def _before_stop(self, event: asyncio.Future[Any], serving: asyncio.Future[None]) -> bool:
        """Whether `event` happens before a signal or the end of uvicorn."""
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((event, stop, serving), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return event.done()

    async def _engine_stopped(self) -> None:
        while self._worker.state is not State.STOPPED:
            await asyncio.sleep(TIMES.poll)

    async def _drain(self) -> None:
        draining = asyncio.ensure_future(self._worker.drain(self._settings.shutdown_timeout))
        stop_now = asyncio.ensure_future(self._stop_now.wait())
        await asyncio.wait((draining, stop_now), return_when=asyncio.FIRST_COMPLETED)
        stop_now.cancel()
        if not draining.done():
            draining.cancel()
            await self._worker.abort_all()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, self._on_signal)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._on_signal))

    def _on_signal(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()


__all__ = ["ProcessTimes", "run"]
