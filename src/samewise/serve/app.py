"""The HTTP routes: each reads a body, asks the engine, and answers in OpenAI's format."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from samewise.errors import CallerError, MachineError, SamewiseError
from samewise.llm.aio import AsyncLLM
from samewise.openai.bodies import (
    CHAT,
    COMPLETIONS,
    ChatBody,
    CompletionBody,
    CompletionReply,
    DetokenizeBody,
    DetokenizeReply,
    ModelCard,
    ModelList,
    StatusReply,
    TokenizeBody,
    TokenizeReply,
    VersionReply,
)
from samewise.openai.errors import ApiError, invalid
from samewise.openai.messages import conversation, template_kwargs
from samewise.openai.parse import (
    ParsedRequest,
    ParseOptions,
    parse,
    read_json,
    refuse_unsupported,
    served_name,
    validate,
)
from samewise.openai.replies import refuse_aborted, respond
from samewise.openai.stream import DONE, StreamWriter, encode_event, join_chunks
from samewise.outputs import RequestOutput
from samewise.receipts import Receipt, is_complete
from samewise.receipts.store import save
from samewise.serve.http import EventStream, JsonResponse, error_response, read_body, until_disconnect
from samewise.serve.metrics import Metrics
from samewise.serve.middleware import AuthMiddleware, RequestIdMiddleware
from samewise.serve.openapi import Endpoint, docs_page, openapi_document
from samewise.serve.settings import ServeSettings
from samewise.serve.web_page import PAGE_HEADERS, page_routes
from samewise.serve.worker import ActiveRequest, State, Worker, salt_of

log = logging.getLogger("samewise.serve")

DESCRIPTION = (
    "OpenAI's interface to a model that answers the same way every time: for a verified request, tokens "
    "and log-probabilities are a function of the contract (`system_fingerprint`), prompt, sampling "
    "parameters and seed."
)

PUBLIC_PAGES = frozenset(("/", "/docs", "/openapi.json"))
"""Paths outside the OpenAPI document that need no key; the others are the endpoints' own `public`."""


class Service:
    """The handlers, and what they share: worker, settings, metrics."""

    def __init__(self, worker: Worker, settings: ServeSettings, version: str) -> None:
        self.worker, self.settings, self.version = worker, settings, version
        self.metrics = Metrics(worker, settings)
        self._started = int(time.time())
        self._parse_options: ParseOptions | None = None  # of the current contract

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints of the OpenAPI document."""
        return (
            Endpoint(method="POST", path=COMPLETIONS, handler=self.completions, body=CompletionBody,
                     reply=CompletionReply, streams=True),
            Endpoint(method="POST", path=CHAT, handler=self.chat_completions, body=ChatBody,
                     reply=CompletionReply, streams=True),
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
            Endpoint(method="GET", path="/version", handler=self.get_version, reply=VersionReply,
                     public=True),
            Endpoint(method="GET", path="/metrics", handler=self.get_metrics, reply=str, public=True),
        )  # fmt: skip

    # ---- answers

    async def completions(self, request: Request) -> Response:
        """Continue a text."""
        return await self._answer(request, COMPLETIONS)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._answer(request, CHAT)

    async def _answer(self, request: Request, endpoint: str) -> Response:
        llm = self.worker.llm
        raw = await read_body(request, self.settings.max_body)
        active = self.worker.begin()
        with ExitStack() as closing:
            closing.callback(active.close)
            parsed, name = await until_disconnect(
                request.receive, self._submit(request, endpoint, raw, active)
            )
            fields: Any = {
                "model": name,
                "created": int(time.time()),
                "id": ("chatcmpl-" if parsed.chat else "cmpl-") + request.state.request_id,
                "decode": llm.intake.decode,
                "token_bytes": llm.intake.token_bytes,
            }
            if parsed.stream:
                writer = StreamWriter(parsed, **fields, fingerprint=llm.contract.id)
                return EventStream(self._events(parsed, active, writer), close=closing.pop_all().close)
            outputs = await until_disconnect(request.receive, active.outputs())
            refuse_aborted(outputs)
            self.metrics.finished(parsed, outputs)
            receipts = await self._receipts(parsed, outputs)
            return JsonResponse(respond(parsed, outputs, **fields, receipts=receipts))

    async def _submit(
        self, request: Request, endpoint: str, raw: bytes, active: ActiveRequest
    ) -> tuple[ParsedRequest, str]:
        """Everything before the engine: parse, validate, render, tokenise and check, in one thread job.

        Returns the request and the model's name in its answer.
        """
        llm, options = self.worker.llm, self._options()

        def prepare() -> tuple[ParsedRequest, str, list[Any]]:
            parsed = parse(endpoint, read_json(raw), options)
            name = self._name(parsed.model, llm)
            active.reserve(parsed.num_choices)
            return parsed, name, parsed.check(llm.intake)

        with llm.expecting():
            parsed, name, checked = await asyncio.to_thread(prepare)
        salt = salt_of(request.state.key_digest, parsed.cache_salt)
        active.read_from(await llm.submit(checked, salt=salt, streamed=parsed.stream))
        return parsed, name

    async def _events(
        self, parsed: ParsedRequest, active: ActiveRequest, writer: StreamWriter
    ) -> AsyncGenerator[bytes]:
        """An answer as events. An error in the middle is an event too, the last one before the end mark."""
        try:
            async with aclosing(active.chunks()) as batches:
                async for batch in batches:
                    data = b"".join(
                        writer.encode(prompt_index, chunk, active.readers[prompt_index].prompt_output)
                        for prompt_index, chunk in (batch if len(batch) == 1 else join_chunks(batch))
                    )
                    if data:
                        yield data
            outputs = [reader.output() for reader in active.readers]
            refuse_aborted(outputs)
            self.metrics.finished(parsed, outputs)
            last = writer.last_events(outputs, await self._receipts(parsed, outputs))
            yield b"".join(map(encode_event, last)) + DONE
        except SamewiseError as error:
            yield encode_event(ApiError.of(error).body()) + DONE

    async def _receipts(
        self, parsed: ParsedRequest, outputs: Sequence[RequestOutput]
    ) -> list[dict[str, Any]] | None:
        """Receipts for the reply, if it asked for them. All are stored where a folder is configured."""
        folder = self.settings.receipts
        if not (parsed.receipt or folder) or not all(map(is_complete, outputs)):
            return None
        receipts = [
            receipt
            for output in outputs
            for receipt in self.worker.llm.receipts(
                output, parsed.params, key=self.settings.signer, hide_prompt=self.settings.hide_prompts
            )
        ]
        if folder is not None:
            await asyncio.to_thread(_store, folder, receipts)
        return [receipt.as_json() for receipt in receipts] if parsed.receipt else None

    def _options(self) -> ParseOptions:
        llm, options = self.worker.llm, self._parse_options
        if options is None or options.contract_id != llm.contract.id:  # new weights are another contract
            options = self._parse_options = ParseOptions.of(
                llm.intake, proposer=llm.config.proposer, contract_id=llm.contract.id
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
            "max_model_len": llm.max_model_len,
            "contract": llm.contract.id,
        }

    # ---- tokens

    async def tokenize(self, request: Request) -> Response:
        """Turn a prompt or a conversation into token ids."""
        llm, raw = self.worker.llm, await read_body(request, self.settings.max_body)
        return JsonResponse(await asyncio.to_thread(self._tokenize, raw, llm))

    def _tokenize(self, raw: bytes, llm: AsyncLLM) -> TokenizeReply:
        body = validate(TokenizeBody, read_json(raw))
        self._name(body.model, llm)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give a prompt or messages, one of them")
        try:
            if body.prompt is not None:
                special = body.add_special_tokens is not False
                tokens = llm.intake.encode(body.prompt, add_special_tokens=special)
            else:
                refuse_unsupported(body, add_special_tokens=False)
                messages = conversation(body.messages or [])
                tokens = llm.intake.chat_prompt(messages, **template_kwargs(body))
        except CallerError as error:
            raise ApiError.of(error, prompt_field="messages" if body.messages else "prompt") from error
        reply: TokenizeReply = {
            "count": len(tokens),
            "max_model_len": llm.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            reply["token_strs"] = [llm.intake.decode([token]) for token in tokens]
        return reply

    async def detokenize(self, request: Request) -> Response:
        """Turn token ids into text."""
        llm, raw = self.worker.llm, await read_body(request, self.settings.max_body)
        return JsonResponse(await asyncio.to_thread(self._detokenize, raw, llm))

    def _detokenize(self, raw: bytes, llm: AsyncLLM) -> DetokenizeReply:
        body = validate(DetokenizeBody, read_json(raw))
        self._name(body.model, llm)
        try:
            return {"prompt": llm.intake.decode(body.tokens)}
        except CallerError as error:
            raise ApiError.of(error, prompt_field="tokens") from error

    # ---- operation

    async def health(self, _: Request) -> Response:
        """Whether the process works: 503 once the engine has stopped."""
        return self._status(ok=self.worker.state is not State.STOPPED)

    async def ready(self, _: Request) -> Response:
        """Whether requests are accepted: 503 while loading, draining or stopped."""
        return self._status(ok=self.worker.state is State.READY)

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
        Route(endpoint.path, endpoint.handler, methods=[endpoint.method]) for endpoint in service.endpoints
    ]
    routes += [*_document_routes(service), *page_routes(worker)]
    routes += [Route("/v1/responses", _no_responses, methods=["POST", "GET"])]
    middleware = [Middleware(RequestIdMiddleware)]
    if settings.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"],
                allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"],
            )
        )  # fmt: skip
    public_paths = PUBLIC_PAGES | {endpoint.path for endpoint in service.endpoints if endpoint.public}
    middleware.append(Middleware(AuthMiddleware, keys=settings.keys, public_paths=public_paths))
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=EXCEPTION_HANDLERS)
    app.state.service = service
    return app


def _document_routes(service: Service) -> list[Route]:
    """`/openapi.json` and `/docs`."""
    document = openapi_document(
        service.endpoints, title="Samewise", version=service.version, description=DESCRIPTION
    )

    async def openapi(request: Request) -> Response:
        mounted_at = request.scope.get("root_path", "")
        return JsonResponse(document | ({"servers": [{"url": mounted_at}]} if mounted_at else {}))

    async def docs(_: Request) -> Response:
        return Response(docs_page(document), headers=PAGE_HEADERS, media_type="text/html")

    return [Route("/openapi.json", openapi), Route("/docs", docs)]


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


async def _no_responses(_: Request) -> Response:
    raise ApiError(
        f"/v1/responses is not served; use {CHAT}", status=404, param="url", code="unsupported_endpoint"
    )


async def _on_error(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors (unknown path, wrong method) in OpenAI's format."""
    assert isinstance(error, HTTPException)
    message, code = {
        404: ("there is no such address", "not_found"),
        405: (f"{request.method} is not allowed here", "method_not_allowed"),
    }.get(error.status_code, (error.detail, None))
    message = f"{message}: {request.url.path[:200]}"
    response = error_response(ApiError(message, status=error.status_code, param="url", code=code))
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
