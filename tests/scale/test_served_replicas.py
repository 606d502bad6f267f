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
    "proposer": "none",
}  # fmt: skip
"""Without drafts each delta has one token, so that replicas die in the middle of answers."""


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

    asyncio.run(asyncio.wait_for(main(), 240))


AGENTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "messages": CHAT["messages"], "max_tokens": 60, "temperature": 1, "seed": 3, "ignore_eos": True,
        "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "proposer": "none",
    },
    "/v1/responses": {
        "input": "hello", "max_output_tokens": 60, "temperature": 1, "seed": 3, "ignore_eos": True,
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "return_token_ids": True,
        "proposer": "none",
    },
}  # fmt: skip


async def agents_stream(client: httpx.AsyncClient, path: str) -> tuple[str, Any]:
    """The text of a stream, and what its end says of the answer."""
    reply = await client.post(path, json=AGENTS[path] | {"stream": True})
    assert reply.status_code == 200, reply.text
    lines = [line for line in reply.content.split(b"\n") if line.startswith(b"data: ")]
    found = [json.loads(line[6:]) for line in lines]
    deltas = [event["delta"] for event in found if event["type"].endswith(("_block_delta", "_text.delta"))]
    text = "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)
    if path == "/v1/messages":
        delta, stop = found[-2:]
        assert stop["type"] == "message_stop"
        return text, [delta[name] for name in ("delta", "logprobs", "seed", "token_ids")]
    response = found[-1]["response"]
    return text, [response["output"][0]["content"], response["status"], response["token_ids"]]


def test_agents_streams_go_on_when_replicas_die() -> None:
    async def main() -> None:
        async with client_of(AsyncLLM.over(make_engine())) as client:
            wanted = [await agents_stream(client, path) for path in AGENTS]
        replicas = LocalReplicas([make_engine(), make_engine()], kill_after=23)
        llm = AsyncLLM.over(RemoteEngine(facts_of(make_engine()), replicas, num_replicas=2))
        async with client_of(llm) as client:
            asked = [agents_stream(client, path) for path in (*AGENTS, *AGENTS)]
            assert await asyncio.gather(*asked) == [*wanted, *wanted]
            assert (await llm.stats())["failovers"] > 0

    asyncio.run(asyncio.wait_for(main(), 240))
