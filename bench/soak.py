"""Checks a server under misbehaving clients for minutes: leaks, latency, answers. Last line: JSON.

    python bench/soak.py --minutes 10 --clients 32

The server runs a tiny random model in its own process, with so little KV memory that it preempts. Clients
request complete answers and streams of completions, chats, responses and messages, verified and not, one
choice or several, with and without a grammar, with tools and with reasoning; they read stored responses and
continue them; they disconnect at any moment, also
while sending a request; and they send malformed requests. After each round all clients stop and the server's
state is checked: every page free, no task, connection, descriptor or thread left over, memory no larger than
after warm-up. Every complete verified answer (token ids, log-probabilities, text) must equal its reference,
computed beforehand, one at a time, by an engine in another process without speculation and without prefix
caching.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from soak_requests import (
    FOLLOW_UP,
    MALFORMED,
    MIB,
    RESPONSES,
    TEMPLATE,
    SoakRequest,
    as_json,
    is_complete,
    make_engine,
    random_bodies,
    references,
    results_of,
    streamed_results_of,
)

# ---- server


def serve(kv_memory: str) -> None:
    """The server, with one more route, /inside, that reports its state."""
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    from samewise import AsyncLLM
    from samewise.serve.app import make_app
    from samewise.serve.limits import ServeLimits
    from samewise.serve.settings import ServeSettings

    settings = ServeSettings(limits=ServeLimits(max_stored=MIB // 4))  # so that it is soon full

    async def main() -> None:
        async with AsyncLLM.over(make_engine(kv_memory=kv_memory, max_num_seqs=16, max_queued=36)) as llm:
            llm.intake.tokenizer.chat_template = TEMPLATE
            app = make_app(llm, settings)
            server = uvicorn.Server(
                uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
            )

            async def inside(_: Request) -> JSONResponse:
                gc.collect()
                await llm._call(llm._engine.check)
                stats = await llm.stats()
                state = {
                    "state": app.state.service.worker.state.value,
                    "requests": app.state.service.worker.num_active,
                    "choices": app.state.service.worker._num_choices,
                    "readers": len(llm._readers),
                    "tasks": len(asyncio.all_tasks()),
                    "threads": threading.active_count(),
                    "connections": len(server.server_state.connections),
                    "stored": app.state.service.stored.used,
                    "descriptors": len(list(Path("/proc/self/fd").iterdir())),
                    "rss": rss(),
                    "objects": len(gc.get_objects()),
                } | {
                    name: stats[name]
                    for name in ("running", "waiting", "pages", "pages_available", "preempted", "frames",
                                 "aborted", "output_tokens", "contract")
                }  # fmt: skip
                return JSONResponse(state)

            app.add_route("/inside", inside)
            with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
                print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
                await server.serve(sockets=[listener])

    asyncio.run(main())


def rss() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


# ---- clients


@dataclass
class Results:
    """Counts, latencies in seconds and errors. Shared by all clients, which run in one event loop."""

    counts: Counter = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)


class Clients:
    """All clients of one server."""

    def __init__(self, port: int, requests: list[SoakRequest], seed: int) -> None:
        self.port, self.requests, self.seed = port, requests, seed
        self.url, self.results = f"http://127.0.0.1:{port}", Results()

    async def round(self, number: int, clients: int, seconds: float) -> None:
        """Run so many clients at once for so many seconds."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(f"{self.seed} {number} {i}", end) for i in range(clients)))

    async def _client(self, seed: str, end: float) -> None:
        rng = random.Random(seed)
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            while time.monotonic() < end:
                request = rng.choice(self.requests)
                kinds = ("whole", "stream", "leave", "cut", "malformed", "pause")
                kind = rng.choices(kinds, weights=(30, 34, 20, 6, 8, 2))[0]
                self.results.counts[kind] += 1
                try:
                    if kind == "pause":
                        await asyncio.sleep(rng.random() * 0.3)
                    elif kind == "malformed":
                        await self._malformed(rng)
                    elif kind == "cut":
                        await self._cut(request, rng)
                    else:
                        await self._send(client, request, kind, rng)
                except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
                    self._error(f"{kind}: {type(error).__name__} {error} for {str(request.body)[:200]}")

    def _error(self, message: str) -> None:
        self.results.counts["wrong"] += 1
        self.results.errors.append(message)

    async def _send(
        self, client: httpx.AsyncClient, request: SoakRequest, kind: str, rng: random.Random
    ) -> None:
        verified = rng.random() < 0.7
        body = request.body | ({} if verified else {"verify": False})
        leaving = kind == "leave"
        stream = kind == "stream" or (leaving and rng.random() < 0.6)
        send = self._stream if stream else self._complete
        work = send(client, request.path, body)
        began = time.monotonic()
        if leaving:
            seconds = rng.choice((rng.random() * 0.02, rng.random() * 0.2, rng.random()))
            try:
                await asyncio.wait_for(work, seconds)
                self.results.counts["did not leave in time"] += 1
            except TimeoutError:
                self.results.counts["left"] += 1
            return
        choices, first, response_id = await work
        if choices is None:
            self.results.counts["429"] += 1
            await asyncio.sleep(rng.random() * 0.2)
            return
        name = f"{'verified' if verified else 'unverified'} {kind}"
        self.results.seconds[name].append(time.monotonic() - began)
        if first is not None:
            self.results.seconds["first token"].append(first - began)
        self.results.counts[f"completed {name}"] += 1
        self.results.counts["completed tokens"] += sum(len(choice[0]) for choice in choices)
        if verified and choices != request.expected:
            self._error(
                f"not the reference, {name}: {choices} instead of {request.expected} for {request.body}"
            )
        elif verified and request.follow_up:
            await self._follow_up(client, request, response_id)

    async def _follow_up(self, client: httpx.AsyncClient, request: SoakRequest, response_id: str) -> None:
        """Continue a stored response, which may have been forgotten to make room."""
        body = FOLLOW_UP | {"previous_response_id": response_id}
        response = await client.post(RESPONSES, json=body)
        self.results.counts[f"follow-up {response.status_code}"] += 1
        if response.status_code in (404, 429):
            return
        found = results_of(RESPONSES, response.json())
        if found != request.follow_up:
            self._error(f"not the reference, follow-up: {found} instead of {request.follow_up}")

    async def _complete(self, client: httpx.AsyncClient, path: str, body: dict):
        response = await client.post(path, json=body)
        if response.status_code == 429:
            assert response.headers["retry-after"]
            return None, None, ""
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {response.text[:300]}")
        reply = response.json()
        if path == RESPONSES:
            await self._retrieve(client, reply)
        return results_of(path, reply), None, reply["id"]

    async def _retrieve(self, client: httpx.AsyncClient, reply: dict) -> None:
        """A stored response is as it was sent, or was forgotten to make room."""
        stored = await client.get(f"{RESPONSES}/{reply['id']}")
        self.results.counts[f"stored response {stored.status_code}"] += 1
        if stored.status_code != 404 and stored.json() != reply:
            raise ValueError(f"{stored.status_code} {stored.text[:300]} instead of {reply}")

    async def _stream(self, client: httpx.AsyncClient, path: str, body: dict):
        events, first, done = [], None, False
        async with client.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code == 429:
                return None, None, ""
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    first = first or time.monotonic()
                    events.append(json.loads(line.removeprefix("data: ")))
        if not is_complete(path, events, done=done) or any("error" in event for event in events):
            raise ValueError(f"a stream ended without its end mark or with an error: {events[-1:]}")
        response_id = events[-1]["response"]["id"] if path == RESPONSES else ""
        return streamed_results_of(path, events), first, response_id

    async def _malformed(self, rng: random.Random) -> None:
        method, path, body, status = rng.choice(MALFORMED)
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            response = await client.request(
                method, path, content=body, headers={"Content-Type": "application/json"}
            )
        if response.status_code not in (status, 429):  # a full queue may be checked first
            raise ValueError(f"{method} {path} {body[:60]!r}: {response.status_code} {response.text[:200]}")
        if not {"message", "param", "code"} <= response.json()["error"].keys():
            raise ValueError(f"not an error: {response.text[:200]}")

    async def _cut(self, request: SoakRequest, rng: random.Random) -> None:
        """Send part of a request over a plain socket, or random bytes, and close or reset the connection."""
        body = as_json(request.body | {"stream": rng.random() < 0.5})
        fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"POST {request.path} HTTP/1.1\r\n{fields}\r\n".encode()
        noise = rng.random() < 0.15
        sent = (
            rng.randbytes(rng.randint(1, 300)) if noise else (head + body)[: rng.randint(0, len(head + body))]
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            await writer.drain()
            await asyncio.sleep(rng.random() * 0.05)
            if rng.random() < 0.5:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(rng.randint(1, 500)), rng.random() * 0.2)
        except ConnectionError:
            pass  # the server closed the connection after random bytes
        finally:
            if rng.random() < 0.5:
                writer.transport.abort()  # sends RST instead of FIN
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


# ---- checks


async def idle_state(url: str, first: dict | None, seconds: float = 30) -> tuple[dict, list[str]]:
    """The server's state without clients, and what is still left over after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            state = (await client.get("/inside")).json()
        errors = left_over(state, first)
        if not errors or time.monotonic() > end:
            return state, errors
        await asyncio.sleep(0.1)


COMPILER_FILES = 1
"""Descriptors of the process that compiles grammars: it starts with the first one and ends when idle."""


def left_over(state: dict, first: dict | None) -> list[str]:
    names = ("running", "waiting", "requests", "choices", "readers")
    errors = [f"{name}: {state[name]}" for name in names if state[name]]
    if state["state"] != "ready":
        errors.append(f"state: {state['state']}")
    if state["pages_available"] != state["pages"]:
        errors.append(f"pages: {state['pages_available']} of {state['pages']} are free")
    return errors + [
        f"{name}: {state[name]} instead of {first[name]}"
        for name, more in (("tasks", 0), ("connections", 0), ("descriptors", COMPILER_FILES))
        if first is not None and state[name] > first[name] + more
    ]


def growth(states: list[dict], first: dict) -> list[str]:
    """Whether memory, objects or threads kept growing after warm-up, the first third of the rounds."""
    warm, last = states[max(1, len(states) // 3) - 1], states[-1]
    errors = []
    if last["rss"] - warm["rss"] > max(24 * MIB, warm["rss"] // 20):
        errors.append(f"memory grew from {warm['rss'] // MIB} to {last['rss'] // MIB} MiB")
    if last["objects"] - warm["objects"] > 20_000:
        errors.append(f"objects grew from {warm['objects']} to {last['objects']}")
    if last["threads"] > first["threads"] + 40:  # asyncio's own pool has at most 32
        errors.append(f"threads grew from {first['threads']} to {last['threads']}")
    return errors


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {"num": len(values), "p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(values)}


async def soak(args: argparse.Namespace, port: int, requests: list[SoakRequest], contract: str) -> dict:
    clients = Clients(port, requests, args.seed)
    first, errors = await idle_state(clients.url, None)
    if first["contract"] != contract:
        errors.append(f"contract {first['contract']} is not that of the references, {contract}")
    seconds, states, began = args.minutes * 60 / args.rounds, [], time.monotonic()
    for number in range(args.rounds):
        await clients.round(number, args.clients, seconds)
        state, left = await idle_state(clients.url, first)
        states.append(state)
        errors += [f"after round {number + 1}: {one}" for one in left]
        print(f"  {time.monotonic() - began:6.0f} s  {clients.results.counts['completed tokens']:8d} tokens  "
              f"preempted {state['preempted']:6d}  aborted {state['aborted']:6d}  tasks {state['tasks']}  "
              f"threads {state['threads']:2d}  {state['rss'] / MIB:6.1f} MiB  {state['objects']} objects  "
              f"wrong {len(clients.results.errors) + len(errors)}", flush=True)  # fmt: skip
    counts, last = clients.results.counts, states[-1]
    if not 0 < last["stored"] <= MIB // 4:
        errors.append(f"stored responses take {last['stored']} bytes of {MIB // 4}")
    errors += growth(states, first) + clients.results.errors
    if not last["preempted"]:
        errors.append("nothing was preempted, so preemption was not tested; give less --kv-memory")
    return {
        "seconds": time.monotonic() - began,
        "clients": args.clients,
        "counts": dict(counts),
        "latency": {name: percentiles(values) for name, values in sorted(clients.results.seconds.items())},
        "tokens_per_second": counts["completed tokens"] / (args.minutes * 60),
        "server": {name: last[name] for name in ("preempted", "aborted", "frames", "output_tokens", "pages")},
        "memory_mib": [round(state["rss"] / MIB, 1) for state in states],
        "objects": [state["objects"] for state in states],
        "threads": [state["threads"] for state in states],
        "wrong": errors[:20],
        "num_wrong": len(errors),
    }  # fmt: skip


def report(result: dict) -> None:
    print(f"\n{'':24}{'number':>8}{'p50':>9}{'p95':>9}{'p99':>9}{'max':>9}   milliseconds")
    for name, row in result["latency"].items():
        cells = "".join(f"{row[cut] * 1e3:9.1f}" for cut in ("p50", "p95", "p99", "max"))
        print(f"{name:24}{row['num']:8d}{cells}")
    print("\n" + ", ".join(f"{name} {num}" for name, num in sorted(result["counts"].items())))
    for error in result["wrong"]:
        print(f"WRONG {error[:1000]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--rounds", type=int, help="rounds, with a check after each; by default one every 30 s, 4 at least"
    )
    parser.add_argument("--asks", type=int, default=96, help="different requests")
    parser.add_argument("--kv-memory", default="256KiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.kv_memory)
        return
    args.rounds = args.rounds or max(4, round(args.minutes * 2))
    began = time.monotonic()
    requests, contract = references(random_bodies(args.asks, random.Random(args.seed)))
    print(f"{len(requests)} references in {time.monotonic() - began:.1f} s, contract {contract}; "
          f"{args.clients} clients, {args.minutes:g} minutes in {args.rounds} rounds; "
          f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
          flush=True)  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", "--kv-memory", args.kv_memory],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = json.loads(server.stdout.readline())["port"]
        result = asyncio.run(soak(args, port, requests, contract))
    finally:
        server.terminate()
        code = server.wait(30)
    report(result)
    print(json.dumps(result | {"exit_code": code, "load": os.getloadavg()[0]}))
    sys.exit(bool(result["num_wrong"]))


if __name__ == "__main__":
    main()
