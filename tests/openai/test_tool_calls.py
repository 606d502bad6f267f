"""Tool calls in an answer's text: the same result however the text is cut into pieces."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samewise.openai.tool_calls import ToolCall, ToolCallParser, ToolFormat, call_ids, parse_tool_calls

F = ToolCall("f", '{"a": 1}')
TEXTS = [
    (ToolFormat.HERMES, "just text", "just text", ()),
    (ToolFormat.HERMES, "", "", ()),
    (ToolFormat.HERMES, " text \n", " text \n", ()),
    (ToolFormat.HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', None, (F,)),
    (
        ToolFormat.HERMES,
        'So.\n<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>\n<tool_call>{"name":"g"}</tool_call>',
        "So.",
        (F, ToolCall("g", "{}")),
    ),
    (ToolFormat.HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', None, (F,)),
    (ToolFormat.HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, (F,)),
    (ToolFormat.HERMES, '<tool_call>{"name": "f"}</tool_call>', None, (ToolCall("f", "{}"),)),
    (
        ToolFormat.HERMES,
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        None,
        (ToolCall("f", "{}"),),
    ),
    (ToolFormat.HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "}"}</tool_call>!', "!", (F,)),
    # Cut off, and malformed.
    (ToolFormat.HERMES, '<tool_call>{"name": "f", "arguments": {"a": ', None, (ToolCall("f", '{"a": '),)),
    (ToolFormat.HERMES, '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', ()),
    (ToolFormat.HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> so', " so", (F,)),
    (
        ToolFormat.HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>',
        None,
        (ToolCall("f", '{"a": 1'),),
    ),
    (ToolFormat.HERMES, "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", ()),
    (ToolFormat.HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', ()),
    (ToolFormat.HERMES, "a <tool_ b <tool_cal", "a <tool_ b <tool_cal", ()),
    (
        ToolFormat.HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> {\\" }"}}</tool_call>',
        None,
        (ToolCall("f", '{"a": "</tool_call> {\\" }"}'),),
    ),
    (ToolFormat.LLAMA, '{"name": "f", "parameters": {"a": 1}}', None, (F,)),
    (ToolFormat.LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', None, (F,)),
    (
        ToolFormat.LLAMA,
        '\n{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        None,
        (F, ToolCall("g", "{}")),
    ),
    (ToolFormat.LLAMA, 'Well: {"name": "f", "parameters": {}}', 'Well: {"name": "f", "parameters": {}}', ()),
    (ToolFormat.LLAMA, '{"answer": {"name": "f"}} indeed', '{"answer": {"name": "f"}} indeed', ()),
    (ToolFormat.LLAMA, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', ()),
    (ToolFormat.LLAMA, "<|py", "<|py", ()),
    (ToolFormat.MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', None, (F,)),
    (
        ToolFormat.MISTRAL,
        'Yes.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g", "arguments": {}}]',
        "Yes.",
        (F, ToolCall("g", "{}")),
    ),
    (ToolFormat.MISTRAL, "[TOOL_CALLS] []", "[TOOL_CALLS] []", ()),
    (ToolFormat.MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}', None, (F,)),
    (
        ToolFormat.MISTRAL_ARGS,
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g{}',
        None,
        (F, ToolCall("g", "{}")),
    ),
    (ToolFormat.MISTRAL_ARGS, "[TOOL_CALLS] no, not this", "[TOOL_CALLS] no, not this", ()),
]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), TEXTS)
def test_content_and_calls_are_found_in_a_text(tool_format, text, content, calls):
    assert parse_tool_calls(tool_format, text) == (content, calls)


def joined(deltas):
    """(content, calls) as a client joins them from deltas."""
    content, calls = "", []
    for delta in deltas:
        assert set(delta) in ({"content"}, {"tool_calls"})
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["type"] == "function"
                assert call["function"]["arguments"] == ""
                calls.append([call["id"], call["function"]["name"], ""])
            else:
                assert set(call) == {"index", "function"}
                assert call["index"] == len(calls) - 1
                calls[-1][2] += call["function"]["arguments"]
    return content, calls


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), TEXTS)
def test_a_stream_gives_the_same_calls_however_it_is_cut(tool_format, text, content, calls):
    rng = random.Random(text)
    ids = call_ids(tool_format, "sw-1", [1, 2])
    for size in (1, 2, 3, 7, None):
        parser, deltas, rest = ToolCallParser(tool_format, ids), [], text
        while rest:
            num = size or rng.randint(1, 12)
            deltas += parser.push(rest[:num])
            rest = rest[num:]
        deltas += parser.flush()
        assert joined(deltas) == (
            content or "",
            [[ids(i), call.name, call.arguments] for i, call in enumerate(calls)],
        )


PIECES = [
    "<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '{"a": [1, "}"]}', "}", "[", "]",
    "null", "[TOOL_CALLS]", "f[ARGS]", "<|python_tag|>", "{}", ", ", "\n", " so ", '"', "\\", "<", ";",
]  # fmt: skip


@given(
    tool_format=st.sampled_from(list(ToolFormat)),
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    seed=st.integers(0, 1000),
    single=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_any_text_gives_the_same_calls_however_it_is_cut(tool_format, pieces, seed, single):
    text, rng = "".join(pieces), random.Random(seed)
    content, calls = parse_tool_calls(tool_format, text, single=single)
    parser, deltas, rest = ToolCallParser(tool_format, str, single=single), [], text
    while rest:
        num = rng.randint(1, 4)
        deltas += parser.push(rest[:num])
        rest = rest[num:]
    deltas += parser.flush()
    assert joined(deltas) == (content or "", [[str(i), c.name, c.arguments] for i, c in enumerate(calls)])
    if not calls:
        assert content == text


def test_arguments_are_streamed_as_they_arrive():
    parser = ToolCallParser(ToolFormat.HERMES, str)
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a') == [
        {
            "tool_calls": [
                {"index": 0, "id": "0", "type": "function", "function": {"name": "f", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}]},
    ]
    assert parser.push('": 1') == [{"tool_calls": [{"index": 0, "function": {"arguments": '": 1'}}]}]
    assert parser.push("}}") == [{"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}]
    assert parser.push("</tool_call>") == []
    assert parser.flush() == []
    assert parser.calls == [ToolCall("f", '{"a": 1}')]


def test_text_after_a_single_call_is_dropped():
    two = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2 + "x"
    assert parse_tool_calls(ToolFormat.HERMES, two, single=True) == (None, (F,))


def test_call_ids_are_derived_from_the_request():
    ids = call_ids(ToolFormat.HERMES, "sw-1", [1, 2, 3])
    assert ids(0) == call_ids(ToolFormat.HERMES, "sw-1", (1, 2, 3))(0)
    others = [
        call_ids(ToolFormat.HERMES, *how)(0)
        for how in (("sw-2", [1, 2, 3]), ("sw-1", [1, 2]), ("sw-1", [1, 2, 3], 1))
    ]
    assert len({ids(0), ids(1), *others}) == 5
    assert ids(0).startswith("call_")
    mistral = call_ids(ToolFormat.MISTRAL, "sw-1", [1])(0)
    assert len(mistral) == 9
    assert mistral.isalnum()
