"""AsyncLLM: the asynchronous interface, for servers.

One thread owns the engine. Calls reach it through one queue; results return to the event loop of the caller,
so several loops may share one engine. Closing a reader aborts its request within one step.

A step that fails does not end the thread: its requests are computed again, one at a time, and one that fails
again ends with RequestFailed while the others go on. The thread ends when the engine is lost, or its weights
are not the certified ones any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from samewise.config import EngineConfig, settings_signature
from samewise.contract import Contract
from samewise.engine import build
from samewise.engine.weights import CheckedUpdate, WeightUpdate
from samewise.errors import BadParameter, CallerError, GuaranteeLost, MachineError, RequestFailed
from samewise.llm.answer import Answer
from samewise.llm.any_engine import AnyEngine
from samewise.llm.gate import Gate, Work, check_mode
from samewise.llm.intake import CheckedRequest, Intake, Prompt
from samewise.llm.mailbox import Item, LoopWaker, Mailbox, UnreadBudget, call_in_loop
from samewise.llm.step_loop import StepLoop
from samewise.outputs import Chunk, RequestOutput
from samewise.params import SamplingParams
from samewise.receipts.receipt import Receipt
from samewise.text.grammar import CompiledGrammar
from samewise.verify.probe import ProbeReport

T = TypeVar("T")
RunsCompiling = Callable[[Callable[[], Future[CompiledGrammar]]], Awaitable[Future[CompiledGrammar]]]
"""Runs a function in a thread."""

log = logging.getLogger("samewise")

FAILED = "this request failed inside the engine and was ended; other requests go on"
"""The message of RequestFailed. Why it failed is in the log: it may quote another request."""

HALTED = "the update is incomplete, so that requests wait until another one succeeds"
"""Added to the error of an update that failed half-way."""


@dataclass(frozen=True, slots=True)
class GatherTimes:
    """How long an idle engine waits for further requests, so that requests sent together share a frame.

    Otherwise the first of them gets a frame of its own and the others start one frame later.
    """

    expected: float = 0.01  # seconds at most, while a request is known to be on its way; set by hand
    unexpected: float = 0.05  # share of the last step's time, with no request known of; set by hand


GATHER = GatherTimes()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Where an answer's chunks go."""

    loop: asyncio.AbstractEventLoop
    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class _EngineCall:
    """Work for the engine's thread, and what to do if the thread ends before it."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None]
    is_request: bool = False  # whether it waits while the gate is not open


class ResponseReader:
    """Reads one request's chunks in the event loop that submitted it.

    Close it when done, however it ended (or use it in a `with`): that frees its pages, at once if it is still
    running.
    """

    def __init__(self, answer: Answer, mailbox: Mailbox, close: Callable[[Answer], None]) -> None:
        self._answer, self._mailbox, self._close = answer, mailbox, close
        self._ended = False
        self._failure: BaseException | None = None

    async def next_chunks(self, pause: float | None = None) -> list[Chunk] | None:
        """Chunks since the last call, in order, at least one; empty when the request is over.

        None after `pause` seconds without one. Raises the error that ended the request, after the chunks
        before it were returned.
        """
        if self._ended:
            return []
        chunks: list[Chunk] = []
        items = [] if self._failure else await self._mailbox.take(pause)
        if not items and not self._failure and pause is not None:
            return None
        if len(items) == 1 and isinstance(items[0], Chunk):
            return [items[0]]
        for item in items:
            if isinstance(item, Chunk):
                chunks.append(item)
                continue
            self._ended, self._failure = item is None, item
            break
        if self._failure is not None and not chunks:
            self._ended = True
            raise self._failure
        return chunks

    def prompt_output(self) -> RequestOutput:
        """What is known of the prompt; with its log-probabilities once the first chunk was read."""
        return self._answer.prompt_output()

    def output(self) -> RequestOutput:
        """The whole answer, once `next_chunks()` has returned nothing."""
        return self._answer.output()

    @property
    def params(self) -> SamplingParams:
        """The parameters of the answer, as they were checked."""
        return self._answer.checked.params

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(len(choice.token_ids) for choice in self._answer.choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._answer.checked.token_ids)

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and was read to its end."""
        return self._ended and self._answer.finished

    def fail(self, error: BaseException) -> None:
        """Make the reader raise `error`, after what came before it."""
        self._mailbox.put(error)

    def drop(self, error: BaseException) -> None:
        """Make the reader raise `error` next, in place of what it has not read, and abort the request."""
        self._mailbox.replace(error)
        self._close(self._answer)

    def limit(self, budget: UnreadBudget, drop: Callable[[], object], *, owner: bytes | None = None) -> None:
        """Count the chunks that are not read in a budget; `drop` is called when they are too many."""
        self._mailbox.limit(budget, drop, owner=owner)

    def on_end(self, call: Callable[[], object]) -> None:
        """Call this when the engine is done with the request, however much of it was read."""
        self._mailbox.on_end(call)

    def close(self) -> None:
        """Abort the request if it is still running. Closing twice is fine."""
        self._mailbox.close()
        self._close(self._answer)

    def __enter__(self) -> ResponseReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLLM:
    """Stream answers from coroutines. `close()` it, or leave its context, to stop the engine's thread.

    Keywords are those of EngineConfig.
    """

    __signature__ = settings_signature()

    def __init__(self, model: str | os.PathLike[str] = "smollm2", **settings: Any) -> None:
        self._begin(build(EngineConfig.of(model=os.fspath(model), **settings)))

    @classmethod
    def over(cls, engine: AnyEngine) -> AsyncLLM:
        """The same interface over an engine that was built already, or over one in other processes."""
        llm = cls.__new__(cls)
        llm._begin(engine)  # noqa: SLF001 - an alternative constructor
        return llm

    def _begin(self, engine: AnyEngine) -> None:
        self._engine: AnyEngine = engine
        self._loop = StepLoop(engine)
        self._calls: queue.SimpleQueue[_EngineCall | None] = queue.SimpleQueue()
        self._gate = Gate()
        self._reading = ThreadPoolExecutor(1, "samewise-update")  # reads new weights
        self._held: list[_EngineCall] = []  # calls that the gate has, to be failed if the thread ends
        self._readers: dict[Answer, _Reader] = {}
        self._failure: BaseException | None = None
        self._expected: set[object] = set()  # one mark per request that is on its way
        self._step_seconds = 0.0  # duration of the last step
        self._stopped = threading.Event()
        self._waker = LoopWaker()
        self._thread = threading.Thread(target=self._run_engine, name="samewise-engine", daemon=True)
        self._thread.start()

    # ---- requests

    async def submit(
        self,
        checked: Sequence[CheckedRequest],
        *,
        salt: bytes = b"",
        owner: bytes | None = None,
        streamed: bool = True,
    ) -> list[ResponseReader]:
        """Queue checked requests, all of them or none, in one call to the engine's thread.

        Requests of one `owner` get no more of the engine's places than its share, so that those of another
        owner start at once; without an owner they are served by arrival. `streamed=False`: only the outputs
        are wanted, so the readers receive no chunks. The caller closes the readers.
        """
        loop = asyncio.get_running_loop()
        readers = [_Reader(loop, Mailbox()) for _ in checked]
        answers: list[Answer] = []

        left: list[bool] = []  # whether the caller has gone before the request was taken

        def add() -> None:
            if left:
                return
            try:
                for one, reader in zip(checked, readers, strict=True):
                    answers.append(self._loop.submit(one, salt=salt, owner=owner, streamed=streamed))
                    self._readers[answers[-1]] = reader
            except BaseException:
                self._drop(answers)
                raise

        try:
            await self._call(add, is_request=True)
        except asyncio.CancelledError:
            left.append(True)
            self._put(_EngineCall(lambda: self._drop(answers), lambda _: None))
            raise
        return [
            ResponseReader(answer, reader.mailbox, self._close_answer)
            for answer, reader in zip(answers, readers, strict=True)
        ]

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: bytes = b"",
        streamed: bool = True,
    ) -> ResponseReader:
        """Check one request in a thread of its own and submit it."""
        params = params or self.default_params
        compiled = await self.compile_grammar(params)
        with self.expecting():  # tokenising a long prompt takes milliseconds
            checked = await asyncio.to_thread(self.intake.check, prompt, params)
        del compiled
        (reader,) = await self.submit([checked], salt=salt, streamed=streamed)
        return reader

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b""
    ) -> AsyncIterator[Chunk]:
        """Chunks as they become final. Leaving the loop early aborts the request."""
        with await self.open(prompt, params, salt=salt) as reader:
            while chunks := await reader.next_chunks():
                for chunk in chunks:
                    yield chunk

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b""
    ) -> RequestOutput:
        """The whole answer. Cancelling the task aborts the request."""
        with await self.open(prompt, params, salt=salt, streamed=False) as reader:
            while await reader.next_chunks():
                pass
            return reader.output()

    async def chat_prompt(self, messages: Any, /, **template: Any) -> list[int]:
        """Token ids of a conversation under the model's chat template."""
        with self.expecting():
            return await asyncio.to_thread(self.intake.chat_prompt, messages, **template)

    async def compile_grammar(
        self, params: SamplingParams, *, owner: bytes | None = None, run: RunsCompiling = asyncio.to_thread
    ) -> CompiledGrammar | None:
        """Compile a request's grammar; no thread is blocked while it waits. None: it has none.

        `run` runs a function in a thread, where the grammar was not compiled before.

        Hold on to the result until the request was checked: the check finds it then, whatever else was
        compiled meanwhile, for the same `owner`, whose grammars take no more than a share of the queue.
        """
        grammar = params.grammar
        if grammar is None:
            return None
        compiling = self.intake.find_compiled(grammar, owner=owner)
        if compiling is None:
            compiling = await run(partial(self.intake.start_compiling, grammar, owner=owner))
        return await asyncio.wrap_future(compiling)

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Tell the engine's thread that a request is on its way: an idle engine waits a moment for it."""
        mark = object()
        self._expected.add(mark)
        try:
            yield
        finally:
            self._expected.discard(mark)

    def receipts(self, output: RequestOutput, params: SamplingParams, **options: Any) -> list[Receipt]:
        """A receipt for each choice of an answer; options are those of `StepLoop.receipts`."""
        return self._loop.receipts(output, params, **options)

    # ---- weights

    async def update_weights(self, update: WeightUpdate, *, mode: str | None = None) -> Contract:
        """Replace the weights: see Engine.update_weights.

        `mode` says what becomes of requests that were submitted before. `wait`: they end first, and later
        ones wait; `abort`: they end with what they have, and the finish reason `abort`; `keep`: they go on
        under the new weights from the tokens they have, and their outputs say which token is whose
        (`CompletionOutput.weights`). Without a mode there may be none. While paused, requests are kept. If
        it fails after weights were written, all requests wait until another update succeeds.

        Updates are made in the order of the calls, in one event loop: one that comes while another waits for
        requests to end follows it, whatever its mode; `abort` then ends those requests.
        """
        if mode is not None:
            check_mode(mode)
        if self._stopped.is_set():
            raise self._stopped_error()
        # Read and checked while requests go on, by one thread: no update overtakes an earlier one.
        loop = asyncio.get_running_loop()
        checked = await loop.run_in_executor(self._reading, self._engine.read_update, update)
        ways = {"wait": self._gate.when_quiet, "abort": self._abort_in_turn}
        enter = ways.get(mode or "keep", self._gate.in_turn)
        return await self._call(partial(self._replace, checked, mode), enter=enter)

    async def check_update(self, update: WeightUpdate) -> None:
        """Raise what `update_weights` would say of these weights. Changes nothing; not for iterators."""
        await asyncio.to_thread(self._engine.read_update, update)

    async def pause(self, mode: str = "wait") -> None:
        """Stop generating; requests wait until `resume`.

        `wait` returns when those under way have ended; `abort` ends them; `keep` stops them where they are.
        """
        check_mode(mode)

        def begin() -> None:
            if mode == "abort":
                self._abort_open()
            self._gate.freeze()

        if mode == "wait":
            await self._call(self._gate.freeze, enter=partial(self._gate.when_quiet, pauses=True))
        else:
            await self._call(begin)

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._call(self._gate.resume)

    async def abort_all(self) -> int:
        """End every request under way with what it has; returns how many there were."""
        return await self._call(self._abort_open)

    async def abort(self, readers: Iterable[ResponseReader]) -> int:
        """End the requests of these readers with what they have; returns how many were under way."""
        answers = {reader._answer for reader in readers}  # noqa: SLF001 - the readers are its own
        return await self._call(lambda: self._abort_open(answers))

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, unless requests run. Returns whether it was done.

        Requests that a pause has stopped lose their KV too, and are computed again from their tokens.
        """

        def clear() -> bool:
            if not (self._loop.idle or self._gate.frozen):
                return False
            self._loop.forget_prefixes()
            return True

        return await self._call(clear)

    @property
    def paused(self) -> bool:
        """Whether a pause was asked for and not ended."""
        return self._gate.paused

    @property
    def weights_version(self) -> int:
        """How often the weights were replaced."""
        return self._engine.weights_version

    # ---- what it is

    @property
    def intake(self) -> Intake:
        """Checks prompts and parameters, tokenises and decodes. Any thread may use it."""
        return self._loop.intake

    @property
    def contract(self) -> Contract:
        """Everything the output bits depend on."""
        return self._engine.contract

    @property
    def config(self) -> EngineConfig:
        """What the engine was built from."""
        return self._engine.config

    @property
    def default_params(self) -> SamplingParams:
        """The checkpoint's own generation defaults, used where no parameters are given."""
        return self.intake.default_params()

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest context."""
        return self._engine.max_model_len

    @property
    def report(self) -> ProbeReport:
        """What the probe found at start-up."""
        return self._engine.report

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the engine's thread, if one did."""
        return self._failure

    @property
    def alive(self) -> bool:
        """Whether the engine's thread still takes requests."""
        return not self._stopped.is_set()

    async def stats(self) -> dict[str, Any]:
        """The engine's counters; requests that wait for their owner's share count as waiting."""
        return await self._call(self._stats)

    async def live(self, since: int = 0) -> dict[str, Any]:
        """The engine's counters and its frames after number `since`; see Engine.live."""
        return await self._call(lambda: self._live(since))

    def close(self) -> None:
        """Stop the engine's thread. Requests still running end with an error."""
        self.intake.stop_compiling()
        if self._thread.is_alive():
            self._put(None)
            self._thread.join()
        self._reading.shutdown(wait=False)
        self._engine.close()
        self._waker.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ---- in the caller's event loop

    async def _call(
        self,
        work: Callable[[], T],
        *,
        is_request: bool = False,
        enter: Callable[[object, Work], None] | None = None,
    ) -> T:
        """Run something on the engine's thread and wait for it without blocking the event loop.

        `is_request`: not before the gate is open. `enter`: how the gate takes the work; None: it is done at
        once. A caller that is cancelled calls off what has not begun.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        left: list[bool] = []  # whether the caller was cancelled

        resolve = partial(_resolve, future)

        def run() -> None:
            if left:
                return
            try:
                result: T | None = work()
                error: BaseException | None = None
            except BaseException as caught:
                result, error = None, caught
            self._waker.call(loop, resolve, (result, error))
            if error is not None and self._ends_thread(error):
                raise error

        def fail(error: BaseException) -> None:
            call_in_loop(loop, resolve, (None, error))

        call = _EngineCall(run, fail, is_request)
        begin = _EngineCall(lambda: None if left or enter is None else self._enter(call, enter), fail)
        self._put(call if enter is None else begin)
        if self._stopped.is_set():
            self._fail_calls()
        try:
            return await future
        except asyncio.CancelledError:
            left.append(True)
            self._put(_EngineCall(lambda: self._call_off(call), lambda _: None))
            raise

    def _put(self, call: _EngineCall | None) -> None:
        """Give the engine's thread a call, or None: stop."""
        self._calls.put(call)
        self._engine.wake()

    def _close_answer(self, answer: Answer) -> None:
        self._put(_EngineCall(lambda: self._drop([answer]), lambda _: None))

    def _stopped_error(self) -> MachineError:
        error = MachineError(f"the engine has stopped{f': {self._failure}' if self._failure else ''}")
        error.__cause__ = self._failure
        return error

    # ---- in the engine's thread

    def _stats(self) -> dict[str, Any]:
        stats = self._engine.stats()
        return stats | {"waiting": stats["waiting"] + self._loop.num_held}

    def _live(self, since: int) -> dict[str, Any]:
        return self._engine.live(since) | {"stats": self._stats()}

    def _abort_open(self, only: Collection[Answer] | None = None) -> int:
        aborted = self._loop.abort_all(only)
        self._deliver(aborted)
        return len(aborted)

    def _replace(self, checked: CheckedUpdate, mode: str | None) -> Contract:
        """Replace the weights; if that fails half-way, nothing runs until it succeeds."""
        if mode == "abort":
            self._abort_open()
        try:
            loop = self._engine if mode is None else self._loop
            contract = loop.update_weights(checked)
        except Exception as error:
            self._gate.halted = not self._engine.certified
            if not self._gate.halted or self._engine.lost is not None:
                raise
            log.exception("an update of the weights failed; requests wait for another one")
            if isinstance(error, CallerError):
                raise BadParameter(f"{error}; {HALTED}", param=error.param) from error
            raise GuaranteeLost(f"the update of the weights failed: {error}; {HALTED}") from error
        self._gate.halted = False
        return contract

    def _enter(self, call: _EngineCall, enter: Callable[[object, Work], None]) -> None:
        self._held.append(call)  # also failed from here if the thread ends in `enter`
        enter(call, lambda: self._run_held(call))

    def _abort_in_turn(self, key: object, run: Work) -> None:
        """Enter the gate as the update of mode `abort`: what earlier updates wait for ends now."""
        if self._gate.updates_wait:
            self._abort_open()
        self._gate.in_turn(key, run)

    def _call_off(self, call: _EngineCall) -> None:
        """Forget a call that waits for quiet; one that waits for the gate to open does nothing then."""
        if self._gate.call_off(call):
            self._held.remove(call)

    def _run_held(self, call: _EngineCall) -> None:
        self._held.remove(call)
        call.run()

    def _settle_gate(self) -> None:
        self._gate.settle(idle=self._loop.idle)

    def _run_engine(self) -> None:
        """Take calls, step while there is work, block while there is none."""
        try:
            while self._take_calls():
                began = time.monotonic()
                changed = self._step()
                self._step_seconds = time.monotonic() - began
                self._deliver(changed)
                self._settle_gate()
        except BaseException as error:
            log.exception("the engine has stopped")  # here alone: callers may be clients of others
            self._failure = error
        self._stopped.set()  # before readers are told, so that they find it set
        for reader in self._readers.values():
            self._waker.call(reader.loop, reader.mailbox.put, self._stopped_error())
        self._waker.stop()
        self._fail_calls()

    def _step(self) -> list[Answer]:
        """One step; after a failure, its requests are computed again. Raises if the engine is lost."""
        try:
            return self._loop.step()
        except Exception as error:
            if self._ends_thread(error):
                raise
            log.exception("a step failed; its requests are computed again, one at a time")
            return self._loop.recover(blame=True)

    def _ends_thread(self, error: BaseException) -> bool:
        """Whether no request can be answered any more, also after another update of the weights."""
        if self._engine.lost is not None:
            return True
        return isinstance(error, GuaranteeLost) and not self._gate.halted

    def _take_calls(self) -> bool:
        """Run waiting calls; block while the engine is idle. False when it is time to stop."""
        was_idle, began = self._engine.idle, 0.0
        while True:
            wait: float | None = 0.0
            if self._engine.idle or self._gate.frozen:
                wait = None
            elif was_idle:
                began = began or time.monotonic()
                gather = GATHER.expected
                if not self._expected:
                    gather = min(gather, GATHER.unexpected * self._step_seconds)
                wait = max(0.0, began + gather - time.monotonic())
            try:
                call = self._calls.get(timeout=wait)
            except queue.Empty:
                return True
            if call is None:
                return False
            if call.is_request and not self._gate.is_open:
                self._held.append(call)
                self._gate.hold(partial(self._run_held, call))
                continue
            try:
                call.run()
                self._settle_gate()
            except Exception as error:  # of a call whose caller does not wait for it
                if self._ends_thread(error):
                    raise
                log.exception("a call of the engine failed; its requests are computed again")

    def _deliver(self, changed: list[Answer]) -> None:
        """Send new chunks to their readers, and the end of each finished answer."""
        mail: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Item]]] = {}
        for answer in changed:
            reader = self._readers.get(answer)
            if reader is None or not (answer.pending or answer.finished):
                continue
            items = mail.setdefault(reader.loop, [])
            while answer.pending:
                items.append((reader.mailbox, answer.pending.popleft()))
            if answer.finished:
                failure = answer.error or RequestFailed(FAILED) if answer.failed else None
                items.append((reader.mailbox, failure))
        self._waker.deliver(mail)

    def _drop(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._readers.pop(answer, None)
            self._loop.abort(answer)

    def _fail_calls(self) -> None:
        """Fail the calls that are still queued: the engine's thread has ended."""
        while True:
            try:
                call = self._held.pop()  # a caller's thread may be here too
            except IndexError:
                break
            call.fail(self._stopped_error())
        while True:
            try:
                queued = self._calls.get_nowait()
            except queue.Empty:
                return
            if queued is not None:
                queued.fail(self._stopped_error())


def _resolve(future: asyncio.Future[T], outcome: tuple[T | None, BaseException | None]) -> None:
    """Give a future its result or its error, unless its caller has left."""
    result, error = outcome
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]


__all__ = ["GATHER", "AsyncLLM", "GatherTimes", "ResponseReader"]
