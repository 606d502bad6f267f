"""The engine behind the server: loading it, counting the requests on it, draining it.

The engine has a thread of its own (AsyncLLM). Everything here runs in the server's event loop except
`ActiveRequest.reserve`, which the thread that parses a request calls.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Collection
from enum import StrEnum
from functools import partial
from hashlib import sha256
from typing import NamedTuple

from samewise.llm.aio import AsyncLLM, ResponseReader
from samewise.llm.mailbox import UnreadBudget
from samewise.openai.errors import RETRY_AFTER, ApiError, unavailable
from samewise.outputs import Chunk, RequestOutput
from samewise.serve.settings import MAX_QUEUED
from samewise.serve.threads import in_daemon_thread
from samewise.shares import SharedBudget, within_share
from samewise.text.grammar import Pace

log = logging.getLogger("samewise.serve")

ABORT_SECONDS = 5.0
"""Time for aborted requests to send their error before the connections are closed. Set
by hand: an error is one small message, so only a client that does not read needs longer."""


class State(StrEnum):
    """What a worker is doing."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class Names(NamedTuple):
    """What a client calls a request, by which it may end it from another connection."""

    request: frozenset[str] = frozenset()
    prompts: tuple[str, ...] = ()


UNNAMED = Names()


class ActiveRequest:
    """A client's request from its arrival to the end of its answer, with one reader per prompt.

    Owned by its Worker. Close it however it ends: what is still running is then aborted within one step.
    `owner`: the key that the request came with, where there are several; None: there is one owner only.
    `names`: the client's names of the request, and of each of its prompts, where it gave any.
    """

    def __init__(self, worker: Worker, owner: bytes | None, names: Names) -> None:
        self._worker, self.owner, self._names = worker, owner, names
        self.readers: list[ResponseReader] = []
        self._failure: ApiError | None = None
        self.num_choices = 0  # places it has; counted by the worker, guarded by its lock
        self.closed = False
        self._give_prompts_back: Callable[[], None] = lambda: None

    def named(self, names: Collection[str]) -> list[ResponseReader]:
        """The readers of what has one of these names and is on the engine."""
        if not self._names.request.isdisjoint(names):
            return self.readers
        return [
            reader for reader, name in zip(self.readers, self._names.prompts, strict=False) if name in names
        ]

    def reserve(self, num_choices: int) -> None:
        """Take places for these choices, or raise what a full server answers. Any thread may call it."""
        self._worker.reserve(self, num_choices)

    def hold_prompts(self, budget: SharedBudget, num_tokens: int) -> None:
        """Count the tokens of its prompts until it is closed. Raises 429 where there are too many."""
        owner: object = self if self.owner is None else self.owner
        if num_tokens > budget.limit:
            raise ApiError(
                f"the prompts of this request have {num_tokens} tokens, and this server holds "
                f"{budget.limit} of all requests (--max-prompt-tokens); send less at once",
                code="context_length_exceeded",
            )
        if not budget.take(owner, num_tokens):
            full = budget.used + num_tokens > budget.limit
            whose = "all requests" if full else "this key's requests"
            raise ApiError(
                f"the prompts of {whose} under way leave no room for {num_tokens} tokens more: the "
                f"server holds {budget.limit} of all (--max-prompt-tokens), of which each key has a share; "
                "try again later",
                status=429, kind="rate_limit_error", code="prompts_full" if full else "share_used",
                retry_after=RETRY_AFTER,
            )  # fmt: skip
        self._give_prompts_back = partial(budget.give_back, owner, num_tokens)

    def read_from(self, readers: list[ResponseReader], unread: UnreadBudget | None = None) -> None:
        """The request is on the engine: its answers are read from these.

        Its places are given back as the engine is done with each, whether they were read or not. What is not
        read counts in `unread`.
        """
        self.readers = readers
        each = self.num_choices // max(1, len(readers))
        for reader in readers:
            reader.on_end(lambda: self._worker.give_back(self, each))
            if unread is not None:
                reader.limit(unread, self._drop, owner=self.owner)
        if self._failure is not None:
            self.fail(self._failure)

    def _drop(self) -> None:
        """The client does not read, and the memory is needed: end the request."""
        log.warning("an answer is dropped: its client does not read, and unread answers fill the memory")
        for reader in self.readers:
            reader.drop(
                ApiError(
                    "the answer was not read in time; read faster, or ask for less",
                    status=408, kind="server_error", code="unread",
                )
            )  # fmt: skip

    def fail(self, error: ApiError) -> None:
        """End the request with an error, also one that is not on the engine yet."""
        self._failure = error
        for reader in self.readers:
            reader.fail(error)

    def close(self) -> None:
        """Abort what is still running and give the places back. Closing twice is fine."""
        if not self.closed:
            self._worker.release(self)
            self._give_prompts_back()
            for reader in self.readers:
                reader.close()

    async def chunks(self, pause: float | None = None) -> AsyncGenerator[list[tuple[int, Chunk]]]:
        """(index of the prompt, chunk) as they become final, as many at a time as there are.

        An empty list after each `pause` seconds without a chunk.
        """
        if len(self.readers) == 1:
            while (chunks := await self.readers[0].next_chunks(pause)) != []:
                yield [(0, chunk) for chunk in chunks or ()]
            return
        waits = {asyncio.ensure_future(reader.next_chunks()): i for i, reader in enumerate(self.readers)}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield []
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

    async def wait(self) -> None:
        """Wait until every answer is complete."""
        for reader in self.readers:
            while await reader.next_chunks():
                pass

    async def outputs(self) -> list[RequestOutput]:
        """The complete answers, one per prompt."""
        await self.wait()
        return [reader.output() for reader in self.readers]


class Worker:
    """Owns the engine and the active requests of a server."""

    def __init__(self, load: Callable[[], AsyncLLM]) -> None:
        self._load = load
        self._llm: AsyncLLM | None = None
        self._active: dict[ActiveRequest, None] = {}
        self._lock = threading.Lock()  # guards the counts of choices
        self._num_choices = 0  # places taken, over all active requests
        self._choices_of: dict[bytes, int] = {}  # and by owner; none of them 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    def over(cls, llm: AsyncLLM) -> Worker:
        """A worker over an engine that is loaded already."""
        worker = cls(lambda: llm)
        worker._take(llm)
        return worker

    async def load(self) -> AsyncLLM:
        """Load the engine in a thread. Raises what loading raises."""
        if self._llm is None:
            return self._take(await in_daemon_thread(self._load))
        return self._llm

    def _take(self, llm: AsyncLLM) -> AsyncLLM:
        """Serve with this engine: whatever grammar a client sends, others go on."""
        llm.intake.bound_grammars(Pace())
        self._llm = llm
        return llm

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

    @property
    def num_preparing(self) -> int:
        """Number of active requests that are not on the engine yet."""
        return sum(not one.readers for one in self._active)

    # ---- one request

    def begin(self, owner: bytes | None = None, names: Names = UNNAMED) -> ActiveRequest:
        """A new request, which the caller closes. Raises 503 while draining."""
        if self._draining:
            raise unavailable("the server is shutting down; send the request to another server", "draining")
        request = ActiveRequest(self, owner, names)
        self._active[request] = None
        self._idle.clear()
        return request

    async def abort(self, names: Collection[str]) -> int:
        """End requests with what they have, by their clients' names; returns the number of prompts."""
        return await self.llm.abort([reader for one in self._active for reader in one.named(names)])

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
            self._refuse_if_full(request.owner, num_choices, max_queued + config.max_num_seqs)
            self._count(request, num_choices)

    def _refuse_if_full(self, owner: bytes | None, num_choices: int, places: int) -> None:
        """Raise 429 where there are no places, or an owner has its share of them."""
        used = self._num_choices
        full = used + num_choices > places
        if not full and owner is not None:
            own = self._choices_of.get(owner, 0)
            if not within_share(own, used, places, num_choices):
                raise ApiError(
                    f"{own} answers of this key are under way, its share of the server; try again later",
                    status=429, kind="rate_limit_error", code="share_used", retry_after=RETRY_AFTER,
                )  # fmt: skip
        if full:
            raise ApiError(
                "the server has as many answers under way as it queues; try again later",
                status=429, kind="rate_limit_error", code="queue_full", retry_after=RETRY_AFTER,
            )  # fmt: skip

    def give_back(self, request: ActiveRequest, num_choices: int) -> None:
        """Some of a request's answers have ended on the engine: their places are free."""
        with self._lock:
            self._count(request, -min(num_choices, request.num_choices))

    def _count(self, request: ActiveRequest, change: int) -> None:
        request.num_choices += change
        self._num_choices += change
        if request.owner is not None:
            count = self._choices_of.pop(request.owner, 0) + change
            if count:
                self._choices_of[request.owner] = count

    def release(self, request: ActiveRequest) -> None:
        """Forget a request that is being closed."""
        with self._lock:
            request.closed = True
            self._count(request, -request.num_choices)
        del self._active[request]
        if not self._active:
            self._idle.set()

    # ---- shutting down

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the active ones; after `timeout` seconds abort them.

        Returns whether all of them finished.
        """
        self._draining = True
        if self._llm is not None:
            self._llm.intake.stop_compiling()  # a grammar may take seconds, and its request has not begun
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


def salt_of(key_digest: bytes, cache_salt: str | None) -> bytes:
    """A request's salt: prefixes and drafts are shared only between requests of equal key and cache_salt."""
    if not key_digest and cache_salt is None:
        return b""
    salt = b"" if cache_salt is None else sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()
    return sha256(b"samewise salt\0" + key_digest + b"\0" + salt).digest()


__all__ = ["UNNAMED", "ActiveRequest", "Names", "State", "Worker", "salt_of"]
