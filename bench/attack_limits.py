"""Attacks by holding what is scarce: slots, the engine, connections, memory for bodies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from typing import Any

from attack_tools import (
    MIB,
    OTHER,
    Bench,
    Outcome,
    Server,
    attack,
    connection,
    head,
    peak_memory,
    send,
)

COMPLETIONS = "/v1/completions"
LOG_LINES = 200  # that one attack may add to the log
HELD_SECONDS = 20.0  # how long connections are held; shorter than any deadline that must pass is not counted


@contextlib.asynccontextmanager
async def unread(server: Server, body: dict[str, Any], number: int):
    """Connections that send a request and never read the answer; their receive buffers are small."""
    writers = []
    raw = json.dumps(body).encode()
    try:
        for _ in range(number):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
            writers.append(sock)
            await asyncio.get_running_loop().sock_sendall(sock, head("POST", COMPLETIONS, len(raw)) + raw)
        yield
    finally:
        for sock in writers:
            sock.close()


# ---- share


@attack(
    "share", "2 streams with n=128 and 20 log-probabilities, never read", "everyone else got 429", seconds=200
)
async def unread_streams(bench: Bench) -> Outcome:
    body = {"prompt": "x", "n": 128, "max_tokens": 64, "logprobs": 20, "stream": True, "ignore_eos": True}
    short = {"prompt": "y", "max_tokens": 1}
    replies = []
    async with peak_memory(bench.server) as memory, unread(bench.server, body, 2):
        end = time.monotonic() + HELD_SECONDS
        while time.monotonic() < end:
            replies.append(await send(bench.server, "POST", COMPLETIONS, short, key=OTHER))
            await asyncio.sleep(0.5)
    refused = sum(r.status != 200 for r in replies)
    broken = [f"{refused} of {len(replies)} requests of another key were refused"] if refused else []
    figures = {
        "refused": refused,
        "asked": len(replies),
        "grown_mib": (memory["peak"] - memory["start"]) // MIB,
    }
    return Outcome(2, f"{refused} of {len(replies)} others refused", broken, figures)


@attack("share", "200 long requests of one key", "a 1-token request of another key waited 50 s", seconds=200)
async def engine_share(bench: Bench) -> Outcome:
    body = {"prompt": "tell a story", "max_tokens": 400, "ignore_eos": True}
    flood = [
        asyncio.ensure_future(send(bench.server, "POST", COMPLETIONS, body, timeout=60)) for _ in range(200)
    ]
    await asyncio.sleep(1)
    waits = []
    for _ in range(10):
        reply = await send(bench.server, "POST", COMPLETIONS, {"prompt": "y", "max_tokens": 1}, key=OTHER)
        waits.append(reply.seconds if reply.status == 200 else float("inf"))
        await asyncio.sleep(1)
    for one in flood:
        one.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    broken = [f"another key waited {max(waits):.1f} s"] if max(waits) > 5 else []
    return Outcome(200, f"another key waited at most {max(waits):.2f} s", broken, {"waits": waits})


# ---- connection


@attack(
    "connection",
    "1,100 silent connections at `ulimit -n 1024`",
    "`/health` timed out; 19,460 tracebacks",
    file_limit=1024,
)
async def silent_connections(bench: Bench) -> Outcome:
    server, opened = bench.server, []
    before = server.log_lines()
    try:
        for _ in range(1100):
            with contextlib.suppress(OSError, TimeoutError):
                opened.append(await asyncio.wait_for(asyncio.open_connection("127.0.0.1", server.port), 2))
        await asyncio.sleep(3)
        replies = [await send(server, "GET", "/health", timeout=10) for _ in range(3)]
        descriptors = server.descriptors()
    finally:
        for _, writer in opened:
            writer.transport.abort()
    added, slowest = server.log_lines() - before, max(r.seconds for r in replies)
    broken = [f"/health: {r.status} after {r.seconds:.1f} s" for r in replies if r.status != 200]
    if added > LOG_LINES or "Traceback" in server.log_text():
        broken.append(f"{added} lines in the log")
    figures = {"log_lines": added, "descriptors": descriptors, "health_seconds": slowest}
    return Outcome(1100, f"`/health` in {slowest * 1e3:.0f} ms, {added} log lines", broken, figures)


@attack(
    "connection",
    "900 requests of one key under way at `ulimit -n 1024`",
    "`/health` and other keys were refused",
    file_limit=1024,
)
async def answered_connections(bench: Bench) -> Outcome:
    server, opened = bench.server, []
    raw = json.dumps({"prompt": "tell a story", "max_tokens": 400, "ignore_eos": True}).encode()
    try:
        for _ in range(900):
            with contextlib.suppress(OSError, TimeoutError):
                pair = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", server.port), 2)
                opened.append(pair)
                pair[1].write(head("POST", COMPLETIONS, len(raw)) + raw)
        await asyncio.sleep(3)
        replies = [await send(server, "GET", "/health", key=None, timeout=10) for _ in range(3)]
        body = {"prompt": "y", "max_tokens": 1}
        replies += [await send(server, "POST", COMPLETIONS, body, key=OTHER, timeout=20) for _ in range(3)]
    finally:
        for _, writer in opened:
            writer.transport.abort()
    broken = [f"{r.status} after {r.seconds:.1f} s" for r in replies if r.status != 200]
    slowest = max(r.seconds for r in replies)
    return Outcome(900, f"another key and `/health` within {slowest:.2f} s", broken)


@attack(
    "connection",
    "20 connections without a key with 14,000 requests each, sent at once and not read",
    "no other client served for 5 s; 40 tracebacks",
)
async def pipelined_requests(bench: Bench) -> Outcome:
    server, before = bench.server, bench.server.log_lines()
    fields = b"Host: 127.0.0.1\r\n\r\n"
    floods = (b"GET / HTTP/1.1\r\n" + fields) * 7000, (b"GET /openapi.json HTTP/1.1\r\n" + fields) * 7000
    opened, broken = [], []
    try:
        for i in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            opened.append(writer)
            writer.write(floods[i % 2] * 2)
            with contextlib.suppress(OSError, TimeoutError):  # reset while the rest is being sent
                answer = await asyncio.wait_for(reader.read(12), 20)
                if not answer.startswith(b"HTTP/1.1 400"):
                    broken.append(f"answered {answer!r}")
    finally:
        for writer in opened:
            writer.transport.abort()
    await asyncio.sleep(1)
    added = server.log_lines() - before
    if added > LOG_LINES or "Traceback" in server.log_text():
        broken.append(f"{added} lines in the log, {server.log_text().count('Traceback')} tracebacks")
    return Outcome(20, f"refused with the second request, {added} log lines", broken, {"log_lines": added})


@attack(
    "connection",
    "uploads of another key beside 40 silent connections a second at 64 connections",
    "uploads were reset",
    options=("--max-connections", "64"),
)
async def interrupted_uploads(bench: Bench) -> Outcome:
    silent: list[asyncio.StreamWriter] = []

    async def flood() -> None:
        while True:
            with contextlib.suppress(OSError):
                silent.append((await asyncio.open_connection("127.0.0.1", bench.server.port))[1])
            await asyncio.sleep(0.025)

    async def upload() -> bytes:
        raw = json.dumps({"prompt": "y", "max_tokens": 1, "user": "x" * 200_000}).encode()
        with contextlib.suppress(OSError):
            async with connection(bench.server) as (reader, writer):
                writer.write(head("POST", COMPLETIONS, len(raw), key=OTHER))
                for start in range(0, len(raw), len(raw) // 40):
                    writer.write(raw[start : start + len(raw) // 40])
                    await writer.drain()
                    await asyncio.sleep(0.1)
                return await asyncio.wait_for(reader.read(12), 30)
        return b"reset"

    flooding = asyncio.ensure_future(flood())
    try:
        await asyncio.sleep(2)
        answers = await asyncio.gather(*(upload() for _ in range(5)))
    finally:
        flooding.cancel()
        for writer in silent:
            writer.transport.abort()
    broken = [f"an upload: {one!r}" for one in answers if one != b"HTTP/1.1 200"]
    return Outcome(5, f"{len(answers) - len(broken)} of 5 uploads answered", broken)


@attack("connection", "50 heads and 50 bodies sent a byte a second", "no deadline")
async def slow_senders(bench: Bench) -> Outcome:
    async def drip(data: bytes, whole: bytes) -> float | None:
        """Seconds until the server closed the connection; None if it did not within a minute."""
        began = time.monotonic()
        with contextlib.suppress(OSError):
            async with connection(bench.server) as (reader, writer):
                writer.write(data)
                for byte in whole:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(-1), 1)
                        return time.monotonic() - began
                    if time.monotonic() - began > 75:
                        return None
        return time.monotonic() - began

    heads = [drip(b"POST /v1/completions HTTP/1.1\r\n", b"X-Slow: " + b"a" * 200) for _ in range(50)]
    bodies = [drip(head("POST", COMPLETIONS, 2000), b'{"prompt": "' + b"a" * 200) for _ in range(50)]
    took = await asyncio.gather(*heads, *bodies)
    open_ones = sum(one is None for one in took)
    broken = [f"{open_ones} of 100 were still open after 75 s"] if open_ones else []
    longest = max((one for one in took if one is not None), default=0.0)
    return Outcome(
        100, f"closed within {longest:.0f} s" if not open_ones else f"{open_ones} stayed open", broken
    )


@attack("connection", "60 bodies of 8 MB, all but the last byte", "600 MB held")
async def held_bodies(bench: Bench) -> Outcome:
    size, opened, refused = 8 * MIB, [], 0

    async def hold() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.server.port)
        opened.append((reader, writer))
        writer.write(head("POST", COMPLETIONS, size))
        piece = b" " * 65536
        for _ in range(size // len(piece) - 1):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)  # as over a network: the sender's own work must not delay the bystander

    async with peak_memory(bench.server) as memory:
        try:
            holding = [asyncio.wait_for(hold(), 10) for _ in range(60)]
            refused = sum(
                isinstance(r, BaseException) for r in await asyncio.gather(*holding, return_exceptions=True)
            )
            await asyncio.sleep(2)
        finally:
            for _, writer in opened:
                writer.transport.abort()
    grown = (memory["peak"] - memory["start"]) // MIB
    broken = [f"memory grew by {grown} MiB"] if grown > 200 else []
    return Outcome(
        60, f"{grown} MiB more, {refused} cut off", broken, {"grown_mib": grown, "cut_off": refused}
    )
