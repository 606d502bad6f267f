"""Run by test_replicas.py in a process of its own: an application, replaced and then refused.

Its last line is JSON: what was seen.
"""

import asyncio
import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from replica_requests import CHATS, requests, streamed, whole

from samewise.config import EngineConfig
from samewise.errors import GuaranteeLost
from samewise.scale import ScaleSettings, app
from samewise.scale.cluster import deployed, ray_cluster
from samewise.scale.deploy import BuildEngine
from samewise.scale.roster import roster_of
from samewise.serve.settings import ServeSettings

folder, port, log = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
URL = f"http://127.0.0.1:{port}"
SETTINGS = {"device": "cpu", "kv_memory": "4MiB", "max_num_seqs": 16}
SERVE = ServeSettings(model_names=("tiny",))
TIMEOUT = 200
"""Seconds: a slow machine starts replicas meanwhile."""


def answers(num: int) -> list[object]:
    """Answers to the same chats every time, every other one streamed. Raises where one is not complete."""
    return asyncio.run(ask(num))


async def ask(num: int) -> list[object]:
    async with httpx.AsyncClient(base_url=URL, timeout=TIMEOUT) as client:
        return [await ask_one(client, body | {"model": "tiny"}) for body in requests(num)]


async def ask_one(client: httpx.AsyncClient, body: dict[str, Any]) -> object:
    if body["seed"] % 2:
        answer = await streamed(client, body)
        assert answer.error is None, answer.error
        assert answer.done
        return answer.result()
    reply = await client.post(CHATS, json=body)
    assert reply.status_code == 200, reply.text
    return whole(reply.json())


class Asker(threading.Thread):
    """Asks again and again, until it is told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[tuple[float, object]] = []  # when each began, and its answers or its error
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            began = time.monotonic()
            try:
                self.rounds.append((began, answers(8)))
            except Exception as error:
                self.rounds.append((began, f"{type(error).__name__}: {error}"))


def wait_for_rounds(askers: list[Asker]) -> None:
    """Wait until each asker has ended a round that began after this call."""
    now = time.monotonic()
    while not all(any(began > now for began, _ in list(asker.rounds)) for asker in askers):
        time.sleep(0.1)


def wait_until_ready() -> None:
    while httpx.get(f"{URL}/ready", timeout=10).status_code != 200:
        time.sleep(0.1)


def replicas() -> list[str]:
    """Names of the replicas that report."""
    text = httpx.get(f"{URL}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("samewise:frames_total{")]
    return sorted(line.split('replica="')[1].split('"')[0] for line in lines)


seen: dict[str, object] = {}
with ray_cluster(None, 3, "the test"):
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(
        app(folder, scale=ScaleSettings(replicas=2, drain_seconds=1), serve=SERVE, **SETTINGS), name="a"
    )
    wait_until_ready()
    seen["models"] = httpx.get(f"{URL}/v1/models", timeout=10).json()["data"]
    seen["first"] = answers(8)
    while len(before := replicas()) < 2:
        time.sleep(0.2)
    # The same application again, of another code version: every replica is replaced, one after the other.
    askers = [Asker() for _ in range(2)]
    for asker in askers:
        asker.start()
    wait_for_rounds(askers)
    again = app(folder, scale=ScaleSettings(replicas=2, drain_seconds=0.5), serve=SERVE, seed=1, **SETTINGS)
    serve.run(again, name="a")
    wait_until_ready()
    seen["replaced"] = answers(8)
    while set(now := replicas()) & set(before) or len(now) < 2:
        time.sleep(0.2)
    wait_for_rounds(askers)
    for asker in askers:
        asker.stopped.set()
    for asker in askers:
        asker.join()
    seen["meanwhile"] = [
        [result for _, result in asker.rounds if result != seen["first"]] for asker in askers
    ]
    other = app(folder, scale=ScaleSettings(replicas=2), serve=SERVE, dtype="bfloat16", **SETTINGS)
    with suppress(RuntimeError):  # Ray Serve's own words; the roster's name the facts
        serve.run(other, name="a")
    seen["refused"] = list(ray.get(roster_of("a").refused.remote(), timeout=30).values())
    seen["after"] = answers(8)
    serve.shutdown()


class EveryOther:
    """Builds engines: the first in float32, those after it in bfloat16."""

    def __call__(self) -> object:
        try:
            log.touch(exist_ok=False)
            first = True
        except FileExistsError:
            first = False
            while not log.read_text():
                time.sleep(0.1)
            time.sleep(5)  # so that the first has joined
        engine = BuildEngine(
            EngineConfig.of(model=folder, dtype="float32" if first else "bfloat16", **SETTINGS)
        )()
        if first:
            log.write_text("built")
        return engine


config = EngineConfig.of(model=folder, **SETTINGS)
with deployed(
    config, ScaleSettings(replicas=2), None, what="the test", make_engine=EveryOther()
) as replicas_of_two:
    try:
        replicas_of_two.load()
        seen["second"] = None
    except GuaranteeLost as error:
        seen["second"] = str(error)
ray.shutdown()
print(json.dumps(seen))
