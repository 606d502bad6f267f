"""HTTP's side of things: JSON bodies in, JSON and event streams out, and noticing who has gone away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from samewise.openai.errors import ApiError
from samewise.openai.sse import DONE, dump, event

T = TypeVar("T")

LARGE = 65536  # bytes of a body that are worth a thread


class Json(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return dump(content)


def failure(error: BaseException) -> Json:
    """An error as a response."""
    told = ApiError.of(error)
    return Json(told.body(), status_code=told.status, headers=told.headers)


async def read_body(request: Request, most: int, understand: Callable[[Any], T]) -> T:
    """The request's JSON, understood; away from the event loop if there is much of it."""
    raw = await _raw(request, most)

    def work() -> T:
        return understand(_json(raw))

    return await asyncio.to_thread(work) if len(raw) > LARGE else work()


async def _raw(request: Request, most: int) -> bytes:
    too_large = ApiError(
        f"the body is larger than {most} bytes; send less at once", status=413, code="body_too_large"
    )
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > most:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


async def unless_gone(
    request: Request, work: Coroutine[Any, Any, T], lost: Callable[[T], object] | None = None
) -> T:
    """Do something for a client; should it go away, stop, and raise ClientDisconnect.

    `lost` is told of a result that nobody will be given: it came as the client went, or we were cancelled.
    """
    return await _unless_gone(request.receive, work, lost)


async def _unless_gone(
    receive: Receive, work: Coroutine[Any, Any, T], lost: Callable[[T], object] | None = None
) -> T:
    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _stop(doing, lost)
        raise
    finally:
        watching.cancel()
    if not doing.done():
        await _stop(doing, lost)
        raise ClientDisconnect
    return doing.result()


async def _stop(task: asyncio.Future[T], lost: Callable[[T], object] | None) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and task.exception() is None and lost is not None:
        lost(task.result())


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, for as long as somebody reads them. A slow reader holds up nobody else."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], *, close: Callable[[], object]) -> None:
        self._events, self._close = events, close
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        """Send events until they end or the reader goes away; then let go of what they came from."""
        try:
            await _unless_gone(receive, self._pump(send))
        except ClientDisconnect:
            pass  # its request is dropped below
        finally:
            self._close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for some in events:
                await send({"type": "http.response.body", "body": some, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


__all__ = ["DONE", "EventStream", "Json", "dump", "event", "failure", "read_body", "unless_gone"]
