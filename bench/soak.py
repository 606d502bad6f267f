"""Clients with bad manners, for minutes: does the server stay whole, its answers the same? Last line: JSON.

    python bench/soak.py --minutes 10 --clients 32

A server over a tiny random model in a process of its own, with so little KV memory that it preempts. Clients
ask for whole answers and streams, verified and not, one or several, with and without a grammar; leave at any
moment, also in the middle of their own request; and send what is no request at all. Every so often they all
fall silent, and the server is looked at from inside: every page free, no task, connection, descriptor or
thread left over, memory no larger than after warm-up. Every completed verified answer (token ids,
log-probabilities, text) must equal the reference, computed one at a time beforehand by another engine in
another process, that guesses nothing and keeps no prefixes.
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

from soak_asks import MALFORMED, MIB, Ask, bodies, dumped, engine, joined, references, said

# ---- the server


def serve(kv_memory: str) -> None:
    """The server, and one more route through which to look at it from inside."""
    import uvicorn

    from samewise import AsyncLLM
    from samewise.serve.app import make_app

    async def main() -> None:
        async with AsyncLLM.over(engine(kv_memory=kv_memory, max_num_seqs=16, max_queued=36)) as llm:
            app = make_app(llm)
            server = uvicorn.Server(
                uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
            )

            async def inside() -> dict:
                gc.collect()
                await llm._call(llm._engine.check)
                stats = await llm.stats()
                return {
                    "state": app.state.service.worker.state.value,
                    "jobs": app.state.service.worker.num_jobs,
                    "choices": app.state.service.worker._choices,
                    "readers": len(llm._readers),
                    "tasks": len(asyncio.all_tasks()),
                    "threads": threading.active_count(),
                    "connections": len(server.server_state.connections),
                    "descriptors": len(list(Path("/proc/self/fd").iterdir())),
                    "rss": rss(),
                    "objects": len(gc.get_objects()),
                } | {
                    name: stats[name]
                    for name in ("running", "waiting", "pages", "pages_available", "preempted", "frames",
                                 "aborted", "output_tokens", "contract")
                }  # fmt: skip

            app.add_api_route("/inside", inside)
            with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
                print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
                await server.serve(sockets=[listener])

    asyncio.run(main())


def rss() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


# ---- the clients


@dataclass
class Tally:
    """What happened. Shared by all clients, of one event loop."""

    counts: Counter = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)


class Crowd:
    """All clients, and the mischief they are up to."""

    def __init__(self, port: int, asks: list[Ask], seed: int) -> None:
        self.port, self.asks, self.seed = port, asks, seed
        self.url, self.tally = f"http://127.0.0.1:{port}", Tally()

    async def round(self, number: int, clients: int, seconds: float) -> None:
        """Everybody at once, for a while; then silence."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(f"{self.seed} {number} {i}", end) for i in range(clients)))

    async def _client(self, seed: str, end: float) -> None:
        rng = random.Random(seed)
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            while time.monotonic() < end:
                ask = rng.choice(self.asks)
                kinds = ("whole", "stream", "leave", "cut", "malformed", "pause")
                kind = rng.choices(kinds, weights=(30, 34, 20, 6, 8, 2))[0]
                self.tally.counts[kind] += 1
                try:
                    if kind == "pause":
                        await asyncio.sleep(rng.random() * 0.3)
                    elif kind == "malformed":
                        await self._malformed(rng)
                    elif kind == "cut":
                        await self._cut(ask, rng)
                    else:
                        await self._ask(client, ask, kind, rng)
                except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
                    self._wrong(f"{kind}: {type(error).__name__} {error} for {str(ask.body)[:200]}")

    def _wrong(self, what: str) -> None:
        self.tally.counts["wrong"] += 1
        self.tally.wrong.append(what)

    async def _ask(self, client: httpx.AsyncClient, ask: Ask, kind: str, rng: random.Random) -> None:
        verified = rng.random() < 0.7
        body = ask.body | ({} if verified else {"verify": False})
        leaving = kind == "leave"
        stream = kind == "stream" or (leaving and rng.random() < 0.6)
        work = self._stream(client, ask.path, body) if stream else self._whole(client, ask.path, body)
        began = time.monotonic()
        if leaving:
            patience = rng.choice((rng.random() * 0.02, rng.random() * 0.2, rng.random()))
            try:
                await asyncio.wait_for(work, patience)
                self.tally.counts["did not leave in time"] += 1
            except TimeoutError:
                self.tally.counts["left"] += 1
            return
        found, first = await work
        if found is None:
            self.tally.counts["429"] += 1
            await asyncio.sleep(rng.random() * 0.2)
            return
        who = f"{'verified' if verified else 'unverified'} {kind}"
        self.tally.seconds[who].append(time.monotonic() - began)
        if first is not None:
            self.tally.seconds["first token"].append(first - began)
        self.tally.counts[f"completed {who}"] += 1
        self.tally.counts["completed tokens"] += sum(len(choice[0]) for choice in found)
        if verified and found != ask.wanted:
            self._wrong(f"not the reference, {who}: {found} instead of {ask.wanted} for {ask.body}")

    async def _whole(self, client: httpx.AsyncClient, path: str, body: dict):
        response = await client.post(path, json=body)
        if response.status_code == 429:
            assert response.headers["retry-after"]
            return None, None
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {response.text[:300]}")
        return tuple(said(choice) for choice in response.json()["choices"]), None

    async def _stream(self, client: httpx.AsyncClient, path: str, body: dict):
        events, first, done = [], None, False
        async with client.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code == 429:
                return None, None
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line:
                    first = first or time.monotonic()
                    events.append(json.loads(line.removeprefix("data: ")))
        if not done or any("error" in event for event in events):
            raise ValueError(f"a stream ended badly: {events[-1:]}")
        return joined(events), first

    async def _malformed(self, rng: random.Random) -> None:
        method, path, body, wanted = rng.choice(MALFORMED)
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            response = await client.request(method, path, content=body)
        if response.status_code not in (wanted, 429):  # a full queue may be noticed first
            raise ValueError(f"{method} {path} {body[:60]!r}: {response.status_code} {response.text[:200]}")
        if list(response.json()) != ["error"]:
            raise ValueError(f"not an error: {response.text[:200]}")

    async def _cut(self, ask: Ask, rng: random.Random) -> None:
        """By hand: a connection that breaks anywhere, or speaks no HTTP at all."""
        body = dumped(ask.body | {"stream": rng.random() < 0.5})
        head = f"POST {ask.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
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
            pass  # it hung up on noise
        finally:
            if rng.random() < 0.5:
                writer.transport.abort()  # RST, not FIN
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


# ---- looking


async def silence(url: str, floor: dict | None, seconds: float = 30) -> tuple[dict, list[str]]:
    """Look inside once everybody has gone; what is still there after a while was left behind."""
    end = time.monotonic() + seconds
    while True:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            seen = (await client.get("/inside")).json()
        wrong = left_over(seen, floor)
        if not wrong or time.monotonic() > end:
            return seen, wrong
        await asyncio.sleep(0.1)


def left_over(seen: dict, floor: dict | None) -> list[str]:
    wrong = [
        f"{name}: {seen[name]}" for name in ("running", "waiting", "jobs", "choices", "readers") if seen[name]
    ]
    if seen["state"] != "ready":
        wrong.append(f"state: {seen['state']}")
    if seen["pages_available"] != seen["pages"]:
        wrong.append(f"pages: {seen['pages_available']} of {seen['pages']} are back")
    return wrong + [
        f"{name}: {seen[name]} instead of {floor[name]}"
        for name in ("tasks", "connections", "descriptors")
        if floor is not None and seen[name] > floor[name]
    ]


def grown(looks: list[dict], floor: dict) -> list[str]:
    """Whether memory, objects or threads went on growing after warm-up, the first third."""
    warm, last = looks[max(1, len(looks) // 3) - 1], looks[-1]
    wrong = []
    if last["rss"] - warm["rss"] > max(24 * MIB, warm["rss"] // 20):
        wrong.append(f"memory grew from {warm['rss'] // MIB} to {last['rss'] // MIB} MiB")
    if last["objects"] - warm["objects"] > 20_000:
        wrong.append(f"objects grew from {warm['objects']} to {last['objects']}")
    if last["threads"] > floor["threads"] + 40:  # asyncio's own pool has at most 32
        wrong.append(f"threads grew from {floor['threads']} to {last['threads']}")
    return wrong


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {"num": len(values), "p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(values)}


async def soak(args: argparse.Namespace, port: int, asks: list[Ask], contract: str) -> dict:
    crowd = Crowd(port, asks, args.seed)
    floor, wrong = await silence(crowd.url, None)
    if floor["contract"] != contract:
        wrong.append(f"contract {floor['contract']} is not that of the references, {contract}")
    seconds, looks, began = args.minutes * 60 / args.rounds, [], time.monotonic()
    for number in range(args.rounds):
        await crowd.round(number, args.clients, seconds)
        seen, bad = await silence(crowd.url, floor)
        looks.append(seen)
        wrong += [f"after round {number + 1}: {one}" for one in bad]
        print(f"  {time.monotonic() - began:6.0f} s  {crowd.tally.counts['completed tokens']:8d} tokens  "
              f"preempted {seen['preempted']:6d}  aborted {seen['aborted']:6d}  tasks {seen['tasks']}  "
              f"threads {seen['threads']:2d}  {seen['rss'] / MIB:6.1f} MiB  {seen['objects']} objects  "
              f"wrong {len(crowd.tally.wrong) + len(wrong)}", flush=True)  # fmt: skip
    counts, last = crowd.tally.counts, looks[-1]
    wrong += grown(looks, floor) + crowd.tally.wrong
    if not last["preempted"]:
        wrong.append("nothing was preempted: this proves less than it should; give less --kv-memory")
    return {
        "seconds": time.monotonic() - began,
        "clients": args.clients,
        "counts": dict(counts),
        "latency": {who: percentiles(values) for who, values in sorted(crowd.tally.seconds.items())},
        "tokens_per_second": counts["completed tokens"] / (args.minutes * 60),
        "server": {name: last[name] for name in ("preempted", "aborted", "frames", "output_tokens", "pages")},
        "memory_mib": [round(look["rss"] / MIB, 1) for look in looks],
        "objects": [look["objects"] for look in looks],
        "threads": [look["threads"] for look in looks],
        "wrong": wrong[:20],
        "num_wrong": len(wrong),
    }  # fmt: skip


def report(found: dict) -> None:
    print(f"\n{'':24}{'number':>8}{'p50':>9}{'p95':>9}{'p99':>9}{'max':>9}   milliseconds")
    for who, row in found["latency"].items():
        cells = "".join(f"{row[name] * 1e3:9.1f}" for name in ("p50", "p95", "p99", "max"))
        print(f"{who:24}{row['num']:8d}{cells}")
    print("\n" + ", ".join(f"{name} {num}" for name, num in sorted(found["counts"].items())))
    for one in found["wrong"]:
        print(f"WRONG {one[:1000]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--rounds", type=int, help="silences to look inside at; by default one every 30 s, 4 at least"
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
    asks, contract = references(bodies(args.asks, random.Random(args.seed)))
    print(f"{len(asks)} references in {time.monotonic() - began:.1f} s, contract {contract}; "
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
        found = asyncio.run(soak(args, port, asks, contract))
    finally:
        server.terminate()
        code = server.wait(30)
    report(found)
    print(json.dumps(found | {"exit_code": code, "load": os.getloadavg()[0]}))
    sys.exit(bool(found["num_wrong"]))


if __name__ == "__main__":
    main()
