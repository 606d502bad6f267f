"""The web page at `/`, its files, and its live feed, as routes.

The files in `page/` are served as they are: no build step, no cookies, nothing from other servers. The
content security policy allows the browser to load from this server only.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from samewise.llm.mailbox import UnreadBudget
from samewise.openai.errors import RETRY_AFTER, ApiError, unavailable
from samewise.serve.http import EventStream
from samewise.serve.live_feed import LiveFeed
from samewise.serve.settings import ServeSettings
from samewise.serve.worker import State, Worker
from samewise.shares import SharedBudget

PAGE_FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
"""Not from `mimetypes`, whose type for .js depends on the machine; browsers refuse modules of other types."""

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",  # the browser asks again, and gets 304 while the file is unchanged
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes(worker: Worker, settings: ServeSettings, unread: UnreadBudget) -> list[Route]:
    """The page, its files, and the live feed of a worker's engine."""

    async def live_stats(since: int) -> dict[str, Any]:
        if worker.state is State.DRAINING:  # a feed does not end by itself and would delay the shutdown
            raise unavailable("the server is shutting down", "draining")
        return await worker.llm.live(since)

    feed = LiveFeed(live_stats, facts=lambda: dict(worker.llm.contract.facts))

    places = SharedBudget(settings.limits.max_listeners)

    async def live(request: Request) -> Response:
        worker.llm  # noqa: B018 - raises 503 while there is none
        key: bytes | None = request.state.key_digest if settings.several_owners else None
        owner: object = key or object()
        if not places.take(owner):
            raise ApiError(
                f"{places.used} of {places.limit} places of the live feed are taken, your share; close "
                "one, or try later",
                status=429, kind="rate_limit_error", code="listeners_full", retry_after=RETRY_AFTER,
            )  # fmt: skip
        return EventStream(feed.events(), close=lambda: places.give_back(owner), unread=unread, owner=key)

    async def index(request: Request) -> Response:
        return _file_response(request, "index.html")

    async def file(request: Request) -> Response:
        return _file_response(request, request.path_params["name"])

    live_route = Route("/samewise/live", live, methods=["GET"])
    live_route.methods = {"GET"}  # Starlette adds HEAD, which would be an endless response without a body
    return [Route("/", index), Route("/samewise/page/{name}", file), live_route]


def _file_response(request: Request, name: str) -> Response:
    """A file of the page; 304 if the browser has it."""
    if name not in _files():
        raise ApiError(f"the page has no file {name[:100]!r}", status=404, param="url", code="not_found")
    body, tag = _files()[name]
    headers = PAGE_HEADERS | {"ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=MEDIA_TYPES[Path(name).suffix])


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """The page's files: name → (content, entity tag). Read once; they are few and small."""
    files = {
        path.name: path.read_bytes() for path in sorted(PAGE_FOLDER.iterdir()) if path.suffix in MEDIA_TYPES
    }
    return {name: (body, f'"{sha256(body).hexdigest()[:20]}"') for name, body in files.items()}


__all__ = ["PAGE_HEADERS", "page_routes"]
