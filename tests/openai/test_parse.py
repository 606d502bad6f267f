"""Bodies understood, and answers said: no server, no engine, no torch."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samewise.errors import BadParameter, GuaranteeLost, MachineError, QueueFull, UnknownModel
from samewise.openai.bodies import REFUSED
from samewise.openai.errors import ApiError
from samewise.openai.parse import CHAT, COMPLETIONS, Parsed, Terms, parse, respond
from samewise.openai.replies import Streamer, joined
from samewise.outputs import Chunk, CompletionOutput, Logprob, RequestMetrics, RequestOutput
from samewise.params import SamplingParams
from samewise.serve.http import dump, event

USER = [{"role": "user", "content": "hi"}]
WIRE: Any = {"model": "m", "created": 7, "id": "x"}


def chat(**fields: Any) -> Parsed:
    return parse(CHAT, {"messages": USER} | fields)


def complete(**fields: Any) -> Parsed:
    return parse(COMPLETIONS, {"prompt": "hi"} | fields)


# ---- understanding


def test_nothing_said_means_openais_defaults() -> None:
    assert complete().params == SamplingParams(max_tokens=16)
    assert chat().params == SamplingParams(max_tokens=None)
    assert chat().template == {"add_generation_prompt": True}
    assert not complete().stream


def test_null_is_absent() -> None:
    fields = (
        "max_tokens",
        "temperature",
        "n",
        "stop",
        "seed",
        "logprobs",
        "echo",
        "stream",
        "stream_options",
    )
    assert complete(**dict.fromkeys(fields)) == complete()


def test_what_is_said_arrives() -> None:
    said: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "n": 3, "stop": ["a"], "seed": 4, "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": {"5": 2}, "verify": False, "top_k": 3, "min_p": 0.1,
        "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [1],
        "bad_words": ["x"], "prompt_logprobs": 2, "truncate_prompt_tokens": 9, "share": False,
        "skip_special_tokens": False, "max_tokens": 12,
    }  # fmt: skip
    params = complete(**said).params
    for name, value in said.items():
        wanted = {"stop": ("a",), "stop_token_ids": (1,), "bad_words": ("x",), "logit_bias": {5: 2.0}}
        assert getattr(params, name) == wanted.get(name, value), name
    parsed = chat(max_completion_tokens=5, logprobs=True, top_logprobs=2, cache_salt="s", model="m")
    assert (parsed.params.max_tokens, parsed.params.logprobs) == (5, 2)
    assert (parsed.cache_salt, parsed.model) == ("s", "m")


def test_checkpoints_defaults_and_what_overrides_them() -> None:
    terms = Terms(defaults=SamplingParams(temperature=0.3, top_k=7, max_tokens=99))
    assert parse(COMPLETIONS, {"prompt": "a"}, terms).params == SamplingParams(
        temperature=0.3, top_k=7, max_tokens=16
    )
    assert parse(COMPLETIONS, {"prompt": "a", "temperature": 1, "top_k": 0}, terms).params.top_k == 0


def test_echo_asks_for_the_prompts_logprobs() -> None:
    assert complete(echo=True, logprobs=2, max_tokens=0).params.prompt_logprobs == 2
    assert complete(echo=True).params.prompt_logprobs is None
    with pytest.raises(ApiError, match="same number"):
        complete(echo=True, logprobs=2, prompt_logprobs=3)


@pytest.mark.parametrize(
    ("own", "asked", "speculates"),
    [
        (None, "ngram", True),
        (None, "none", False),
        ("auto", None, True),
        ("auto", "auto", True),
        ("auto", "none", False),
        ("none", "none", True),
        ("ngram+decode", "ngram+decode", True),
        ("auto", "ngram", None),
        (None, "wizard", None),
    ],
)
def test_a_request_may_do_without_guesses(
    own: str | None, asked: str | None, speculates: bool | None
) -> None:
    body = {"prompt": "a", "proposer": asked}
    if speculates is None:
        with pytest.raises(ApiError, match="cannot be had"):
            parse(COMPLETIONS, body, Terms(proposer=own))
    else:
        assert parse(COMPLETIONS, body, Terms(proposer=own)).params.speculate is speculates


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_honoured_is_refused_unless_it_changes_nothing(name: str) -> None:
    neutral, _ = REFUSED[name]
    with pytest.raises(ApiError) as told:
        complete(**{name: {"anything": 1}})
    assert (told.value.param, told.value.code) == (name, "unsupported_parameter")
    for value in (None, *neutral):
        assert complete(**{name: value}) == complete()


def test_best_of_n_is_n() -> None:
    assert complete(best_of=3, n=3).params.n == 3


def test_messages_become_what_templates_read() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
    ]
    found = parse(CHAT, {"messages": messages}).messages
    assert [one["role"] for one in found] == ["system", "user", "assistant", "tool", "assistant"]
    assert [one["content"] for one in found] == ["d", "a", "", "r", "no"]
    assert found[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert found[3]["tool_call_id"] == "c"
    assert "tool_calls" not in found[4]  # a template would take it for a call


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"type": "custom"}]},
        {"role": "assistant", "tool_calls": "f"},
        {"role": "assistant", "content": "a", "function_call": {"name": "f"}},
        {"role": "user", "content": [{"type": "input_audio"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["a"]},
        {"role": "user", "content": 1},
        {"role": "user", "content": "a", "name": 1},
        {"role": ["user"], "content": "a"},
    ],
)  # fmt: skip
def test_messages_that_will_not_do(message: Any) -> None:
    with pytest.raises(ApiError) as told:
        parse(CHAT, {"messages": [message]})
    assert told.value.param == "messages"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted(
    {
        "prompt",
        "messages",
        "n",
        "stop",
        "logit_bias",
        "stream",
        "stream_options",
        "temperature",
        "seed",
        "tools",
    }
    | {"top_k", "logprobs", "echo", "response_format", "tool_choice", "chat_template_kwargs", "max_tokens"}
    | {"proposer", "verify", "cache_salt", "bad_words", "allowed_token_ids", "best_of", "functions"}
)


@given(
    endpoint=st.sampled_from([COMPLETIONS, CHAT]),
    body=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6) | JSON,
    good=st.booleans(),
)
def test_whatever_is_sent_is_understood_or_refused(endpoint: str, body: Any, good: bool) -> None:
    if good and isinstance(body, dict):
        body = {"prompt": "a", "messages": USER} | body
    told: ApiError | None = None
    try:
        assert parse(endpoint, body).num_choices >= 1
    except ApiError as error:
        told = error
    if told is not None:
        assert 400 <= told.status < 500
        assert json.loads(dump(told.body()))["error"]["message"]


# ---- errors


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("full"), 429, "queue_full"),
        (UnknownModel("m"), 404, "model_not_found"),
        (BadParameter("top_p=7: no"), 400, "invalid_value"),
        (MachineError("broken"), 500, "engine_failed"),
        (GuaranteeLost("lost"), 500, "internal_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_errors_as_clients_see_them(error: Exception, status: int, code: str) -> None:
    told = ApiError.of(error)
    assert (told.status, told.code) == (status, code)
    assert "secret" not in told.message
    if isinstance(error, BadParameter):
        assert told.param == "top_p"


def test_no_surrogate_and_no_number_breaks_the_wire() -> None:
    assert json.loads(dump({"a": "\ud800é"})) == {"a": "\ud800é"}
    assert event({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'.encode()
    assert json.loads(dump([0.1 + 0.2])) == [0.1 + 0.2]


# ---- saying


def answer(*texts: str, finish: str = "stop", **more: Any) -> RequestOutput:
    outputs = [
        CompletionOutput(i, text, [1] * len(text), -1.0, None, finish, None, [-1.0] * len(text), 9)
        for i, text in enumerate(texts)
    ]
    metrics = RequestMetrics(0.0, 0.1, 0.2, 4, 2, 3)
    return RequestOutput(**({
        "request_id": "1", "prompt": "hi", "prompt_token_ids": [5, 6], "prompt_logprobs": None,
        "outputs": outputs, "finished": True, "num_cached_tokens": 1, "contract": "sw-1", "metrics": metrics,
    } | more))  # fmt: skip


def test_usage() -> None:
    body = respond(complete(), [answer("ab")], **WIRE)
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1, "reasoning_tokens": 0
        },
    }  # fmt: skip


def test_receipts_are_carried() -> None:
    assert respond(complete(), [answer("a")], **WIRE, receipts=[{"r": 1}])["receipt"] == {"r": 1}
    streamer = Streamer(complete(stream=True), **WIRE, fingerprint="f")
    assert streamer.end([answer("a")]) == []
    (last,) = streamer.end([answer("a")], [{"r": 1}, {"r": 2}])
    assert (last["choices"], last["receipt"]) == ([], [{"r": 1}, {"r": 2}])


def test_tokens_written_alike_do_not_hide_each_other() -> None:
    entry = {1: Logprob(-3.0, None, "?"), 2: Logprob(-1.0, 1, "?"), 3: Logprob(float("-inf"), 2, "b")}
    one = CompletionOutput(0, "?", [1], -3.0, [entry], "length", None, [-3.0], 0)
    body = respond(complete(logprobs=2), [answer(outputs=[one])], **WIRE)
    (tops,) = body["choices"][0]["logprobs"]["top_logprobs"]
    assert tops == {"?": -3.0, "token_id:2": -1.0, "b": -9999.0}
    body = respond(complete(logprobs=2, return_tokens_as_token_ids=True), [answer(outputs=[one])], **WIRE)
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:1"]
    body = respond(chat(logprobs=True, top_logprobs=2), [answer(outputs=[one])], **WIRE)
    (part,) = body["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in part["top_logprobs"]] == ["?", "b"]
    assert part["bytes"] == [63]


def test_echoing_token_ids_needs_a_decoder() -> None:
    out = replace(answer("c"), prompt=None)
    with pytest.raises(ValueError, match="decode"):
        respond(complete(echo=True), [out], **WIRE)
    body = respond(complete(echo=True), [out], **WIRE, decode=lambda ids: f"<{len(ids)}>")
    assert body["choices"][0]["text"] == "<2>c"


def test_with_echo_the_first_choice_speaks_first() -> None:
    """The prompt's log-probabilities come with it."""
    parsed = complete(echo=True, logprobs=0, n=2, stream=True)
    streamer = Streamer(parsed, **WIRE, fingerprint="f", decode=lambda ids: "h")
    prompt = answer(prompt_logprobs=[None, {6: Logprob(-0.5, None, "i")}], outputs=[])
    entry = [{1: Logprob(-1.0, None, "z")}]
    late = Chunk(1, "z", [1], [-1.0], entry, "length")
    first = Chunk(0, "z", [1], [-1.0], entry, "length")
    assert streamer.chunk(0, late, lambda: prompt) == []
    events = streamer.chunk(0, first, lambda: prompt)
    assert [one["choices"][0]["index"] for one in events] == [0, 1]
    for one in events:
        assert one["choices"][0]["text"] == "hiz"
        assert one["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -1.0]


def test_chunks_that_came_together_go_together() -> None:
    entry = {1: Logprob(-1.0, None, "z")}
    parts = [
        (0, Chunk(0, "a", [1], [-1.0], [entry], None, None, 1, 2, 9)),
        (0, Chunk(1, "x", [2], [-2.0], [entry], "length", None, 0, 0, 9)),
        (1, Chunk(0, "p", [4], [-4.0], [entry], None, None, 0, 0, 9)),
        (0, Chunk(0, "b", [3], [-3.0], [entry], "stop", "b", 1, 3, 9)),
    ]
    one = Chunk(0, "ab", [1, 3], [-1.0, -3.0], [entry, entry], "stop", "b", 2, 5, 9)
    assert joined(parts) == [(0, one), parts[1], parts[2]]
    assert joined(parts[:1]) == parts[:1]


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream_options": {"include_usage": True}},
                                    {"logprobs": 1}, {"return_token_ids": True}, {"explain": True},
                                    {"stream_options": {"continuous_usage_stats": True}}])  # fmt: skip
@pytest.mark.parametrize("ask", [chat, complete])
def test_what_is_written_once_is_what_would_be_written(ask: Any, fields: dict[str, Any]) -> None:
    if ask is chat and "logprobs" in fields:
        fields = {"logprobs": True, "top_logprobs": 1}
    parsed = ask(stream=True, **fields)
    wire = {"model": 'a "model"', "created": 7, "id": "x", "fingerprint": "f"}
    one, two = Streamer(parsed, **wire), Streamer(parsed, **wire)
    entry = [{1: Logprob(-1.0, 1, "z")}] if parsed.params.logprobs is not None else None
    texts = ["a", 'b"\n', "", "é🙂", "\0the text of a chunk\0", "\ud800", "end"]
    for i, text in enumerate(texts):
        for index in range(parsed.params.n):
            chunk = Chunk(
                index, text, [1], [-1.0], entry, "stop" if i == len(texts) - 1 else None, None, 1, 2
            )
            whole = b"".join(map(event, one.chunk(0, chunk, lambda: answer(outputs=[]))))
            assert two.wire(0, chunk, lambda: answer(outputs=[])) == whole


def test_an_end_no_client_knows_is_not_streamed() -> None:
    streamer = Streamer(chat(stream=True), **WIRE, fingerprint="f")
    assert streamer.chunk(0, Chunk(0, "", [], [], None, "abort"), lambda: answer(outputs=[])) == []


class Calls:
    """A reader of a made-up language: capitals are calls, one letter each; the rest is content."""

    def __init__(self) -> None:
        self.count = -1

    def push(self, text: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for letter in text:
            if letter.isupper():
                self.count += 1
                head = {"index": self.count, "id": f"c{self.count}", "type": "function"}
                found.append({"tool_calls": [head | {"function": {"name": letter, "arguments": "{"}}]})
                found.append({"tool_calls": [{"index": self.count, "function": {"arguments": "}"}}]})
            else:
                found.append({"content": letter})
        return found

    def flush(self) -> list[dict[str, Any]]:
        return [{"content": "!"}] if self.count < 0 else []


@pytest.mark.parametrize(
    ("text", "content", "names", "finish"),
    [("ab", "ab!", [], "stop"), ("aBC", "a", ["B", "C"], "tool_calls"), ("B", None, ["B"], "tool_calls")],
)
def test_calls_whole_and_streamed(text: str, content: str | None, names: list[str], finish: str) -> None:
    parsed = replace(chat(stream=True), reader=lambda *_: Calls())
    (choice,) = respond(parsed, [answer(text)], **WIRE)["choices"]
    message = choice["message"]
    assert message["content"] == content
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == names
    assert all(call["function"]["arguments"] == "{}" for call in message.get("tool_calls", []))
    assert [call["id"] for call in message.get("tool_calls", [])] == [f"c{i}" for i in range(len(names))]
    assert choice["finish_reason"] == finish
    streamer = Streamer(parsed, **WIRE, fingerprint="f")
    chunks = [Chunk(0, letter, [1], [-1.0]) for letter in text] + [Chunk(0, "", [2], [-1.0], None, "stop")]
    events = [one["choices"][0] for c in chunks for one in streamer.chunk(0, c, lambda: answer(outputs=[]))]
    assert events[0]["delta"] == {"role": "assistant", "content": ""}
    said = "".join(one["delta"].get("content") or "" for one in events)
    assert said == (content or "")
    streamed = [part for one in events for part in one["delta"].get("tool_calls", ())]
    assert [part["function"]["name"] for part in streamed if "id" in part] == names
    assert [one["finish_reason"] for one in events if one["finish_reason"]] == [finish]
