"""Request bodies in, JSON and event streams out, and the detection of clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from samewise.anthropic.bodies import MESSAGES
from samewise.anthropic.errors import error_body
from samewise.llm.mailbox import UnreadBudget
from samewise.openai.errors import RETRY_AFTER, ApiError
from samewise.openai.replies import encode_json
from samewise.shares import SharedBudget

T = TypeVar("T")

SLICE_BYTES = 64 * 2**10
"""Bytes of a large answer that are sent at once. Set by hand: uvicorn's own limit of what is not sent yet."""

DISCARD_SECONDS = 2.0
"""How long the rest of a body is read that is refused. Set by hand: 32 MB over a good connection."""


SMALL_KEPT = 256 * 2**10
"""Bytes of a request that may stay in memory until its answer ends without being counted. Set by hand: 1,000
requests keep 256 MiB at most; ordinary ones keep a few kilobytes, those of agents with their tools 100."""


KEY_WEIGHT = 4
"""How many numbers of a list a key, a list or an object counts as. Measured: a million numbers are read in 45
ms, between which other threads run, 200,000 keys in 45 ms, between which none does."""


class JsonResponse(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encode_json(content)


class SlicedResponse(Response):
    """A large JSON response, rendered before, and sent in slices as its client reads it.

    What is not sent yet counts in `unread`; where that is full, and this answer is the largest of the owner
    that holds most of it, the connection ends in the middle of the body.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterable[bytes], *, unread: UnreadBudget, owner: bytes | None) -> None:
        self._slices, self._unread, self._owner = _slices(pieces), unread, owner
        super().__init__()
        self.headers["content-length"] = str(sum(map(len, self._slices)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        """Send the slices."""
        with suppress(ClientDisconnect):
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_slices(self._slices, send, self._unread, self._owner, ends=True)


async def _send_slices(
    slices: list[bytes], send: Send, unread: UnreadBudget, owner: bytes | None, *, ends: bool
) -> None:
    """Send slices, which are taken out of the list, and count what is not sent. `ends`: so does the body.

    Raises ClientDisconnect where the budget drops them.
    """
    sending = asyncio.current_task()
    assert sending is not None
    account = unread.account(sending.cancel, owner=owner)
    account.add(sum(map(len, slices)))
    try:
        while slices:
            data = slices.pop(0)
            await send({"type": "http.response.body", "body": data, "more_body": bool(slices) or not ends})
            account.remove(len(data))
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        if not account.closed:  # cancelled by the server, not by the budget
            raise
        raise ClientDisconnect from None
    finally:
        account.close()


def _slices(pieces: Iterable[bytes]) -> list[bytes]:
    """The same bytes in slices of about SLICE_BYTES. At least one slice."""
    slices, current, size = [], [], 0
    for piece in pieces:
        for start in range(0, len(piece), SLICE_BYTES):
            current.append(piece[start : start + SLICE_BYTES])
            size += len(current[-1])
            if size >= SLICE_BYTES:
                slices.append(b"".join(current))
                current, size = [], 0
    return [*slices, b"".join(current)] if current or not slices else slices


def error_response(error: BaseException, scope: Scope) -> JsonResponse:
    """An exception as a response, in the form of the clients of the request's path."""
    api_error = ApiError.of(error)
    body: Any = api_error.body()
    if is_anthropic(scope):
        body = error_body(api_error, scope.get("state", {}).get("request_id"))
    return JsonResponse(body, status_code=api_error.status, headers=api_error.headers)


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is for a path of Anthropic's interface."""
    path: str = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    return path == MESSAGES or path.startswith(MESSAGES + "/")


# ---- bodies


class HeldBody:
    """The body of one request, counted in a budget while it is held. Use it in a `with`.

    `owner` is the key the request came with; where there is none, each request is an owner of its own.
    """

    def __init__(self, request: Request, budget: SharedBudget, *, max_body: int, owner: bytes | None) -> None:
        self._request, self._budget, self._max_body = request, budget, max_body
        self._owner: object = self if owner is None else owner
        self._size = 0

    async def read(self, seconds: float) -> bytes:
        """The body. 415 where it is not JSON, 413 where it is too large, 408 where it takes too long."""
        parts: list[bytes] = []
        stream = self._request.stream()
        try:
            async with asyncio.timeout(seconds):
                self._refuse_other_types()
                self._refuse_length()
                async for part in stream:
                    self._add(part)
                    parts.append(part)
        except ApiError:
            parts.clear()
            self._give_back()
            await _discard(stream, 4 * self._max_body)
            raise
        except TimeoutError:
            raise ApiError(
                f"the body did not arrive within {seconds:g} seconds; send it faster, or less of it",
                status=408, code="body_timeout", close=True,
            ) from None  # fmt: skip
        return b"".join(parts)

    def _refuse_other_types(self) -> None:
        """Browsers let any page send a body of another type, or of none, without asking the server first."""
        given = self._request.headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                f"the body has the type {given[:60]!r}; send JSON, with Content-Type: application/json",
                status=415, code="unsupported_media_type",
            )  # fmt: skip

    def _refuse_length(self) -> None:
        length = self._request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            raise _too_large(self._max_body)

    def _add(self, part: bytes) -> None:
        if self._size + len(part) > self._max_body:
            raise _too_large(self._max_body)
        self._take(len(part))

    def _take(self, size: int) -> None:
        if not self._budget.take(self._owner, size):
            raise ApiError(
                "the server holds too many large bodies; try again later",
                status=429, kind="rate_limit_error", code="bodies_full", retry_after=RETRY_AFTER, close=True,
            )  # fmt: skip
        self._size += size

    def keep(self, size: int) -> Callable[[], None]:
        """Go on counting `size` bytes after the body itself was dropped, until the result is called.

        Small parts are not counted. Raises 429.
        """
        if size <= SMALL_KEPT:
            return lambda: None
        if size > self._size:
            self._take(size - self._size)
        self._size -= size
        return lambda: self._budget.give_back(self._owner, size)

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        self._budget.give_back(self._owner, self._size)
        self._size = 0


def refuse_crowded(raw: bytes, max_values: int) -> None:
    """Refuse a body of too many values: reading JSON cannot be interrupted, and delays other clients."""
    if is_crowded(raw, max_values):
        raise ApiError(
            f"the body has more than {max_values} values; send less at once",
            status=413,
            code="body_too_large",
        )


def is_crowded(raw: bytes, max_values: int) -> bool:
    """Whether JSON has too many values: a comma counts as 1, a key, a list or an object as KEY_WEIGHT."""
    if len(raw) * KEY_WEIGHT <= max_values or _count_values(raw, 0, len(raw)) <= max_values:
        return False  # also if characters of texts are counted, which is fast
    if json.detect_encoding(raw) not in ("utf-8", "utf-8-sig"):
        return True  # which bytes are texts is not known
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # where each quote begins or ends a text
    values = at = 0
    while values <= max_values:
        begin = plain.find(b'"', at)
        end = plain.find(b'"', begin + 1) if begin >= 0 else -1
        if end < 0:
            return values + _count_values(plain, at, len(plain)) > max_values
        between = _count_values(plain, at, begin)
        if not between and at:
            return False  # two texts side by side: not JSON, and read no further than here
        values, at = values + between, end + 1
    return True


def _count_values(raw: bytes, start: int, end: int) -> int:
    keys_and_lists = sum(raw.count(one, start, end) for one in (b":", b"[", b"{"))
    return raw.count(b",", start, end) + KEY_WEIGHT * keys_and_lists


async def _discard(stream: AsyncGenerator[bytes], most: int) -> None:
    """Read the rest of a body and keep nothing of it, for a while and up to a size.

    A connection that is closed while its client still sends is reset, and the client never sees the answer.
    """
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DISCARD_SECONDS):
            async for part in stream:
                most -= len(part)
                if most < 0:
                    return


def _too_large(max_body: int) -> ApiError:
    message = f"the body is larger than {max_body} bytes; send less at once"
    return ApiError(message, status=413, code="body_too_large", close=True)


# ---- disconnects and streams


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
    """Server-sent events, sent as fast as the client reads them, until they end or the client disconnects.

    Events above SLICE_BYTES are sent in slices, and what is not sent of them counts in `unread`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        close: Callable[[], object],
        unread: UnreadBudget,
        owner: bytes | None,
    ) -> None:
        self._events, self._close, self._unread, self._owner = events, close, unread, owner
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
                if len(data) <= SLICE_BYTES:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                else:
                    await _send_slices(_slices([data]), send, self._unread, self._owner, ends=False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


__all__ = [
    "SLICE_BYTES",
    "EventStream",
    "HeldBody",
    "JsonResponse",
    "SlicedResponse",
    "error_response",
    "is_anthropic",
    "is_crowded",
    "refuse_crowded",
    "until_disconnect",
]
