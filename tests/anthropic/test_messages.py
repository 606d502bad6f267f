"""`/v1/messages` without a server: blocks to messages, fields to those of a chat, blocks and events."""

import json

import pytest

from samewise.anthropic.blocks import chat_messages
from samewise.anthropic.builder import MessageBuilder
from samewise.anthropic.errors import error_body
from samewise.anthropic.parse import parse_count, parse_message
from samewise.openai.errors import ApiError
from samewise.openai.request import ParseOptions
from samewise.params import SamplingParams

TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{% if enable_thinking %}{{ reasoning_effort }}{% endif %}</think>"
)
OPTIONS = ParseOptions(
    defaults=SamplingParams(), template=lambda tools: TEMPLATE, decode=lambda ids: bytes(ids).decode()
)
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def read(**body):
    return parse_message({"max_tokens": 9, "messages": HELLO} | body, OPTIONS)


# ---- blocks


def test_a_conversation_of_a_coding_agent_becomes_a_chat():
    """What Claude Code sends: system blocks, thinking, calls, results with text after them, cache marks."""
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "Be brief."} | CACHED,
        {"type": "text", "text": "You are an agent."} | CACHED,
    ]
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"} | CACHED]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "ok"},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "done"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "bad", "is_error": True} | CACHED,
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "system", "content": "Be quick."},
    ]
    chat = chat_messages(system, given)
    assert [message["role"] for message in chat] == [
        "system", "user", "assistant", "tool", "tool", "user", "system",
    ]  # fmt: skip
    assert chat[0]["content"] == "Be brief.\nYou are an agent."
    assert chat[1]["content"] == "a\nb"
    assert (chat[2]["content"], chat[2]["reasoning_content"]) == ("ok", "so")
    assert [(call["id"], call["function"]["arguments"]) for call in chat[2]["tool_calls"]] == [
        ("t1", '{"x": 1}'),
        ("t2", "{}"),
    ]
    assert [(one["tool_call_id"], one["content"]) for one in chat[3:5]] == [
        ("t1", "done"),
        ("t2", "Error: bad"),
    ]
    assert chat[5]["content"] == "go on"


@pytest.mark.parametrize(
    ("content", "role"),
    [
        (5, "user"),
        (None, "assistant"),
        ([5], "user"),
        ([{"type": "image", "source": {}}], "user"),
        ([{"type": ["text"], "text": "x"}], "user"),
        ([{"type": "text"}], "user"),
        ([{"type": "tool_result", "content": "x"}], "user"),
        ([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}], "user"),
        ([{"type": "tool_use", "id": "t", "name": "f", "input": "x"}], "assistant"),
        ([{"type": "tool_use", "name": "f", "input": {}}], "assistant"),
        ([{"type": "thinking"}], "assistant"),
        ("x", "tool"),
    ],
)
def test_malformed_blocks_are_refused_as_messages(content, role):
    with pytest.raises(ApiError) as refused:
        chat_messages(None, [{"role": role, "content": content}])
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_system_messages_at_the_start_are_one_with_the_system_prompt():
    """Coding agents send parts of it as messages; many templates take one system message, at the start."""
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    later = {"role": "system", "content": [billing, {"type": "text", "text": "Be quick."}]}
    given = [{"role": "system", "content": [billing, {"type": "text", "text": "Be kind."}]}, *HELLO, later]
    chat = chat_messages([billing, {"type": "text", "text": "Be brief."}], given)
    assert [one["content"] for one in chat] == ["Be brief.\n\nBe kind.", "hi", "Be quick."]
    assert [one["role"] for one in chat] == ["system", "user", "system"]
    assert chat_messages(None, given[:2]) == [{"role": "system", "content": "Be kind."}, *HELLO]
    assert chat_messages([billing], [{"role": "system", "content": [billing]}, *HELLO]) == HELLO
    assert chat_messages("", HELLO) == [{"role": "system", "content": ""}, *HELLO]
    with pytest.raises(ApiError) as refused:
        read(messages=[{"role": "system", "content": [billing]}])
    assert refused.value.param == "messages"


def test_a_document_of_text_is_text():
    source = {"type": "text", "media_type": "text/plain", "data": "page"}
    (message,) = chat_messages(None, [{"role": "user", "content": [{"type": "document", "source": source}]}])
    assert message["content"] == "page"


# ---- translation


def test_fields_are_translated_to_those_of_a_chat():
    request = read(
        stop_sequences=["x"], temperature=0.5, top_k=5, top_p=0.9, seed=3, verify=False, stream=True,
        metadata={"user_id": "u"}, context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        output_config={"effort": "high"}, thinking={"type": "enabled", "budget_tokens": 1024},
        service_tier="auto", cache_control={"type": "ephemeral"}, diagnostics=None,
    )  # fmt: skip
    params = request.parsed.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 5, 0.9)
    assert (params.stops, params.seed, params.verify, request.parsed.stream) == (("x",), 3, False, True)
    assert request.parsed.template["enable_thinking"] is True
    assert request.parsed.template["reasoning_effort"] == "high"
    assert request.parsed.fit_max_tokens


@pytest.mark.parametrize(
    ("thinking", "told"),
    [(None, False), ("disabled", False), ("enabled", True), ("adaptive", None), ("between_tools", None)],
)
def test_a_model_thinks_where_it_is_asked_to(thinking, told):
    request = read(**({} if thinking is None else {"thinking": {"type": thinking}}))
    assert request.parsed.template.get("enable_thinking") is told


def test_tools_and_choices():
    others = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
    ]
    request = read(tools=[TOOL | CACHED, *others], tool_choice={"type": "auto"})
    (tool,) = request.parsed.template["tools"]
    assert tool["function"] == {"name": "f", "description": "d", "parameters": TOOL["input_schema"]}
    assert request.parsed.params.grammar is None
    assert read(tools=[TOOL], tool_choice={"type": "any"}).parsed.params.grammar is not None
    assert read(tools=[TOOL], tool_choice={"type": "tool", "name": "f"}).parsed.params.grammar is not None
    assert read(tools=[TOOL], tool_choice={"type": "none"}).parsed.template.get("tools") is None
    assert read(tools=others, tool_choice={"type": "auto"}).parsed.template.get("tools") is None
    long = read(tools=[TOOL | {"name": "mcp__" + "x" * 100}])
    assert long.parsed.template["tools"]


def test_a_schema_is_a_grammar():
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert read(output_config={"format": schema}).parsed.params.grammar.kind == "json_schema"
    assert read(output_format=schema).parsed.params.grammar.kind == "json_schema"


def test_a_last_message_of_the_assistant_is_continued():
    template = read(messages=[*HELLO, {"role": "assistant", "content": "{"}]).parsed.template
    assert (template["continue_final_message"], template["add_generation_prompt"]) == (True, False)
    prefilled = [*HELLO, {"role": "assistant", "content": "{"}]
    assert not read(messages=prefilled, continue_final_message=False).parsed.template.get(
        "continue_final_message"
    )
    used = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]
    template = read(messages=[*HELLO, {"role": "assistant", "content": used}]).parsed.template
    assert "continue_final_message" not in template


def test_counting_ignores_what_is_not_part_of_the_prompt():
    parsed = parse_count(
        {"messages": HELLO, "max_tokens": 0, "stream": True, "temperature": 9, "system": "s"}, OPTIONS
    )
    assert [message["role"] for message in parsed.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "all"}}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"thinking": {"type": ["enabled"]}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
        ({"guided_json": {}}, "guided_json"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body, param):
    with pytest.raises(ApiError) as refused:
        read(**body)
    assert (refused.value.param, refused.value.status) == (param, 400)


# ---- blocks and events of an answer


def test_events_have_their_published_names_order_and_fields():
    made = MessageBuilder({"id": "msg_0", "type": "message", "role": "assistant", "model": "m"}, contract="c")
    events = made.begin({"input_tokens": 1, "output_tokens": 0})
    for deltas in (
        [{"reasoning": "so"}],
        [{"reasoning": " on"}, {"content": "a"}],
        [{"content": "b"}],
        [{"tool_calls": [{"index": 0, "id": "t1", "function": {"name": "f", "arguments": ""}}]}],
        [{"tool_calls": [{"index": 0, "function": {"arguments": '{"x": 1}'}}]}],
        [{"tool_calls": [{"index": 1, "id": "t2", "function": {"name": "g", "arguments": "{"}}]}],
    ):
        events += made.add(deltas)
    events += made.end({"stop_reason": "tool_use", "stop_sequence": None}, {"output_tokens": 5})
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_delta",
        "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == [
        "thinking_delta", "thinking_delta", "signature_delta", "text_delta", "text_delta", "input_json_delta",
        "input_json_delta",
    ]  # fmt: skip
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[2] == {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    thinking, text, one, two = made.blocks
    assert (thinking["thinking"], text["text"]) == ("so on", "ab")
    assert len(thinking["signature"]) == 64
    assert (one["input"], two["input"]) == ({"x": 1}, {})
    json.dumps(events)


@pytest.mark.parametrize("arguments", ['{"x": NaN}', '{"x": -Infinity}', '{"x": 1e999}', "[1]", '{"x"'])
def test_arguments_that_are_no_json_object_are_an_empty_input(arguments):
    """A model may write them; a reply can hold none of these numbers."""
    made = MessageBuilder({"id": "msg_0"}, contract="c")
    function = {"name": "f", "arguments": arguments}
    made.add([{"tool_calls": [{"index": 0, "id": "t1", "function": function}]}])
    made.end({"stop_reason": "tool_use"}, {"output_tokens": 5})
    assert made.blocks[0]["input"] == {}


def test_omitted_thinking_has_a_signature_alone():
    made = MessageBuilder({"id": "msg_0"}, contract="c", show_thinking=False)
    shown = MessageBuilder({"id": "msg_0"}, contract="c")
    for one in (made, shown):
        one.add([{"reasoning": "so"}, {"content": "a"}])
    assert made.blocks[0] == shown.blocks[0] | {"thinking": ""}
    assert not read(thinking={"type": "adaptive", "display": "omitted"}).show_thinking


def test_errors_have_anthropics_form():
    body = error_body(ApiError("no", status=429, kind="rate_limit_error"), "r")
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", "rate_limit_error", "r")
    kinds = [
        error_body(ApiError("no", status=status))["error"]["type"]
        for status in (400, 401, 404, 413, 500, 503)
    ]
    assert kinds == [
        "invalid_request_error", "authentication_error", "not_found_error", "request_too_large", "api_error",
        "overloaded_error",
    ]  # fmt: skip
