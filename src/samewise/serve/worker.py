"""The engine behind the server: loading it, counting the requests on it, draining it.

The engine has a thread of its own (AsyncLLM). Everything here runs in the server's event loop except
`ActiveRequest.reserve`, which the thread that parses a request calls.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from enum import StrEnum
from hashlib import sha256
from typing import TypeVar

from samewise.llm.aio import AsyncLLM, ResponseReader
from samewise.openai.errors import RETRY_AFTER, ApiError, unavailable
from samewise.outputs import Chunk, RequestOutput
from samewise.serve.settings import MAX_QUEUED

log = logging.getLogger("samewise.serve")

T = TypeVar("T")

ABORT_SECONDS = 5.0
"""Time for aborted requests to send their error before the connections are closed. Set
by hand: an error is one small message, so only a client that does not read needs longer."""


class State(StrEnum):
    """What a worker is doing."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class ActiveRequest:
    """A client's request from its arrival to the end of its answer, with one reader per prompt.

    Owned by its Worker. Close it however it ends: what is still running is then aborted within one step.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.readers: list[ResponseReader] = []
        self._failure: ApiError | None = None
        self.num_choices = 0  # counted by the worker; guarded by its lock
        self.closed = False

    def reserve(self, num_choices: int) -> None:
        """Take places for these choices, or raise what a full server answers. Any thread may call it."""
        self._worker.reserve(self, num_choices)

    def read_from(self, readers: list[ResponseReader]) -> None:
        """The request is on the engine: its answers are read from these."""
        self.readers = readers
        if self._failure is not None:
            self.fail(self._failure)

    def fail(self, error: ApiError) -> None:
        """End the request with an error, also one that is not on the engine yet."""
        self._failure = error
        for reader in self.readers:
            reader.fail(error)

    def close(self) -> None:
        """Abort what is still running and give the places back. Closing twice is fine."""
        if not self.closed:
            self._worker.release(self)
            for reader in self.readers:
                reader.close()

    async def chunks(self) -> AsyncGenerator[list[tuple[int, Chunk]]]:
        """(index of the prompt, chunk) as they become final, as many at a time as there are."""
        if len(self.readers) == 1:
            while chunks := await self.readers[0].next_chunks():
                yield [(0, chunk) for chunk in chunks]
            return
        waits = {asyncio.ensure_future(reader.next_chunks()): i for i, reader in enumerate(self.readers)}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                batch: list[tuple[int, Chunk]] = []
                for wait in sorted(done, key=lambda one: waits[one]):
                    index = waits.pop(wait)
                    if chunks := wait.result():
                        batch += [(index, chunk) for chunk in chunks]
                        waits[asyncio.ensure_future(self.readers[index].next_chunks())] = index
                if batch:
                    yield batch
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def outputs(self) -> list[RequestOutput]:
        """The complete answers, one per prompt."""
        for reader in self.readers:
            while await reader.next_chunks():
                pass
        return [reader.output() for reader in self.readers]


class Worker:
    """Owns the engine and the active requests of a server."""

    def __init__(self, load: Callable[[], AsyncLLM]) -> None:
        self._load = load
        self._llm: AsyncLLM | None = None
        self._active: dict[ActiveRequest, None] = {}
        self._lock = threading.Lock()  # guards the two counts of choices
        self._num_choices = 0  # over all active requests
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    def over(cls, llm: AsyncLLM) -> Worker:
        """A worker over an engine that is loaded already."""
        worker = cls(lambda: llm)
        worker._llm = llm
        return worker

    async def load(self) -> AsyncLLM:
        """Load the engine in a thread. Raises what loading raises."""
        if self._llm is None:
            self._llm = await _in_daemon_thread(self._load)
        return self._llm

    @property
    def state(self) -> State:
        """The current state."""
        if self._llm is None:
            return State.LOADING
        if not self._llm.alive:
            return State.STOPPED
        return State.DRAINING if self._draining else State.READY

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the engine's thread, if one did."""
        return self._llm.failure if self._llm is not None else None

    @property
    def llm(self) -> AsyncLLM:
        """The engine's interface. Raises 503 while there is none."""
        if self._llm is None:
            raise unavailable("the model is being loaded; try again in a while", "loading")
        if not self._llm.alive:
            raise unavailable("the engine has stopped; the server is about to exit", "engine_stopped")
        return self._llm

    @property
    def num_active(self) -> int:
        """Number of active requests."""
        return len(self._active)

    # ---- one request

    def begin(self) -> ActiveRequest:
        """A new request, which the caller closes. Raises 503 while draining."""
        if self._draining:
            raise unavailable("the server is shutting down; send the request to another server", "draining")
        request = ActiveRequest(self)
        self._active[request] = None
        self._idle.clear()
        return request

    def reserve(self, request: ActiveRequest, num_choices: int) -> None:
        """See ActiveRequest.reserve. Called before the prompt is tokenised, so that refusing is cheap."""
        config = self.llm.config
        max_queued = config.max_queued or MAX_QUEUED
        if num_choices > max_queued:
            raise ApiError(
                f"{num_choices} answers in one request are more than this server queues ({max_queued}); "
                "ask for fewer", param="n", code="invalid_value",
            )  # fmt: skip
        with self._lock:
            if request.closed:
                raise ConnectionAbortedError("the client has disconnected")
            if self._num_choices + num_choices > max_queued + config.max_num_seqs:
                raise ApiError(
                    f"{self._num_choices} answers are under way and {max_queued} may wait; try again later",
                    status=429, kind="rate_limit_error", code="queue_full", retry_after=RETRY_AFTER,
                )  # fmt: skip
            request.num_choices = num_choices
            self._num_choices += num_choices

    def release(self, request: ActiveRequest) -> None:
        """Forget a request that is being closed."""
        with self._lock:
            request.closed = True
            self._num_choices -= request.num_choices
        del self._active[request]
        if not self._active:
            self._idle.set()

    # ---- shutting down

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the active ones; after `timeout` seconds abort them.

        Returns whether all of them finished.
        """
        self._draining = True
        log.info("draining: %d requests are under way", self.num_active)
        if self._idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            log.warning("%d requests did not end in %g seconds and are aborted", self.num_active, timeout)
            await self.abort_all()
            return False
        return True

    async def abort_all(self) -> None:
        """End every active request with an error, and wait until the errors were sent."""
        self._draining = True
        for request in list(self._active):
            request.fail(unavailable("the server is shutting down", "draining"))
        try:
            await asyncio.wait_for(self._idle.wait(), ABORT_SECONDS)
        except TimeoutError:
            log.warning("%d clients do not read their answers; their connections are closed", self.num_active)

    async def close(self) -> None:
        """Stop the engine's thread."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.close)


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that does not keep the process alive. (asyncio.to_thread's would.)"""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        with suppress(RuntimeError):  # the event loop was closed meanwhile
            loop.call_soon_threadsafe(resolve, *outcome)

    threading.Thread(target=run, name="samewise-load", daemon=True).start()
    return await future


def salt_of(key_digest: bytes, cache_salt: str | None) -> bytes:
    """A request's salt: prefixes and drafts are shared only between requests of equal key and cache_salt."""
    if not key_digest and cache_salt is None:
        return b""
    salt = b"" if cache_salt is None else sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()
    return sha256(b"samewise salt\0" + key_digest + b"\0" + salt).digest()


__all__ = ["ActiveRequest", "State", "Worker", "salt_of"]
