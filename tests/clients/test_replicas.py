"""Servers and batches over Ray, each in a process of its own: bits, fail-over, refusals.

The bits of one replica are those of `server`, a server without Ray.
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from replica_requests import CHATS, StreamedAnswer, mixed, requests, streamed, whole
from server_process import CLIENT_ENV, ServerProcess, running_server

pytest.importorskip("ray", reason="ray is not installed; see make test-clients")

MAIN = "from samewise.cli.main import main; main()"
ENV = os.environ | CLIENT_ENV | {"RAY_USAGE_STATS_ENABLED": "0"}
TESTS = Path(__file__).parent
GIVE_UP = 900
"""Seconds. A slow machine takes a minute or more for a replica."""


@pytest.fixture(scope="module")
def replicas(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server over two replicas."""
    log = tmp_path_factory.mktemp("replicas") / "log"
    options = ("--replicas", "2", "--replica-cpus", "1", "--kv-memory", "4MiB", "--max-num-seqs", "16")
    with running_server(folder, log, *options, ready_seconds=180) as running:
        yield running
        running.process.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0


def replica_pids(server: ServerProcess) -> list[int]:
    """Process ids of the server's replicas that still run."""
    return [pid for pid, command in below(server.process.pid) if ":Engines" in command]


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


async def ask_all(url: str, bodies: list[dict[str, Any]], at_once: int) -> list[list[Any]]:
    """Complete answers of chats, so many requests under way."""
    return await ask_mixed(url, [(CHATS, body) for body in bodies], at_once)


async def ask_mixed(
    url: str, requests: list[tuple[str, dict[str, Any]]], at_once: int, *, whole_only: bool = False
) -> list[list[Any]]:
    """Answers, whole and streamed, so many requests under way. `whole_only`: none as a stream."""
    limit = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(path: str, body: dict[str, Any]) -> list[Any]:
            body |= {"model": "tiny"}
            async with limit:
                if body.get("stream") and not whole_only:
                    answer = await streamed(client, body, path)
                    assert answer.error is None
                    assert answer.done
                    return answer.result()
                reply = await client.post(path, json=body | {"stream": False})
            assert reply.status_code == 200, reply.text
            return whole(reply.json())

        return list(await asyncio.gather(*(one(*request) for request in requests)))


def test_two_replicas_give_the_bits_of_one_server(server: ServerProcess, replicas: ServerProcess) -> None:
    asked = mixed(200)
    wanted = asyncio.run(ask_mixed(server.url, asked, 8, whole_only=True))
    assert asyncio.run(ask_mixed(replicas.url, asked, 24)) == wanted
    one, two = (httpx.get(f"{each.url}/v1/models").json()["data"] for each in (server, replicas))
    assert [card["contract"] for card in one] == [card["contract"] for card in two]
    end = time.monotonic() + 60
    while True:  # until every replica has reported
        lines = httpx.get(f"{replicas.url}/metrics").text.splitlines()
        rows = [line for line in lines if line.startswith("samewise:generation_tokens_total{")]
        if len(rows) == 2 and all(float(row.split()[-1]) > 0 for row in rows):
            break
        assert time.monotonic() < end, rows
        time.sleep(0.2)
    assert all('replica="' in row for row in rows)


def test_a_prompt_goes_where_its_pages_are(replicas: ServerProcess) -> None:
    for number in range(6):
        body = {"model": "tiny", "prompt": f"{number}: " + "a long beginning " * 9, "max_tokens": 2}
        cached = [
            httpx.post(f"{replicas.url}/v1/completions", json=body, timeout=60).json()["usage"][
                "prompt_tokens_details"
            ]["cached_tokens"]
            for _ in range(2)
        ]
        assert cached[1] > 100 > cached[0]


def reporting(server: ServerProcess) -> set[str]:
    """Names of the replicas that report, and of those that did so seconds ago."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    rows = [line for line in lines if line.startswith("samewise:frames_total{")]
    return {row.split('replica="')[1].split('"')[0] for row in rows}


async def kill_one_by_one(server: ServerProcess, num: int, killed: list[int]) -> None:
    """Kill a replica with kill -9, wait until the one that replaces it reports, and so on."""
    names = await asyncio.to_thread(reporting, server)
    num_before = len(names)
    while len(killed) < num:
        await asyncio.sleep(0.3)
        names |= await asyncio.to_thread(reporting, server)
        fresh = [pid for pid in replica_pids(server) if pid not in killed]
        if len(names) >= num_before + len(killed) and fresh:
            killed.append(fresh[0])
            os.kill(fresh[0], signal.SIGKILL)


def test_streams_survive_the_death_of_replicas(
    server: ServerProcess, replicas: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixteen clients stream; three replicas are killed, each when the one before it was replaced."""
    bodies = [body | {"model": "tiny"} for body in requests(64, max_tokens=400)]
    wanted = asyncio.run(ask_all(server.url, bodies, 8))
    killed: list[int] = []
    streams: list[tuple[int, StreamedAnswer]] = []  # with the number of the body

    async def main() -> None:
        numbers = itertools.count()
        async with httpx.AsyncClient(base_url=replicas.url, timeout=240) as client:
            killing = asyncio.ensure_future(kill_one_by_one(replicas, 3, killed))

            async def reader() -> None:
                while (number := next(numbers)) < len(bodies) or not killing.done():
                    index = number % len(bodies)
                    streams.append((index, await streamed(client, bodies[index])))

            await asyncio.gather(*(reader() for _ in range(16)))
            await killing

    asyncio.run(asyncio.wait_for(main(), GIVE_UP))
    assert len(killed) == 3
    assert len(streams) >= len(bodies)
    for index, stream in streams:
        assert stream.error is None
        assert stream.done
        assert stream.result() == wanted[index]
    num, seconds = replicas.metric("failovers_total"), replicas.metric("failover_seconds_total")
    assert num > 0
    with capsys.disabled():
        waits = max(stream.longest_wait for _, stream in streams)
        print(
            f"\n{len(streams)} streams, 3 kills: {num:g} sequences went on elsewhere, after "
            f"{seconds / num:.2f} s on average; the longest wait for an event was {waits:.2f} s"
        )


def test_nothing_is_left_when_clients_go_while_replicas_die(replicas: ServerProcess) -> None:
    """Clients leave in the middle of streams; replicas are killed meanwhile."""
    bodies = [body | {"model": "tiny"} for body in requests(48, max_tokens=400)]
    killed: list[int] = []

    async def main() -> None:
        numbers = itertools.count()
        async with httpx.AsyncClient(base_url=replicas.url, timeout=240) as client:
            killing = asyncio.ensure_future(kill_one_by_one(replicas, 2, killed))

            async def reader() -> None:
                while (number := next(numbers)) < len(bodies) or not killing.done():
                    index = number % len(bodies)
                    await streamed(client, bodies[index], max_pieces=20 + index)

            await asyncio.gather(*(reader() for _ in range(12)))
            await killing

    asyncio.run(asyncio.wait_for(main(), GIVE_UP))
    assert len(killed) == 2
    replicas.check_idle()


def test_a_full_server_over_replicas_answers_429(folder: Path, tmp_path: Path) -> None:
    options = ("--replicas", "1", "--replica-cpus", "1", "--max-num-queued-reqs", "1", "--max-num-seqs", "2")
    with running_server(folder, tmp_path / "log", *options, ready_seconds=180) as server:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 900, "ignore_eos": True}

        async def main() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
                return sorted(reply.status_code for reply in replies)

        assert asyncio.run(main()) == [200] * 3 + [429] * 5


def port_nobody_is_given() -> int:
    """A free port below those that the system gives out: Ray opens many before this one is taken."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in range(lowest - 1, 1024, -13):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def test_an_application_is_replaced_unnoticed_and_refuses_another_contract(
    server: ServerProcess, folder: Path, tmp_path: Path
) -> None:
    port = port_nobody_is_given()
    log = tmp_path / "log"
    ran = subprocess.run(
        [sys.executable, str(TESTS / "ray_app.py"), str(folder), str(port), str(log)],
        env=ENV, capture_output=True, text=True, check=False, timeout=GIVE_UP,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    wanted = json.loads(json.dumps(asyncio.run(ask_all(server.url, requests(8), 4))))
    assert seen["first"] == wanted
    assert seen["replaced"] == wanted
    assert seen["after"] == wanted
    assert seen["meanwhile"] == [[], []]
    contract = httpx.get(f"{server.url}/v1/models").json()["data"][0]["contract"]
    assert [card["contract"] for card in seen["models"]] == [contract]
    assert seen["refused"]
    assert all("dtype is bfloat16, not float32" in text for text in seen["refused"])
    assert "dtype is bfloat16, not float32" in seen["second"]


def test_long_streams_go_on_when_replicas_are_stopped_or_lose_their_engine(
    folder: Path, tmp_path: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, str(TESTS / "ray_failures.py"), str(folder), str(tmp_path)],
        env=ENV, capture_output=True, text=True, check=False, timeout=GIVE_UP,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert list(seen) == ["drained", "lost"]
    assert len(seen["drained"]["replaced"]) == 2
    assert len(seen["lost"]["replaced"]) == 1
    for what in seen.values():
        assert what["failovers"] > 0
        assert what["num_answers"] > 0
        assert not what["others"], seen


def batch_lines(num: int) -> str:
    lines = []
    for i, body in enumerate(requests(num, max_tokens=24)):
        line = {"custom_id": f"line-{i}", "url": "/v1/chat/completions", "body": body | {"model": "tiny"}}
        lines.append(json.dumps(line))
    return "".join(line + "\n" for line in [*lines, "this is no request"])


def test_a_batch_over_two_workers_of_which_one_dies(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(batch_lines(500))

    def command(target: Path, *options: str) -> list[str]:
        engine = ("--device", "cpu", "--kv-memory", "4MiB", "--max-num-seqs", "16", "--model", str(folder))
        names = ("--served-model-name", "tiny")
        return [sys.executable, "-c", MAIN, "batch", str(source), str(target), *names, *engine, *options]

    alone, on_ray = tmp_path / "alone.jsonl", tmp_path / "ray.jsonl"
    ran = subprocess.run(command(alone), env=ENV, capture_output=True, text=True, check=False, timeout=300)
    assert "500 answered, 1 bad" in ran.stderr, ran.stderr

    # Begun, and killed with all its workers after some answers; then gone on with, and a worker killed.
    first = subprocess.Popen(command(on_ray, "--ray", "--workers", "2"), env=ENV, start_new_session=True)
    wait_for_lines(on_ray, 20, first)
    first.kill()
    first.wait()
    kept = on_ray.read_bytes().rpartition(b"\n")[0]
    with (tmp_path / "errors").open("w") as errors:  # a pipe that nobody reads may fill up
        second = subprocess.Popen(command(on_ray, "--ray", "--workers", "2"), env=ENV, stderr=errors)
        wait_for_lines(on_ray, kept.count(b"\n") + 100, second)
        (worker, *_) = batch_workers(second)
        os.kill(worker, signal.SIGKILL)
        code = second.wait(timeout=300)
    assert code == 0, (tmp_path / "errors").read_text()
    assert on_ray.read_bytes().startswith(kept)
    assert answers_of(on_ray) == answers_of(alone)
    assert len(on_ray.read_text().splitlines()) == 501


def wait_for_lines(path: Path, num: int, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + 200
    while not path.exists() or path.read_bytes().count(b"\n") < num:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


def batch_workers(command: subprocess.Popen[Any]) -> list[int]:
    """Process ids of Ray Data's actors that a command has started."""
    return [pid for pid, words in below(command.pid) if "MapWorker" in words or "LineAnswerer" in words]


def answers_of(path: Path) -> dict[str, Any]:
    """By custom_id, what of the lines is a function of the requests."""
    found: dict[str, Any] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        assert str(line["custom_id"]) not in found
        body = (line["response"] or {}).get("body") or {}
        usage = {name: count for name, count in (body.get("usage") or {}).items() if isinstance(count, int)}
        found[str(line["custom_id"])] = line["id"], line["error"], body.get("choices"), usage
    return found
