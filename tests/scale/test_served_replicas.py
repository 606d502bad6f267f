"""The server over replicas: the same routes and answers, metrics by replica."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from local_replicas import LocalReplicas

from samewise import AsyncLLM
from samewise.engine import Engine
from samewise.scale.engine_host import facts_of
from samewise.scale.remote_engine import RemoteEngine
from samewise.serve.app import make_app
from samewise.testing import tiny_engine

CHAT = {
    "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 60, "temperature": 1,
    "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["~"], "ignore_eos": True,
}  # fmt: skip


def make_engine() -> Engine:
    return tiny_engine(max_num_seqs=16)


@asynccontextmanager
async def client_of(llm: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        llm,
        httpx.AsyncClient(transport=httpx.ASGITransport(make_app(llm)), base_url="http://served") as client,
    ):
        yield client


async def events(client: httpx.AsyncClient, **changes: Any) -> list[Any]:
    """By choice: the text, the log-probabilities and the end of a stream."""
    reply = await client.post("/v1/chat/completions", json=CHAT | {"stream": True} | changes)
    assert reply.status_code == 200, reply.text
    choices: dict[int, Any] = {}
    for text in reply.content.split(b"\n\n"):
        if not text.startswith(b"data: {"):
            continue
        event = json.loads(text[6:])
        assert "error" not in event
        for choice in event["choices"]:
            one = choices.setdefault(choice["index"], ["", [], []])
            one[0] += choice["delta"].get("content") or ""
            one[1] += (choice["logprobs"] or {"content": []})["content"]
            one[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return [choices[index] for index in sorted(choices)]


def test_streams_receipts_and_metrics_over_replicas_that_die() -> None:
    async def main() -> None:
        async with client_of(AsyncLLM.over(make_engine())) as client:
            wanted = await events(client)
            models = (await client.get("/v1/models")).json()["data"][0]
            receipt = (await client.post("/v1/chat/completions", json=CHAT | {"receipt": True})).json()
        replicas = LocalReplicas([make_engine(), make_engine()], kill_after=23)
        llm = AsyncLLM.over(RemoteEngine(facts_of(make_engine()), replicas, num_replicas=2))
        async with client_of(llm) as client:
            for got in await asyncio.gather(*(events(client) for _ in range(4))):
                assert got == wanted
            again = (await client.post("/v1/chat/completions", json=CHAT | {"receipt": True})).json()
            assert again["choices"] == receipt["choices"]
            assert json.dumps(again["receipt"], sort_keys=True) == json.dumps(
                receipt["receipt"], sort_keys=True
            )
            assert (await client.get("/v1/models")).json()["data"][0]["contract"] == models["contract"]
            text = (await client.get("/metrics")).text
            live = [line for line in text.splitlines() if line.startswith("samewise:frames_total{")]
            assert len(live) == 2
            assert all('replica="' in line for line in live)
            (failed_over,) = [
                line for line in text.splitlines() if line.startswith("samewise:failovers_total{")
            ]
            assert float(failed_over.split()[-1]) > 0
            assert replicas.num_killed > 0

    asyncio.run(main())
