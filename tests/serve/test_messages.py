"""`/v1/messages` over a tiny model: whole and streamed, keys, errors, counting, with the bits of a chat."""

import asyncio
import json
from typing import Any

import pytest

from samewise.serve.settings import Keys, ServeSettings

from agent_bodies import HERMES, OPENED, PARAMETERS, SCHEMA, THINKING, THOUGHT, named_events  # isort: skip
from served_app import CHAT, run, served_app  # isort: skip

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"messages": HELLO, "temperature": 0.8, "seed": 5, "max_tokens": 24}
TOOL = {"name": "weather", "description": "How it is outside.", "input_schema": PARAMETERS}


async def stream(served: Any, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the message that the events add up to, the events)."""
    reply = await served.client.post(MESSAGES, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    events = named_events(reply.text)
    assert events[0]["type"] == "message_start"
    assert events[-1] == {"type": "message_stop"}
    return joined(events), events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    message = dict(events[0]["message"])
    blocks, inputs = message["content"], dict[int, str]()
    for event in events[1:]:
        index = event.get("index")
        if event["type"] == "content_block_start":
            assert index == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                inputs[index] = inputs.get(index, "") + delta["partial_json"]
            else:
                blocks[index][kind] += delta[kind]
        elif event["type"] == "message_delta":
            extras = {name: event[name] for name in event if name not in ("type", "delta", "usage")}
            message |= event["delta"] | extras | {"usage": message["usage"] | event["usage"]}
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("id", "usage")}


def error_of(response: Any) -> dict[str, Any]:
    """The error; checks its form."""
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    error: dict[str, Any] = body["error"]
    return error


def test_a_message_has_the_bits_of_the_chat_whole_and_streamed() -> None:
    async def work() -> None:
        async with served_app() as served:
            extras = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2}
            whole = await served.post(MESSAGES, BODY | extras | {"system": "Be brief."})
            chat = await served.post(
                CHAT, BODY | extras | {"messages": [{"role": "system", "content": "Be brief."}, *HELLO]}
            )
            (choice,) = chat["choices"]
            assert whole["content"] == [{"type": "text", "text": choice["message"]["content"]}]
            assert (whole["type"], whole["role"], whole["stop_reason"]) == (
                "message",
                "assistant",
                "max_tokens",
            )
            assert whole["token_ids"] == choice["token_ids"]
            assert whole["logprobs"] == choice["logprobs"]
            assert (whole["system_fingerprint"], whole["seed"]) == (chat["system_fingerprint"], 5)
            usage = whole["usage"]
            assert usage["output_tokens"] == 24
            prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert prompt == chat["usage"]["prompt_tokens"]
            message, events = await stream(served, BODY | extras | {"system": "Be brief."})
            assert without_ids(message) == without_ids(whole)
            assert len([event for event in events if event["type"] == "content_block_delta"]) > 1
            counted = await served.post(COUNT, {"messages": HELLO, "system": "Be brief."})
            assert counted == {"input_tokens": prompt}
            await served.check_idle()

    run(work())


def test_a_receipt_is_that_of_the_chat_and_answers_are_counted() -> None:
    """Whole and streamed: the receipt is the chat's, and metrics count a message as they count a chat."""

    async def work() -> None:
        async with served_app() as served:
            chat = await served.post(CHAT, BODY | {"receipt": True})
            whole = await served.post(MESSAGES, BODY | {"receipt": True})
            message, _ = await stream(served, BODY | {"receipt": True})
            assert whole["receipt"] == message["receipt"] == chat["receipt"]
            text = (await served.client.get("/metrics")).text
            (line,) = [
                line for line in text.splitlines() if line.startswith("samewise:request_success_total{")
            ]
            assert float(line.split()[-1]) == 3

    run(work())


def test_zero_tokens_read_the_prompt() -> None:
    async def work() -> None:
        async with served_app() as served:
            whole = await served.post(MESSAGES, BODY | {"max_tokens": 0})
            assert (whole["content"], whole["usage"]["output_tokens"]) == ([], 0)
            assert whole["stop_reason"] == "max_tokens"
            assert without_ids((await stream(served, BODY | {"max_tokens": 0}))[0]) == without_ids(whole)

    run(work())


def test_stop_sequences() -> None:
    async def work() -> None:
        async with served_app() as served:
            text = (await served.post(MESSAGES, BODY))["content"][0]["text"]
            stop = next(letter for letter in text[3:] if letter.isascii() and letter not in text[:3])
            whole = await served.post(MESSAGES, BODY | {"stop_sequences": ["\x00\x01", stop]})
            assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
            assert whole["content"][0]["text"] == text.partition(stop)[0]
            assert without_ids((await stream(served, BODY | {"stop_sequences": [stop]}))[0]) == without_ids(
                whole
            )

    run(work())


def test_a_tool_is_used_and_its_result_returned() -> None:
    async def work() -> None:
        async with served_app(eos=True) as served:
            served.llm.intake.tokenizer.chat_template = HERMES
            choice = {"type": "any", "disable_parallel_tool_use": True}
            tools = {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}
            body = BODY | tools | {"tool_choice": choice, "max_tokens": 160}
            whole = await served.post(MESSAGES, body)
            (used,) = whole["content"]
            assert (used["type"], used["name"], whole["stop_reason"]) == ("tool_use", "weather", "tool_use")
            assert used["input"]["town"] in ("Ulm", "Bonn")
            assert without_ids((await stream(served, body))[0]) == without_ids(whole)
            result = {"type": "tool_result", "tool_use_id": used["id"], "content": "rain"}
            messages = [
                *HELLO,
                {"role": "assistant", "content": [used]},
                {"role": "user", "content": [result]},
            ]
            await served.post(MESSAGES, BODY | tools | {"messages": messages})
            counted = await served.post(COUNT, {"messages": messages} | tools)
            assert (
                counted["input_tokens"] > (await served.post(COUNT, {"messages": messages}))["input_tokens"]
            )
            await served.check_idle()

    run(work())


def test_a_schema_is_followed() -> None:
    async def work() -> None:
        async with served_app(eos=True) as served:
            config = {"format": {"type": "json_schema", "schema": SCHEMA}}
            whole = await served.post(MESSAGES, BODY | {"output_config": config, "max_tokens": 80})
            assert set(json.loads(whole["content"][0]["text"])) == {"name", "age"}
            assert whole["stop_reason"] == "end_turn"

    run(work())


def test_thinking_is_a_block_of_its_own_and_comes_back() -> None:
    async def work() -> None:
        async with served_app(eos=True) as served:
            served.llm.intake.tokenizer.chat_template = THINKING
            thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
            # A grammar of the whole answer, as a chat takes it: a tiny model does not think by itself.
            body = BODY | thinking | {"max_tokens": 80, "return_token_ids": True}
            chat = await served.post(
                CHAT, {"messages": HELLO, "temperature": 0.8, "seed": 5, "max_tokens": 80,
                       "response_format": THOUGHT, "enable_thinking": True},
            )  # fmt: skip
            message = chat["choices"][0]["message"]
            assert message["reasoning"] == message["reasoning_content"]
            assert set(message["reasoning"]) <= set("abc")
            assert set(message["content"]) <= set("def")
            blocks = [
                {"type": "thinking", "thinking": message["reasoning"], "signature": "x"},
                {"type": "text", "text": message["content"]},
            ]
            messages = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": "so?"}]
            continued = await served.post(MESSAGES, body | {"messages": messages})
            prompt = served.llm.intake.decode(continued["prompt_token_ids"])
            assert f"<think>\n{message['reasoning']}\n</think>\n\n{message['content']}" in prompt
            assert prompt.endswith("assistant: ")
            quiet = await served.post(MESSAGES, BODY | {"return_token_ids": True})
            assert served.llm.intake.decode(quiet["prompt_token_ids"]).endswith("</think>\n\n")

    run(work())


@pytest.mark.parametrize("display", [{}, {"display": "omitted"}])
def test_a_prompt_that_opens_the_marks_begins_a_thinking_block(display: dict[str, str]) -> None:
    async def work() -> None:
        async with served_app() as served:
            served.llm.intake.tokenizer.chat_template = OPENED + "{# </think> #}"
            body = BODY | {"thinking": {"type": "adaptive"} | display}
            whole = await served.post(MESSAGES, body)
            (block,) = whole["content"]
            assert block["type"] == "thinking"
            assert bool(block["thinking"]) is not bool(display)
            assert len(block["signature"]) == 64
            assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 24}
            assert without_ids((await stream(served, body))[0]) == without_ids(whole)
            chat = await served.chat(max_tokens=24, temperature=0.8, seed=5)
            assert chat["choices"][0]["message"]["content"] is None
            assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == 24
            events = await served.events(
                CHAT, {"messages": HELLO, "max_tokens": 24, "temperature": 0.8, "seed": 5}
            )
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            text = "".join(delta.get("reasoning", "") for delta in deltas)
            assert text == chat["choices"][0]["message"]["reasoning"]

    run(work())


def test_a_last_message_of_the_assistant_is_continued() -> None:
    async def work() -> None:
        async with served_app() as served:
            messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
            whole = await served.post(MESSAGES, BODY | {"messages": messages, "return_token_ids": True})
            assert served.llm.intake.decode(whole["prompt_token_ids"]).endswith("assistant: Well,")

    run(work())


def test_an_answer_that_exceeds_the_context_is_ended_by_it() -> None:
    async def work() -> None:
        async with served_app() as served:
            body = BODY | {"max_tokens": 32000, "ignore_eos": True}
            whole = await served.post(MESSAGES, body)
            assert whole["stop_reason"] == "model_context_window_exceeded"
            reply = await served.client.post(
                MESSAGES, json=BODY | {"messages": [{"role": "user", "content": "x" * 5000}]}
            )
            assert reply.status_code == 400
            assert error_of(reply)["type"] == "invalid_request_error"
            assert error_of(reply)["param"] == "messages"

    run(work())


JSON = {"Content-Type": "application/json"}


def test_keys_and_errors_in_anthropics_form() -> None:
    async def work() -> None:
        async with served_app(ServeSettings(keys=Keys.of(["one"]))) as served:
            post = served.client.post
            assert (await post(MESSAGES, json=BODY, headers={"x-api-key": "one"})).status_code == 200
            assert (
                await post(MESSAGES, json=BODY, headers={"Authorization": "Bearer one"})
            ).status_code == 200
            assert (
                await post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers={"x-api-key": "one"})
            ).status_code == 200
            for reply, status, kind in (
                (await post(MESSAGES, json=BODY), 401, "authentication_error"),
                (await post(COUNT, json=BODY, headers={"x-api-key": "two"}), 401, "authentication_error"),
            ):
                assert (reply.status_code, error_of(reply)["type"]) == (status, kind)
            served.client.headers["x-api-key"] = "one"
            for reply, status, kind in (
                (await post(MESSAGES, content=b"{", headers=JSON), 400, "invalid_request_error"),
                (await post(MESSAGES, json=BODY | {"max_tokens": -1}), 400, "invalid_request_error"),
                (await post(MESSAGES, json=BODY | {"model": "other"}), 404, "not_found_error"),
                (await post(COUNT, json=BODY | {"model": "other"}), 404, "not_found_error"),
                (await post(MESSAGES + "/batches", json={}), 404, "not_found_error"),
                (await served.client.get(MESSAGES), 405, "invalid_request_error"),
                (await post(MESSAGES, content=b"{"), 415, "invalid_request_error"),
                (await post(MESSAGES, content=b" " * (9 * 2**20), headers=JSON), 413, "request_too_large"),
            ):
                assert (reply.status_code, error_of(reply)["type"]) == (status, kind), reply.text
            assert (await post(CHAT, json={})).json()["error"]["param"] == "messages"

    run(work())


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    async def work() -> None:
        async with served_app() as served:
            body = BODY | {"stream": True, "max_tokens": 400, "ignore_eos": True}
            streaming = asyncio.create_task(served.client.post(MESSAGES, json=body))
            while not (await served.llm.stats())["output_tokens"]:
                await asyncio.sleep(0.005)
            await served.worker.abort_all()
            events = named_events((await streaming).text)
            assert (events[0]["type"], events[-1]["type"]) == ("message_start", "error")
            assert events[-1]["error"]["type"] == "overloaded_error"

    run(work())
