"""Times a server over replicas beside a server without Ray, and kills replicas while clients stream.

    python bench/scale.py --case alone                # samewise serve
    python bench/scale.py --case router               # one replica with as many threads, behind the router
    python bench/scale.py --case two                  # two replicas, which divide the cores
    python bench/scale.py --case kill --kills 4       # two replicas; one at a time is killed with kill -9

Cases are runs of their own, so that each has the machine for itself; compare runs that were made one after
the other. Clients stream greedy completions of a fixed length. In the case `kill` the same requests are asked
first without killing; every stream must then give the same tokens, log-probabilities and text again, and each
client's longest wait for an event is printed. Last line: JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

MAIN = "from samewise.cli.main import main; main()"
READY_SECONDS = 240
TOPICS = ("the sea", "a tree", "numbers", "rain", "bread", "maps", "glass", "trains")


def options(case: str, cores: int) -> list[str]:
    """Of `samewise serve`, for a case."""
    if case == "alone":
        return []
    replicas = 1 if case == "router" else 2
    return ["--replicas", str(replicas), "--replica-cpus", str(max(1, cores // replicas))]


class Server:
    """`samewise serve` in a process of its own."""

    def __init__(self, model: str, case: str, cores: int, log: Path) -> None:
        command = [
            *(sys.executable, "-c", MAIN, "serve", model, "--port", "0", "--json-logs"),
            *("--proposer", "none", "--max-num-seqs", "32", *options(case, cores)),
        ]
        env = os.environ | {"OMP_NUM_THREADS": str(cores), "RAY_USAGE_STATS_ENABLED": "0"}
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        self.url = self._wait("listening on").split("listening on ")[1].split(";")[0]
        self._wait("ready: ")

    def _wait(self, text: str) -> str:
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            for line in self._log.read_text().splitlines():
                if text in line:
                    return str(json.loads(line)["message"])
            time.sleep(0.05)
        raise SystemExit(f"the server does not start:\n{self._log.read_text()}")

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"samewise:{name}{{"))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def body(number: int, tokens: int, **fields: Any) -> dict[str, Any]:
    prompt = f"{number}. A short story about {TOPICS[number % len(TOPICS)]}:"
    return {
        "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
        "return_token_ids": True,
    } | fields  # fmt: skip


class Streamed(NamedTuple):
    """What came of one stream."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    end: str | None  # the reason for which it is complete; None: it is not
    error: str | None

    @property
    def is_complete(self) -> bool:
        return self.end is not None and self.error is None


def broken(error: str) -> Streamed:
    """A stream without an answer."""
    return Streamed([], [], "", None, error)


async def stream(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[Streamed, float]:
    """(what came; the longest wait for an event)."""
    tokens: list[int] = []
    logprobs: list[float] = []
    text, end, error, held = "", None, None, b""
    last, longest = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        if response.status_code != 200:
            return broken(f"status {response.status_code}"), 0.0
        async for piece in response.aiter_bytes():
            now = time.perf_counter()
            last, longest = now, max(longest, now - last)
            *lines, held = (held + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                error = error or event.get("error")
                for choice in event.get("choices", []):
                    tokens += choice["token_ids"]
                    text += choice["text"]
                    if choice["logprobs"]:
                        logprobs += choice["logprobs"]["token_logprobs"]
                    end = end or choice["finish_reason"]
    return Streamed(tokens, logprobs, text, end, error and str(error)), longest


async def ask(url: str, bodies: list[dict[str, Any]], clients: int) -> list[tuple[Streamed, float]]:
    """All streams, so many at once."""
    results: list[tuple[Streamed, float]] = [(broken("not asked"), 0.0)] * len(bodies)
    left = list(range(len(bodies)))
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one() -> None:
            while left:
                number = left.pop(0)
                try:
                    results[number] = await stream(client, bodies[number])
                except httpx.HTTPError as error:
                    results[number] = broken(repr(error)), 0.0

        await asyncio.gather(*(one() for _ in range(clients)))
    return results


async def ask_complete(url: str, bodies: list[dict[str, Any]], clients: int) -> list[tuple[Streamed, float]]:
    """The same. Exits if a stream is not complete: its tokens and its time mean nothing."""
    results = await ask(url, bodies, clients)
    for got, _ in results:
        if not got.is_complete:
            raise SystemExit(f"a stream is not complete: {got.error} after {len(got.tokens)} tokens")
    return results


def below(ancestor: int) -> list[tuple[int, str]]:
    """(process id, command line) of the processes that a process has started, and those that they have."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue

    def is_below(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == ancestor:
                return True
        return False

    return [(pid, command) for pid, command in sorted(commands.items()) if is_below(pid)]


def replica_pids(server: int) -> list[int]:
    """Processes of a server's replicas, by the name that Ray gives them."""
    return [pid for pid, command in below(server) if "ServeReplica" in command and ":Engines" in command]


async def killing(server: int, kills: int, every: float, killed: list[int]) -> None:
    """Kill a replica, wait until there are two again, and so on."""
    while len(killed) < kills:
        await asyncio.sleep(every)
        running = [pid for pid in replica_pids(server) if pid not in killed]
        if len(running) >= 2:
            killed.append(running[len(killed) % 2])
            os.kill(killed[-1], signal.SIGKILL)


async def with_kills(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    bodies = [body(i, args.tokens, logprobs=2, seed=i, temperature=i % 2) for i in range(args.clients)]
    wanted = await ask_complete(server.url, bodies, args.clients)
    killed: list[int] = []
    killer = asyncio.ensure_future(killing(server.process.pid, args.kills, args.every, killed))
    pauses: list[float] = []
    streams = incomplete = differing = 0
    while len(killed) < args.kills and time.perf_counter() < args.until:
        for (got, pause), (want, _) in zip(await ask(server.url, bodies, args.clients), wanted, strict=True):
            streams += 1
            incomplete += not got.is_complete
            differing += got != want
            pauses.append(pause)
    killer.cancel()
    quiet = [pause for _, pause in wanted]
    return {
        "kills": len(killed), "streams": streams, "broken": incomplete, "differing": differing,
        "failovers": server.metric("failovers_total"),
        "mean_pause_of_failovers": server.metric("failover_seconds_total")
        / max(1, server.metric("failovers_total")),
        "longest_wait": {"median": statistics.median(pauses), "most": max(pauses)},
        "longest_wait_without_kills": {"median": statistics.median(quiet), "most": max(quiet)},
    }  # fmt: skip


async def timed(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    await ask_complete(server.url, [body(1000 + i, 16) for i in range(args.clients)], args.clients)
    rates = []
    for part in range(args.repeats):
        bodies = [body(100 * part + i, args.tokens) for i in range(args.clients)]
        began = time.perf_counter()
        results = await ask_complete(server.url, bodies, args.clients)
        seconds = time.perf_counter() - began
        rates.append(sum(len(got.tokens) for got, _ in results) / seconds)
    return {"tokens_per_second": statistics.median(rates), "runs": [round(rate, 1) for rate in rates]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=("alone", "router", "two", "kill"), required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clients", type=int, default=0, help="default: 8, and 16 for kill")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--every", type=float, default=2.0, help="seconds before a kill")
    parser.add_argument("--seconds", type=float, default=120, help="of killing, at most")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the server with it
    args.clients = args.clients or (16 if args.case == "kill" else 8)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        server = Server(args.model, args.case, args.cores, Path(folder) / "log")
        ready = time.perf_counter() - began
        args.until = time.perf_counter() + args.seconds
        try:
            found = asyncio.run((with_kills if args.case == "kill" else timed)(server, args))
        finally:
            server.stop()
    said = {
        "case": args.case, "model": args.model, "cores": args.cores, "clients": args.clients,
        "tokens": args.tokens, "ready_seconds": round(ready, 1), "machine": platform.machine(),
    }  # fmt: skip
    for name, value in found.items():
        print(f"{name}: {value}")
    print(json.dumps(said | found))


if __name__ == "__main__":
    main()
