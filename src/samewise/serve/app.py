"""The application over an engine: the endpoints, and the middleware around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

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
from samewise.errors import SamewiseError
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
from samewise.openai.errors import ApiError, unsupported
from samewise.openai.exchange import OpenAIExchange
from samewise.openai.replies import encode_json
from samewise.openai.responses.bodies import RESPONSES, DeletedReply, ResponseReply, ResponsesBody
from samewise.openai.responses.exchange import Records, ResponsesExchange
from samewise.serve.answers import Answers
from samewise.serve.http import JsonResponse, SlicedResponse, error_response
from samewise.serve.metrics import Metrics
from samewise.serve.middleware import (
    AuthMiddleware,
    PlaceMiddleware,
    RequestIdMiddleware,
    WebPageMiddleware,
)
from samewise.serve.model_routes import ModelRoutes
from samewise.serve.openapi import Endpoint, docs_page, openapi_document
from samewise.serve.requests import Requests
from samewise.serve.settings import ServeSettings
from samewise.serve.stored import ResponseStore
from samewise.serve.training import TrainingRoutes
from samewise.serve.turns import TurnMiddleware, Turns
from samewise.serve.web_page import PAGE_HEADERS, page_routes
from samewise.serve.worker import State, Worker
from samewise.shares import SharedBudget

Handler = Callable[[Request], Awaitable[Response]]

DESCRIPTION = (
    "OpenAI's and Anthropic's interfaces to a model that answers the same way every time: for a verified "
    "request, tokens and log-probabilities are a function of the contract (`system_fingerprint`), prompt, "
    "sampling parameters and seed."
)

PUBLIC_PAGES = frozenset(("/", "/docs", "/openapi.json"))
"""Paths outside the OpenAPI document that need no key; the others are the endpoints' own `public`."""


class Service:
    """The endpoints of one server, and what they share: worker, settings, metrics, memory."""

    def __init__(self, worker: Worker, settings: ServeSettings, version: str) -> None:
        self.worker, self.settings, self.version = worker, settings, version
        self.metrics = Metrics(worker, settings)
        self.unread = UnreadBudget(settings.limits.max_unread)
        self.stored = ResponseStore(settings.limits.max_stored, settings.limits.max_values)
        self._bodies = SharedBudget(settings.limits.max_bodies)
        self._requests = Requests(worker, settings, self._bodies)
        prompts = SharedBudget(settings.limits.max_prompts)
        self.answers = Answers(worker, settings, self._requests, self.metrics, self.unread, prompts)
        self._model = ModelRoutes(worker, settings, self._requests, self.unread)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Those of the OpenAPI document."""
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
            Endpoint(method="POST", path=COUNT_TOKENS, handler=self._model.count_tokens, body=CountTokensBody,
                     reply=CountTokensReply, error=MessageErrorBody),
            Endpoint(method="GET", path="/v1/models", handler=self._model.models, reply=ModelList),
            Endpoint(method="GET", path="/v1/models/{model_id:path}", handler=self._model.model,
                     reply=ModelCard),
            Endpoint(method="POST", path="/tokenize", handler=self._model.tokenize, body=TokenizeBody,
                     reply=TokenizeReply),
            Endpoint(method="POST", path="/detokenize", handler=self._model.detokenize, body=DetokenizeBody,
                     reply=DetokenizeReply),
            Endpoint(method="GET", path="/health", handler=self.health, reply=StatusReply, public=True,
                     state=True),
            Endpoint(method="GET", path="/ready", handler=self.ready, reply=StatusReply, public=True,
                     state=True),
            Endpoint(method="GET", path="/live", handler=self.live, reply=StatusReply, public=True,
                     state=True),
            Endpoint(method="GET", path="/load", handler=self.get_load, reply=LoadReply),
            Endpoint(method="GET", path="/tokenizer_info", handler=self._model.get_tokenizer_info,
                     reply=TokenizerInfo),
            Endpoint(method="GET", path="/version", handler=self.get_version, reply=VersionReply,
                     public=True),
            Endpoint(method="GET", path="/metrics", handler=self.get_metrics, reply=str, public=True),
        )  # fmt: skip

    # ---- answers

    async def completions(self, request: Request) -> Response:
        """Continue a text."""
        return await self.answers.answer(request, partial(OpenAIExchange, COMPLETIONS))

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self.answers.answer(request, partial(OpenAIExchange, CHAT))

    async def responses(self, request: Request) -> Response:
        """Continue a conversation of items; the response can be stored and continued."""
        key: bytes = request.state.key_digest
        records = Records(partial(self.stored.get, key, param="previous_response_id"))
        return await self.answers.answer(
            request, partial(ResponsesExchange, records=records, keep=partial(self.stored.add, key))
        )

    async def stored_response(self, request: Request) -> Response:
        """A stored response, whole."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise unsupported("stream", "is not supported here; a stored response is returned whole")
        record = self.stored.get(
            request.state.key_digest, request.path_params["response_id"], param="response_id"
        )
        return SlicedResponse([record.reply], unread=self.unread, owner=self._requests.owner(request))

    async def delete_response(self, request: Request) -> Response:
        """Forget a stored response."""
        response_id: str = request.path_params["response_id"]
        self.stored.delete(request.state.key_digest, response_id)
        reply: DeletedReply = {"id": response_id, "object": "response", "deleted": True}
        return JsonResponse(reply)

    async def messages(self, request: Request) -> Response:
        """Continue a conversation, in Anthropic's format."""
        return await self.answers.answer(request, MessagesExchange)

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
        service.answers.before = training.use_collected
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
    middleware.append(Middleware(TurnMiddleware, turns=Turns()))
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
