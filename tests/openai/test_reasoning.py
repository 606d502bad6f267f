"""Reasoning apart from the answer: formats, splitting at any cut, counting, and what reaches the template."""

import itertools

import pytest

from samewise.openai.bodies import CHAT
from samewise.openai.errors import ApiError
from samewise.openai.parse import parse
from samewise.openai.reasoning import (
    AnswerParser,
    ReasoningFormat,
    reasoning_format_of,
    thinking_kwargs,
)
from samewise.openai.request import ParseOptions
from samewise.openai.tool_calls import ToolCallParser, ToolFormat

THINK = ReasoningFormat("<think>", "</think>")
CHANNELS = ReasoningFormat("<|channel|>", "<|message|>", special=True)


def joined(deltas):
    return tuple("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content"))


def split(marks, text, before=""):
    """(reasoning, content), after a check that no cut of the text gives another result."""
    whole = None
    cuts = [(), *((i,) for i in range(1, len(text))), tuple(range(1, len(text)))]
    cuts += itertools.islice(itertools.combinations(range(1, len(text), 3), 2), 200)
    for cut in cuts:
        parser = AnswerParser(marks.splitter(before), None)
        deltas = []
        for start, end in itertools.pairwise((0, *cut, len(text))):
            deltas += parser.push(text[start:end])
        result = joined(deltas + parser.flush())
        assert whole is None or result == whole, cut
        whole = result
    return whole


@pytest.mark.parametrize(
    ("text", "before", "expected"),
    [
        ("<think>\na\n\nb\n</think>\n\nyes", "assistant\n", ("a\n\nb", "yes")),  # Qwen3
        ("<think>\n\n</think>\n\nyes", "", ("", "yes")),
        ("a\n</think>\n\nyes", "<｜Assistant｜><think>\n", ("a", "yes")),  # DeepSeek-R1
        ("<think>\na\n</think>yes", "<think>\n", ("a", "yes")),  # the mark twice
        ("a and <thi", "<think>", ("a and <thi", "")),  # cut off
        ("<think>a", "", ("a", "")),
        ("yes <think>no</think>", "", ("", "yes <think>no</think>")),  # only before the answer
        ("  yes", "", ("", "  yes")),
        ("<thin", "", ("", "<thin")),
        ("yes", "<think>\n\n</think>\n\n", ("", "yes")),  # switched off by the template
        ("a < b </think>\nc", "<think>", ("a < b ", "c")),
    ],
)
def test_marks_split_reasoning_from_content(text, before, expected):
    assert split(THINK, text, before) == expected


@pytest.mark.parametrize(
    ("text", "before", "expected"),
    [
        (
            "<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>yes",
            "<|start|>assistant",
            ("a b", "yes"),
        ),
        (
            (
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
                "<|start|>assistant<|channel|>commentary<|message|>so<|end|>"
            ),
            "<|start|>assistant",
            ("a\nb", "so"),
        ),
        ("<|channel|>final<|message|>yes<|return|>", "<|start|>assistant", ("", "yes")),
        ("plain", "<|start|>assistant", ("", "plain")),
        ("a<|en", "<|start|>assistant<|channel|>analysis<|message|>", ("a<|en", "")),
        ("<|channel|>ana", "<|start|>assistant", ("", "")),
    ],
)
def test_channels_split_reasoning_from_content(text, before, expected):
    assert split(CHANNELS, text, before) == expected


def test_calls_of_tools_follow_the_reasoning():
    text = '<think>\na\n</think>\n\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    tools = ToolCallParser(ToolFormat.HERMES, lambda i: f"call_{i}")
    parser = AnswerParser(THINK.splitter(""), tools)
    deltas = [delta for letter in text for delta in parser.push(letter)] + parser.flush()
    assert joined(deltas) == ("a", "")
    assert tools.calls[0].name == "f"
    assert tools.calls[0].arguments == '{"x": 1}'


def test_both_names_are_written_and_reasoning_can_be_left_out():
    deltas = AnswerParser(THINK.splitter(""), None).push("<think>a</think>b")
    assert deltas == [{"reasoning": "a", "reasoning_content": "a"}, {"content": "b"}]
    assert AnswerParser(THINK.splitter(""), None, show=False).push("<think>a</think>b") == [{"content": "b"}]


def test_a_template_or_the_vocabulary_names_the_format():
    qwen = "{%- if '</think>' in content %}{% endif %}"
    assert reasoning_format_of(qwen) == THINK
    assert reasoning_format_of("{{ x }}", ["<think>", "</think>"]) == THINK
    assert reasoning_format_of("{{ x }}", ["<think>"]) is None
    assert reasoning_format_of("{{ x }}") is None
    assert reasoning_format_of(None) is None
    mistral = reasoning_format_of("[THINK] [/THINK]", special=["[THINK]", "[/THINK]"])
    assert mistral == ReasoningFormat("[THINK]", "[/THINK]", special=True)
    channels = reasoning_format_of("<|channel|>analysis<|message|>", special=["<|channel|>"])
    assert channels is not None
    assert channels.channels


def bytes_of(ids):
    return bytes(ids).decode()


@pytest.mark.parametrize(
    ("text", "before", "num"),
    [
        ("<think>a</think>yes", "", len("<think>a</think>")),
        ("a</think>yes", "<think>\n", len("a</think>")),
        ("<think>a", "", len("<think>a")),
        ("yes", "", 0),
    ],
)
def test_reasoning_tokens_are_counted_with_their_marks(text, before, num):
    assert THINK.num_tokens(before, list(text.encode()), bytes_of) == num


def test_reasoning_tokens_of_channels():
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>yes"
    num = CHANNELS.num_tokens("<|start|>assistant", list(text.encode()), bytes_of)
    assert text[:num].endswith("<|channel|>final")
    assert CHANNELS.num_tokens("", list(b"<|channel|>final<|message|>yes"), bytes_of) == 0


QWEN = "{%- if enable_thinking is defined and enable_thinking is false %}…{% endif %} verbosity"
GPT = "{{ 'Reasoning: ' + reasoning_effort }}"
V31 = "{% if thinking %}…{% endif %}"


@pytest.mark.parametrize(
    ("template", "fields", "kwargs"),
    [
        (QWEN, {"enable_thinking": False}, {"enable_thinking": False}),
        (QWEN, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (QWEN, {"reasoning_effort": "none", "enable_thinking": True}, {"enable_thinking": True}),
        (QWEN, {"reasoning_effort": "high", "verbosity": "low"}, {}),  # verbosity is no variable there
        (GPT, {"reasoning_effort": "high", "enable_thinking": True}, {"reasoning_effort": "high"}),
        (GPT, {"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        (V31, {"enable_thinking": True}, {"thinking": True}),
        (None, {"enable_thinking": True, "reasoning_effort": "low", "verbosity": "high"}, {}),
    ],
)
def test_fields_reach_the_templates_that_know_them(template, fields, kwargs):
    assert thinking_kwargs(template, **fields) == kwargs


def test_a_contradiction_and_a_word_that_is_none_are_refused():
    with pytest.raises(ApiError) as refused:
        thinking_kwargs(QWEN, enable_thinking=True, given={"enable_thinking": False})
    assert refused.value.param == "chat_template_kwargs"
    with pytest.raises(ApiError) as refused:
        thinking_kwargs(GPT, reasoning_effort="<|im_end|>")
    assert refused.value.param == "reasoning_effort"


def test_marks_that_are_special_tokens_are_kept_in_the_text():
    def parsed(**body):
        options = ParseOptions(
            template=lambda tools: "[THINK] [/THINK]", special_names=frozenset(special), decode=bytes_of
        )
        return parse(CHAT, {"messages": [{"role": "user", "content": "x"}]} | body, options)

    special = ("[THINK]", "[/THINK]")
    assert not parsed().params.skip_special_tokens
    assert parsed().make_parser is not None
    assert parsed(skip_special_tokens=True).make_parser is None  # the text will have no marks
    special = ()
    assert parsed().params.skip_special_tokens
    assert parsed().make_parser is not None


def test_a_message_that_is_continued_may_have_opened_the_marks():
    def continued(content):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
        body = {"messages": messages, "continue_final_message": True}
        options = ParseOptions(template=lambda tools: "</think>", decode=bytes_of)
        parser = parse(CHAT, body, options).make_parser(None, 0)
        return joined(parser.push("a</think>b") + parser.flush())

    assert continued("<think>so") == ("a", "b")
    assert continued("<think>so</think>yes") == ("", "a</think>b")
    assert continued("yes") == ("", "a</think>b")
    empty = {"messages": [], "continue_final_message": True}
    options = ParseOptions(template=lambda tools: "</think>", decode=bytes_of)
    with pytest.raises(ApiError, match="is empty"):
        parse(CHAT, empty, options)
