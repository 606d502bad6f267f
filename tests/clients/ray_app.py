"""Run by test_replicas.py in a process of its own: `samewise.scale.app`, rolling replacement, other contracts.

Its last line is JSON: what was seen.
"""

import json
import sys
import time
from pathlib import Path

import httpx
import ray
from ray import serve
from replica_requests import requests, whole

from samewise.scale import ScaleSettings, app
from samewise.scale.cluster import cause_of, ray_cluster
from samewise.serve.settings import ServeSettings

folder, port, log = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
URL = f"http://127.0.0.1:{port}"
SETTINGS = {"device": "cpu", "kv_memory": "4MiB", "max_num_seqs": 16}
SERVE = ServeSettings(model_names=("tiny",))


def answers(num: int) -> list[object]:
    with httpx.Client(base_url=URL, timeout=60) as client:
        replies = [client.post("/v1/chat/completions", json=body | {"model": "tiny"}) for body in requests(num)]
        return [whole(reply.json()) for reply in replies]


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
    serve.run(app(folder, scale=ScaleSettings(replicas=2, drain_seconds=1), serve=SERVE, **SETTINGS), name="a")
    wait_until_ready()
    seen["models"] = httpx.get(f"{URL}/v1/models", timeout=10).json()["data"]
    seen["first"] = answers(8)
    while len(before := replicas()) < 2:
        time.sleep(0.2)
    # The same application again, of another code version: every replica is replaced, one after the other.
    again = app(folder, scale=ScaleSettings(replicas=2, drain_seconds=0.5), serve=SERVE, seed=1, **SETTINGS)
    serve.run(again, name="a")
    wait_until_ready()
    seen["replaced"] = answers(8)
    while set(now := replicas()) & set(before) or len(now) < 2:
        time.sleep(0.2)
    other = app(folder, scale=ScaleSettings(replicas=2), serve=SERVE, dtype="bfloat16", **SETTINGS)
    try:
        serve.run(other, name="a")
        seen["refused"] = None
    except RuntimeError as error:
        seen["refused"] = str(cause_of(str(error)))
    log.write_text("")
    serve.shutdown()
ray.shutdown()
print(json.dumps(seen))
