"""Many clients with bad manners, for minutes: does the server stay whole, and its answers the same? Last line: JSON.

    python bench/soak.py --minutes 10 --clients 32

A server over a tiny random model in a process of its own, with so little KV memory that it preempts. Clients
ask for whole answers and streams, verified and not, one or several, with and without a grammar; leave at any
moment, also in the middle of their own request; and send what is no request at all. Every so often they all
fall silent, and the server is looked at from inside: every page free, no task, connection, descriptor or thread
left over, memory no larger than after warm-up. Every completed verified answer (token ids, log-probabilities,
text) must equal the reference, computed one at a time beforehand by another engine in another process, that
guesses nothing and keeps no prefixes.
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

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HERE = Path(__file__).parent
MIB = 2**20

# ---- the server


def engine(**settings):
    from samewise.testing import tiny_engine

    return tiny_engine(eos=True, **settings)


def serve(kv_memory: str) -> None:
    """The server, and one more route through which to look at it from inside."""
    import uvicorn

    from samewise import AsyncLLM
    from samewise.serve.app import make_app

    async def main() -> None:
        async with AsyncLLM.over(engine(kv_memory=kv_memory, max_num_seqs=16, max_queued=24)) as llm:
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
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "rss": rss(),
                    "objects": len(gc.get_objects()),
                } | {
                    name: stats[name]
                    for name in ("running", "waiting", "pages", "pages_available", "preempted", "frames", "aborted",
                                 "output_tokens", "contract", "uptime")
                }  # fmt: skip

            app.add_api_route("/inside", inside)
            with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
                print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
                await server.serve(sockets=[listener])

    asyncio.run(main())


def rss() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024


# ---- what is asked


@dataclass(frozen=True)
class Ask:
    """A request and, if it is verified, what it must give: per choice (token ids, log-probabilities, text)."""

    path: str
    body: dict
    wanted: tuple | None = None


def bodies(num: int, rng: random.Random) -> list[tuple[str, dict]]:
    """All sorts of requests that make sense."""
    words = ["frame", "span", "row", "page", "truth", "guess", "replay", "bit", "crowd", "alone", "ß", "日本"]
    shared = " ".join(rng.choices(words, k=16))  # a beginning that many have in common
    found = []
    for i in range(num):
        text = " ".join(rng.choices(words, k=rng.choice((1, 3, 8, 20))))
        text = f"{shared} {text}"[:220] if i % 3 == 0 else text
        body = {"max_tokens": rng.choice((1, 4, 12, 30, 30, 70)), "seed": i, "return_token_ids": True}
        body["temperature"] = rng.choice((0, 0, 0.8, 1.3))
        if i % 4 == 1:
            body |= {"top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        if i % 5 == 2:
            body |= {"top_k": 20, "min_p": 0.01, "stop": ["q", "zz"]}
        if i % 7 == 3:
            body |= {"ignore_eos": True, "min_tokens": 1}
        if i % 6 == 4:
            body["n"] = 2
        if i % 8 == 5:
            body["proposer"] = "none"
        if i % 9 == 6:
            body["cache_salt"] = f"customer {i % 2}"
        if i % 10 == 7:
            body["response_format"] = {"type": "json_object"}
        if rng.random() < 0.3:
            messages = [{"role": "user", "content": text}]
            found.append((CHAT, body | {"messages": messages, "logprobs": True, "top_logprobs": 2}))
        else:
            echo = {"echo": True} if i % 11 == 8 else {}
            prompt = list(text.encode()) if i % 12 == 9 else text
            found.append((COMPLETIONS, body | {"prompt": prompt, "logprobs": 1} | echo))
    return found


def references(asked: list[tuple[str, dict]]) -> tuple[list[Ask], str]:
    """Each of them alone, in this process, and the contract they were computed under."""
    from samewise import LLM
    from samewise.serve.protocol import parse
    from samewise.serve.replies import respond
    from samewise.testing import byte_tokenizer

    llm = LLM.over(engine(proposer="none", enable_prefix_caching=False, max_num_seqs=1))
    found = []
    for path, body in asked:
        parsed = parse(path, body)
        prompt = llm.chat_prompt(parsed.messages, **parsed.template) if parsed.chat else parsed.prompts[0]
        outputs = llm.generate([prompt], parsed.params, use_tqdm=False)
        reply = respond(parsed, outputs, model="x", created=0, id="x", decode=byte_tokenizer().decode)
        found.append(Ask(path, body, tuple(said(choice) for choice in reply["choices"])))
    return found, llm.engine.contract.id


def said(choice: dict) -> tuple:
    """What must be the same: token ids, log-probabilities, text, and why it ended."""
    logprobs = choice["logprobs"]
    values = logprobs["token_logprobs"] if "token_logprobs" in logprobs else [
        one["logprob"] for one in logprobs["content"]
    ]  # fmt: skip
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return tuple(choice["token_ids"]), tuple(values), text, choice["finish_reason"]


def joined(events: list[dict]) -> tuple:
    """The same, from a stream."""
    ids, values, texts, ends = defaultdict(list), defaultdict(list), defaultdict(str), {}
    for event in events:
        for choice in event["choices"]:
            i, logprobs = choice["index"], choice["logprobs"] or {}
            ids[i] += choice.get("token_ids", [])
            values[i] += logprobs.get("token_logprobs", []) + [
                one["logprob"] for one in logprobs.get("content", [])
            ]
            texts[i] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            ends[i] = choice["finish_reason"] or ends.get(i)
    return tuple((tuple(ids[i]), tuple(values[i]), texts[i], ends[i]) for i in sorted(ends))


def _json(body: object) -> bytes:
    return json.dumps(body).encode()


MALFORMED: list[tuple[str, str, bytes, int]] = [
    ("POST", COMPLETIONS, b"{", 400),
    ("POST", COMPLETIONS, b"\xff\xfe\x00", 400),
    ("POST", COMPLETIONS, b"[]", 400),
    ("POST", COMPLETIONS, b"[" * 100_000, 400),
    ("POST", COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
    ("POST", COMPLETIONS, _json({}), 400),
    ("POST", COMPLETIONS, _json({"prompt": 5}), 400),
    ("POST", COMPLETIONS, _json({"prompt": ["a", ""]}), 400),
    ("POST", COMPLETIONS, _json({"prompt": [[1, 2], [10**9]]}), 400),
    ("POST", COMPLETIONS, _json({"prompt": [-1]}), 400),
    ("POST", COMPLETIONS, _json({"prompt": "x" * 5000}), 400),
    ("POST", COMPLETIONS, _json({"prompt": "x", "max_tokens": "5"}), 400),
    ("POST", COMPLETIONS, _json({"prompt": "x", "max_tokens": 10**9}), 400),
    ("POST", COMPLETIONS, _json({"prompt": "x", "n": 0}), 400),
    ("POST", COMPLETIONS, _json({"prompt": "x", "n": 128}), 400),
    ("POST", COMPLETIONS, _json({"prompt": "x", "logprobs": 21}), 400),
    ("POST", COMPLETIONS, _json({"prompt": "x", "suffix": "y"}), 400),
    ("POST", COMPLETIONS, _json({"prompt": "x", "model": "other"}), 404),
    ("POST", COMPLETIONS, _json({"prompt": "x", "response_format": {"type": "json_schema"}}), 400),
    ("POST", COMPLETIONS, _json({"prompt": "x", "stop": [""] * 100}), 400),
    ("POST", CHAT, _json({"messages": []}), 400),
    ("POST", CHAT, _json({"messages": [{"role": "nobody", "content": "x"}]}), 400),
    ("POST", CHAT, _json({"messages": [{"role": "user", "content": 5}]}), 400),
    ("POST", CHAT, b" " * (9 * MIB), 413),
    ("POST", "/v1/responses", _json({"input": "x"}), 404),
    ("GET", COMPLETIONS, b"", 405),
    ("GET", "/nowhere", b"", 404),
]
"""(method, path, body, status): none of these may be answered in any other way."""

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
        body = _json(ask.body | {"stream": rng.random() < 0.5})
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
    for name in ("tasks", "connections", "descriptors"):
        if floor is not None and seen[name] > floor[name]:
            wrong.append(f"{name}: {seen[name]} instead of {floor[name]}")
    return wrong


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
        "server": {name: last[name] for name in ("preempted", "aborted", "frames", "output_tokens", "pages", "contract")},
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
    print(f"{len(asks)} references in {time.monotonic() - began:.1f} s, contract {contract}; {args.clients} clients, "
          f"{args.minutes:g} minutes in {args.rounds} rounds; {platform.machine()}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
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
