"""AsyncLLM: the asynchronous face, for servers. One thread owns the engine; the event loop never waits.

Every call crosses to the engine's thread through one queue and comes back through the caller's own
event loop, so many loops may share one engine; a second thread does nothing but wake those loops. A
reader that goes away is aborted within a step.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack

from samewise.config import EngineConfig, EngineSettings
from samewise.contract import Contract
from samewise.engine import Engine, build
from samewise.errors import BadPrompt, CallerError, MachineError
from samewise.llm.answers import Answer, Asked, Desk, Prompt
from samewise.outputs import Chunk, RequestOutput
from samewise.params import SamplingParams
from samewise.receipts.receipt import Receipt, make
from samewise.receipts.signing import SigningKey
from samewise.verify.probe import Report

T = TypeVar("T")


GATHER = 0.01
"""Seconds at most that an idle engine waits for requests which are known to be coming, so that who comes
together starts together: otherwise the first has a frame to itself, and the others a frame later theirs."""

LINGER = 0.05
"""For how much of a step it waits even if it knows of none."""

Item = Chunk | BaseException | None
"""What a reader is handed: a chunk, the error that ends them, or None where they end well."""


class _Mailbox:
    """Chunks on their way to one reader, put and taken in its loop. (asyncio.Queue costs more.)"""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Add something, and wake whoever waits for it."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Item]:
        """All there is, waiting for something."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return items


@dataclass(frozen=True, slots=True)
class _Reader:
    """Where an answer's chunks go, and the loop that may put them there."""

    loop: asyncio.AbstractEventLoop
    chunks: _Mailbox
    whole: bool = False  # it waits for the end: what comes before is not worth waking anybody for


_Letter = tuple[asyncio.AbstractEventLoop, Callable[..., object], object]
"""A loop, something to be called there, and with what."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to be run on the engine's thread, and whom to tell if it never is."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None]


class Reading:
    """One request under way, read in the event loop that opened it.

    Leave it when done, however it ended (or use it in a `with`): that gives its pages back, at once if it
    is still running.
    """

    def __init__(
        self,
        answer: Answer,
        chunks: _Mailbox,
        leave: Callable[[Answer], None],
    ) -> None:
        self._answer, self._chunks, self._leave = answer, chunks, leave
        self._ended = False
        self._failure: BaseException | None = None

    async def some(self) -> list[Chunk]:
        """What became final since the last call, waiting for something; nothing when it is over."""
        if self._ended:
            return []
        found: list[Chunk] = []
        for item in () if self._failure else await self._chunks.take():
            if isinstance(item, Chunk):
                found.append(item)
                continue
            self._ended, self._failure = item is None, item
            break
        if self._failure is not None and not found:  # what came before it is handed out first
            self._ended = True
            raise self._failure
        return found

    def prompt(self) -> RequestOutput:
        """What is known of the prompt; its log-probabilities, too, once the first choice has spoken."""
        return self._answer.prompt_output()

    def output(self) -> RequestOutput:
        """The whole answer, once `some()` has returned nothing."""
        return self._answer.output()

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, as far as it was read."""
        return self._ended and self._answer.finished

    def fail(self, error: BaseException) -> None:
        """Have the reader raised this, whatever was still to come."""
        self._chunks.put(error)

    def leave(self) -> None:
        """Nobody reads this any more."""
        self._leave(self._answer)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class AsyncLLM:
    """Stream answers from coroutines. Start it once; `close()` or leave the context to stop it."""

    def __init__(self, model: str | os.PathLike[str] = "smollm2", **settings: Unpack[EngineSettings]) -> None:
        self._begin(build(EngineConfig.of(model=os.fspath(model), **settings)))

    @classmethod
    def over(cls, engine: Engine) -> AsyncLLM:
        """The same face over an engine built by hand."""
        llm = cls.__new__(cls)
        llm._begin(engine)  # noqa: SLF001 - an alternative constructor
        return llm

    def _begin(self, engine: Engine) -> None:
        self._engine, self._desk = engine, Desk(engine)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._readers: dict[Answer, _Reader] = {}
        self._failure: BaseException | None = None
        self._coming: set[object] = set()  # a mark for each request that is being read
        self._step_seconds = 0.0  # what the last one took
        self._stopped = threading.Event()
        self._post: queue.SimpleQueue[_Letter | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._own, name="samewise-engine", daemon=True),
            threading.Thread(target=self._carry, name="samewise-post", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def contract(self) -> Contract:
        """The name of everything the bits depend on."""
        return self._engine.contract

    @property
    def failure(self) -> BaseException | None:
        """What killed the engine thread, if anything did."""
        return self._failure

    async def open(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b"", whole: bool = False
    ) -> Reading:
        """Start a request. Whoever opens it leaves it: see Reading.

        `whole`: the reader wants the output alone; of the chunks it gets only the last.
        """
        reader = _Reader(asyncio.get_running_loop(), _Mailbox(), whole)
        answer = await self._open(prompt, params or self._desk.default_params(), reader, salt)
        return Reading(answer, reader.chunks, self._leave)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b""
    ) -> AsyncIterator[Chunk]:
        """Chunks as they become final. Leaving the loop early aborts the request."""
        with await self.open(prompt, params, salt=salt) as reading:
            while chunks := await reading.some():
                for chunk in chunks:
                    yield chunk

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b""
    ) -> RequestOutput:
        """The whole answer. Cancelling the task aborts the request."""
        with await self.open(prompt, params, salt=salt, whole=True) as reading:
            while await reading.some():
                pass
            return reading.output()

    async def chat_prompt(self, messages: Any, **template: Any) -> list[int]:
        """Token ids of a conversation; see Desk.chat_prompt."""
        with self._expected():
            return await asyncio.to_thread(self._desk.chat_prompt, messages, **template)

    def receipts(
        self,
        output: RequestOutput,
        params: SamplingParams,
        *,
        hide_prompt: bool = False,
        key: SigningKey | None = None,
    ) -> list[Receipt]:
        """A receipt for each choice of an answer that `params` asked for: see receipts.make."""
        engine = self._engine
        return make(
            output, params, contract=engine.contract, model=engine.config.model, settings=engine.settings,
            hide_prompt=hide_prompt, key=key,
        )  # fmt: skip

    async def tokens(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's token ids."""
        if self._desk.tokenizer is None:
            raise BadPrompt("this model has no tokenizer; it reads and writes token ids")
        return await asyncio.to_thread(self._desk.encode, text, add_special_tokens=add_special_tokens)

    def text(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens and all."""
        if self._desk.tokenizer is None:
            raise BadPrompt("this model has no tokenizer; it reads and writes token ids")
        self._engine.refuse_unknown(token_ids)
        return str(self._desk.tokenizer.decode(token_ids))

    def spell(self, token: int) -> bytes | None:
        """The bytes a token stands for; None where they are not known apart from its neighbours'."""
        return self._desk.spell(token)

    def template(self, tools: Any = None) -> str:
        """The model's chat template, as text; some have another one for conversations with tools."""
        return self._desk.template(tools)

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of this model, or None."""
        return self._desk.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """The checkpoint's own generation defaults; what is used where none are given."""
        return self._desk.default_params()

    @property
    def config(self) -> EngineConfig:
        """What the engine was built from."""
        return self._engine.config

    @property
    def max_model_len(self) -> int:
        """Longest context."""
        return self._engine.max_model_len

    @property
    def report(self) -> Report:
        """What the probe found at start-up."""
        return self._engine.report

    @property
    def alive(self) -> bool:
        """Whether the engine's thread still takes requests."""
        return not self._stopped.is_set()

    async def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        return await self._call(self._engine.stats)

    async def live(self, since: int = 0) -> dict[str, Any]:
        """The engine's counters and its frames after number `since`; see Engine.live."""
        return await self._call(lambda: self._engine.live(since))

    def close(self) -> None:
        """Stop the engine thread. Requests still running end with an error."""
        if any(thread.is_alive() for thread in self._threads):
            self._calls.put(None)
            for thread in self._threads:
                thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ---- in the caller's loop

    async def _open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        reader: _Reader,
        salt: bytes,
    ) -> Answer:
        # Tokenising a long prompt takes milliseconds: neither the loop nor the engine waits for it.
        with self._expected():
            asked = await asyncio.to_thread(self._desk.ask, prompt, params)
        made: list[Answer] = []
        try:
            return await self._call(lambda: self._submit(asked, salt, reader, made))
        except asyncio.CancelledError:
            self._calls.put(_Call(lambda: self._drop_all(made), lambda _: None))
            raise

    async def _call(self, work: Callable[[], T]) -> T:
        """Run something on the engine's thread and wait for it without blocking the loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(outcome: tuple[T | None, BaseException | None]) -> None:
            result, error = outcome
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result, error = work(), None
            except CallerError as caught:
                result, error = None, caught
            except BaseException as broken:
                self._post.put((loop, settle, (None, broken)))
                raise
            self._post.put((loop, settle, (result, error)))

        def fail(error: BaseException) -> None:
            _tell(loop, settle, (None, error))

        self._calls.put(_Call(run, fail))
        if self._stopped.is_set():
            self._refuse_calls()
        return await future

    @contextmanager
    def _expected(self) -> Iterator[None]:
        """Meanwhile, a request is known to be coming."""
        mark = object()
        self._coming.add(mark)
        try:
            yield
        finally:
            self._coming.discard(mark)

    def _leave(self, answer: Answer) -> None:
        """A reader is done with an answer, or tired of it."""
        self._calls.put(_Call(lambda: self._drop(answer), lambda _: None))

    def _gone(self) -> MachineError:
        return MachineError(f"the engine has stopped{f': {self._failure}' if self._failure else ''}")

    # ---- in the engine's thread

    def _submit(self, asked: Asked, salt: bytes, reader: _Reader, made: list[Answer]) -> Answer:
        answer = self._desk.submit(asked, salt=salt)
        made.append(answer)
        self._readers[answer] = reader
        return answer

    def _drop(self, answer: Answer) -> None:
        self._readers.pop(answer, None)
        self._desk.abort(answer)

    def _drop_all(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._drop(answer)

    def _own(self) -> None:
        """The engine's thread: take calls, step while there is work, sleep while there is none."""
        try:
            while self._take_calls():
                began = time.monotonic()
                news = self._desk.step()
                self._step_seconds = time.monotonic() - began
                self._hand_out(news)
        except BaseException as error:
            self._failure = error
        self._stopped.set()  # before anybody is told: who hears of it must find it so
        for reader in self._readers.values():
            self._post.put((reader.loop, reader.chunks.put, self._gone()))
        self._post.put(None)
        self._refuse_calls()

    def _carry(self) -> None:
        """The postman's thread: wake loops on the engine's behalf.

        To wake one is a system call. Who makes it lets go of the interpreter, and gets it back when the
        loop has done its work: a millisecond with eight readers, in which the engine would not step.
        """
        while (letter := self._post.get()) is not None:
            _tell(*letter)

    def _hand_out(self, news: list[Answer]) -> None:
        """What became final, to whoever reads it: each loop is woken once, however many read there."""
        mail: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, Item]]] = {}
        for answer in news:
            reader = self._readers.get(answer)
            if reader is None:
                continue
            if reader.whole and not answer.finished:
                answer.pending.clear()
                continue
            box = mail.setdefault(reader.loop, [])
            while answer.pending:
                box.append((reader.chunks, answer.pending.popleft()))
            if answer.finished:
                box.append((reader.chunks, None))
        for loop, box in mail.items():
            self._post.put((loop, _deliver, box))

    def _take_calls(self) -> bool:
        """Run waiting calls; block while the engine is idle. False when it is time to stop."""
        rested, began = self._engine.idle, 0.0
        while True:
            wait: float | None = 0.0
            if self._engine.idle:
                wait = None
            elif rested:
                began = began or time.monotonic()
                patience = GATHER if self._coming else min(GATHER, LINGER * self._step_seconds)
                wait = max(0.0, began + patience - time.monotonic())
            try:
                call = self._calls.get(timeout=wait)
            except queue.Empty:
                return True
            if call is None:
                return False
            call.run()

    def _refuse_calls(self) -> None:
        """Nobody will run what is still queued: say so to whoever waits for it."""
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                call.fail(self._gone())


def _deliver(box: list[tuple[_Mailbox, Item]]) -> None:
    for chunks, item in box:
        chunks.put(item)


def _tell(loop: asyncio.AbstractEventLoop, tell: Callable[..., object], what: object) -> None:
    """Hand something to a coroutine's loop, which may have gone away meanwhile."""
    try:
        loop.call_soon_threadsafe(tell, what)
    except RuntimeError:  # the loop is closed: nobody is waiting there any more
        return


__all__ = ["AsyncLLM", "Reading"]
