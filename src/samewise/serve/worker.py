"""The engine behind the server: loaded beside it, drained before it goes, and missed when it dies.

The engine has a thread of its own (AsyncLLM); everything here runs in the server's event loop and never
waits for it but by awaiting. Customers are kept apart: prefixes and guesses are shared only under an
equal salt, and the salt is made from the key.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from enum import StrEnum
from hashlib import sha256
from typing import Any, TypeVar

from samewise.errors import BadPrompt
from samewise.llm.aio import AsyncLLM, Reading
from samewise.openai.errors import RETRY_AFTER, ApiError
from samewise.openai.parsed import Parsed, Prompt
from samewise.outputs import Chunk, RequestOutput
from samewise.serve.settings import MAX_QUEUED

log = logging.getLogger("samewise.serve")

T = TypeVar("T")


class State(StrEnum):
    """Where a worker stands."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class Job:
    """One client's request under way: as many readings as it has prompts. Owned by its Worker.

    Leave it when done (or use it in a `with`): what is still running is aborted within a step.
    """

    def __init__(self, parsed: Parsed, gone: Callable[[Job], None]) -> None:
        self.parsed, self._gone = parsed, gone
        self.readings: list[Reading] = []
        self.left = False

    def leave(self) -> None:
        """Nobody reads this any more. Leaving twice is fine."""
        if not self.left:
            self.left = True
            for reading in self.readings:
                reading.leave()
            self._gone(self)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    async def open(self, asking: Sequence[Coroutine[Any, Any, Reading]]) -> None:
        """Start every prompt at once, so that they share frames from the first; all of them or none."""
        tasks = [asyncio.ensure_future(one) for one in asking]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        finally:
            # Without a pause since they were done: a cancellation in between would lose what was opened.
            done = [task for task in tasks if task.done() and not task.cancelled()]
            self.readings += [task.result() for task in done if task.exception() is None]
        for task in tasks:
            task.result()

    async def chunks(self) -> AsyncGenerator[list[tuple[int, Chunk]]]:
        """(place of the prompt, chunk) as they become final, as many at a time as there are."""
        if len(self.readings) == 1:
            while some := await self.readings[0].some():
                yield [(0, chunk) for chunk in some]
            return
        waits = {asyncio.ensure_future(reading.some()): place for place, reading in enumerate(self.readings)}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                found: list[tuple[int, Chunk]] = []
                for wait in sorted(done, key=lambda one: waits[one]):
                    place = waits.pop(wait)
                    if some := wait.result():
                        found += [(place, chunk) for chunk in some]
                        waits[asyncio.ensure_future(self.readings[place].some())] = place
                if found:
                    yield found
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def outputs(self) -> list[RequestOutput]:
        """The whole answers."""
        for reading in self.readings:
            while await reading.some():
                pass
        return [reading.output() for reading in self.readings]


class Worker:
    """Owns the engine on behalf of the server, and knows who is being served."""

    def __init__(self, load: Callable[[], AsyncLLM]) -> None:
        self._load = load
        self._llm: AsyncLLM | None = None
        self._jobs: dict[Job, None] = {}
        self._choices = 0  # sequences admitted and not yet gone
        self._draining = False
        self._quiet = asyncio.Event()
        self._quiet.set()

    @classmethod
    def over(cls, llm: AsyncLLM) -> Worker:
        """Over an engine that is there already."""
        worker = cls(lambda: llm)
        worker._llm = llm
        return worker

    async def load(self) -> AsyncLLM:
        """Build the engine, away from the event loop. Raises what building raises."""
        if self._llm is None:
            self._llm = await _aside(self._load)
        return self._llm

    @property
    def state(self) -> State:
        """Where it stands now."""
        if self._llm is None:
            return State.LOADING
        if not self._llm.alive:
            return State.STOPPED
        return State.DRAINING if self._draining else State.READY

    @property
    def failure(self) -> BaseException | None:
        """What killed the engine, if anything did."""
        return self._llm.failure if self._llm is not None else None

    @property
    def llm(self) -> AsyncLLM:
        """The engine's face, while there is one to ask; else ApiError 503."""
        if self._llm is None:
            raise _unavailable("the model is being loaded; try again in a while", "loading")
        if not self._llm.alive:
            raise _unavailable("the engine has stopped; the server is about to exit", "engine_stopped")
        return self._llm

    @property
    def num_jobs(self) -> int:
        """How many clients are being served."""
        return len(self._jobs)

    # ---- one request

    async def admit(self, parsed: Parsed, customer: bytes) -> Job:
        """Take a request in. Whoever gets the job leaves it, however it ends."""
        llm = self.llm
        if self._draining:
            raise _unavailable("the server is shutting down; ask another one", "draining")
        self._refuse_crowd(parsed.num_choices, llm)
        self._choices += parsed.num_choices
        job = Job(parsed, self._gone)
        self._jobs[job] = None
        self._quiet.clear()
        try:
            prompts = await _prompts(parsed, llm)
            salt = salt_of(customer, parsed.cache_salt)
            how: Any = {"salt": salt, "whole": not parsed.stream}
            await job.open([llm.open(prompt, parsed.params, **how) for prompt in prompts])
        except BaseException as error:
            job.leave()
            if isinstance(error, BadPrompt):
                raise ApiError.of(error, prompt=parsed.prompt_field) from error
            raise
        return job

    def _gone(self, job: Job) -> None:
        self._choices -= job.parsed.num_choices
        del self._jobs[job]
        if not self._jobs:
            self._quiet.set()

    def _refuse_crowd(self, wanted: int, llm: AsyncLLM) -> None:
        """Full is full before a prompt is even read; what could never fit is told so."""
        queue = llm.config.max_queued or MAX_QUEUED
        if wanted > queue:
            raise ApiError(
                f"{wanted} answers in one request are more than this server queues ({queue}); ask for fewer",
                param="n", code="invalid_value",
            )  # fmt: skip
        if self._choices + wanted > queue + llm.config.max_num_seqs:
            raise ApiError(
                f"{self._choices} answers are under way and {queue} may wait; try again later",
                status=429, kind="rate_limit_error", code="queue_full", retry_after=RETRY_AFTER,
            )  # fmt: skip

    # ---- the end

    async def drain(self, timeout: float) -> bool:
        """Admit nobody more and wait for those who are here; then send them away. Whether all ended well."""
        self._draining = True
        log.info("draining: %d requests are under way", self.num_jobs)
        if self._quiet.is_set():
            return True
        try:
            await asyncio.wait_for(self._quiet.wait(), timeout)
        except TimeoutError:
            log.warning("%d requests did not end in %g seconds and are aborted", self.num_jobs, timeout)
            await self.dismiss()
            return False
        return True

    async def dismiss(self) -> None:
        """Send everybody away with an error, now."""
        self._draining = True
        for job in list(self._jobs):
            for reading in job.readings:
                reading.fail(_unavailable("the server is shutting down", "draining"))
        try:
            await asyncio.wait_for(self._quiet.wait(), 5)
        except TimeoutError:
            log.warning("%d clients do not read their answers; their connections are closed", self.num_jobs)

    async def close(self) -> None:
        """Stop the engine's thread."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.close)


async def _aside(work: Callable[[], T]) -> T:
    """Do something long in a thread that the process need not wait for when it is told to end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            done: tuple[T | None, BaseException | None] = (work(), None)
        except BaseException as error:
            done = (None, error)
        with suppress(RuntimeError):  # the loop has gone: nobody is waiting
            loop.call_soon_threadsafe(settle, *done)

    threading.Thread(target=run, name="samewise-load", daemon=True).start()
    return await future


def salt_of(customer: bytes, cache_salt: str | None) -> bytes:
    """Under what a request's prefixes and text are shared: its customer, and whatever it asked to add."""
    if not customer and cache_salt is None:
        return b""
    mark = b"" if cache_salt is None else sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()
    return sha256(b"samewise salt\0" + customer + b"\0" + mark).digest()


async def _prompts(parsed: Parsed, llm: AsyncLLM) -> Sequence[Prompt]:
    if not parsed.chat:
        return parsed.prompts
    return [await llm.chat_prompt(parsed.messages, **parsed.template)]


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(message, status=503, kind="server_error", code=code, retry_after=RETRY_AFTER)


__all__ = ["Job", "State", "Worker", "salt_of"]
