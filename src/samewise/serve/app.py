"""The routes. Each reads a body, asks the worker, and answers in OpenAI's words."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from samewise.errors import BadPrompt, MachineError, SamewiseError
from samewise.llm.aio import AsyncLLM
from samewise.openai.bodies import DetokenizeBody, TokenizeBody
from samewise.openai.errors import ApiError, invalid
from samewise.openai.messages import conversation
from samewise.openai.parse import chat_template, parse, read, refuse_unsupported
from samewise.openai.parsed import CHAT, COMPLETIONS, Dialect, Parsed, Terms
from samewise.openai.replies import Streamer, joined, refuse_aborted, respond
from samewise.openai.toolbox import special_tokens
from samewise.outputs import RequestOutput
from samewise.receipts import Receipt, is_complete
from samewise.receipts.store import save
from samewise.serve import schema
from samewise.serve.http import DONE, EventStream, Json, event, failure, read_body, unless_gone
from samewise.serve.metrics import Metrics
from samewise.serve.middleware import Guard, Named
from samewise.serve.settings import ServeSettings
from samewise.serve.site import add_site
from samewise.serve.worker import Job, State, Worker

log = logging.getLogger("samewise.serve")


class Service:
    """What the routes share: the worker, the settings, the metrics."""

    def __init__(self, worker: Worker, settings: ServeSettings, version: str) -> None:
        self.worker, self.settings, self.version = worker, settings, version
        self.metrics = Metrics(worker, settings)
        self.began = int(time.time())
        self._special_of: tuple[AsyncLLM, dict[str, int]] | None = None

    # ---- answers

    async def complete(self, request: Request) -> Response:
        """`/v1/completions` and `/v1/chat/completions`."""
        path = CHAT if request.scope["path"].endswith(CHAT) else COMPLETIONS  # wherever we are mounted
        llm = self.worker.llm
        terms = self.terms(llm)
        parsed = await read_body(request, self.settings.max_body, lambda body: parse(path, body, terms))
        said = self.model(parsed.model, llm)
        wire = {
            "model": said,
            "created": int(time.time()),
            "id": ("chatcmpl-" if parsed.chat else "cmpl-") + request.state.request_id,
        }
        job = await unless_gone(request, self.worker.admit(parsed, request.state.customer), Job.leave)
        says: Any = {"decode": llm.text, "spell": llm.spell}
        if parsed.stream:
            streamer = Streamer(parsed, **wire, fingerprint=llm.contract.id, **says)
            return EventStream(self._events(job, streamer), close=job.leave)
        with job:
            outputs = await unless_gone(request, job.outputs())
            refuse_aborted(outputs)
            self.metrics.finished(parsed, outputs)
            body = respond(parsed, outputs, **wire, **says, receipts=await self.receipts(parsed, outputs))
        return Json(body)

    async def _events(self, job: Job, streamer: Streamer) -> AsyncGenerator[bytes]:
        """A job as events. An error in the middle is an event, too, and the last but the end mark."""
        try:
            async with aclosing(job.chunks()) as chunks:
                async for some in chunks:
                    events = [
                        streamer.wire(place, chunk, job.readings[place].prompt)
                        for place, chunk in (some if len(some) == 1 else joined(some))
                    ]
                    if any(events):
                        yield b"".join(events)
            outputs = [reading.output() for reading in job.readings]
            refuse_aborted(outputs)
            self.metrics.finished(job.parsed, outputs)
            last = streamer.end(outputs, await self.receipts(job.parsed, outputs))
            yield b"".join(map(event, last)) + DONE
        except SamewiseError as error:
            yield event(ApiError.of(error).body()) + DONE

    async def receipts(self, parsed: Parsed, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]] | None:
        """Receipts for whoever asked (`receipt: true`), and one of every answer for `--receipts`."""
        folder = self.settings.receipts
        if not (parsed.receipt or folder) or not all(map(is_complete, outputs)):
            return None
        how: Any = {"key": self.settings.signer, "hide_prompt": self.settings.hide_prompts}
        made = [one for out in outputs for one in self.worker.llm.receipts(out, parsed.params, **how)]
        if folder is not None:
            await asyncio.to_thread(_keep, folder, made)
        return [one.as_json() for one in made] if parsed.receipt else None

    # ---- what it is

    def terms(self, llm: AsyncLLM) -> Terms:
        """What bodies may ask of this engine."""
        return Terms(
            defaults=llm.default_params,
            proposer=llm.config.proposer,
            receipts=True,
            dialect=Dialect(llm.template, self._special(llm), llm.contract.id),
        )

    def _special(self, llm: AsyncLLM) -> dict[str, int]:
        if self._special_of is None or self._special_of[0] is not llm:
            self._special_of = (llm, special_tokens(llm.tokenizer))
        return self._special_of[1]

    def names(self, llm: AsyncLLM) -> tuple[str, ...]:
        """What the model is called here."""
        return self.settings.model_names or (llm.config.model,)

    def model(self, asked: str | None, llm: AsyncLLM) -> str:
        """The name answers carry; 404 for another model than the one there is."""
        names = self.names(llm)
        if asked is None or asked in names:
            return asked or names[0]
        raise ApiError(
            f"the model {asked[:200]!r} is not served here; there is {', '.join(map(repr, names))}",
            status=404, param="model", code="model_not_found",
        )  # fmt: skip

    def card(self, name: str, llm: AsyncLLM) -> dict[str, Any]:
        """What `/v1/models` says of a name."""
        return {
            "id": name,
            "object": "model",
            "created": self.began,
            "owned_by": "samewise",
            "root": llm.config.model,
            "max_model_len": llm.max_model_len,
            "contract": llm.contract.id,
        }

    async def models(self, _: Request) -> Response:
        """`/v1/models`."""
        llm = self.worker.llm
        return Json({"object": "list", "data": [self.card(name, llm) for name in self.names(llm)]})

    async def one_model(self, request: Request) -> Response:
        """`/v1/models/{id}`."""
        llm = self.worker.llm
        return Json(self.card(self.model(request.path_params["model_id"], llm), llm))

    # ---- texts and tokens

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`: a prompt or a conversation."""
        llm = self.worker.llm
        body = await read_body(request, self.settings.max_body, lambda raw: read(TokenizeBody, raw))
        self.model(body.model, llm)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give a prompt or messages, one of them")
        if body.prompt is not None:
            tokens = await llm.tokens(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            refuse_unsupported(body, add_special_tokens=False)
            messages = conversation(body.messages or [])
            tokens = await llm.chat_prompt(messages, **chat_template(body))
        found: dict[str, Any] = {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            found["token_strs"] = [llm.text([token]) for token in tokens]
        return Json(found)

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`."""
        llm = self.worker.llm
        body = await read_body(request, self.settings.max_body, lambda raw: read(DetokenizeBody, raw))
        self.model(body.model, llm)
        try:
            return Json({"prompt": llm.text(body.tokens)})
        except BadPrompt as error:
            raise ApiError.of(error, prompt="tokens") from error

    # ---- operation

    async def health(self, _: Request) -> Response:
        """`/health`: whether the process is of any use; 503 once the engine has died."""
        state = self.worker.state
        return Json({"status": state.value}, status_code=503 if state is State.STOPPED else 200)

    async def ready(self, _: Request) -> Response:
        """`/ready`: whether requests are taken."""
        state = self.worker.state
        return Json({"status": state.value}, status_code=200 if state is State.READY else 503)

    async def say_version(self, _: Request) -> Response:
        """`/version`."""
        contract = self.worker.llm.contract.id if self.worker.state is State.READY else None
        return Json({"version": self.version, "contract": contract})

    async def expose(self, _: Request) -> Response:
        """`/metrics`."""
        return Response(await self.metrics.text(), media_type=self.metrics.media_type)


def make_app(
    llm: AsyncLLM | Worker, settings: ServeSettings | None = None, *, version: str = "0.0.0"
) -> FastAPI:
    """The application over an engine, or over a worker that may still be loading one."""
    settings = settings or ServeSettings()
    worker = llm if isinstance(llm, Worker) else Worker.over(llm)
    service = Service(worker, settings, version)
    app = FastAPI(
        title="Samewise", version=version, description=schema.DESCRIPTION, docs_url=None, redoc_url=None
    )
    app.state.service = service
    for path in (COMPLETIONS, CHAT):
        _route(app, "POST", path, service.complete)
    _route(app, "GET", "/v1/models", service.models)
    _route(app, "GET", "/v1/models/{model_id:path}", service.one_model)
    _route(app, "POST", "/tokenize", service.tokenize)
    _route(app, "POST", "/detokenize", service.detokenize)
    _route(app, "GET", "/health", service.health)
    _route(app, "GET", "/ready", service.ready)
    _route(app, "GET", "/version", service.say_version)
    _route(app, "GET", "/metrics", service.expose)
    app.add_api_route("/v1/responses", _no_responses, methods=["POST", "GET"], include_in_schema=False)
    add_site(app, worker)
    _errors(app)
    schema.describe(app)
    app.add_middleware(Guard, keys=settings.keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"],
            allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"],
        )  # fmt: skip
    app.add_middleware(Named)
    return app


def _keep(folder: Path, receipts: Sequence[Receipt]) -> None:
    """Where every answer is to have a receipt, there is no answer without one."""
    try:
        for receipt in receipts:
            save(folder, receipt)
    except MachineError as error:
        log.error("%s", error)  # noqa: TRY400 - the message says it all
        raise ApiError(
            "the receipt could not be kept; the server's log says why",
            status=500, kind="server_error", code="receipt_failed",
        ) from error  # fmt: skip


def _route(app: FastAPI, method: str, path: str, handler: Any) -> None:
    app.add_api_route(
        path, handler, methods=[method], response_model=None, summary=(handler.__doc__ or "").strip(),
        operation_id=f"{method.lower()}{path.partition('{')[0].rstrip('/').replace('/', '_')}"
        + ("_one" if "{" in path else ""),
        openapi_extra=schema.taken(method, path), responses=schema.given(method, path),
    )  # fmt: skip
    if method == "GET":  # load balancers like to ask for the headers alone
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)


async def _no_responses() -> Response:
    raise ApiError(
        f"/v1/responses is not served; use {CHAT}", status=404, param="url", code="unsupported_endpoint"
    )


def _errors(app: FastAPI) -> None:
    """Every error leaves in one shape."""

    async def ours(_: Request, error: Exception) -> Response:
        return failure(error)

    async def https(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said, code = {
            404: ("there is no such address", "not_found"),
            405: (f"{request.method} is not allowed here", "method_not_allowed"),
        }.get(error.status_code, (error.detail, None))
        message = f"{said}: {request.url.path[:200]}"
        told = ApiError(message, status=error.status_code, param="url", code=code)
        response = failure(told)
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody will read it

    app.add_exception_handler(SamewiseError, ours)
    app.add_exception_handler(HTTPException, https)
    app.add_exception_handler(ClientDisconnect, gone)


__all__ = ["Service", "make_app"]
