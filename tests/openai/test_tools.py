"""Tools of a request: the template's format, the grammar for the answer, and what is refused."""

import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.errors import BadParameter
from samewise.llm.llm import LLM
from samewise.openai.tool_calls import (
    ToolCall,
    ToolFormat,
    call_ids,
    parse_tool_calls,
    tool_format_of,
)
from samewise.openai.tools import MAX_TOOLS, request_tools, special_tokens
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
    ToolFormat.HERMES: HERMES,
    ToolFormat.LLAMA: LLAMA,
    ToolFormat.MISTRAL: MISTRAL,
    ToolFormat.MISTRAL_ARGS: MISTRAL_ARGS,
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


# ---- the format


@pytest.mark.parametrize(("tool_format", "template"), TEMPLATES.items())
def test_the_tool_format_is_recognised_by_the_chat_template(tool_format, template):
    assert tool_format_of(template) is tool_format


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% if tools %}<tool_call><function=f><parameter=a>1</parameter></function></tool_call>{% endif %}",
        "{% if tools %}<tool_call>name<arg_key>a</arg_key></tool_call>{% endif %}",
        "{% if tools %}<|start_header_id|>respond with a python list of calls{% endif %}",
    ],
)
def test_tools_are_refused_where_the_template_has_no_known_format(template):
    assert tool_format_of(template) is None
    with pytest.raises(BadParameter, match=r"^tools=.*chat template"):
        request_tools([CLOCK], template=template)


# ---- tool_choice


def test_a_request_without_tools_keeps_its_response_format():
    for given in (None, []):
        for choice in (None, "none", "auto"):
            tools = request_tools(given, choice, template=None, response=Grammar.json_object())
            assert (tools.tools, tools.tool_format, tools.grammar) == ((), None, Grammar.json_object())


def test_tool_choice_none_hides_the_tools_from_the_template():
    tools = request_tools([WEATHER], "none", template="no tools here", response=Grammar.regex("a"))
    assert (tools.tools, tools.tool_format, tools.grammar) == ((), None, Grammar.regex("a"))


def test_tool_choice_auto_sets_no_grammar():
    tools = request_tools([WEATHER, CLOCK], template=HERMES)
    assert tools.tools == (WEATHER, CLOCK)
    assert (tools.tool_format, tools.grammar, tools.single) == (ToolFormat.HERMES, None, False)
    assert request_tools([CLOCK], "auto", parallel=False, template=HERMES).single


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
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
        ([CLOCK] * (MAX_TOOLS + 1), None, f"at most {MAX_TOOLS}"),
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
def test_invalid_tools_are_refused_by_name(tools, choice, message):
    with pytest.raises(
        BadParameter, match=f"^{message}" if message.startswith("tool") else message
    ) as caught:
        request_tools(tools, choice, template=HERMES)
    assert caught.value.param == str(caught.value).partition("=")[0]


def test_hundreds_of_tools_are_taken():
    """Coding agents with MCP servers send them."""
    tools = [{"type": "function", "function": {"name": f"mcp__{i}"}} for i in range(MAX_TOOLS)]
    assert MAX_TOOLS == 1024
    assert len(request_tools(tools, template=HERMES).tools) == MAX_TOOLS
    assert request_tools(tools, "required", template=HERMES).grammar is not None


def test_a_response_format_is_refused_where_a_call_cannot_be_told_from_it():
    for template, response in ((LLAMA, Grammar.json_object()), (HERMES, Grammar.regex("a"))):
        with pytest.raises(BadParameter, match=rf"^response_format={response.kind}: .*tool_choice"):
            request_tools([CLOCK], "auto", template=template, response=response)
    response = Grammar.json_object()
    assert request_tools([CLOCK], "required", template=HERMES, response=response).grammar != response


# ---- calls under a grammar


def tokenizer_with(*added):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=special) for text, special in added])
    return tokenizer


WITH_MARKERS = tokenizer_with(
    ("<tool_call>", False), ("</tool_call>", False), ("[TOOL_CALLS]", True), ("[ARGS]", True)
)
PLAIN = byte_tokenizer()
ARGUMENTS = '{"place": "rome", "unit": "C"}'
NAMED = {"type": "function", "function": {"name": "get_weather"}}
TEXTS = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>",
    ToolFormat.LLAMA: '{"name": "get_weather", "parameters": ' + ARGUMENTS + "}",
    ToolFormat.MISTRAL: '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + ARGUMENTS + "}]",
    ToolFormat.MISTRAL_ARGS: "[TOOL_CALLS]get_weather[ARGS]" + ARGUMENTS,
}


def follows(tokenizer, grammar, text):
    """Whether a grammar accepts a text in this tokenizer's tokens."""
    guide = Grammars(tokenizer, 320, [257]).guide(grammar, frozenset({257}))
    return guide.fits([], (*tokenizer.encode(text, add_special_tokens=False), 257)) >= len(
        tokenizer.encode(text, add_special_tokens=False)
    )


@pytest.mark.parametrize("tokenizer", [WITH_MARKERS, PLAIN], ids=["marked", "plain"])
@pytest.mark.parametrize("tool_format", ToolFormat)
@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
def test_the_grammar_allows_exactly_the_calls_that_the_choice_allows(tool_format, tokenizer, choice):
    tools = request_tools(
        [CLOCK, STRICT], choice, template=TEMPLATES[tool_format], special=special_tokens(tokenizer)
    )
    text, forced = TEXTS[tool_format], choice != "auto"
    assert follows(tokenizer, tools.grammar, text)
    assert not follows(tokenizer, tools.grammar, text.replace('"C"', '"K"'))
    assert not follows(tokenizer, tools.grammar, text.replace("get_weather", "get_money"))
    assert follows(tokenizer, tools.grammar, "It is sunny.") is not forced
    other = text.replace("get_weather", "clock").replace(ARGUMENTS, "{}")
    assert follows(tokenizer, tools.grammar, other) is (choice != NAMED)
    if tool_format not in (ToolFormat.LLAMA, ToolFormat.MISTRAL):
        between = "\n" if tool_format is ToolFormat.HERMES else ""
        assert follows(tokenizer, tools.grammar, text + between + text) is (choice != NAMED)
    if tool_format is not ToolFormat.LLAMA:
        assert follows(tokenizer, tools.grammar, "Let me see. " + text) is not forced
    assert parse_tool_calls(tool_format, text) == (None, (ToolCall("get_weather", ARGUMENTS),))


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_without_parallel_calls_the_grammar_allows_one_call(tool_format):
    tools = request_tools([STRICT], "required", parallel=False, template=TEMPLATES[tool_format])
    assert follows(PLAIN, tools.grammar, TEXTS[tool_format])
    assert not follows(PLAIN, tools.grammar, TEXTS[tool_format] + "\n" + TEXTS[tool_format])


@pytest.mark.parametrize("tokenizer", [WITH_MARKERS, PLAIN], ids=["marked", "plain"])
@pytest.mark.parametrize("tool_format", [ToolFormat.HERMES, ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS])
@pytest.mark.parametrize(
    "response",
    [
        Grammar.json_object(),
        Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
    ],
    ids=["object", "schema"],
)
def test_beside_a_response_format_an_answer_is_calls_or_that(tool_format, tokenizer, response):
    template, special = TEMPLATES[tool_format], special_tokens(tokenizer)
    tools = request_tools([CLOCK, WEATHER], "auto", template=template, special=special, response=response)
    assert not tools.free
    assert follows(tokenizer, tools.grammar, TEXTS[tool_format])
    assert follows(tokenizer, tools.grammar, '{"a": 5}')
    assert follows(tokenizer, tools.grammar, '{"a": "x"}') is (response.kind == "json_object")
    for text in ("It is sunny.", "Let me see. " + TEXTS[tool_format], TEXTS[tool_format] + ' {"a": 5}'):
        assert not follows(tokenizer, tools.grammar, text)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(eos=True, proposer="ngram")


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_a_random_model_makes_the_required_call(engine, tool_format):
    """A call of the right function, with arguments that fit its schema."""
    tools = request_tools([CLOCK, WEATHER], NAMED, template=TEMPLATES[tool_format])
    params = SamplingParams(max_tokens=300, seed=1, grammar=tools.grammar, skip_special_tokens=False)
    llm = LLM.over(engine)
    (output,) = llm.generate("What is the weather?", params, use_tqdm=False)
    answer = output.outputs[0]
    content, (call,) = parse_tool_calls(tool_format, answer.text)
    assert (content, call.name, answer.finish_reason) == (None, "get_weather", "stop")
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"place", "unit"}
    assert arguments["unit"] in ("C", "F")
    parser = tools.parser(call_ids(tool_format, output.contract, output.prompt_token_ids))
    for chunk in llm.stream("What is the weather?", params):
        parser.push(chunk.text)
    parser.flush()
    assert parser.calls == [call]


@pytest.fixture(scope="module")
def engine_with_markers() -> Engine:
    loaded = replace(tiny(eos=True), tokenizer=WITH_MARKERS)
    config = EngineConfig(model="tiny", device="cpu", kv_memory=2**22, proposer="ngram")
    return Engine(loaded, config)


@pytest.mark.parametrize("tool_format", [ToolFormat.HERMES, ToolFormat.MISTRAL_ARGS])
@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_markers_are_generated_as_special_tokens_where_the_tokenizer_has_them(
    engine_with_markers, tool_format, choice
):
    llm, special = LLM.over(engine_with_markers), special_tokens(WITH_MARKERS)
    tools = request_tools([CLOCK, WEATHER], choice, template=TEMPLATES[tool_format], special=special)
    params = SamplingParams(max_tokens=400, seed=3, grammar=tools.grammar, skip_special_tokens=False)
    answer = llm.generate("What is the weather?", params, use_tqdm=False)[0].outputs[0]
    opening = "<tool_call>" if tool_format is ToolFormat.HERMES else "[TOOL_CALLS]"
    assert answer.token_ids[0] == special[opening]
    content, calls = parse_tool_calls(tool_format, answer.text)
    assert content is None
    assert {call.name for call in calls} <= {"clock", "get_weather"}
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls[:-1])


def test_the_chat_template_receives_the_tools(engine):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = HERMES
    intake = LLM.over(engine)._loop.intake
    intake.tokenizer = tokenizer
    prompt = intake.chat_prompt([{"role": "user", "content": "hi"}], tools=[WEATHER])
    assert '"get_weather"' in tokenizer.decode(prompt)
    tokenizer.chat_template = {"default": "plain", "tool_use": HERMES}
    assert "get_weather" in tokenizer.decode(
        intake.chat_prompt([{"role": "user", "content": "hi"}], tools=[WEATHER])
    )
    assert tokenizer.decode(intake.chat_prompt([{"role": "user", "content": "hi"}])) == "plain"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    intake.chat_prompt([{"role": "user", "content": "hi"}, call])
