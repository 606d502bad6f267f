"""Request bodies in, JSON and event streams out, and the detection of clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from samewise.openai.errors import ApiError
from samewise.openai.replies import encode_json

T = TypeVar("T")


class JsonResponse(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encode_json(content)


def error_response(error: BaseException) -> JsonResponse:
    """An exception as a response."""
    api_error = ApiError.of(error)
    return JsonResponse(api_error.body(), status_code=api_error.status, headers=api_error.headers)


async def read_body(request: Request, max_body: int) -> bytes:
    """The request's body; 413 as soon as it is known to be larger than `max_body` bytes."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_body:
        raise _too_large(max_body)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_body:
            raise _too_large(max_body)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_body: int) -> ApiError:
    message = f"the body is larger than {max_body} bytes; send less at once"
    return ApiError(message, status=413, code="body_too_large")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, cancels `work` and raises ClientDisconnect."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _cancel(working)
        raise
    finally:
        watching.cancel()
    if not working.done():
        await _cancel(working)
        raise ClientDisconnect
    return working.result()


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # mark as retrieved: asyncio would log it


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, sent as fast as the client reads them, until they end or the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], *, close: Callable[[], object]) -> None:
        self._events, self._close = events, close
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        """Send the events, then call `close`."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


__all__ = ["EventStream", "JsonResponse", "error_response", "read_body", "until_disconnect"]
