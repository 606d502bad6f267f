"""Attacks on access and on what answers say: keys, web pages, prefixes, TLS, sockets, clocks, lists."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import random
import socket
import ssl
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attack_tools import (
    ATTACKER,
    OTHER,
    Bench,
    Outcome,
    attack,
    connection,
    environment,
    head,
    send,
)

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "x", "max_tokens": 1}
SECRET = "secret of /another/client"


# ---- error


@attack("error", "exceptions of the engine", "their text went to every client", server=False)
async def engine_exception(bench: Bench) -> Outcome:
    """A server whose engine raises in every step once a file exists."""
    mark = bench.folder / "fail"
    mark.unlink(missing_ok=True)
    code = (
        "import os\nfrom samewise.engine.engine import Engine\nstep = Engine.step\n"
        "def failing(self):\n"
        f"    if os.path.exists({str(mark)!r}): raise RuntimeError({SECRET!r})\n"
        "    return step(self)\n"
        "Engine.step = failing\nfrom samewise.cli.main import main\nmain()"
    )
    server = await asyncio.to_thread(bench.start, command=(sys.executable, "-c", code))
    try:
        mark.touch()
        bodies = [SHORT, SHORT | {"stream": True}] * 2
        replies = await asyncio.gather(
            *(send(server, "POST", COMPLETIONS, body, timeout=30) for body in bodies)
        )
        broken = [
            f"{r.status} {r.body[:300]!r}" for r in replies if SECRET.encode() in r.body or not r.status
        ]
        if SECRET not in server.log_text():
            broken.append("the log does not say why")
    finally:
        mark.unlink(missing_ok=True)
        server.kill()
    return Outcome(len(bodies), "a fixed sentence; the text is in the log", broken)


# ---- keys


@attack("access", "keys guessed by timing, 3,000 requests", "not tried")
async def key_timing(bench: Bench) -> Outcome:
    """Wrong keys that share a prefix with a right one, against wrong keys that share nothing."""

    def measure() -> tuple[float, float, float]:
        rng, times = random.Random(0), {"near": [], "far": []}
        link = http.client.HTTPConnection("127.0.0.1", bench.server.port, timeout=30)
        for _ in range(3000):
            kind = rng.choice(("near", "far"))
            key = ATTACKER[:-1] + "z" if kind == "near" else "z" * len(ATTACKER)
            began = time.perf_counter()
            link.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
            response = link.getresponse()
            response.read()
            times[kind].append(time.perf_counter() - began)
            assert response.status == 401
        near, far = (sorted(times[kind])[: len(times[kind]) // 2] for kind in ("near", "far"))
        error = (statistics.variance(near) / len(near) + statistics.variance(far) / len(far)) ** 0.5
        return statistics.fmean(near), statistics.fmean(far), error

    near, far, error = await asyncio.to_thread(measure)
    broken = (
        []
        if abs(near - far) < max(6 * error, 2e-6)
        else [f"{near * 1e6:.2f} µs near, {far * 1e6:.2f} µs far"]
    )
    figures = {"near_us": near * 1e6, "far_us": far * 1e6, "error_us": error * 1e6}
    return Outcome(3000, f"{(near - far) * 1e6:+.2f} ± {error * 1e6:.2f} µs", broken, figures)


# ---- web pages


@attack("access", "a web page drives a server without a key", "not tried", server=False)
async def web_pages(bench: Bench) -> Outcome:
    server = await asyncio.to_thread(bench.start, keys=False)
    evil, port = "https://evil.example", server.port
    try:
        tries = {
            "simple POST": {"Origin": evil, "Content_Type": "text/plain"},
            "JSON POST": {"Origin": evil},
            "no origin told": {"Origin": "null", "Content_Type": "text/plain"},
            "rebound name": {"Host": "evil.example", "Origin": "http://evil.example"},
            "rebound name without origin": {"Host": f"evil.example:{port}"},
            "another port": {"Origin": "http://127.0.0.1:1"},
        }
        broken = []
        for name, headers in tries.items():
            reply = await send(server, "POST", COMPLETIONS, SHORT, key=None, **headers)
            if reply.status == 200 or "access-control-allow-origin" in reply.headers:
                broken.append(f"{name}: {reply.status} {reply.headers.get('access-control-allow-origin')}")
        asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
        preflight = await send(server, "OPTIONS", COMPLETIONS, key=None, Origin=evil, **asked)
        if "access-control-allow-origin" in preflight.headers:
            broken.append(f"preflight: {preflight.headers}")
        own = await send(server, "POST", COMPLETIONS, SHORT, key=None, Host=f"127.0.0.1:{port}")
        if own.status != 200:
            broken.append(f"a local program was refused: {own.status} {own.body[:200]!r}")
    finally:
        await asyncio.to_thread(server.stop, 20)
        server.kill()
    return Outcome(len(tries) + 1, "refused; local programs are answered", broken)


ODD_PATHS = (
    *("/samewise/page/../../v1/models", "/samewise/page/..%2f..%2fv1/models", "//v1/models"),
    *("/v1/models/", "/health/../v1/models", "/docs/../v1/models", "/%76%31/models", "/V1/models"),
    *("/samewise/page//etc/passwd", "/samewise/page/%2e%2e/app.py", "/v1/models?x=/health"),
    *("/v1/models;/docs", "/v1/models#/health"),
)


@attack("access", "paths around the key: prefixes, dots, doubled slashes", "not tried")
async def odd_paths(bench: Bench) -> Outcome:
    replies = [await send(bench.server, "GET", path, key=None) for path in ODD_PATHS]
    broken = [f"{path}: {r.status} {r.body[:100]!r}" for path, r in zip(ODD_PATHS, replies, strict=True)
              if r.status == 200 or r.status >= 500 or b"max_model_len" in r.body]  # fmt: skip
    return Outcome(len(ODD_PATHS), "none shows anything", broken)


MOUNTED = """
import socket
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from samewise import AsyncLLM
from samewise.serve.app import make_app
from samewise.serve.settings import Keys, ServeSettings
from samewise.testing import tiny_engine

app = make_app(AsyncLLM.over(tiny_engine()), ServeSettings(keys=Keys.of(["%s"])))
app, root_path = %s
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, root_path=root_path, log_config=None, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
"""
"""A server of one's own, with a tiny model, in which the application stands under a prefix."""
PREFIXED = {
    "mount": ('Starlette(routes=[Mount("/api", app)]), ""', "/api"),
    "two mounts": ('Starlette(routes=[Mount("/a", Starlette(routes=[Mount("/b", app)]))]), ""', "/a/b"),
    "root_path": ('app, "/api"', ""),  # of a proxy that takes the prefix off: the server adds it again
    "public name": ('Starlette(routes=[Mount("/health", app)]), ""', "/health"),
}


@attack("access", "the application mounted under a prefix, in 4 ways", "not tried", server=False)
async def mounted(_: Bench) -> Outcome:
    broken: list[str] = []
    tried = 0
    for name, (mounting, prefix) in PREFIXED.items():
        code = MOUNTED % (OTHER, mounting)
        with subprocess.Popen(
            [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                server = SimpleNamespace(port=int(await asyncio.to_thread(process.stdout.readline)))
                tries = [("GET", f"{start}{path}") for path in ODD_PATHS for start in (prefix, prefix * 2)]
                tries += [
                    ("POST", f"{prefix}{path}") for path in (COMPLETIONS, "/tokenize", "/health/../tokenize")
                ]
                for method, path in tries:
                    reply = await send(server, method, path, SHORT if method == "POST" else None, key=None)
                    if reply.status == 200 or reply.status >= 500 or b"max_model_len" in reply.body:
                        broken.append(f"{name}: {method} {path}: {reply.status} {reply.body[:100]!r}")
                health = await send(server, "GET", f"{prefix}/health", key=None)
                answer = await send(server, "POST", f"{prefix}{COMPLETIONS}", SHORT, key=OTHER)
                broken += [
                    f"{name}: {r.status} {r.body[:100]!r}" for r in (health, answer) if r.status != 200
                ]
                tried += len(tries) + 2
            finally:
                process.kill()
    return Outcome(tried, "none shows anything; the key's own requests are answered", broken)


# ---- TLS and Unix sockets


@attack("access", "TLS: 200 handshakes never finished, plain text to the TLS port", "not tried", server=False)
async def tls(bench: Bench) -> Outcome:
    certificate, key = bench.folder / "cert.pem", bench.folder / "key.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)], capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        return Outcome(0, "openssl is missing", ["openssl is missing"])
    options = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    server = await asyncio.to_thread(bench.start, options)
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False

    def answer() -> tuple[int, float]:
        began = time.monotonic()
        with contextlib.closing(
            http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=20)
        ) as link:
            link.request("POST", COMPLETIONS, json.dumps(SHORT), {"Authorization": f"Bearer {OTHER}"})
            return link.getresponse().status, time.monotonic() - began

    opened, broken = [], []
    try:
        for i in range(200):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            opened.append((reader, writer))
            if i % 4 == 0:
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        status, seconds = await asyncio.to_thread(answer)
        if status != 200 or seconds > 5:
            broken.append(f"another client: {status} after {seconds:.1f} s")
        closed, end = 0, time.monotonic() + 20
        for reader, _ in opened:
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(reader.read(-1), max(0.1, end - time.monotonic()))
                closed += 1
        if closed < len(opened):
            broken.append(f"{len(opened) - closed} unfinished handshakes stayed open for 20 s")
        for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            with contextlib.suppress(ssl.SSLError, OSError, ValueError):
                old.minimum_version = old.maximum_version = version
                with socket.create_connection(("127.0.0.1", server.port), 5) as plain, old.wrap_socket(plain):
                    broken.append(f"{version.name} was accepted")
        if "Traceback" in server.log_text():
            broken.append("tracebacks in the log")
    finally:
        for _, writer in opened:
            writer.transport.abort()
        server.kill()
    return Outcome(202, f"closed; another client answered in {seconds:.2f} s", broken)


@attack(
    "access", "the Unix socket: its mode, a second server, a file in its place", "not tried", server=False
)
async def unix_socket(bench: Bench) -> Outcome:
    path, broken = bench.folder / "server.sock", []
    server = await asyncio.to_thread(bench.start, ("--unix-socket", str(path)))
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o002:
            broken.append(f"every user of the machine may connect: mode {mode:o}")
        second = await asyncio.to_thread(_serve_once, bench, path)
        if second.returncode != 2 or "another server" not in second.stderr:
            broken.append(f"a second server: exit {second.returncode} {second.stderr[-200:]}")
        if not path.exists():
            broken.append("the second server removed the socket of the first")
    finally:
        await asyncio.to_thread(server.stop, 20)
        server.kill()
    path.unlink(missing_ok=True)
    path.write_text("precious")
    third = await asyncio.to_thread(_serve_once, bench, path)
    if third.returncode != 2 or path.read_text() != "precious":
        broken.append(f"a file in its place: exit {third.returncode}")
    return Outcome(3, f"mode {mode:o}; a second server and a file are refused", broken, {"mode": f"{mode:o}"})


def _serve_once(bench: Bench, path: Path) -> subprocess.CompletedProcess[str]:
    from attack_tools import run_command

    return run_command("serve", bench.model, "--unix-socket", str(path), "--device", "cpu", timeout=30)


# ---- clocks, lists


@attack("access", "a wall clock that jumps by a day, both ways", "not tried", server=False)
async def clock_jumps(bench: Bench) -> Outcome:
    """`time.time` of the server process follows a file; deadlines must use the monotonic clock."""
    offset = bench.folder / "offset"
    offset.write_text("0")
    code = (
        "import time\nnow = time.time\n"
        "def jumping():\n"
        f"    try: return now() + float(open({str(offset)!r}).read() or 0)\n"
        "    except (OSError, ValueError): return now()\n"
        "time.time = jumping\nfrom samewise.cli.main import main\nmain()"
    )
    server = await asyncio.to_thread(bench.start, command=(sys.executable, "-c", code))
    broken = []
    try:
        body = SHORT | {"max_tokens": 40, "ignore_eos": True, "stream": True}
        for jump in ("86400", "-86400", "1e9", "0"):
            asking = [
                asyncio.ensure_future(send(server, "POST", COMPLETIONS, body, timeout=40)) for _ in range(3)
            ]
            await asyncio.sleep(0.05)
            offset.write_text(jump)
            replies = await asyncio.gather(*asking)
            broken += [f"{jump}: {r.status} {r.body[-100:]!r}" for r in replies if b"[DONE]" not in r.body]
            if (health := await send(server, "GET", "/health")).status != 200:
                broken.append(f"{jump}: /health {health.status}")
    finally:
        server.kill()
    return Outcome(4, "no stream ended early, `/health` 200", broken)


@functools.cache
def long_bodies() -> dict[str, bytes]:
    """Bodies with long lists by what is long in them; made once, as making them takes longer than sending."""
    words = [f"word{i} of many words" for i in range(200_000)]
    lists: dict[str, dict[str, Any]] = {
        "stops": {"stop": words},
        "a long stop": {"stop": ["x" * 4_000_000]},
        "bad words": {"bad_words": words},
        "a long bad word": {"bad_words": ["y " * 500_000]},
        "stop tokens": {"stop_token_ids": list(range(1_000_000))},
        "allowed tokens": {"allowed_token_ids": list(range(1_000_000))},
        "biases": {"logit_bias": {str(i): 1 for i in range(200_000)}},
        "1024 bad words": {"bad_words": [f"w{i}" for i in range(1024)]},
        "64 of each": {"stop": [f"s{i}" for i in range(64)], "bad_words": ["a b c " * 100] * 64},
    }
    return {name: json.dumps(SHORT | body).encode() for name, body in lists.items()}


@attack("access", "very long lists of stops, bad words, biases", "not tried", seconds=200)
async def long_lists(bench: Bench) -> Outcome:
    bodies = long_bodies()
    replies = [await send(bench.server, "POST", COMPLETIONS, body, timeout=60) for body in bodies.values()]
    slowest = max(r.seconds for r in replies)
    broken = [f"{name}: {r.status} {r.body[:120]!r}" for name, r in zip(bodies, replies, strict=True)
              if r.status not in (200, 400, 413)]  # fmt: skip
    if slowest > 5:
        broken.append(f"one took {slowest:.1f} s")
    return Outcome(len(bodies), f"answered or refused within {slowest:.1f} s", broken, {"seconds": slowest})


@attack("access", "malformed HTTP: 300 random and smuggled requests", "not tried")
async def malformed_http(bench: Bench) -> Outcome:
    rng, broken = random.Random(0), []
    raw = json.dumps(SHORT).encode()
    both = head("POST", COMPLETIONS, len(raw), Transfer_Encoding="chunked") + raw
    twice = (
        head("POST", COMPLETIONS, 4).replace(b"Content-Length: 4", b"Content-Length: 4\r\nContent-Length: 5")
        + raw
    )
    special = [
        *(both, twice, b"GET /\x00 HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 200_000),
        *(b"\r\n" * 1000, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n"),
    ]
    for i in range(300):
        data = special[i] if i < len(special) else rng.randbytes(rng.randint(1, 2000))
        with contextlib.suppress(OSError, TimeoutError):
            async with connection(bench.server) as (reader, writer):
                writer.write(data)
                writer.write_eof()
                answer = await asyncio.wait_for(reader.read(4096), 15)
                if answer[9:12] in (b"500", b"502"):
                    broken.append(f"{data[:60]!r}: {answer[:100]!r}")
    if "Traceback" in bench.server.log_text():
        broken.append("tracebacks in the log")
    return Outcome(300, "refused or closed", broken)
