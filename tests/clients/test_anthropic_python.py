"""The anthropic client's `messages`, whole and streaming, with tools, structured output and thinking."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from server_process import NAME, ServerProcess

# A module of it: a folder of tests has the package's name.
pytest.importorskip("anthropic.types", reason="the anthropic client is not installed; see make test-clients")
import anthropic

HELLO: Any = [{"role": "user", "content": "hello"}]
REQUEST: Any = {"model": NAME, "messages": HELLO, "max_tokens": 40}
SEED: Any = {"extra_body": {"temperature": 0.8, "seed": 5, "return_token_ids": True}}
WEATHER: Any = {
    "name": "weather",
    "description": "How it is outside.",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"type": "string", "enum": ["Ulm", "Bonn"]}},
        "required": ["town"],
        "additionalProperties": False,
    },
}


class Person(BaseModel):
    name: Literal["Ann", "Bob"]  # the client does not send lengths and bounds
    tall: bool


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_all_ways_of_asking_give_the_same_answer(client: Any, server: ServerProcess) -> None:
    """Whole, streamed, through the helper, and concurrent: text, tokens and contract are equal."""
    one = client.messages.create(**REQUEST, **SEED, system="Be brief.")
    assert type(one).model_validate(one.to_dict()).stop_reason == "max_tokens"
    assert one._request_id
    text = one.content[0].text
    events = list(client.messages.create(**REQUEST, **SEED, system="Be brief.", stream=True))
    assert [event.type for event in (events[0], events[-1])] == ["message_start", "message_stop"]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == text
    with client.messages.stream(**REQUEST, **SEED, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (text, one.stop_reason)
    assert final.usage.output_tokens == one.usage.output_tokens == 40

    async def many() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as other:
            asking = (other.messages.create(**REQUEST, **SEED, system="Be brief.") for _ in range(6))
            return list(await asyncio.gather(*asking))

    for again in asyncio.run(many()):
        assert (again.token_ids, again.content) == (one.token_ids, one.content)
        assert again.system_fingerprint == one.system_fingerprint
    counted = client.messages.count_tokens(model=NAME, messages=HELLO, system="Be brief.")
    assert counted.input_tokens == len(one.prompt_token_ids)
    server.check_idle()


def test_tools_are_used_and_answered(client: Any, server: ServerProcess) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    request = REQUEST | {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 160} | SEED
    one = client.messages.create(**request)
    (used,) = one.content
    assert (used.type, used.name, one.stop_reason) == ("tool_use", "weather", "tool_use")
    assert used.input["town"] in ("Ulm", "Bonn")
    with client.messages.stream(**request) as stream:
        snapshots = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert snapshots
    assert (streamed.id, streamed.input) == (used.id, used.input)
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "rain"}
    messages = [*HELLO, {"role": "assistant", "content": one.content}, {"role": "user", "content": [result]}]
    client.messages.create(**REQUEST | {"messages": messages, "tools": [WEATHER]})
    server.check_idle()


def test_structured_output_is_parsed_whole_and_streamed(client: Any) -> None:
    request = REQUEST | {"max_tokens": 120} | SEED
    person = client.messages.parse(**request, output_format=Person).parsed_output
    assert isinstance(person, Person)
    with client.messages.stream(**request, output_format=Person) as stream:
        assert stream.get_final_message().parsed_output == person


def test_thinking_blocks_come_back(client: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    blocks = [
        {"type": "thinking", "thinking": "abc", "signature": "x"},
        {"type": "text", "text": "def"},
    ]
    messages = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": "so?"}]
    request = REQUEST | {"thinking": thinking, "messages": messages}
    with_thought = client.messages.create(**request | {"max_tokens": 8} | SEED)
    messages[1] = {"role": "assistant", "content": blocks[1:]}
    without = client.messages.create(**request | {"max_tokens": 8, "messages": messages} | SEED)
    marks = len("<think>\nabc\n</think>\n\n")
    assert len(with_thought.prompt_token_ids) == len(without.prompt_token_ids) + marks


def test_what_a_coding_agent_sends_is_answered(client: Any) -> None:
    """A request with the fields, headers, blocks and tools that Claude Code sends, streamed."""
    cached = {"cache_control": {"type": "ephemeral"}}
    body: Any = {
        "model": NAME, "max_tokens": 32000, "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a1b2c;"},
            {"type": "text", "text": "You are an agent."} | cached,
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "list files"} | cached]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": "abc"},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False},
                {"type": "text", "text": "<system-reminder>…</system-reminder>"},
            ]},
        ],
        "tools": [
            {"name": "Bash", "description": "Runs a command.",
             "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
                              "properties": {"command": {"type": "string"}}, "required": ["command"]}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_x"}, "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"}, "stop_sequences": ["a", "e", "\n"],
    }  # fmt: skip
    events = list(
        client.beta.messages.create(**body, betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"])
    )
    assert events[-1].type == "message_stop"
    counted = client.beta.messages.count_tokens(
        **{name: body[name] for name in ("model", "messages", "system", "tools", "thinking")},
        betas=["token-counting-2024-11-01"],
    )
    assert counted.input_tokens > 100


def test_errors_are_raised_as_their_classes(client: Any, server: ServerProcess) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**REQUEST | {"max_tokens": -1})
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**REQUEST | {"model": "other"})
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(anthropic.BadRequestError, match="reads text"):
        client.messages.create(**REQUEST | {"messages": [{"role": "user", "content": [image]}]})
    server.check_idle()
