"""The page for people, its live feed, and the interface described, as routes.

The page is a handful of files beside this module, served as they are: no build, no cookie, nothing from
elsewhere. Its policy lets a browser load what this server sends and nothing more.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from samewise.openai.errors import ApiError
from samewise.serve.feed import Feed
from samewise.serve.http import EventStream
from samewise.serve.manual import render
from samewise.serve.worker import State, Worker

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
"""By hand: what a machine's own table says of .js differs, and a module of another type is not run."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",  # asked for again, and answered with 304 unless a new version is installed
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_site(app: FastAPI, worker: Worker) -> Feed:
    """The page at `/`, its files, `/docs`, and the live feed over a worker's engine."""

    async def look(since: int) -> dict[str, Any]:
        if worker.state is State.DRAINING:  # a feed has no end of its own, and would hold up the server's
            raise ApiError("the server is shutting down", status=503, code="draining")
        return await worker.llm.live(since)

    feed = Feed(look, facts=lambda: dict(worker.llm.contract.facts))

    async def live(_: Request) -> Response:
        worker.llm  # noqa: B018 - 503 while there is none
        return EventStream(feed.events(), close=lambda: None)

    async def page(request: Request) -> Response:
        return _send(request, INDEX)

    async def file(request: Request) -> Response:
        return _send(request, request.path_params["name"])

    async def docs(_: Request) -> Response:
        return Response(render(app.openapi()), headers=HEADERS, media_type=TYPES[".html"])

    for path, handler in (("/", page), ("/docs", docs), ("/samewise/page/{name}", file)):
        app.add_api_route(path, handler, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/samewise/live", live, methods=["GET"], include_in_schema=False)
    return feed


def _send(request: Request, name: str) -> Response:
    """A file of the page, or that the browser has it already."""
    found = _files().get(name)
    if found is None:
        raise ApiError(f"the page has no file {name[:100]!r}", status=404, param="url", code="not_found")
    body, tag = found
    headers = HEADERS | {"ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=TYPES[Path(name).suffix])


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """The page's files by name, each with its mark: few, small, and read once."""
    found = {path.name: path.read_bytes() for path in sorted(PAGE.iterdir()) if path.suffix in TYPES}
    return {name: (body, f'"{sha256(body).hexdigest()[:20]}"') for name, body in found.items()}


__all__ = ["add_site"]
