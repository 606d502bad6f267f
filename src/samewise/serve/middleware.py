"""What every request passes: its name, its key, its line in the log, and a last resort for our own bugs.

Plain ASGI, so that nothing stands between a response and the client's going away. Logs hold no prompt,
no key and no query string.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samewise.openai.errors import ApiError
from samewise.serve.http import failure
from samewise.serve.settings import Keys

log = logging.getLogger("samewise.serve")

OPEN = ("/", "/docs", "/health", "/metrics", "/openapi.json", "/ready", "/version")
OPEN_UNDER = "/samewise/page/"
"""What needs no key; everything else does, whatever it is."""

QUIET = ("/health", "/ready", "/metrics")  # asked all day long
GOOD_ID = re.compile(r"[\w.:\-]{1,128}", re.ASCII)


class Named:
    """Gives every request an id (the client's own, if it is a plain word) and a line in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if GOOD_ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        began, status = time.monotonic(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:  # our bug: the log gets all of it, the client that it happened
            log.exception("request %s failed", name)
            if status:
                raise
            await failure(ApiError.of(RuntimeError()))(scope, receive, named)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            log.log(
                level, "%s %s %s", scope["method"], _printable(scope["path"]), status or "-",
                extra={"facts": self._facts(scope, name, status, began)},
            )  # fmt: skip

    @staticmethod
    def _facts(scope: Scope, name: str, status: int, began: float) -> dict[str, Any]:
        seconds = round(time.monotonic() - began, 4)
        path = _printable(scope["path"])
        return {
            "method": scope["method"], "path": path, "status": status, "seconds": seconds, "request_id": name
        }  # fmt: skip


class Guard:
    """Lets in who has a key, where there are keys; says which customer it is."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, or not."""
        if scope["type"] == "http":
            customer: bytes | None = b""
            if self._keys and not _open(scope):
                customer = self._keys.customer(_bearer(Headers(scope=scope)))
            if customer is None:
                refusal = ApiError(
                    "the API key is missing or not one of this server's; send 'Authorization: Bearer KEY'",
                    status=401, code="invalid_api_key",
                )  # fmt: skip
                response = failure(refusal)
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope.setdefault("state", {})["customer"] = customer
        await self._app(scope, receive, send)


def _open(scope: Scope) -> bool:
    """Whether anybody may ask this. Where we are mounted in another application counts for nothing."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
    return path in OPEN or path.startswith(OPEN_UNDER)


def _bearer(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _printable(path: str) -> str:
    """A path as a log may hold it: plain characters, on one line, with an end; nothing a terminal obeys."""
    return "".join(c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in path[:200])


__all__ = ["Guard", "Named"]
