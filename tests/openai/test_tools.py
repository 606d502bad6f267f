"""Tool calls: found in text however it is cut, chosen under a grammar, refused by name."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.errors import BadParameter
from samewise.llm.llm import LLM
from samewise.openai.toolbox import MOST, special_tokens, toolbox_of
from samewise.openai.tools import Family, ToolCall, ToolStream, call_ids, family_of, parse_tool_calls
from samewise.params import SamplingParams
from samewise.testing import byte_tokenizer, tiny, tiny_engine
from samewise.text.grammar import Grammars
from samewise.types import Grammar

HERMES = (
    "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "return a json object within <tool_call></tool_call> XML tags{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
LLAMA = (
    "{% if tools is not none %}<|start_header_id|>Respond in the format "
    '{"name": function name, "parameters": dictionary}{% endif %}'
)
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] ["
MISTRAL_ARGS = "{% if tools %}{% endif %}[TOOL_CALLS]name[ARGS]"
TEMPLATES = {
    Family.HERMES: HERMES,
    Family.LLAMA: LLAMA,
    Family.MISTRAL: MISTRAL,
    Family.MISTRAL_ARGS: MISTRAL_ARGS,
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}, "unit": {"enum": ["C", "F"]}},
            "required": ["place", "unit"],
            "additionalProperties": False,
            "$defs": {"place": {"type": "string", "pattern": "^[a-z]{1,6}$"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}


# ---- which family


@pytest.mark.parametrize(("family", "template"), TEMPLATES.items())
def test_a_template_tells_its_family(family, template):
    assert family_of(template) is family


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% if tools %}<tool_call><function=f><parameter=a>1</parameter></function></tool_call>{% endif %}",
        "{% if tools %}<tool_call>name<arg_key>a</arg_key></tool_call>{% endif %}",
        "{% if tools %}<|start_header_id|>respond with a python list of calls{% endif %}",
    ],
)
def test_a_template_that_knows_no_tools_or_others(template):
    assert family_of(template) is None
    with pytest.raises(BadParameter, match=r"^tools=.*chat template"):
        toolbox_of([CLOCK], template=template)


# ---- what is found

F = ToolCall("f", '{"a": 1}')
FOUND = [
    (Family.HERMES, "just text", "just text", ()),
    (Family.HERMES, "", "", ()),
    (Family.HERMES, " text \n", " text \n", ()),
    (Family.HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', None, (F,)),
    (
        Family.HERMES,
        'So.\n<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>\n<tool_call>{"name":"g"}</tool_call>',
        "So.",
        (F, ToolCall("g", "{}")),
    ),
    (Family.HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', None, (F,)),
    (Family.HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, (F,)),
    (Family.HERMES, '<tool_call>{"name": "f"}</tool_call>', None, (ToolCall("f", "{}"),)),
    (Family.HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', None, (ToolCall("f", "{}"),)),
    (Family.HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "}"}</tool_call>!', "!", (F,)),
    # Broken off, and broken.
    (Family.HERMES, '<tool_call>{"name": "f", "arguments": {"a": ', None, (ToolCall("f", '{"a": '),)),
    (Family.HERMES, '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', ()),
    (Family.HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> so', " so", (F,)),
    (
        Family.HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>',
        None,
        (ToolCall("f", '{"a": 1'),),
    ),
    (Family.HERMES, "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", ()),
    (Family.HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', ()),
    (Family.HERMES, "a <tool_ b <tool_cal", "a <tool_ b <tool_cal", ()),
    (
        Family.HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> {\\" }"}}</tool_call>',
        None,
        (ToolCall("f", '{"a": "</tool_call> {\\" }"}'),),
    ),
    (Family.LLAMA, '{"name": "f", "parameters": {"a": 1}}', None, (F,)),
    (Family.LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', None, (F,)),
    (
        Family.LLAMA,
        '\n{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        None,
        (F, ToolCall("g", "{}")),
    ),
    (Family.LLAMA, 'Well: {"name": "f", "parameters": {}}', 'Well: {"name": "f", "parameters": {}}', ()),
    (Family.LLAMA, '{"answer": {"name": "f"}} indeed', '{"answer": {"name": "f"}} indeed', ()),
    (Family.LLAMA, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', ()),
    (Family.LLAMA, "<|py", "<|py", ()),
    (Family.MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', None, (F,)),
    (
        Family.MISTRAL,
        'Yes.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g", "arguments": {}}]',
        "Yes.",
        (F, ToolCall("g", "{}")),
    ),
    (Family.MISTRAL, "[TOOL_CALLS] []", "[TOOL_CALLS] []", ()),
    (Family.MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}', None, (F,)),
    (
        Family.MISTRAL_ARGS,
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g{}',
        None,
        (F, ToolCall("g", "{}")),
    ),
    (Family.MISTRAL_ARGS, "[TOOL_CALLS] no, not this", "[TOOL_CALLS] no, not this", ()),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), FOUND)
def test_what_is_found(family, text, content, calls):
    assert parse_tool_calls(family, text) == (content, calls)


def told(deltas):
    """What a client puts together from deltas."""
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


@pytest.mark.parametrize(("family", "text", "content", "calls"), FOUND)
def test_every_cut_says_the_same(family, text, content, calls):
    rng = random.Random(text)
    ids = call_ids(family, "sw-1", [1, 2])
    for size in (1, 2, 3, 7, None):
        stream, deltas, left = ToolStream(family, ids), [], text
        while left:
            num = size or rng.randint(1, 12)
            deltas += stream.push(left[:num])
            left = left[num:]
        deltas += stream.flush()
        assert told(deltas) == (
            content or "",
            [[ids(i), call.name, call.arguments] for i, call in enumerate(calls)],
        )


PIECES = [
    "<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '{"a": [1, "}"]}', "}", "[", "]",
    "null", "[TOOL_CALLS]", "f[ARGS]", "<|python_tag|>", "{}", ", ", "\n", " so ", '"', "\\", "<", ";",
]  # fmt: skip


@given(
    family=st.sampled_from(list(Family)),
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    seed=st.integers(0, 1000),
    single=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_any_text_cut_anywhere(family, pieces, seed, single):
    text, rng = "".join(pieces), random.Random(seed)
    content, calls = parse_tool_calls(family, text, single=single)
    stream, deltas, left = ToolStream(family, str, single=single), [], text
    while left:
        num = rng.randint(1, 4)
        deltas += stream.push(left[:num])
        left = left[num:]
    deltas += stream.flush()
    assert told(deltas) == (content or "", [[str(i), c.name, c.arguments] for i, c in enumerate(calls)])
    if not calls:
        assert content == text  # nothing is lost


def test_arguments_are_given_out_as_they_come():
    stream = ToolStream(Family.HERMES, str)
    assert stream.push('<tool_call>{"name": "f", "arguments": {"a') == [
        {
            "tool_calls": [
                {"index": 0, "id": "0", "type": "function", "function": {"name": "f", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}]},
    ]
    assert stream.push('": 1') == [{"tool_calls": [{"index": 0, "function": {"arguments": '": 1'}}]}]
    assert stream.push("}}") == [{"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}]
    assert stream.push("</tool_call>") == []
    assert stream.flush() == []
    assert stream.calls == [ToolCall("f", '{"a": 1}')]


def test_one_call_where_only_one_is_wanted():
    two = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2 + "x"
    assert parse_tool_calls(Family.HERMES, two, single=True) == (None, (F,))


def test_names_of_calls_are_derived():
    ids = call_ids(Family.HERMES, "sw-1", [1, 2, 3])
    assert ids(0) == call_ids(Family.HERMES, "sw-1", (1, 2, 3))(0)
    others = [
        call_ids(Family.HERMES, *how)(0)
        for how in (("sw-2", [1, 2, 3]), ("sw-1", [1, 2]), ("sw-1", [1, 2, 3], 1))
    ]
    assert len({ids(0), ids(1), *others}) == 5
    assert ids(0).startswith("call_")
    mistral = call_ids(Family.MISTRAL, "sw-1", [1])(0)
    assert len(mistral) == 9
    assert mistral.isalnum()


# ---- what was asked


def test_no_tools_is_no_tools():
    for tools in (None, []):
        for choice in (None, "none", "auto"):
            found = toolbox_of(tools, choice, template=None, response=Grammar.json_object())
            assert (found.tools, found.family, found.grammar) == (None, None, Grammar.json_object())


def test_none_is_told_to_nobody():
    found = toolbox_of([WEATHER], "none", template="no tools here", response=Grammar.regex("a"))
    assert (found.tools, found.family, found.grammar) == (None, None, Grammar.regex("a"))


def test_auto_leaves_the_model_free():
    found = toolbox_of([WEATHER, CLOCK], template=HERMES)
    assert found.tools == (WEATHER, CLOCK)
    assert (found.family, found.grammar, found.single) == (Family.HERMES, None, False)
    assert toolbox_of([CLOCK], "auto", parallel=False, template=HERMES).single


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        ("f", None, r"tools=f: give a list"),
        ({"a": 1}, None, r"tools=.*give a list"),
        ([{"type": "web_search"}], None, r"tools=web_search: tools\[0\]: only"),
        ([CLOCK, 3], None, r"tools=3: tools\[1\]"),
        ([{"type": "function"}], None, r"tools=None: tools\[0\]: a function has a name"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools=a b: .*letters, digits"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": []}}],
            None,
            "parameters is of type dict",
        ),
        ([{"type": "function", "function": {"name": "a", "strict": 1}}], None, "strict is of type bool"),
        ([CLOCK, CLOCK], None, "tools=clock: two functions"),
        ([CLOCK] * (MOST + 1), None, f"at most {MOST}"),
        (None, "required", "tool_choice=required: there are no tools"),
        ([], {"type": "function", "function": {"name": "f"}}, "tool_choice=f: there are no tools"),
        ([CLOCK], "sometimes", "tool_choice=sometimes: give"),
        ([CLOCK], {"type": "allowed_tools"}, "tool_choice=.*allowed_tools.*: give"),
        ([CLOCK], {"type": "function", "function": {"name": "f"}}, "tool_choice=f: .*known are clock"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}],
            "required",
            "tools=a: its parameters are an object",
        ),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"x-guidance": {}}}}],
            "required",
            "x-guidance",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(tools, choice, says):
    with pytest.raises(BadParameter, match=f"^{says}" if says.startswith("tool") else says):
        toolbox_of(tools, choice, template=HERMES)


def test_a_format_and_free_calls_exclude_each_other():
    response = Grammar.json_object()
    with pytest.raises(BadParameter, match=r"^response_format=json_object: .*tool_choice"):
        toolbox_of([CLOCK], "auto", template=HERMES, response=response)
    assert toolbox_of([CLOCK], "required", template=HERMES, response=response).grammar != response


# ---- calls under a grammar


def tokenizer_with(*added):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=special) for text, special in added])
    return tokenizer


MARKED = tokenizer_with(
    ("<tool_call>", False), ("</tool_call>", False), ("[TOOL_CALLS]", True), ("[ARGS]", True)
)
PLAIN = byte_tokenizer()
ARGUMENTS = '{"place": "rome", "unit": "C"}'
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SAID = {
    Family.HERMES: '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>",
    Family.LLAMA: '{"name": "get_weather", "parameters": ' + ARGUMENTS + "}",
    Family.MISTRAL: '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]",
    Family.MISTRAL_ARGS: "[TOOL_CALLS]get_weather[ARGS]" + ARGUMENTS,
}


def follows(tokenizer, grammar, text):
    """Whether a text is of a grammar, as this tokenizer writes it."""
    walk = Grammars(tokenizer, 320, [257]).guide(grammar, frozenset({257}))
    return walk.fits([], (*tokenizer.encode(text, add_special_tokens=False), 257)) >= len(
        tokenizer.encode(text, add_special_tokens=False)
    )


@pytest.mark.parametrize("tokenizer", [MARKED, PLAIN], ids=["marked", "plain"])
@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
def test_a_grammar_over_the_tools(family, tokenizer, choice):
    found = toolbox_of([CLOCK, STRICT], choice, template=TEMPLATES[family], special=special_tokens(tokenizer))
    said, forced = SAID[family], choice != "auto"
    assert follows(tokenizer, found.grammar, said)
    assert not follows(tokenizer, found.grammar, said.replace('"C"', '"K"'))
    assert not follows(tokenizer, found.grammar, said.replace("get_weather", "get_money"))
    assert follows(tokenizer, found.grammar, "It is sunny.") is not forced
    other = said.replace("get_weather", "clock").replace(ARGUMENTS, "{}")
    assert follows(tokenizer, found.grammar, other) is (choice != NAMED)
    if family not in (Family.LLAMA, Family.MISTRAL):
        between = "\n" if family is Family.HERMES else ""
        assert follows(tokenizer, found.grammar, said + between + said) is (choice != NAMED)
    if family is not Family.LLAMA:
        assert follows(tokenizer, found.grammar, "Let me see. " + said) is not forced
    assert parse_tool_calls(family, said) == (None, (ToolCall("get_weather", ARGUMENTS),))


@pytest.mark.parametrize("family", Family)
def test_one_call_at_most_if_that_is_asked_for(family):
    found = toolbox_of([STRICT], "required", parallel=False, template=TEMPLATES[family])
    assert follows(PLAIN, found.grammar, SAID[family])
    assert not follows(PLAIN, found.grammar, SAID[family] + "\n" + SAID[family])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(eos=True, proposer="ngram")


@pytest.mark.parametrize("family", Family)
def test_a_random_model_calls_what_it_must(engine, family):
    """Whatever the weights say: a call of the right function, whose arguments fit its schema."""
    found = toolbox_of([CLOCK, WEATHER], NAMED, template=TEMPLATES[family])
    params = SamplingParams(max_tokens=300, seed=1, grammar=found.grammar, skip_special_tokens=False)
    llm = LLM.over(engine)
    (output,) = llm.generate("What is the weather?", params, use_tqdm=False)
    answer = output.outputs[0]
    content, (call,) = parse_tool_calls(family, answer.text)
    assert (content, call.name, answer.finish_reason) == (None, "get_weather", "stop")
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"place", "unit"}
    assert arguments["unit"] in ("C", "F")
    stream = found.stream(call_ids(family, output.contract, output.prompt_token_ids))
    deltas = [
        delta for chunk in llm.stream("What is the weather?", params) for delta in stream.push(chunk.text)
    ]
    assert told([*deltas, *stream.flush()])[1][0][1:] == list(call)


@pytest.fixture(scope="module")
def marked() -> Engine:
    loaded = replace(tiny(eos=True), tokenizer=MARKED)
    config = EngineConfig(model="tiny", device="cpu", kv_memory=2**22, proposer="ngram")
    return Engine(loaded, config)


@pytest.mark.parametrize("family", [Family.HERMES, Family.MISTRAL_ARGS])
@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_markers_that_are_tokens_come_as_tokens(marked, family, choice):
    llm, special = LLM.over(marked), special_tokens(MARKED)
    found = toolbox_of([CLOCK, WEATHER], choice, template=TEMPLATES[family], special=special)
    params = SamplingParams(max_tokens=400, seed=3, grammar=found.grammar, skip_special_tokens=False)
    answer = llm.generate("What is the weather?", params, use_tqdm=False)[0].outputs[0]
    opening = "<tool_call>" if family is Family.HERMES else "[TOOL_CALLS]"
    assert answer.token_ids[0] == special[opening]
    content, calls = parse_tool_calls(family, answer.text)
    assert content is None
    assert {call.name for call in calls} <= {"clock", "get_weather"}
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls[:-1])


def test_tools_reach_the_chat_template(engine):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = HERMES
    desk = LLM.over(engine)._desk
    desk.tokenizer = tokenizer
    prompt = desk.chat_prompt([{"role": "user", "content": "hi"}], tools=[WEATHER])
    assert '"get_weather"' in tokenizer.decode(prompt)
    tokenizer.chat_template = {"default": "plain", "tool_use": HERMES}
    assert "get_weather" in tokenizer.decode(
        desk.chat_prompt([{"role": "user", "content": "hi"}], tools=[WEATHER])
    )
    assert tokenizer.decode(desk.chat_prompt([{"role": "user", "content": "hi"}])) == "plain"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    desk.chat_prompt([{"role": "user", "content": "hi"}, call])
