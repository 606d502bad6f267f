"""ASGI middleware: request ids, log lines, API keys, web pages, places, and a response for our own bugs.

Plain ASGI, so that a response sees its client disconnect directly. Log lines hold no prompt, key or query
string.
"""

from __future__ import annotations

import base64
import logging
import re
import time
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samewise.openai.errors import RETRY_AFTER, ApiError
from samewise.serve.http import error_response, is_anthropic
from samewise.serve.settings import Keys
from samewise.serve.turns import STATE_PATHS, local_path
from samewise.shares import SharedBudget

log = logging.getLogger("samewise.serve")

PUBLIC_PREFIX = "/samewise/page/"
"""Paths of the web page's files, which need no key."""

POLLED_PATHS = ("/health", "/ready", "/live", "/load", "/metrics")
"""Paths that monitoring requests every few seconds; logged at debug level."""

PORT = re.compile(r":\d*\Z")
"""The port at the end of a Host header."""

CLIENT_ID = re.compile(r"[\w.:\-]{1,128}", re.ASCII)
"""Request ids that are accepted from clients."""


class RequestIdMiddleware:
    """Gives every request an id (the client's own, if it is a plain word) and a line in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if CLIENT_ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if is_anthropic(scope):
                    headers["Request-Id"] = request_id  # where Anthropic's clients look for it
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # our bug: the traceback goes to the log, the client learns only that it happened
            log.exception("request %s failed", request_id)
            if status:
                raise
            await error_response(RuntimeError(), scope)(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in POLLED_PATHS else logging.INFO
            facts = _facts(scope, request_id, status, time.monotonic() - began)
            log.log(level, "%s %s %s", facts["method"], facts["path"], status or "-", extra={"facts": facts})


class WebPageMiddleware:
    """Refuses requests that a web page of another site makes through the browser of a user of this server.

    A server without keys trusts whatever reaches its address, and a browser on the same machine does. Such a
    browser names the page's origin; a page that made its own name lead to this server names that host.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...] | None, hosts: tuple[str, ...] | None) -> None:
        # origins: allowed beside the server's own; hosts: allowed, without port. None: any.
        self._app = app
        self._origins = None if origins is None or "*" in origins else frozenset(map(str.lower, origins))
        self._hosts = None if hosts is None else frozenset(map(str.lower, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None:
                await error_response(refusal, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host = headers.get("host", "").lower()
        if self._hosts is not None and host and PORT.sub("", host) not in self._hosts:
            return ApiError(
                f"the host {host[:100]!r} is not a name of this server; start it with --allowed-hosts",
                status=421, code="wrong_host",
            )  # fmt: skip
        origin = headers.get("origin", "").lower()
        if self._origins is None or self._is_own(origin, host, headers) or origin in self._origins:
            return None
        return ApiError(
            f"pages of {origin[:100] or 'another site'!r} may not call this server; start it with "
            "--allowed-origins, or with a key",
            status=403, code="wrong_origin",
        )  # fmt: skip

    @staticmethod
    def _is_own(origin: str, host: str, headers: Headers) -> bool:
        """Whether a request comes from this server's own page, from a link to it, or from no page at all."""
        if origin:
            return origin.partition("://")[2] == host
        elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        return not elsewhere or headers.get("sec-fetch-mode") == "navigate"


class AuthMiddleware:
    """Refuses requests without a valid key, where there are keys. Puts the key's digest into the state.

    With `basic` a key may also be the password of an address, http://any:KEY@host, as clients without a field
    for keys send it. Not from web pages: browsers would send such a password of their own accord.

    `public_paths` and the web page's files need no key. Every other path needs one, whether it exists or not.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, public_paths: frozenset[str], *, basic: bool = False
    ) -> None:
        self._app, self._keys, self._public_paths, self._basic = app, keys, public_paths, basic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            digest: bytes | None = b""
            if self._keys.digests and not _is_public(scope, self._public_paths):
                headers = Headers(scope=scope)
                key = _key(headers, basic=self._basic)
                digest = self._keys.match(key) or self._keys.match(headers.get("x-api-key", ""))
            if digest is None:
                refusal = ApiError(
                    "the API key is missing or not one of this server's; send 'Authorization: Bearer KEY' or "
                    "'x-api-key: KEY'",
                    status=401, code="invalid_api_key",
                )  # fmt: skip
                response = error_response(refusal, scope)
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope.setdefault("state", {})["key_digest"] = digest
        await self._app(scope, receive, send)


class PlaceMiddleware:
    """Bounds the requests that are being answered, each of which holds a connection, and shares them by key.

    A connection whose request is being answered is not closed for another client, so without a bound one key
    could hold all of them. Requests for public paths have places of their own, but for STATE_PATHS.
    """

    def __init__(
        self,
        app: ASGIApp,
        places: SharedBudget,
        public_places: SharedBudget,
        public_paths: frozenset[str],
        *,
        shared: bool,
    ) -> None:
        # shared: whether keys are owners; else each request is an owner of its own, and there is no share.
        self._app, self._places, self._public_places = app, places, public_places
        self._public_paths, self._shared = public_paths, shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or local_path(scope) in STATE_PATHS:
            await self._app(scope, receive, send)
            return
        is_public = _is_public(scope, self._public_paths)
        places = self._public_places if is_public else self._places
        owner: object = scope["state"]["key_digest"] if self._shared and not is_public else id(scope)
        if not places.take(owner):
            await error_response(self._refusal(places), scope)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            places.give_back(owner)

    @staticmethod
    def _refusal(places: SharedBudget) -> ApiError:
        full = places.used >= places.limit
        message = (
            "the server has as many requests under way as it has connections for"
            if full
            else "this key has as many requests under way as its share of the server's connections"
        )
        return ApiError(
            f"{message}; try again later",
            status=429, kind="rate_limit_error", code="queue_full" if full else "share_used",
            retry_after=RETRY_AFTER,
        )  # fmt: skip


def _is_public(scope: Scope, public_paths: frozenset[str]) -> bool:
    """Whether a path needs no key."""
    path = local_path(scope)
    return path in public_paths or path.startswith(PUBLIC_PREFIX)


def _key(headers: Headers, *, basic: bool) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if basic and scheme.lower() == "basic" and "origin" not in headers and "sec-fetch-site" not in headers:
        try:
            return base64.b64decode(key.strip(), validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return key.strip() if scheme.lower() == "bearer" else ""


def _facts(scope: Scope, request_id: str, status: int, seconds: float) -> dict[str, Any]:
    """Fields of a JSON log line. The path is shortened, and escaped where a terminal might interpret it."""
    path = "".join(c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in scope["path"][:200])
    return {
        "method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 4),
        "request_id": request_id,
    }  # fmt: skip


__all__ = ["AuthMiddleware", "PlaceMiddleware", "RequestIdMiddleware", "WebPageMiddleware"]
