"""The path of an answer: from the bytes of a request, through the engine, to a reply or events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from samewise.errors import CallerError, MachineError, SamewiseError
from samewise.llm.mailbox import UnreadBudget
from samewise.openai.errors import ApiError, unavailable
from samewise.openai.exchange import AnswerFacts, EventWriter, Exchange, OpenAIExchange, Reader
from samewise.openai.replies import encode_json, encode_slices, refuse_aborted
from samewise.openai.request import ParsedRequest, ParseOptions
from samewise.openai.stream import join_chunks
from samewise.outputs import Chunk, RequestOutput
from samewise.receipts import Receipt, is_complete
from samewise.receipts.store import save
from samewise.serve.http import SLICE_BYTES, EventStream, JsonResponse, SlicedResponse, until_disconnect
from samewise.serve.metrics import Metrics
from samewise.serve.requests import Requests
from samewise.serve.settings import ServeSettings
from samewise.serve.threads import FairThreads
from samewise.serve.worker import UNNAMED, ActiveRequest, Names, State, Worker, salt_of
from samewise.shares import SharedBudget

T = TypeVar("T")

log = logging.getLogger("samewise.serve")

RENDER_THREADS = 2
"""Large answers that are rendered at once. Set by hand: more would take turns on the interpreter's lock, and
delay the event loop by as much."""

LARGE_ANSWER = 2048
"""Tokens and log-probabilities above which an answer is rendered in a thread. Set by hand: 2 ms of work."""

MAX_JOINED = 512
"""Chunks that are joined to events at once, for a late reader. Set by hand: about 1 ms of work."""


class Answers:
    """Answers the requests of one server, at every endpoint that answers.

    `before` is awaited before every answer is begun. `prompts` are the tokens of prompts that are in memory.
    """

    def __init__(
        self,
        worker: Worker,
        settings: ServeSettings,
        requests: Requests,
        metrics: Metrics,
        unread: UnreadBudget,
        prompts: SharedBudget,
    ) -> None:
        self._prompts = prompts
        self._worker, self._settings, self._requests = worker, settings, requests
        self._metrics, self._unread = metrics, unread
        self._renders = FairThreads(RENDER_THREADS)
        self.before: Callable[[], Awaitable[None]] | None = None

    async def answer(self, request: Request, read: Reader) -> Response:
        """The answer to a request, whole or as events."""
        llm = self._worker.llm
        owner = self._requests.owner(request)
        with self._requests.body(request) as body, ExitStack() as closing:
            raw = await body.read(self._settings.limits.body_timeout)
            active = self._worker.begin(owner, Names(frozenset({request.state.request_id})))
            closing.callback(active.close)
            exchange, name = await until_disconnect(request.receive, self._submit(request, read, raw, active))
            del raw
            closing.callback(body.keep(exchange.kept_bytes))
            answering = closing.pop_all()
        with answering:
            facts = AnswerFacts(
                model=name, created=int(time.time()), request_id=request.state.request_id,
                contract=llm.contract.id, decode=llm.intake.decode, token_bytes=llm.intake.token_bytes,
            )  # fmt: skip
            parsed = exchange.parsed
            if parsed.stream:
                events = self._events(exchange, active, exchange.writer(facts))
                return EventStream(events, close=answering.pop_all().close, unread=self._unread, owner=owner)
            return await until_disconnect(request.receive, self._reply(exchange, active, facts))

    async def complete(
        self,
        request: Request,
        endpoint: str,
        body: dict[str, Any],
        *,
        whole_context: bool = False,
        names: Names = UNNAMED,
    ) -> list[RequestOutput]:
        """The complete answers to a body of an endpoint, for routes that answer in another form.

        `whole_context`: without `max_tokens` a completion goes on to the end of the context. `names`: the
        body's own, beside the header's.
        """

        def read(raw: Any, options: ParseOptions) -> Exchange:
            if whole_context:
                options = replace(options, completion_tokens=None)
            return OpenAIExchange(endpoint, raw, options)

        names = names._replace(request=names.request | {request.state.request_id})
        active = self._worker.begin(self._requests.owner(request), names)
        try:
            exchange, _ = await self._submit(request, read, encode_json(body), active)
            outputs = await until_disconnect(request.receive, active.outputs())
            refuse_aborted(outputs)
        finally:
            active.close()
        self._metrics.finished(exchange.parsed, outputs)
        return outputs

    async def _submit(
        self, request: Request, read: Reader, raw: bytes, active: ActiveRequest
    ) -> tuple[Exchange, str]:
        """Everything before the engine: parse, validate, render, tokenise and check, in one thread job.

        Returns the request and the model's name in its answer.
        """
        if self.before is not None:
            await self.before()
        llm, options = self._worker.llm, self._requests.options()

        def prepare() -> tuple[Exchange, str, list[Any]]:
            exchange = read(self._requests.json(raw), options)
            parsed = exchange.parsed
            name = self._requests.name(parsed.model, llm)
            active.reserve(parsed.num_choices)
            return exchange, name, [] if parsed.params.grammar else parsed.check(llm.intake)

        with llm.expecting():
            exchange, name, checked = await self._requests.run(prepare, active.owner)
        parsed = exchange.parsed
        if parsed.params.grammar is not None:  # compiled before a thread is taken for the rest
            compiled = await self._compile(parsed, active.owner)
            check = partial(parsed.check, llm.intake, owner=active.owner)
            checked = await self._requests.run(check, active.owner)
            del compiled
        active.hold_prompts(self._prompts, sum(one.num_held for one in checked))
        salt = salt_of(request.state.key_digest, parsed.cache_salt)
        parsed.refuse_repeats(sum(len(one.token_ids) for one in checked))
        exchange.begun()
        readers = await llm.submit(checked, salt=salt, owner=active.owner, streamed=parsed.stream)
        active.read_from(readers, self._unread)
        return exchange, name

    async def _compile(self, parsed: ParsedRequest, owner: bytes | None) -> object:
        """The request's compiled grammar, to be held until the request was checked."""
        try:
            run = partial(self._requests.run, owner=owner)
            return await self._worker.llm.compile_grammar(parsed.params, owner=owner, run=run)
        except CallerError as error:
            raise parsed.named(ApiError.of(error)) from error
        except MachineError as error:
            if self._worker.state is State.DRAINING:
                raise unavailable("the server is shutting down", "draining") from error
            raise

    async def _reply(self, exchange: Exchange, active: ActiveRequest, facts: AnswerFacts) -> Response:
        """A whole answer, rendered in a thread where it is large."""
        await active.wait()
        parsed = exchange.parsed

        def render() -> tuple[list[RequestOutput], list[bytes]]:
            outputs, receipts = self._finish(parsed, active)
            return outputs, list(encode_slices(exchange.reply(facts, outputs, receipts)))

        large = _is_large(exchange, active)
        outputs, pieces = await self._run(render, exchange, active)
        self._metrics.finished(parsed, outputs)
        if large:
            return SlicedResponse(pieces, unread=self._unread, owner=active.owner)
        return Response(b"".join(pieces), media_type=JsonResponse.media_type)

    async def _events(
        self, exchange: Exchange, active: ActiveRequest, writer: EventWriter
    ) -> AsyncGenerator[bytes]:
        """An answer as events. An error in the middle is an event too, the last one."""
        parsed = exchange.parsed

        def end() -> tuple[list[RequestOutput], bytes]:
            outputs, receipts = self._finish(parsed, active)
            return outputs, writer.last(outputs, receipts)

        try:
            if first := await self._first(exchange, active, writer):
                yield first
            keep_alive, sent = self._settings.keep_alive, time.monotonic()
            in_thread = _repeats_much(parsed, active)
            async with aclosing(active.chunks(keep_alive)) as batches:
                async for batch in batches:
                    if len(batch) == 1 and not in_thread:  # a reader that keeps up: at every token
                        if data := _encode(batch[0], active, writer):
                            yield data
                            sent = time.monotonic()
                            continue
                    else:
                        pieces = _encoded(batch, active, writer)
                        async for data in self._rendered(pieces, active, in_thread=in_thread):
                            yield data
                            sent = time.monotonic()
                    if not batch or time.monotonic() - sent >= keep_alive:  # chunks may be held back
                        yield writer.keep_alive()
                        sent = time.monotonic()
            outputs, last = await self._run(end, exchange, active)
            self._metrics.finished(parsed, outputs)
            yield last
        except SamewiseError as error:
            yield writer.failed(ApiError.of(error))

    async def _rendered(
        self, pieces: Iterator[bytes], active: ActiveRequest, *, in_thread: bool
    ) -> AsyncGenerator[bytes]:
        """Pieces of events, others served between them; made in a thread where they repeat a long prompt."""
        if not in_thread:
            for number, data in enumerate(pieces):
                if number:  # a late reader has many
                    await asyncio.sleep(0)
                yield data
            return
        while data := await self._renders.run(partial(next, pieces, b""), owner=active.owner):
            yield data

    async def _first(self, exchange: Exchange, active: ActiveRequest, writer: EventWriter) -> bytes:
        """What is sent before the first chunk: made in a thread where it repeats much of the request."""
        if exchange.kept_bytes <= SLICE_BYTES:
            return writer.first()
        return await self._renders.run(writer.first, owner=active.owner)

    async def _run(self, work: Callable[[], T], exchange: Exchange, active: ActiveRequest) -> T:
        """The result of `work` on a complete answer: in a thread, unless it is small and stores nothing."""
        stores = self._settings.receipts is not None or exchange.parsed.receipt
        if not stores and not _is_large(exchange, active):
            return work()
        return await self._renders.run(work, owner=active.owner)

    def _finish(
        self, parsed: ParsedRequest, active: ActiveRequest
    ) -> tuple[list[RequestOutput], list[dict[str, Any]] | None]:
        """The outputs of a complete answer, and receipts for the reply if it asked for them.

        Receipts are stored where a folder is configured.
        """
        outputs, folder = [reader.output() for reader in active.readers], self._settings.receipts
        try:
            refuse_aborted(outputs)
        except ApiError as error:
            raise parsed.named(error) from None
        if not (parsed.receipt or folder) or not all(map(is_complete, outputs)):
            return outputs, None
        receipts = [
            receipt
            for output, reader in zip(outputs, active.readers, strict=True)
            for receipt in self._worker.llm.receipts(
                output, reader.params, key=self._settings.signer, hide_prompt=self._settings.hide_prompts
            )
        ]
        if folder is not None:
            _store(folder, receipts)
        return outputs, [receipt.as_json() for receipt in receipts] if parsed.receipt else None


def _is_large(exchange: Exchange, active: ActiveRequest) -> bool:
    """Whether rendering a complete answer takes long: it has many values, or repeats much of the request."""
    parsed = exchange.parsed
    params = parsed.params
    answers = sum(reader.num_tokens for reader in active.readers) * (1 + (params.logprobs or 0))
    return answers + _repeated(parsed, active) > LARGE_ANSWER or exchange.kept_bytes > SLICE_BYTES


def _repeats_much(parsed: ParsedRequest, active: ActiveRequest) -> bool:
    """Whether rendering the first events of the choices takes long."""
    return (parsed.echo or parsed.return_token_ids) and _repeated(parsed, active) > LARGE_ANSWER


def _repeated(parsed: ParsedRequest, active: ActiveRequest) -> int:
    """Tokens and log-probabilities of the prompts, as often as the answer may repeat them."""
    prompts = sum(reader.num_prompt_tokens for reader in active.readers)
    times = parsed.params.n if parsed.echo or parsed.return_token_ids else 1
    return prompts * times * (1 + (parsed.params.prompt_logprobs or 0))


def _encoded(batch: list[tuple[int, Chunk]], active: ActiveRequest, writer: EventWriter) -> Iterator[bytes]:
    """The events of some chunks, as many together as are sent at once."""
    events: list[bytes] = []
    size = 0
    for one in batch if len(batch) == 1 else _joined(batch):
        events.append(_encode(one, active, writer))
        size += len(events[-1])
        if size >= SLICE_BYTES:
            yield b"".join(events)
            events, size = [], 0
    if size:
        yield b"".join(events)


def _encode(one: tuple[int, Chunk], active: ActiveRequest, writer: EventWriter) -> bytes:
    prompt_index, chunk = one
    return writer.encode(prompt_index, chunk, active.readers[prompt_index].prompt_output)


def _joined(batch: list[tuple[int, Chunk]]) -> Iterator[tuple[int, Chunk]]:
    for start in range(0, len(batch), MAX_JOINED):
        yield from join_chunks(batch[start : start + MAX_JOINED])


def _store(folder: Path, receipts: Sequence[Receipt]) -> None:
    """Store receipts. An answer whose receipt cannot be stored is not sent."""
    try:
        for receipt in receipts:
            save(folder, receipt)
    except MachineError as error:
        log.error("%s", error)  # noqa: TRY400 - the message is complete; a traceback adds nothing
        raise ApiError(
            "the receipt could not be kept; the server's log says why",
            status=500, kind="server_error", code="receipt_failed",
        ) from error  # fmt: skip


__all__ = ["Answers"]
