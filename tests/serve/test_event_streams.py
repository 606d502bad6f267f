"""What all event streams have in common: one line for each value, and signs of life while nothing is said."""

import json
from typing import Any

import pytest

from samewise.openai.replies import LINE_ENDS


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
