"""Answers → response bodies and events, without a server or an engine."""

from dataclasses import replace
from typing import Any

import pytest

from samewise.openai.bodies import CHAT, COMPLETIONS
from samewise.openai.parse import parse
from samewise.openai.replies import respond
from samewise.openai.request import ParsedRequest
from samewise.openai.stream import StreamWriter, encode_event, join_chunks
from samewise.outputs import Chunk, CompletionOutput, Logprob, RequestMetrics, RequestOutput

REPLY: Any = {"model": "m", "created": 7, "id": "x"}


def chat(**fields: Any) -> ParsedRequest:
    return parse(CHAT, {"messages": [{"role": "user", "content": "hi"}]} | fields)


def complete(**fields: Any) -> ParsedRequest:
    return parse(COMPLETIONS, {"prompt": "hi"} | fields)


def answer(*texts: str, finish: str = "stop", **more: Any) -> RequestOutput:
    outputs = [
        CompletionOutput(i, text, [1] * len(text), -1.0, None, finish, None, [-1.0] * len(text), 9, 2, 1)
        for i, text in enumerate(texts)
    ]
    metrics = RequestMetrics(0.0, 0.1, 0.2, 4, 2, 3)
    return RequestOutput(**({
        "request_id": "1", "prompt": "hi", "prompt_token_ids": [5, 6], "prompt_logprobs": None,
        "outputs": outputs, "finished": True, "num_cached_tokens": 1, "contract": "sw-1", "metrics": metrics,
    } | more))  # fmt: skip


def test_usage_counts_tokens() -> None:
    body = respond(complete(), [answer("ab")], **REPLY)
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1, "reasoning_tokens": 0
        },
    }  # fmt: skip


def test_replies_and_streams_carry_receipts() -> None:
    assert respond(complete(), [answer("a")], **REPLY, receipts=[{"r": 1}])["receipt"] == {"r": 1}
    writer = StreamWriter(complete(stream=True), **REPLY, fingerprint="f")
    assert writer.last_events([answer("a")]) == []
    (last,) = writer.last_events([answer("a")], [{"r": 1}, {"r": 2}])
    assert (last["choices"], last["receipt"]) == ([], [{"r": 1}, {"r": 2}])


def test_tokens_with_equal_texts_are_all_listed() -> None:
    entry = {1: Logprob(-3.0, None, "?"), 2: Logprob(-1.0, 1, "?"), 3: Logprob(float("-inf"), 2, "b")}
    one = CompletionOutput(0, "?", [1], -3.0, [entry], "length", None, [-3.0], 0)
    body = respond(complete(logprobs=2), [answer(outputs=[one])], **REPLY)
    (tops,) = body["choices"][0]["logprobs"]["top_logprobs"]
    assert tops == {"?": -3.0, "token_id:2": -1.0, "b": -9999.0}
    body = respond(complete(logprobs=2, return_tokens_as_token_ids=True), [answer(outputs=[one])], **REPLY)
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:1"]
    body = respond(chat(logprobs=True, top_logprobs=2), [answer(outputs=[one])], **REPLY)
    (part,) = body["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in part["top_logprobs"]] == ["?", "b"]
    assert part["bytes"] == [63]


def test_echoing_token_ids_needs_a_decoder() -> None:
    out = replace(answer("c"), prompt=None)
    with pytest.raises(ValueError, match="decode"):
        respond(complete(echo=True), [out], **REPLY)
    body = respond(complete(echo=True), [out], **REPLY, decode=lambda ids: f"<{len(ids)}>")
    assert body["choices"][0]["text"] == "<2>c"


def test_with_echo_and_logprobs_the_first_choice_is_streamed_first() -> None:
    """Its chunk carries the prompt's log-probabilities."""
    parsed = complete(echo=True, logprobs=0, n=2, stream=True)
    writer = StreamWriter(parsed, **REPLY, fingerprint="f", decode=lambda ids: "h")
    prompt = answer(prompt_logprobs=[None, {6: Logprob(-0.5, None, "i")}], outputs=[])
    entry = [{1: Logprob(-1.0, None, "z")}]
    late = Chunk(1, "z", [1], [-1.0], entry, "length")
    first = Chunk(0, "z", [1], [-1.0], entry, "length")
    assert writer.events(0, late, lambda: prompt) == []
    events = writer.events(0, first, lambda: prompt)
    assert [one["choices"][0]["index"] for one in events] == [0, 1]
    for one in events:
        assert one["choices"][0]["text"] == "hiz"
        assert one["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -1.0]


def test_waiting_chunks_of_a_choice_are_joined() -> None:
    entry = {1: Logprob(-1.0, None, "z")}
    parts = [
        (0, Chunk(0, "a", [1], [-1.0], [entry], None, None, 1, 2, 9)),
        (0, Chunk(1, "x", [2], [-2.0], [entry], "length", None, 0, 0, 9)),
        (1, Chunk(0, "p", [4], [-4.0], [entry], None, None, 0, 0, 9)),
        (0, Chunk(0, "b", [3], [-3.0], [entry], "stop", "b", 1, 3, 9)),
    ]
    one = Chunk(0, "ab", [1, 3], [-1.0, -3.0], [entry, entry], "stop", "b", 2, 5, 9)
    assert join_chunks(parts) == [(0, one), parts[1], parts[2]]
    assert join_chunks(parts[:1]) == parts[:1]


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream_options": {"include_usage": True}},
                                    {"logprobs": 1}, {"return_token_ids": True}, {"explain": True},
                                    {"stream_options": {"continuous_usage_stats": True}}])  # fmt: skip
@pytest.mark.parametrize("ask", [chat, complete])
def test_the_fast_encoding_equals_the_plain_one(ask: Any, fields: dict[str, Any]) -> None:
    if ask is chat and "logprobs" in fields:
        fields = {"logprobs": True, "top_logprobs": 1}
    parsed = ask(stream=True, **fields)
    wire = {"model": 'a "model"', "created": 7, "id": "x", "fingerprint": "f"}
    one, two = StreamWriter(parsed, **wire), StreamWriter(parsed, **wire)
    entry = [{1: Logprob(-1.0, 1, "z")}] if parsed.params.logprobs is not None else None
    texts = ["a", 'b"\n', "", "é🙂", "\0the text of a chunk\0", "\ud800", "end"]
    for i, text in enumerate(texts):
        for index in range(parsed.params.n):
            chunk = Chunk(
                index, text, [1], [-1.0], entry, "stop" if i == len(texts) - 1 else None, None, 1, 2
            )
            whole = b"".join(map(encode_event, one.events(0, chunk, lambda: answer(outputs=[]))))
            assert two.encode(0, chunk, lambda: answer(outputs=[])) == whole


def test_an_aborted_choice_is_not_streamed() -> None:
    writer = StreamWriter(chat(stream=True), **REPLY, fingerprint="f")
    assert writer.events(0, Chunk(0, "", [], [], None, "abort"), lambda: answer(outputs=[])) == []


class CapitalsParser:
    """A parser of an invented format: every capital letter is a call, any other letter is content."""

    def __init__(self) -> None:
        self.count = -1

    def push(self, text: str) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for letter in text:
            if letter.isupper():
                self.count += 1
                head = {"index": self.count, "id": f"c{self.count}", "type": "function"}
                deltas.append({"tool_calls": [head | {"function": {"name": letter, "arguments": "{"}}]})
                deltas.append({"tool_calls": [{"index": self.count, "function": {"arguments": "}"}}]})
            else:
                deltas.append({"content": letter})
        return deltas

    def flush(self) -> list[dict[str, Any]]:
        return [{"content": "!"}] if self.count < 0 else []


@pytest.mark.parametrize(
    ("text", "content", "names", "finish"),
    [("ab", "ab!", [], "stop"), ("aBC", "a", ["B", "C"], "tool_calls"), ("B", None, ["B"], "tool_calls")],
)
def test_tool_calls_are_the_same_whole_and_streamed(
    text: str, content: str | None, names: list[str], finish: str
) -> None:
    parsed = replace(chat(stream=True), make_parser=lambda *_: CapitalsParser())
    (choice,) = respond(parsed, [answer(text)], **REPLY)["choices"]
    message = choice["message"]
    assert message["content"] == content
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == names
    assert all(call["function"]["arguments"] == "{}" for call in message.get("tool_calls", []))
    assert [call["id"] for call in message.get("tool_calls", [])] == [f"c{i}" for i in range(len(names))]
    assert choice["finish_reason"] == finish
    writer = StreamWriter(parsed, **REPLY, fingerprint="f")
    chunks = [Chunk(0, letter, [1], [-1.0]) for letter in text] + [Chunk(0, "", [2], [-1.0], None, "stop")]
    events = [one["choices"][0] for c in chunks for one in writer.events(0, c, lambda: answer(outputs=[]))]
    assert events[0]["delta"] == {"role": "assistant", "content": ""}
    joined = "".join(one["delta"].get("content") or "" for one in events)
    assert joined == (content or "")
    streamed = [part for one in events for part in one["delta"].get("tool_calls", ())]
    assert [part["function"]["name"] for part in streamed if "id" in part] == names
    assert [one["finish_reason"] for one in events if one["finish_reason"]] == [finish]
