"""`/v1/responses` without a server: items to messages, fields to those of a chat, items and events."""

import json
from dataclasses import replace

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from samewise.openai.errors import ApiError
from samewise.openai.replies import encode_json, encode_slices
from samewise.openai.request import ParseOptions
from samewise.openai.responses.builder import ResponseBuilder
from samewise.openai.responses.exchange import Records, ResponseRecord, ResponsesExchange
from samewise.openai.responses.items import input_items, messages_of, seal
from samewise.openai.responses.parse import parse_response
from samewise.params import SamplingParams

HERMES = "{% if tools %}<tool_call>{% endif %}{% if enable_thinking %}{% endif %}</think>"
OPTIONS = ParseOptions(
    defaults=SamplingParams(), template=lambda tools: HERMES, decode=lambda ids: bytes(ids).decode()
)
TOOL = {
    "type": "function",
    "name": "f",
    "description": "d",
    "strict": False,
    "parameters": {"type": "object"},
}
EVENTS = TypeAdapter(ResponseStreamEvent)


def not_stored(name):
    raise ApiError("not stored", status=404, param="previous_response_id")


def messages(given, instructions=None, find=not_stored):
    return messages_of(input_items(given, find), instructions=instructions)


def read(**body):
    return parse_response({"input": "hi"} | body, OPTIONS, earlier=not_stored, find=not_stored)


# ---- items


def test_a_conversation_of_a_coding_agent_becomes_a_chat():
    """What Codex sends: a developer message, reasoning, calls of several kinds, hosted tools."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox"}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": seal("so")},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "content": [{"type": "output_text", "text": "ok"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"x": 1}', "id": "fc"},
        {"type": "function_call", "call_id": "c2", "name": "shell", "arguments": "{broken"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "bad"}]},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "***"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "patched"},
        {"type": "local_shell_call", "call_id": "c4", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "id": "c4", "output": "files"},
    ]
    system, user, first, one, two, third, three, fourth, four = messages(items, "Be brief.")
    assert system == {"role": "system", "content": "Be brief.\n\nsandbox"}
    assert [part["text"] for part in user["content"]] == ["a", "b"]
    assert (first["content"], first["reasoning_content"]) == ("ok", "so")
    assert [call["id"] for call in first["tool_calls"]] == ["c1", "c2"]
    arguments = [json.loads(call["function"]["arguments"]) for call in first["tool_calls"]]
    assert arguments == [{"x": 1}, {"arguments": "{broken"}]
    assert (one["role"], one["tool_call_id"], one["content"]) == ("tool", "c1", "done")
    assert two["content"] == "bad"
    assert third["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": '{"input": "***"}'}
    assert three["content"] == "patched"
    assert fourth["tool_calls"][0]["function"] == {"name": "local_shell", "arguments": '{"command": ["ls"]}'}
    assert four["content"] == "files"


def test_reasoning_of_a_turn_that_was_cut_off_stays_in_that_turn():
    """A response may have reached its limit while the model was thinking."""

    def thought(text):
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    items = [
        {"role": "user", "content": "a"}, thought("cut"), {"role": "user", "content": "b"}, thought("so"),
        {"role": "assistant", "content": "yes"},
    ]  # fmt: skip
    _, cut, _, answer = messages(items)
    assert cut == {"role": "assistant", "content": "", "reasoning_content": "cut"}
    assert (answer["content"], answer["reasoning_content"]) == ("yes", "so")


def test_reasoning_comes_back_as_text_or_sealed():
    content = [{"type": "reasoning_text", "text": "so"}]
    for reasoning in (
        {"type": "reasoning", "summary": [], "content": content},
        {"type": "reasoning", "summary": [], "encrypted_content": seal("so")},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "so"}],
            "encrypted_content": "gAAA",
        },
    ):
        (message,) = messages([reasoning, {"role": "assistant", "content": "x"}])
        assert message["reasoning_content"] == "so"
    with pytest.raises(ApiError, match="damaged"):
        messages([{"type": "reasoning", "summary": [], "encrypted_content": seal("so")[:-1]}])


@pytest.mark.parametrize(
    "items",
    [
        5,
        ["a"],
        [{}],
        [{"type": ["message"]}],
        [{"type": "mesage", "role": "user", "content": "x"}],
        [{"role": "nobody", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"role": "user", "content": [5]}],
        [{"type": "function_call", "name": "f", "arguments": "{}"}],
        [{"type": "function_call", "call_id": "c", "arguments": "{}"}],
        [{"type": "function_call_output", "output": "x"}],
        [{"type": "function_call_output", "call_id": "c", "output": 5}],
        [{"type": "item_reference"}],
    ],
)
def test_malformed_items_are_refused_as_input(items):
    with pytest.raises(ApiError) as refused:
        messages(items)
    assert (refused.value.status, refused.value.param) == (400, "input")
    assert refused.value.message.startswith(("input[0]", "input: is text, or a list"))


# ---- translation


def test_fields_are_translated_to_those_of_a_chat():
    request = read(
        instructions="Be brief.", max_output_tokens=9, temperature=0.5, top_p=0.9, seed=3, verify=False,
        text={"format": {"type": "text"}, "verbosity": "low"},
        reasoning={"effort": "none", "summary": "auto"},
        metadata={"a": "b"}, service_tier="auto", prompt_cache_key="x", store=False, safety_identifier="u",
        include=["reasoning.encrypted_content", "web_search_call.results"], stream=True,
        stream_options={"include_obfuscation": False}, client_metadata={"x": 1}, truncation="disabled",
    )  # fmt: skip
    params = request.parsed.params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (9, 0.5, 0.9, 3)
    assert (params.verify, request.store, request.encrypted, request.parsed.stream) == (
        False,
        False,
        True,
        True,
    )
    assert [one["role"] for one in request.parsed.messages] == ["system", "user"]
    assert request.parsed.template["enable_thinking"] is False
    assert request.echo["reasoning"] == {"effort": "none", "summary": "auto"}


def test_tools_of_unknown_types_are_passed_over():
    tools = [TOOL, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "local_shell"}]
    request = read(tools=tools, tool_choice="auto", parallel_tool_calls=False)
    (tool,) = request.parsed.template["tools"]
    assert tool["function"] == {name: TOOL[name] for name in ("name", "description", "strict", "parameters")}
    assert request.echo["tools"] == [TOOL]
    assert read(tools=tools[1:], tool_choice="auto").parsed.template.get("tools") is None


def test_tool_choices():
    other = TOOL | {"name": "g"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    request = read(tools=[TOOL, other], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in request.parsed.template["tools"]] == ["g"]
    assert request.parsed.params.grammar is not None
    named = read(tools=[TOOL, other], tool_choice={"type": "function", "name": "f"})
    assert named.parsed.params.grammar is not None
    for choice in ({"type": "web_search"}, {"type": "allowed_tools"}, {"type": "function", "name": "h"}, 5):
        with pytest.raises(ApiError) as refused:
            read(tools=[TOOL], tool_choice=choice)
        assert refused.value.param == "tool_choice"


def test_many_allowed_tools_are_read_in_linear_time():
    """As many tools and names of tools as fit in 1 MiB each."""
    tools = [{"type": "function", "name": f"f{i}"} for i in range(20_000)]
    names = [{"name": f"g{i}"} for i in range(20_000)] + [{"name": ["f1"]}, {"name": "f7"}]
    request = read(tools=tools, tool_choice={"type": "allowed_tools", "tools": names})
    assert [tool["function"]["name"] for tool in request.parsed.template["tools"]] == ["f7"]


def test_text_format_is_a_grammar():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "name": "x", "schema": schema, "strict": True, "description": None}
    assert read(text={"format": named}).parsed.params.grammar.kind == "json_schema"
    assert read(text={"format": {"type": "json_object"}}).parsed.params.grammar is not None


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"background": True}, "background", 400),
        ({"conversation": "conv_1"}, "conversation", 400),
        ({"prompt": {"id": "x"}}, "prompt", 400),
        ({"truncation": "auto"}, "truncation", 400),
        ({"max_tokens": 5}, "max_tokens", 400),
        ({"max_output_tokens": 0}, "max_output_tokens", 400),
        ({"messages": []}, "messages", 400),
        ({"n": 2}, "n", 400),
        ({"logprobs": True}, "logprobs", 400),
        ({"input": None}, "input", 400),
        ({"input": []}, "input", 400),
        ({"input": [{"type": "ghost_snapshot"}]}, "input", 400),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", 400),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", 400),
        ({"text": {"verbosity": "<|im_end|>"}}, "text.verbosity", 400),
        ({"reasoning": {"effort": "very much"}}, "reasoning.effort", 400),
        ({"top_logprobs": 21}, "top_logprobs", 400),
        ({"top_logprobs": 1, "tools": [TOOL]}, "include", 400),
        ({"guided_json": {}}, "guided_json", 400),
        ({"previous_response_id": "resp_1"}, "previous_response_id", 404),
        ({"input": [{"type": "item_reference", "id": "msg_1_0"}]}, "previous_response_id", 404),
        ({"temperature": "hot"}, "temperature", 400),
        ({"tools": [5]}, "tools", 400),
        ({"store": "no"}, "store", 400),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body, param, status):
    with pytest.raises(ApiError) as refused:
        read(**body)
    assert (refused.value.param, refused.value.status) == (param, status)


# ---- items and events of an answer

CALL = [
    {
        "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
        ]
    },
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
]
USAGE = {
    "input_tokens": 1, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 3,
}  # fmt: skip


def builder(**options):
    echo = read(tools=[TOOL]).echo
    head = {"id": "resp_0", "object": "response", "created_at": 1, "model": "m", "output": [], "usage": None}
    return ResponseBuilder(head | echo, **options)


def test_events_have_their_published_names_order_and_fields():
    made = builder(encrypted=True)
    events = made.begin()
    for deltas in ([{"reasoning": "so"}], [{"reasoning": " on"}, {"content": "a"}], [{"content": "b"}], CALL):
        events += made.add(deltas)
    events += made.end(cut=False, usage=USAGE)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    events = json.loads(json.dumps(events))
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]
    final = Response.model_validate(events[-1]["response"])
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "ab"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert done[0]["encrypted_content"] == seal("so on")
    assert (done[2]["call_id"], done[2]["arguments"]) == ("call_1", '{"x": 1}')
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(item["id"], item["status"]) for item in added] == [(item["id"], "in_progress") for item in done]
    parts = [event["part"] for event in events if event["type"] == "response.content_part.added"]
    assert [part["text"] for part in parts] == ["", ""]


def test_an_answer_that_was_cut_is_incomplete():
    made = builder()
    made.begin()
    made.add([{"reasoning": "so"}])
    last = made.end(cut=True, usage=USAGE, incomplete_details={"reason": "max_output_tokens"})[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
    EVENTS.validate_python(last)


def test_an_empty_answer_has_an_empty_message():
    made = builder()
    made.begin()
    (message,) = made.end(cut=False, usage=USAGE)[-1]["response"]["output"]
    assert message["content"][0]["text"] == ""


def test_a_failure_is_an_event():
    made = builder()
    made.begin()
    (event,) = made.fail("it failed", "server_error")
    assert EVENTS.validate_python(event).response.error.message == "it failed"


def test_entries_go_out_with_the_next_text():
    made = builder()
    made.begin()
    row = {"token": "a", "bytes": [97], "logprob": -1.0, "top_logprobs": []}
    (*_, delta) = made.add([{"content": "a"}], [row])
    assert delta["logprobs"] == [row]
    assert made.add([], [row]) == []
    events = made.end(cut=False, usage=USAGE)
    assert events[0]["logprobs"] == [row, row]


def test_a_forgotten_conversation_is_found_by_its_items():
    stored = {
        "id": "msg_0_0",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x"}],
    }
    (message,) = messages([{"type": "item_reference", "id": "msg_0_0"}], find=lambda name: stored)
    assert message == {"role": "assistant", "content": "x"}


def record(items):
    return ResponseRecord("resp_1", b"{}", json.dumps(items).encode())


def test_a_stored_response_is_read_once_however_often_it_is_referred_to():
    asked = []
    stored = record([{"id": "msg_1_0", "role": "user", "content": "x"}, {"id": ["no text"]}])
    records = Records(lambda name: asked.append(name) or stored)
    for _ in range(1000):
        assert records.item("msg_1_0")["content"] == "x"
    for _ in range(2):
        with pytest.raises(ApiError, match="'msg_1_7' is not stored here") as caught:
            records.item("msg_1_7")
        assert caught.value.code == "item_not_found"
    records.conversation("resp_1")
    assert asked == ["resp_1"]


def test_a_request_repeats_no_more_of_stored_responses_than_a_limit():
    stored = record([{"id": "msg_1_0", "role": "user", "content": "x" * 2**20}])
    records = Records(lambda _: stored)
    with pytest.raises(ApiError, match="more than 32 MiB of stored responses") as caught:
        all(records.item("msg_1_0") for _ in range(40))
    assert (caught.value.status, caught.value.param) == (400, "input")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({str(i): "x" for i in range(17)}, "17 entries are more than 16"),
        ({"x" * 65: "x"}, "at most 64 characters"),
        ({"x": "x" * 513}, "a value 512"),
        ({"x": 1}, "valid string"),
    ],
)
def test_metadata_has_openais_limits(metadata, message):
    with pytest.raises(ApiError, match=message) as caught:
        read(metadata=metadata)
    assert (caught.value.status, caught.value.param) == (400, "metadata")
    assert read(metadata={"x" * 64: "x" * 512}).echo["metadata"] == {"x" * 64: "x" * 512}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "web_search", "x": "a" * 2**20}]),
        ("tool_choice", {"type": "allowed_tools", "tools": [{}] * 2**19}),
        ("text", {"format": {"type": "json_schema", "schema": {"x": "a" * 2**20}}}),
        ("reasoning", {"summary": ["a"] * 2**18}),
    ],
)
def test_what_a_response_repeats_has_a_limit(field, value):
    with pytest.raises(ApiError, match="is longer than 1024 KiB") as caught:
        read(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


def test_a_request_keeps_what_its_answer_needs_and_says_how_much():
    body = {"input": "hi" * 500, "instructions": "so" * 5000, "tools": [TOOL]}
    exchange = ResponsesExchange(body, OPTIONS, records=Records(not_stored), keep=lambda _: None)
    assert exchange.parsed.messages
    assert 11_000 < exchange.kept_bytes < 13_000
    exchange.begun()
    assert (exchange.parsed.messages, exchange.parsed.template) == ((), {})
    unstored = ResponsesExchange(
        body | {"store": False}, OPTIONS, records=Records(not_stored), keep=lambda _: None
    )
    assert unstored.kept_bytes < exchange.kept_bytes - 1000


def test_log_probabilities_of_a_response_are_encoded_in_slices():
    row = {
        "token": "a",
        "bytes": [97],
        "logprob": -1.0,
        "top_logprobs": [{"token": "b", "logprob": -2.5}] * 20,
    }
    part = {"type": "output_text", "text": "é", "logprobs": [row] * 3000, "annotations": []}
    response = {"id": "r", "output": [{"type": "message", "content": [part]}], "usage": None, "tools": []}
    for body in (response, {"type": "response.completed", "response": response}):
        pieces = list(encode_slices(body))
        assert b"".join(pieces) == encode_json(body)
        assert max(map(len, pieces)) < len(encode_json(row)) * 33


def test_items_are_counted_before_they_are_read():
    options = replace(OPTIONS, max_messages=2)
    body = {"input": [{"type": "item_reference", "id": "msg_1_0"}] * 9}
    with pytest.raises(ApiError, match="9 items are more than 8"):
        parse_response(body, options, earlier=not_stored, find=not_stored)


@pytest.mark.parametrize("levels", [200, *range(940, 1000)])
def test_arguments_of_calls_that_nest_too_deeply_go_back_as_text(levels):
    text = '{"a":' * levels + "1" + "}" * levels
    (message,) = messages([{"type": "function_call", "call_id": "c", "name": "f", "arguments": text}])
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"arguments": text}


def test_an_answer_may_be_ended_by_the_context():
    assert replace(read(max_output_tokens=10**6).parsed).fit_max_tokens
