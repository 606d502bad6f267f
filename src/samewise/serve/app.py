"""The HTTP routes: each reads a body, asks the engine, and answers in OpenAI's format."""

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

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from samewise.anthropic.bodies import (
    COUNT_TOKENS,
    MESSAGES,
    CountTokensBody,
    CountTokensReply,
    MessageReply,
    MessagesBody,
)
from samewise.anthropic.errors import MessageErrorBody
from samewise.anthropic.exchange import MessagesExchange
from samewise.anthropic.parse import parse_count
from samewise.errors import CallerError, MachineError, SamewiseError
from samewise.llm.aio import AsyncLLM
from samewise.llm.mailbox import UnreadBudget
from samewise.openai.bodies import (
    CHAT,
    COMPLETIONS,
    ChatBody,
    CompletionBody,
    CompletionReply,
    DetokenizeBody,
    DetokenizeReply,
    LoadReply,
    ModelCard,
    ModelList,
    StatusReply,
    TokenizeBody,
    TokenizeReply,
    TokenizerInfo,
    VersionReply,
)
from samewise.openai.errors import ApiError, invalid, unavailable, unsupported
from samewise.openai.exchange import AnswerFacts, EventWriter, Exchange, OpenAIExchange, Reader
from samewise.openai.messages import conversation, template_kwargs
from samewise.openai.parse import (
    ParsedRequest,
    ParseOptions,
    read_json,
    refuse_unsupported,
    served_name,
    template_tools,
    thinking_fields,
    validate,
)
from samewise.openai.replies import encode_json, encode_slices, refuse_aborted
from samewise.openai.responses.bodies import RESPONSES, DeletedReply, ResponseReply, ResponsesBody
from samewise.openai.responses.exchange import Records, ResponsesExchange
from samewise.openai.stream import join_chunks
from samewise.openai.tokenizer_info import tokenizer_info
from samewise.outputs import Chunk, RequestOutput
from samewise.receipts import Receipt, is_complete
from samewise.receipts.store import save
from samewise.serve.http import (
    SLICE_BYTES,
    EventStream,
    HeldBody,
    JsonResponse,
    SlicedResponse,
    error_response,
    refuse_crowded,
    until_disconnect,
)
from samewise.serve.metrics import Metrics
from samewise.serve.middleware import (
    AuthMiddleware,
    PlaceMiddleware,
    RequestIdMiddleware,
    WebPageMiddleware,
)
from samewise.serve.openapi import Endpoint, docs_page, openapi_document
from samewise.serve.settings import ServeSettings
from samewise.serve.stored import ResponseStore
from samewise.serve.threads import FairThreads
from samewise.serve.training import TrainingRoutes
from samewise.serve.web_page import PAGE_HEADERS, page_routes
from samewise.serve.worker import ActiveRequest, State, Worker, salt_of
from samewise.shares import SharedBudget

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("samewise.serve")

INTAKE_THREADS = 4
RENDER_THREADS = 2
"""Requests that are parsed and tokenised at once, and large answers that are rendered at once. Set by hand:
more would take turns on the interpreter's lock, and delay the event loop by as much."""

LARGE_ANSWER = 2048
"""Tokens and log-probabilities above which an answer is rendered in a thread. Set by hand: 2 ms of work."""

MAX_JOINED = 512
"""Chunks that are joined to events at once, for a late reader. Set by hand: about 1 ms of work."""

MAX_TRAINING_LOGPROBS = 1024
"""Log-probabilities per token with `--enable-training`: distillation asks for 100. Set by hand."""

DESCRIPTION = (
    "OpenAI's and Anthropic's interfaces to a model that answers the same way every time: for a verified "
    "request, tokens and log-probabilities are a function of the contract (`system_fingerprint`), prompt, "
    "sampling parameters and seed."
)

PUBLIC_PAGES = frozenset(("/", "/docs", "/openapi.json"))
"""Paths outside the OpenAPI document that need no key; the others are the endpoints' own `public`."""


class Service:
    """The handlers, and what they share: worker, settings, metrics."""

    def __init__(self, worker: Worker, settings: ServeSettings, version: str) -> None:
        self.worker, self.settings, self.version = worker, settings, version
        self.metrics = Metrics(worker, settings)
        self.unread = UnreadBudget(settings.limits.max_unread)
        self.stored = ResponseStore(settings.limits.max_stored, settings.limits.max_values)
        self._bodies = SharedBudget(settings.limits.max_bodies)
        self._intakes, self._renders = FairThreads(INTAKE_THREADS), FairThreads(RENDER_THREADS)
        self._started = int(time.time())
        self._parse_options: ParseOptions | None = None  # of the current contract
        self.before_answers: Callable[[], Awaitable[None]] | None = None
        """Awaited before every answer is begun."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints of the OpenAPI document."""
        return (
            Endpoint(method="POST", path=COMPLETIONS, handler=self.completions, body=CompletionBody,
                     reply=CompletionReply, streams=True),
            Endpoint(method="POST", path=CHAT, handler=self.chat_completions, body=ChatBody,
                     reply=CompletionReply, streams=True),
            Endpoint(method="POST", path=RESPONSES, handler=self.responses, body=ResponsesBody,
                     reply=ResponseReply, streams=True),
            Endpoint(method="GET", path=RESPONSES + "/{response_id}", handler=self.stored_response,
                     reply=ResponseReply),
            Endpoint(method="DELETE", path=RESPONSES + "/{response_id}", handler=self.delete_response,
                     reply=DeletedReply),
            Endpoint(method="POST", path=MESSAGES, handler=self.messages, body=MessagesBody,
                     reply=MessageReply, error=MessageErrorBody, streams=True),
            Endpoint(method="POST", path=COUNT_TOKENS, handler=self.count_tokens, body=CountTokensBody,
                     reply=CountTokensReply, error=MessageErrorBody),
            Endpoint(method="GET", path="/v1/models", handler=self.models, reply=ModelList),
            Endpoint(method="GET", path="/v1/models/{model_id:path}", handler=self.model, reply=ModelCard),
            Endpoint(method="POST", path="/tokenize", handler=self.tokenize, body=TokenizeBody,
                     reply=TokenizeReply),
            Endpoint(method="POST", path="/detokenize", handler=self.detokenize, body=DetokenizeBody,
                     reply=DetokenizeReply),
            Endpoint(method="GET", path="/health", handler=self.health, reply=StatusReply, public=True,
                     state=True),
            Endpoint(method="GET", path="/ready", handler=self.ready, reply=StatusReply, public=True,
                     state=True),
            Endpoint(method="GET", path="/live", handler=self.live, reply=StatusReply, public=True,
                     state=True),
            Endpoint(method="GET", path="/load", handler=self.get_load, reply=LoadReply),
            Endpoint(method="GET", path="/tokenizer_info", handler=self.get_tokenizer_info,
                     reply=TokenizerInfo),
            Endpoint(method="GET", path="/version", handler=self.get_version, reply=VersionReply,
                     public=True),
            Endpoint(method="GET", path="/metrics", handler=self.get_metrics, reply=str, public=True),
        )  # fmt: skip

    # ---- answers

    async def completions(self, request: Request) -> Response:
        """Continue a text."""
        return await self._answer(request, partial(OpenAIExchange, COMPLETIONS))

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._answer(request, partial(OpenAIExchange, CHAT))

    async def responses(self, request: Request) -> Response:
        """Continue a conversation of items; the response can be stored and continued."""
        key: bytes = request.state.key_digest
        records = Records(partial(self.stored.get, key, param="previous_response_id"))
        return await self._answer(
            request, partial(ResponsesExchange, records=records, keep=partial(self.stored.add, key))
        )

    async def stored_response(self, request: Request) -> Response:
        """A stored response, whole."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise unsupported("stream", "is not supported here; a stored response is returned whole")
        record = self.stored.get(
            request.state.key_digest, request.path_params["response_id"], param="response_id"
        )
        return SlicedResponse([record.reply], unread=self.unread, owner=self._owner(request))

    async def delete_response(self, request: Request) -> Response:
        """Forget a stored response."""
        response_id: str = request.path_params["response_id"]
        self.stored.delete(request.state.key_digest, response_id)
        reply: DeletedReply = {"id": response_id, "object": "response", "deleted": True}
        return JsonResponse(reply)

    async def messages(self, request: Request) -> Response:
        """Continue a conversation, in Anthropic's format."""
        return await self._answer(request, MessagesExchange)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a message's prompt."""
        return await self._convert(request, self._count_tokens)

    def _count_tokens(self, raw: bytes, llm: AsyncLLM) -> CountTokensReply:
        parsed = parse_count(self._json(raw), self._options())
        self._name(parsed.model, llm)
        try:
            return {"input_tokens": len(llm.intake.chat_prompt(parsed.messages, **parsed.template))}
        except CallerError as error:
            raise ApiError.of(error, prompt_field="messages") from error

    async def _answer(self, request: Request, read: Reader) -> Response:
        llm = self.worker.llm
        owner = self._owner(request)
        with self._body(request) as body, ExitStack() as closing:
            raw = await body.read(self.settings.limits.body_timeout)
            active = self.worker.begin(owner)
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
                return EventStream(events, close=answering.pop_all().close, unread=self.unread, owner=owner)
            return await until_disconnect(request.receive, self._reply(exchange, active, facts))

    async def complete(
        self, request: Request, endpoint: str, body: dict[str, Any], *, whole_context: bool = False
    ) -> list[RequestOutput]:
        """The complete answers to a body of an endpoint, for routes that answer in another form.

        `whole_context`: without `max_tokens` a completion goes on to the end of the context.
        """

        def read(raw: Any, options: ParseOptions) -> Exchange:
            if whole_context:
                options = replace(options, completion_tokens=None)
            return OpenAIExchange(endpoint, raw, options)

        active = self.worker.begin(self._owner(request))
        try:
            exchange, _ = await self._submit(request, read, encode_json(body), active)
            outputs = await until_disconnect(request.receive, active.outputs())
            refuse_aborted(outputs)
        finally:
            active.close()
        self.metrics.finished(exchange.parsed, outputs)
        return outputs

    async def _submit(
        self, request: Request, read: Reader, raw: bytes, active: ActiveRequest
    ) -> tuple[Exchange, str]:
        """Everything before the engine: parse, validate, render, tokenise and check, in one thread job.

        Returns the request and the model's name in its answer.
        """
        if self.before_answers is not None:
            await self.before_answers()
        llm, options = self.worker.llm, self._options()

        def prepare() -> tuple[Exchange, str, list[Any]]:
            exchange = read(self._json(raw), options)
            parsed = exchange.parsed
            name = self._name(parsed.model, llm)
            active.reserve(parsed.num_choices)
            return exchange, name, [] if parsed.params.grammar else parsed.check(llm.intake)

        with llm.expecting():
            exchange, name, checked = await self._intakes.run(prepare, owner=active.owner)
        parsed = exchange.parsed
        if parsed.params.grammar is not None:  # compiled before a thread is taken for the rest
            compiled = await self._compile(parsed, active.owner)
            check = partial(parsed.check, llm.intake, owner=active.owner)
            checked = await self._intakes.run(check, owner=active.owner)
            del compiled
        salt = salt_of(request.state.key_digest, parsed.cache_salt)
        parsed.refuse_repeats(sum(len(one.token_ids) for one in checked))
        exchange.begun()
        readers = await llm.submit(checked, salt=salt, owner=active.owner, streamed=parsed.stream)
        active.read_from(readers, self.unread)
        return exchange, name

    async def _compile(self, parsed: ParsedRequest, owner: bytes | None) -> object:
        """The request's compiled grammar, to be held until the request was checked."""
        try:
            run = partial(self._intakes.run, owner=owner)
            return await self.worker.llm.compile_grammar(parsed.params, owner=owner, run=run)
        except CallerError as error:
            raise parsed.named(ApiError.of(error)) from error
        except MachineError as error:
            if self.worker.state is State.DRAINING:
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
        self.metrics.finished(parsed, outputs)
        if large:
            return SlicedResponse(pieces, unread=self.unread, owner=active.owner)
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
            keep_alive, sent = self.settings.keep_alive, time.monotonic()
            async with aclosing(active.chunks(keep_alive)) as batches:
                async for batch in batches:
                    async for data in self._rendered(_encoded(batch, active, writer), parsed, active):
                        yield data
                        sent = time.monotonic()
                    if not batch or time.monotonic() - sent >= keep_alive:  # chunks may be held back
                        yield writer.keep_alive()
                        sent = time.monotonic()
            outputs, last = await self._run(end, exchange, active)
            self.metrics.finished(parsed, outputs)
            yield last
        except SamewiseError as error:
            yield writer.failed(ApiError.of(error))

    async def _rendered(
        self, pieces: Iterator[bytes], parsed: ParsedRequest, active: ActiveRequest
    ) -> AsyncGenerator[bytes]:
        """Pieces of events, others served between them; made in a thread where they repeat a long prompt."""
        if not _repeats_much(parsed, active):
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
        stores = self.settings.receipts is not None or exchange.parsed.receipt
        if not stores and not _is_large(exchange, active):
            return work()
        return await self._renders.run(work, owner=active.owner)

    def _finish(
        self, parsed: ParsedRequest, active: ActiveRequest
    ) -> tuple[list[RequestOutput], list[dict[str, Any]] | None]:
        """The outputs of a complete answer, and receipts for the reply if it asked for them.

        Receipts are stored where a folder is configured.
        """
        outputs, folder = [reader.output() for reader in active.readers], self.settings.receipts
        try:
            refuse_aborted(outputs)
        except ApiError as error:
            raise parsed.named(error) from None
        if not (parsed.receipt or folder) or not all(map(is_complete, outputs)):
            return outputs, None
        receipts = [
            receipt
            for output, reader in zip(outputs, active.readers, strict=True)
            for receipt in self.worker.llm.receipts(
                output, reader.params, key=self.settings.signer, hide_prompt=self.settings.hide_prompts
            )
        ]
        if folder is not None:
            _store(folder, receipts)
        return outputs, [receipt.as_json() for receipt in receipts] if parsed.receipt else None

    def _owner(self, request: Request) -> bytes | None:
        """The key that a request came with, where requests of several keys share the server."""
        digest: bytes = request.state.key_digest
        return digest if self.settings.several_owners else None

    def _body(self, request: Request) -> HeldBody:
        return HeldBody(request, self._bodies, max_body=self.settings.max_body, owner=self._owner(request))

    def _json(self, raw: bytes) -> Any:
        refuse_crowded(raw, self.settings.limits.max_values)
        return read_json(raw)

    def _options(self) -> ParseOptions:
        llm, options = self.worker.llm, self._parse_options
        if options is None or options.contract_id != llm.contract.id:  # new weights are another contract
            options = self._parse_options = ParseOptions.of(
                llm.intake,
                proposer=llm.config.proposer,
                contract_id=llm.contract.id,
                special_tokens_in_content=self.settings.special_tokens_in_content,
            )
            defaults = replace(options.defaults, logprobs_mode=self.settings.logprobs_mode)
            limit = MAX_TRAINING_LOGPROBS if self.settings.training else options.max_logprobs
            options = self._parse_options = replace(
                options, defaults=defaults, max_logprobs=limit, fresh_seeds=self.settings.fresh_seeds
            )
        return options

    # ---- the model

    async def models(self, _: Request) -> Response:
        """List the model's names."""
        llm = self.worker.llm
        reply: ModelList = {"object": "list", "data": [self._card(name, llm) for name in self._names(llm)]}
        return JsonResponse(reply)

    async def model(self, request: Request) -> Response:
        """Describe one of the model's names."""
        llm = self.worker.llm
        return JsonResponse(self._card(self._name(request.path_params["model_id"], llm), llm))

    def _names(self, llm: AsyncLLM) -> tuple[str, ...]:
        return self.settings.model_names or (llm.config.model,)

    def _name(self, requested: str | None, llm: AsyncLLM) -> str:
        return served_name(requested, self._names(llm))

    def _card(self, name: str, llm: AsyncLLM) -> ModelCard:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "samewise",
            "root": llm.config.model,
            "parent": None,
            "max_model_len": llm.max_model_len,
            "contract": llm.contract.id,
        }

    # ---- tokens

    async def tokenize(self, request: Request) -> Response:
        """Turn a prompt or a conversation into token ids."""
        return await self._convert(request, self._tokenize)

    async def _convert(self, request: Request, convert: Callable[[bytes, AsyncLLM], Any]) -> Response:
        """The answer to a body, made in a thread."""
        llm = self.worker.llm
        with self._body(request) as body:
            raw = await body.read(self.settings.limits.body_timeout)

            def work() -> list[bytes]:
                return list(encode_slices(convert(raw, llm)))

            converted = self._intakes.run(work, owner=self._owner(request))
            pieces = await until_disconnect(request.receive, converted)
        return SlicedResponse(pieces, unread=self.unread, owner=self._owner(request))

    def _tokenize(self, raw: bytes, llm: AsyncLLM) -> TokenizeReply:
        body = validate(TokenizeBody, self._json(raw))
        self._name(body.model, llm)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give a prompt or messages, one of them")
        try:
            if body.prompt is not None:
                special = body.add_special_tokens is not False
                llm.intake.refuse_endless(body.prompt)
                tokens = llm.intake.encode(body.prompt, add_special_tokens=special)
            else:
                refuse_unsupported(body, add_special_tokens=False)
                messages = conversation(body.messages or [])
                special = self.settings.special_tokens_in_content
                kwargs = template_kwargs(body, special=special) | template_tools(body.tools)
                if llm.intake.tokenizer is not None and llm.intake.tokenizer.chat_template:
                    kwargs |= thinking_fields(body, llm.intake.template())
                tokens = llm.intake.chat_prompt(messages, **kwargs)
        except CallerError as error:
            raise ApiError.of(error, prompt_field="messages" if body.messages else "prompt") from error
        reply: TokenizeReply = {
            "count": len(tokens),
            "max_model_len": llm.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if body.return_token_strs:
            reply["token_strs"] = llm.intake.token_strings(tokens)
        return reply

    async def get_tokenizer_info(self, _: Request) -> Response:
        """The tokenizer's configuration."""
        return JsonResponse(tokenizer_info(self.worker.llm.intake.tokenizer))

    async def detokenize(self, request: Request) -> Response:
        """Turn token ids into text."""
        return await self._convert(request, self._detokenize)

    def _detokenize(self, raw: bytes, llm: AsyncLLM) -> DetokenizeReply:
        body = validate(DetokenizeBody, self._json(raw))
        self._name(body.model, llm)
        try:
            return {"prompt": llm.intake.decode(body.tokens)}
        except CallerError as error:
            raise ApiError.of(error, prompt_field="tokens") from error

    # ---- operation

    async def health(self, _: Request) -> Response:
        """Whether answers can be had: 503 while loading, draining or stopped."""
        return self._status(ok=self.worker.state is State.READY)

    async def ready(self, request: Request) -> Response:
        """The same as `/health`."""
        return await self.health(request)

    async def live(self, _: Request) -> Response:
        """Whether the process works, also while loading or draining: 503 once the engine has stopped."""
        return self._status(ok=self.worker.state is not State.STOPPED)

    async def get_load(self, _: Request) -> Response:
        """The number of requests under way."""
        reply: LoadReply = {"server_load": self.worker.num_active}
        return JsonResponse(reply)

    def _status(self, *, ok: bool) -> Response:
        reply: StatusReply = {"status": self.worker.state.value}
        return JsonResponse(reply, status_code=200 if ok else 503)

    async def get_version(self, _: Request) -> Response:
        """The server's version and its model's contract."""
        contract = self.worker.llm.contract.id if self.worker.state is State.READY else None
        reply: VersionReply = {"version": self.version, "contract": contract}
        return JsonResponse(reply)

    async def get_metrics(self, _: Request) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(await self.metrics.text(), media_type=self.metrics.media_type)


def make_app(
    llm: AsyncLLM | Worker, settings: ServeSettings | None = None, *, version: str = "0.0.0"
) -> Starlette:
    """The application over an engine, or over a worker that may still be loading one."""
    settings = settings or ServeSettings()
    worker = llm if isinstance(llm, Worker) else Worker.over(llm)
    service = Service(worker, settings, version)
    routes = [
        Route(path, _by_method(handlers), methods=list(handlers))
        for path, handlers in _handlers(service.endpoints).items()
    ]
    routes += [*_document_routes(service), *page_routes(worker, settings, service.unread)]
    if settings.training:
        training = TrainingRoutes(service)
        service.before_answers = training.use_collected
        routes += training.routes()
    # A key is not sent by browsers of their own accord, so with keys any page may try.
    origins = None if settings.keys else settings.allowed_origins
    middleware = [
        Middleware(RequestIdMiddleware),
        Middleware(WebPageMiddleware, origins=origins, hosts=settings.allowed_hosts),
    ]
    if settings.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"],
                allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"],
            )
        )  # fmt: skip
    public_paths = PUBLIC_PAGES | {endpoint.path for endpoint in service.endpoints if endpoint.public}
    middleware.append(
        Middleware(
            AuthMiddleware, keys=settings.keys, public_paths=public_paths, basic=settings.training
        )
    )  # fmt: skip
    places = SharedBudget(settings.limits.answered_connections())
    public_places = SharedBudget(settings.limits.public_requests())
    middleware.append(
        Middleware(
            PlaceMiddleware, places=places, public_places=public_places, public_paths=public_paths,
            shared=settings.several_owners,
        )
    )  # fmt: skip
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=EXCEPTION_HANDLERS)
    app.state.service = service
    return app


def _handlers(endpoints: Sequence[Endpoint]) -> dict[str, dict[str, Handler]]:
    """Handlers by path and method."""
    found: dict[str, dict[str, Handler]] = {}
    for endpoint in endpoints:
        found.setdefault(endpoint.path, {})[endpoint.method] = endpoint.handler
    return found


def _by_method(handlers: dict[str, Handler]) -> Handler:
    """A handler for all methods of a path. HEAD is answered as GET is."""
    if len(handlers) == 1:
        return next(iter(handlers.values()))

    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return handle


def _document_routes(service: Service) -> list[Route]:
    """`/openapi.json` and `/docs`."""
    document = openapi_document(
        service.endpoints, title="Samewise", version=service.version, description=DESCRIPTION
    )

    rendered, page = encode_json(document), docs_page(document).encode()  # once: these paths are public

    async def openapi(request: Request) -> Response:
        mounted_at = request.scope.get("root_path", "")
        servers = encode_json({"servers": [{"url": mounted_at}]})[1:]
        body = rendered[:-1] + b"," + servers if mounted_at else rendered
        return Response(body, media_type=JsonResponse.media_type)

    async def docs(_: Request) -> Response:
        return Response(page, headers=PAGE_HEADERS, media_type="text/html")

    return [Route("/openapi.json", openapi), Route("/docs", docs)]


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
    for prompt_index, chunk in batch if len(batch) == 1 else _joined(batch):
        events.append(writer.encode(prompt_index, chunk, active.readers[prompt_index].prompt_output))
        size += len(events[-1])
        if size >= SLICE_BYTES:
            yield b"".join(events)
            events, size = [], 0
    if size:
        yield b"".join(events)


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


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors (unknown path, wrong method) in OpenAI's format."""
    assert isinstance(error, HTTPException)
    message, code = {
        404: ("there is no such address", "not_found"),
        405: (f"{request.method} is not allowed here", "method_not_allowed"),
    }.get(error.status_code, (error.detail, None))
    message = f"{message}: {request.url.path[:200]}"
    response = error_response(
        ApiError(message, status=error.status_code, param="url", code=code), request.scope
    )
    for name, value in (error.headers or {}).items():
        # Starlette joins a set of methods: sorted, the header is the same in every process.
        response.headers[name] = ", ".join(sorted(value.split(", "))) if name == "Allow" else value
    return response


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # for the log: the client has disconnected


EXCEPTION_HANDLERS = {
    SamewiseError: _on_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_disconnect,
}

__all__ = ["Service", "make_app"]
