"""Connections: one request at a time each, and which of them are closed where there are too many."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from served_app import COMPLETIONS, ServedApp, listening, run, served_app, wait_until

from samewise.serve.limits import ServeLimits

PARSERS = pytest.mark.parametrize("http", ["h11", "httptools"])
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def post(body: dict[str, Any], *, missing: int = 0) -> bytes:
    """A request, but for the last bytes of its body."""
    raw = json.dumps(body).encode()
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    return f"POST {COMPLETIONS} HTTP/1.1\r\n{fields}\r\n".encode() + raw[: len(raw) - missing]


@asynccontextmanager
async def served_by(
    http: str, limits: ServeLimits | None = None
) -> AsyncIterator[tuple[ServedApp, list[str], Any]]:
    """A served app, the paths of the requests that reached it, and a function that connects."""
    paths: list[str] = []
    async with served_app() as inner:

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            paths.append(scope["path"])
            await inner.app(scope, receive, send)

        async with listening(counted, limits or ServeLimits(), http=http) as url:  # type: ignore[arg-type]
            port = int(url.rpartition(":")[2])
            yield inner, paths, lambda: asyncio.open_connection("127.0.0.1", port)


@PARSERS
def test_a_request_before_the_answer_of_the_one_before_is_refused(http: str) -> None:
    async def work() -> None:
        async with served_by(http) as (_, paths, connect):
            for _ in range(20):
                reader, writer = await connect()
                writer.write(HEALTH * 5000)
                with suppress(ConnectionError):
                    assert (await reader.read(100)).startswith(b"HTTP/1.1 400 ")
                    await reader.read(-1)
                writer.transport.abort()
            assert len(paths) <= 20
            reader, writer = await connect()
            for _ in range(3):  # one after the other
                writer.write(HEALTH)
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"\r\n")  # an empty line is no request
            writer.transport.abort()

    run(work())


@PARSERS
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_with_another_one_behind_it_is_aborted(
    http: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": stream}

    async def work() -> None:
        async with served_by(http) as (served, _, connect):
            counters = served.llm._engine.scheduler.counters
            reader, writer = await connect()
            writer.write(post(body))
            await wait_until(lambda: counters.output_tokens >= 3)
            if stream:
                await reader.readuntil(b"data: ")
            writer.write(HEALTH)
            rest = await reader.read(-1)
            assert rest.startswith(b"HTTP/1.1 400 ") != stream
            assert b"HTTP/1.1" not in rest[1:]  # no head within an answer
            await served.check_idle()
            assert counters.aborted == 1
            writer.close()

    caplog.set_level(logging.INFO)
    run(work())
    assert "Traceback" not in caplog.text


@PARSERS
def test_silent_connections_do_not_end_an_upload(http: str) -> None:
    async def work() -> None:
        limits = ServeLimits(max_connections=8, head_timeout=300)
        async with served_by(http, limits) as (_, paths, connect):
            reader, writer = await connect()
            whole = post({"prompt": "hello", "max_tokens": 1})
            writer.write(whole[:-1])
            await wait_until(lambda: len(paths) == 1)
            silent = [await connect() for _ in range(40)]
            await asyncio.gather(*(one.read(-1) for one, _ in silent[:30]), return_exceptions=True)
            writer.write(whole[-1:])
            assert (await reader.read(100)).startswith(b"HTTP/1.1 200 ")
            for _, one in [*silent, (reader, writer)]:
                one.transport.abort()

    run(work())


@PARSERS
def test_uploads_without_end_are_closed_for_new_connections(http: str) -> None:
    async def work() -> None:
        async with served_by(http, ServeLimits(max_connections=8)) as (_, paths, connect):
            held = []
            for number in range(8):
                held.append(await connect())
                held[-1][1].write(post({"prompt": "hello"}, missing=1))
                await wait_until(lambda number=number: len(paths) == number + 1)
            reader, writer = await connect()
            writer.write(HEALTH)
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            with suppress(ConnectionError):
                assert await held[0][0].read(100) == b""  # the oldest
            for _, one in [*held, (reader, writer)]:
                one.transport.abort()

    run(work())
