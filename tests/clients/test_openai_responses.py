"""openai-python's `responses`, whole and streaming: tools, structured output, stored conversations."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field
from server_process import NAME, ServerProcess

import openai
from openai import AsyncOpenAI, OpenAI

REQUEST: Any = {"model": NAME, "input": "hello", "temperature": 0.8, "max_output_tokens": 40}
SEED: Any = {"extra_body": {"seed": 5, "return_token_ids": True}}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "How it is outside.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string", "enum": ["Ulm", "Bonn"]}},
        "required": ["town"],
        "additionalProperties": False,
    },
}
THOUGHT = {"type": "grammar", "syntax": "regex", "definition": "<think>\n[a-c]{4,8}\n</think>\n\n[d-f]{3,6}"}


class Person(BaseModel):
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=99)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def test_all_ways_of_asking_give_the_same_answer(client: OpenAI, server: ServerProcess) -> None:
    """Whole, streamed, through the helper, concurrent, and as a chat: text, tokens and contract are equal."""
    request = REQUEST | SEED | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    one: Any = client.responses.create(**request)
    (message,) = one.output
    assert message.content[0].text == one.output_text
    assert len(message.content[0].logprobs) == len(one.token_ids) == one.usage.output_tokens

    events: list[Any] = list(client.responses.create(**request, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == one.output_text
    final = events[-1].response
    assert (final.token_ids, final.output[0].content) == (one.token_ids, message.content)

    with client.responses.stream(**REQUEST, **SEED) as stream:
        helped = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert helped == one.output_text

    async def many() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
            return list(await asyncio.gather(*(other.responses.create(**request) for _ in range(6))))

    for again in asyncio.run(many()):
        assert (again.token_ids, again.output[0].content) == (one.token_ids, message.content)
        assert again.system_fingerprint == one.system_fingerprint
    chat: Any = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hello"}], temperature=0.8, seed=5, max_tokens=40,
        logprobs=True,
    )  # fmt: skip
    assert chat.choices[0].message.content == one.output_text
    wanted = [row.logprob for row in chat.choices[0].logprobs.content]
    assert [row.logprob for row in message.content[0].logprobs] == wanted
    assert chat.system_fingerprint == one.system_fingerprint
    server.check_idle()


def test_conversations_are_stored_continued_and_deleted(client: OpenAI) -> None:
    one: Any = client.responses.create(**REQUEST, **SEED)
    assert client.responses.retrieve(one.id).output == one.output
    more = REQUEST | {"input": "and now?"} | SEED
    two: Any = client.responses.create(**more, previous_response_id=one.id)
    items = [{"role": "user", "content": "hello"}, *one.output, {"role": "user", "content": "and now?"}]
    same: Any = client.responses.create(**more | {"input": items})
    assert (same.prompt_token_ids, same.token_ids) == (two.prompt_token_ids, two.token_ids)
    client.responses.delete(one.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(one.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(**more, previous_response_id=one.id)
    assert gone.value.param == "previous_response_id"
    unstored = client.responses.create(**REQUEST, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_structured_output_is_parsed_whole_and_streamed(client: OpenAI) -> None:
    request = REQUEST | {"max_output_tokens": 120} | SEED
    person = client.responses.parse(**request, text_format=Person).output_parsed
    assert isinstance(person, Person)
    with client.responses.stream(**request, text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == person


def test_tools_are_called_and_answered(client: OpenAI, server: ServerProcess) -> None:
    request = REQUEST | {
        "max_output_tokens": 160, "tools": [WEATHER, {"type": "web_search"}], "tool_choice": "required",
        "parallel_tool_calls": False,
    } | SEED  # fmt: skip
    one: Any = client.responses.create(**request)
    (call,) = one.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["town"] in ("Ulm", "Bonn")
    with client.responses.stream(**request) as stream:
        events = list(stream)
        final: Any = stream.get_final_response()
    (streamed,) = final.output
    assert (streamed.call_id, streamed.arguments) == (call.call_id, call.arguments)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    client.responses.create(
        **REQUEST | {"input": [result], "tools": [WEATHER], "previous_response_id": one.id}
    )
    client.responses.create(**REQUEST | {"input": [{"role": "user", "content": "hello"}, call, result]})
    server.check_idle()


def test_reasoning_is_an_item_of_its_own(client: OpenAI) -> None:
    request = REQUEST | {"max_output_tokens": 80, "include": ["reasoning.encrypted_content"]} | SEED
    request |= {"text": {"format": THOUGHT}, "reasoning": {"effort": "low", "summary": "auto"}}
    one: Any = client.responses.create(**request)
    reasoning, message = one.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert set(one.output_text) <= set("def")
    events: list[Any] = list(client.responses.create(**request, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert text == reasoning.content[0].text
    assert one.usage.output_tokens_details.reasoning_tokens > 0
    client.responses.create(**REQUEST | {"input": [reasoning, message, {"role": "user", "content": "so?"}]})


def test_what_a_coding_agent_sends_is_answered(client: OpenAI) -> None:
    """A request with the fields, items and tools that Codex sends, streamed."""
    request: Any = {
        "model": NAME,
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"},
            {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False,
             "parameters": {"type": "object", "properties": {"command": {"type": "array"}}}},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "local_shell"},
        ],
        "tool_choice": "auto", "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "x",
        "text": {"verbosity": "medium"}, "service_tier": "auto", "max_output_tokens": 8,
        "extra_body": {"client_metadata": {"x": "y"}},
    }  # fmt: skip
    events = list(client.responses.create(**request))
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_errors_are_raised_as_their_classes(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**REQUEST, background=True)
    assert (refused.value.param, refused.value.code) == ("background", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(**REQUEST | {"input": "x" * 4000})
    assert (long.value.param, long.value.code) == ("input", "context_length_exceeded")
