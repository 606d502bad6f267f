"""An answer at `/v1/messages`, whole and as events, without a server or an engine."""

import json
import random
from typing import Any

import pytest
from jiter import from_json

from samewise.anthropic.exchange import MessagesExchange
from samewise.openai.exchange import AnswerFacts
from samewise.openai.request import ParseOptions
from samewise.outputs import Chunk, CompletionOutput, RequestMetrics, RequestOutput
from samewise.params import SamplingParams

HERMES = "{% if tools %}<tool_call>{% endif %}"
OPTIONS = ParseOptions(defaults=SamplingParams(), template=lambda tools: HERMES)
FACTS = AnswerFacts(
    model="m",
    created=0,
    request_id="r",
    contract="sw-1",
    decode=lambda ids: "",
    token_bytes=lambda token: None,
)
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def exchange(**body: Any) -> MessagesExchange:
    return MessagesExchange(
        {"max_tokens": 99, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]} | body, OPTIONS
    )


def answer(text: str, finish: str = "stop", stop: str | None = None) -> RequestOutput:
    """A complete answer, of one token a character."""
    tokens = [1] * len(text)
    made = CompletionOutput(0, text, tokens, -1.0, None, finish, stop, [-1.0] * len(text), 9)
    metrics = RequestMetrics(0.0, 0.1, 0.2, 4, 2, 3)
    return RequestOutput("1", "hi", [5, 6], None, [made], True, 0, "sw-1", metrics)


def events_of(output: RequestOutput, rng: random.Random) -> list[dict[str, Any]]:
    """The events of an answer that arrives in pieces."""
    (made,) = output.outputs
    writer, text, data = exchange(stream=True).writer(FACTS), made.text, b""
    while text:
        num = rng.randint(1, 9)
        piece, text = text[:num], text[num:]
        last = {"finish_reason": made.finish_reason, "stop_reason": made.stop_reason} if not text else {}
        data += writer.encode(0, Chunk(0, piece, [1] * len(piece), [], **last), lambda: output)
    data += writer.last([output], None)
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]


ARGUMENTS = [
    ('{"x": 1, "y": ["a", {}], "z": "\\u2028 \\ud83d\\ude00"}', {"x": 1, "y": ["a", {}], "z": "\u2028 😀"}),
    ("{}", {}),
    ("null", {}),
    (' { "x" : "}" } ', {"x": "}"}),
    ('"{\\"x\\": 1}"', {"x": 1}),
    # What small models write, and no JSON object is.
    ("{'a': True}", {}),
    ('{"a": 1,}', {}),
    ('{"a": "say "hi""}', {}),
    ('{"a": 1 "b": 2}', {}),
    ('{"a": NaN}', {}),
    ('{"a": -Infinity}', {}),
    ('{"a": 1e999}', {}),
    ('{"a": "\\ud83d"}', {}),
    ('{"a": "line\nbreak"}', {}),
    ('{"a": ' + "[" * 130 + "]" * 130 + "}", {}),
    ("[1]", {}),
    ('"x"', {}),
    ("5", {}),
]


@pytest.mark.parametrize(("arguments", "wanted"), ARGUMENTS)
def test_the_input_of_a_call_is_a_json_object_whole_and_streamed(arguments: str, wanted: Any) -> None:
    """Read as anthropic-python reads it: after each event, by a parser that raises at what is no JSON."""
    check_input(
        f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>', "stop", "tool_use", wanted
    )


@pytest.mark.parametrize("arguments", ['{"a": "hal', '{"a": tr', '{"a": {"b": 1}', '{"a": 1, ', ""])
def test_the_input_of_a_call_that_is_cut_off_is_empty(arguments: str) -> None:
    check_input(
        f'<tool_call>{{"name": "f", "arguments": {arguments}', "length", "model_context_window_exceeded", {}
    )


def check_input(text: str, finish: str, reason: str, wanted: Any) -> None:
    output = answer(text, finish)
    whole: Any = exchange().reply(FACTS, [output], None)
    calls = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert [block["input"] for block in calls] == [wanted] * len(calls)
    assert whole["stop_reason"] == reason
    for seed in range(5):
        joined, buffer = list[Any](), b""
        for event in events_of(output, random.Random(seed)):
            if event["type"] == "content_block_start":
                joined.append(dict(event["content_block"]))
                buffer = b""
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
                buffer += event["delta"]["partial_json"].encode()
                joined[-1]["input"] = from_json(buffer, partial_mode=True)
                assert json.loads(buffer) == joined[-1]["input"]
            elif event["type"] == "content_block_delta":
                joined[-1]["text"] += event["delta"]["text"]
        assert joined == whole["content"]
