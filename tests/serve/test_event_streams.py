"""What all event streams have in common: one line for each value, and signs of life while nothing is said."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from openai import AsyncOpenAI
from samewise.openai.replies import LINE_ENDS
from samewise.serve.settings import ServeSettings
from samewise.testing import paced

from agent_bodies import OPENED  # isort: skip
from served_app import CHAT, COMPLETIONS, run, served_app  # isort: skip

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
SPLIT = "a" + LINE_ENDS + "b"
SAID = {"structured_outputs": {"choice": [SPLIT]}, "temperature": 0, "stream": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 24}),
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 24, "logprobs": 1}),
    (CHAT, {"messages": HELLO, "max_tokens": 24}),
    (RESPONSES, {"input": "hello", "max_output_tokens": 24, "instructions": SPLIT}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 24}),
]


def text_of(path: str, event: dict[str, Any]) -> str:
    """The text that an event adds to an answer."""
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in event["choices"])
    if path == CHAT:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if path == RESPONSES:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_reader_of_lines_gets_each_event_as_one_line(path: str, body: dict[str, Any]) -> None:
    """httpx's `iter_lines`, as LiteLLM reads, splits at U+0085, U+2028 and U+2029 too."""

    async def work() -> None:
        async with served_app(eos=True) as served:
            reply = await served.client.post(path, json=body | SAID)
            assert reply.status_code == 200, reply.text
            lines = [line for line in reply.iter_lines() if line and line != "data: [DONE]"]
            assert {line.partition(": ")[0] for line in lines} <= {"event", "data"}
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
            assert "".join(text_of(path, event) for event in events) == SPLIT

    run(work())


# ---- silence

QUIET: list[tuple[str, dict[str, Any], bytes]] = [
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 3}, b": keep-alive\n\n"),
    (COMPLETIONS, {"prompt": ["hello", "you"], "max_tokens": 3}, b": keep-alive\n\n"),
    (CHAT, {"messages": HELLO, "max_tokens": 3}, b": keep-alive\n\n"),
    (RESPONSES, {"input": "hello", "max_output_tokens": 3}, b"event: response.in_progress\n"),
    (MESSAGES, {"messages": HELLO, "max_tokens": 3}, b'event: ping\ndata: {"type":"ping"}\n\n'),
]


@asynccontextmanager
async def slow_app(**options: Any) -> AsyncIterator[Any]:
    """A server whose steps take six times as long as a stream may be silent."""
    async with served_app(ServeSettings(keep_alive=0.05), proposer="none", **options) as served:
        paced(served.llm._engine, 0.3)
        yield served


@pytest.mark.parametrize(("path", "body", "alive"), QUIET)
def test_a_silent_stream_says_that_it_lives(path: str, body: dict[str, Any], alive: bytes) -> None:
    """Before the first token and between two, and never within an event."""

    async def work() -> None:
        async with slow_app() as served:
            reply = await served.client.post(path, json=body | {"stream": True, "temperature": 0})
            assert reply.status_code == 200, reply.text
            assert reply.content.count(alive) >= 4
            kinds = {
                line.partition(b":")[0]
                for block in reply.content.split(b"\n\n")
                for line in block.split(b"\n")
            }
            assert kinds <= {b"", b"data", b"event"}
            first = reply.content.index(b"data: {" if path != RESPONSES else b"response.output_item.added")
            assert alive in reply.content[:first] or path == MESSAGES
            await served.check_idle()

    run(work())


def test_a_stream_with_signs_of_life_adds_up_to_the_whole_answer() -> None:
    """For openai-python's stream helper too; events are numbered as they come."""

    async def work() -> None:
        async with slow_app(on_port=True, eos=True) as served:
            request: Any = {
                "model": "tiny-llama", "input": "hello", "temperature": 0,
                "extra_body": {"structured_outputs": {"choice": ["yes"]}},
            }  # fmt: skip
            async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
                whole = await client.responses.create(**request)
                async with client.responses.stream(**request) as stream:
                    numbers = [event.sequence_number async for event in stream]
                    final = await stream.get_final_response()
            assert final.output_text == whole.output_text == "yes"
            assert len(numbers) > 12
            assert numbers == list(range(len(numbers)))

    run(work())


def test_held_back_text_is_silence() -> None:
    """Thinking that is not shown gives chunks without events."""

    async def work() -> None:
        async with served_app(ServeSettings(keep_alive=0.05), proposer="none") as served:
            served.llm.intake.tokenizer.chat_template = OPENED + "{# </think> #}"
            paced(served.llm._engine, 0.02)
            thinking = {"type": "adaptive", "display": "omitted"}
            body = {"messages": HELLO, "max_tokens": 24, "thinking": thinking, "stream": True}
            reply = await served.client.post(MESSAGES, json=body | {"temperature": 0})
            assert reply.content.count(b"event: ping\n") >= 4

    run(work())
