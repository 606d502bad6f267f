"""`response_format` and tools over the wire: what comes back parses, whole and streamed, and is the same."""

import json
from types import SimpleNamespace

import pytest

from samewise.openai.errors import ApiError
from samewise.openai.replies import refuse_aborted

from shop import CHAT, COMPLETIONS, go, shop  # isort: skip

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": ["Ulm", "Bonn"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
HERMES = (
    "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Answer with <tool_call>{"name": …, "arguments": …}</tool_call>\n{% endif %}'
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
MESSAGES = [{"role": "user", "content": "hello"}]


def asked(**body):
    return {"messages": MESSAGES, "temperature": 0, "max_tokens": 80} | body


def put_together(events):
    """The message a client makes of a stream."""
    content, calls, finish = "", {}, None
    for event in events:
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            for part in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(
                    part["index"], {"id": "", "type": "", "function": {"name": "", "arguments": ""}}
                )
                call["id"] += part.get("id", "")
                call["type"] = part.get("type", call["type"])
                call["function"]["name"] += part.get("function", {}).get("name", "")
                call["function"]["arguments"] += part.get("function", {}).get("arguments", "")
    return content, [calls[i] for i in sorted(calls)], finish


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_schema_is_followed_and_the_same_whatever_else_is_asked(temperature):
    async def run():
        async with shop(eos=True) as there:
            body = asked(response_format=FORMAT, temperature=temperature, seed=3)
            whole = await there.post(CHAT, body)
            person = json.loads(whole["choices"][0]["message"]["content"])
            assert set(person) == {"name", "age"}
            assert isinstance(person["age"], int)
            assert whole["choices"][0]["finish_reason"] == "stop"
            content, calls, finish = put_together(await there.events(CHAT, body))
            assert (content, calls, finish) == (whole["choices"][0]["message"]["content"], [], "stop")
            plain = await there.post(CHAT, body | {"proposer": "none"})
            assert plain["choices"] == whole["choices"]
            loose = await there.post(CHAT, body | {"verify": False})
            json.loads(loose["choices"][0]["message"]["content"])
            await there.quiet()

    go(run())


def test_json_mode_and_grammars_for_completions_too():
    async def run():
        async with shop(eos=True) as there:
            mode = {"type": "json_object"}
            found = await there.complete("{", max_tokens=60, response_format=mode, logit_bias={"125": 5})
            text = found["choices"][0]["text"]
            if found["choices"][0]["finish_reason"] == "stop":
                assert isinstance(json.loads(text), dict)
            assert text.lstrip().startswith("{")
            shape = {"type": "grammar", "syntax": "regex", "definition": "(yes|no)!"}
            assert (await there.complete(response_format=shape))["choices"][0]["text"] in ("yes!", "no!")

    go(run())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_is_made(choice):
    async def run():
        async with shop(eos=True) as there:
            there.llm.tokenizer.chat_template = HERMES
            body = asked(tools=[TOOL], tool_choice=choice, max_tokens=160, parallel_tool_calls=False)
            whole = await there.post(CHAT, body)
            (said,) = whole["choices"]
            assert said["finish_reason"] == "tool_calls"
            assert said["message"]["content"] is None
            (call,) = said["message"]["tool_calls"]
            assert call["type"] == "function"
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["town"] in ("Ulm", "Bonn")
            content, calls, finish = put_together(await there.events(CHAT, body))
            assert (content, calls, finish) == ("", [call], "tool_calls")
            again = await there.post(CHAT, body)
            assert again["choices"] == whole["choices"]  # names of calls and all
            heard = [
                *MESSAGES,
                said["message"],
                {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
            ]
            await there.post(CHAT, asked(messages=heard, tools=[TOOL], tool_choice="none"))
            await there.quiet()

    go(run())


@pytest.mark.parametrize(
    ("extra", "param", "says"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": FORMAT | {"colour": 1}}, "response_format", "colour"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "soup"}},
                }
            },
            "response_format",
            "soup",
        ),
        (
            {"response_format": {"type": "grammar", "syntax": "regex", "definition": "("}},
            "response_format",
            "",
        ),
        ({"tools": [TOOL]}, "tools", "template"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"response_format": FORMAT, "allowed_token_ids": [65]}, "allowed_token_ids", "grammar"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(extra, param, says):
    async def run():
        async with shop(eos=True) as there:
            status, error = await there.refusal(CHAT, asked(**extra))
            assert (status, error["param"]) == (400, param), error
            assert says in error["message"]
            await there.quiet()

    go(run())


def test_tools_beside_special_tokens_that_are_skipped():
    async def run():
        async with shop(eos=True) as there:
            there.llm.tokenizer.chat_template = HERMES
            status, error = await there.refusal(CHAT, asked(tools=[TOOL], skip_special_tokens=True))
            assert (status, error["param"]) == (400, "skip_special_tokens")
            found = await there.post(CHAT, asked(tools=[TOOL], max_tokens=8))
            assert found["choices"][0]["message"]["content"] is not None

    go(run())


def test_an_answer_whose_grammar_could_not_be_followed_is_an_error():
    """It ends with `abort`, which no client knows: no token fits, or the grammar's own limits."""
    fine = SimpleNamespace(outputs=[SimpleNamespace(finish_reason="stop")])
    stuck = SimpleNamespace(outputs=[SimpleNamespace(finish_reason="abort")])
    refuse_aborted([fine])
    with pytest.raises(ApiError, match="grammar") as caught:
        refuse_aborted([fine, stuck])
    assert (caught.value.status, caught.value.param) == (400, "response_format")


def test_completions_have_no_tools():
    async def run():
        async with shop() as there:
            status, error = await there.refusal(COMPLETIONS, {"prompt": "a", "tools": [TOOL]})
            assert (status, error["param"]) == (400, "tools")
            await there.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "tools": []})

    go(run())
