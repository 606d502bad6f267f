"""`/v1/responses` over a tiny model: whole and streamed, stored and continued, with the bits of a chat."""

import asyncio
import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from samewise.openai.errors import ApiError
from samewise.openai.responses.exchange import ResponseRecord
from samewise.serve.limits import ServeLimits
from samewise.serve.settings import Keys, ServeSettings
from samewise.serve.stored import OVERHEAD, ResponseStore

from agent_bodies import HERMES, PARAMETERS, SCHEMA, THINKING, THOUGHT, named_events  # isort: skip
from served_app import CHAT, error_of, run, served_app  # isort: skip

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"input": "hello", "temperature": 0.8, "seed": 5, "max_output_tokens": 24}
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
EVENTS: Any = TypeAdapter(ResponseStreamEvent)
TIMES = ("id", "created_at", "completed_at", "usage")


async def stream(served: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await served.client.post(RESPONSES, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    events = named_events(reply.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        shown = event | ({"response": published(event["response"])} if "response" in event else {})
        assert EVENTS.validate_python(shown).type == event["type"]
    return events


def published(response: dict[str, Any]) -> dict[str, Any]:
    """The response without the form of text that OpenAI does not have."""
    own = response["text"]["format"]["type"] == "grammar"
    return response | ({"text": {"format": {"type": "text"}}} if own else {})


def content_of(response: dict[str, Any]) -> Any:
    """What must be equal however an answer was sent: everything but ids, times and usage details."""
    text = json.dumps({name: value for name, value in response.items() if name not in TIMES})
    return json.loads(text.replace(response["id"].removeprefix("resp_"), "ID"))


def test_a_response_has_the_bits_of_the_chat_whole_and_streamed() -> None:
    async def work() -> None:
        async with served_app() as served:
            extras = {"return_token_ids": True}
            include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
            whole = await served.post(RESPONSES, BODY | extras | include | {"instructions": "Be brief."})
            Response.model_validate(whole)
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
            chat = await served.post(
                CHAT,
                {"messages": messages, "temperature": 0.8, "seed": 5, "max_tokens": 24, "logprobs": True,
                 "top_logprobs": 2, "return_token_ids": True},
            )  # fmt: skip
            (choice,) = chat["choices"]
            (message,) = whole["output"]
            (part,) = message["content"]
            assert whole["token_ids"] == choice["token_ids"]
            assert whole["prompt_token_ids"] == chat["prompt_token_ids"]
            assert part["text"] == choice["message"]["content"]
            wanted = choice["logprobs"]["content"]
            assert [row["logprob"] for row in part["logprobs"]] == [row["logprob"] for row in wanted]
            assert [len(row["top_logprobs"]) for row in part["logprobs"]] == [2] * 24
            assert (whole["system_fingerprint"], whole["seed"]) == (chat["system_fingerprint"], 5)
            assert (whole["status"], whole["incomplete_details"]) == (
                "incomplete",
                {"reason": "max_output_tokens"},
            )
            assert whole["usage"]["output_tokens"] == 24
            assert whole["usage"]["total_tokens"] == chat["usage"]["total_tokens"]
            events = await stream(served, BODY | extras | include | {"instructions": "Be brief."})
            assert content_of(events[-1]["response"]) == content_of(whole)
            deltas = [event for event in events if event["type"] == "response.output_text.delta"]
            assert "".join(delta["delta"] for delta in deltas) == part["text"]
            rows = [row for delta in deltas for row in delta["logprobs"]]
            assert rows == part["logprobs"][: len(rows)]
            fields = {"temperature": 0.8, "seed": 5, "max_tokens": 24, "receipt": True}
            chat = await served.post(CHAT, {"messages": messages} | fields)
            for response in (
                await served.post(RESPONSES, BODY | {"instructions": "Be brief.", "receipt": True}),
                (await stream(served, BODY | {"instructions": "Be brief.", "receipt": True}))[-1]["response"],
            ):
                assert response["receipt"] == chat["receipt"]
            await served.check_idle()

    run(work())


def test_a_response_is_stored_continued_and_deleted() -> None:
    async def work() -> None:
        async with served_app() as served:
            one = await served.post(RESPONSES, BODY)
            stored = await served.client.get(f"{RESPONSES}/{one['id']}")
            assert stored.json() == one
            stored = await served.client.get(f"{RESPONSES}/{one['id']}?stream=false&include[]=x")
            assert stored.json() == one
            streamed = await served.client.get(f"{RESPONSES}/{one['id']}?stream=true")
            assert (streamed.status_code, error_of(streamed)["param"]) == (400, "stream")
            two = await served.post(
                RESPONSES,
                BODY | {"input": "and now?", "previous_response_id": one["id"], "return_token_ids": True},
            )
            assert two["previous_response_id"] == one["id"]
            text = one["output"][0]["content"][0]["text"]
            items = [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": text},
                {"role": "user", "content": "and now?"},
            ]
            same = await served.post(RESPONSES, BODY | {"input": items, "return_token_ids": True})
            assert same["prompt_token_ids"] == two["prompt_token_ids"]
            assert same["token_ids"] == two["token_ids"]
            reference = {"type": "item_reference", "id": one["output"][0]["id"]}
            again = await served.post(
                RESPONSES, BODY | {"input": [items[0], reference, items[2]], "return_token_ids": True}
            )
            assert again["prompt_token_ids"] == two["prompt_token_ids"]
            twice = await served.client.post(RESPONSES, json=BODY | {"input": [reference, reference]})
            assert (twice.status_code, error_of(twice)["param"]) == (400, "input")
            events = await stream(served, BODY | {"input": "so", "previous_response_id": two["id"]})
            streamed = events[-1]["response"]
            assert (await served.client.get(f"{RESPONSES}/{streamed['id']}")).json() == streamed
            deleted = await served.client.delete(f"{RESPONSES}/{one['id']}")
            assert deleted.json() == {"id": one["id"], "object": "response", "deleted": True}
            for reply in (
                await served.client.get(f"{RESPONSES}/{one['id']}"),
                await served.client.delete(f"{RESPONSES}/{one['id']}"),
                await served.client.post(RESPONSES, json=BODY | {"previous_response_id": one["id"]}),
            ):
                assert (reply.status_code, error_of(reply)["code"]) == (404, "response_not_found")
            # What continued it, or referred to an item of it, has a copy of the conversation.
            await served.post(RESPONSES, BODY | {"previous_response_id": two["id"]})
            await served.post(RESPONSES, BODY | {"previous_response_id": again["id"]})
            unstored = await served.post(RESPONSES, BODY | {"store": False})
            assert (await served.client.get(f"{RESPONSES}/{unstored['id']}")).status_code == 404
            wrong = await served.client.put(f"{RESPONSES}/x", json={})
            assert wrong.status_code == 405
            assert {"GET", "DELETE"} <= set(wrong.headers["allow"].split(", "))

    run(work())


def test_a_stored_response_belongs_to_its_key() -> None:
    async def work() -> None:
        settings = ServeSettings(keys=Keys.of(["one", "two"]))
        async with served_app(settings) as served:
            mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
            reply = await served.client.post(RESPONSES, json=BODY, headers=mine)
            address = f"{RESPONSES}/{reply.json()['id']}"
            continued = BODY | {"previous_response_id": reply.json()["id"]}
            assert (await served.client.get(address, headers=other)).status_code == 404
            assert (await served.client.delete(address, headers=other)).status_code == 404
            assert (await served.client.post(RESPONSES, json=continued, headers=other)).status_code == 404
            assert (await served.client.get(address)).status_code == 401
            assert (await served.client.get(address, headers=mine)).status_code == 200
            assert (await served.client.post(RESPONSES, json=continued, headers=mine)).status_code == 200

    run(work())


def record(name: str, size: int) -> ResponseRecord:
    return ResponseRecord(name, b"x" * (size - OVERHEAD), b"")


def held(store: ResponseStore, key: bytes, *names: str) -> list[bool]:
    found = []
    for name in names:
        try:
            found.append(store.get(key, name, param="x").id == name)
        except ApiError:
            found.append(False)
    return found


def test_the_memory_of_stored_responses_is_bounded() -> None:
    """The oldest of the key that holds most is forgotten; one that is too large is not stored."""
    store = ResponseStore(10_000)
    for i in range(3):
        store.add(b"a", record(f"a{i}", 2500))
    store.add(b"b", record("b0", 2500))
    assert store.used == 10_000
    store.add(b"b", record("b1", 2500))
    assert held(store, b"a", "a0", "a1", "a2") == [False, True, True]
    assert held(store, b"b", "b0", "b1", "a1") == [True, True, False]
    store.add(b"c", record("c0", 2_501))  # more than a quarter
    assert held(store, b"c", "c0") == [False]
    store.add(b"c", record("c1", 1_000))
    assert held(store, b"a", "a1", "a2") + held(store, b"b", "b0", "b1") + held(store, b"c", "c1") == [
        False, True, True, True, True,
    ]  # fmt: skip
    store.delete(b"c", "c1")
    assert store.used == 7_500


def test_the_server_forgets_the_oldest() -> None:
    async def work() -> None:
        settings = ServeSettings(limits=ServeLimits(max_stored=16_000))
        async with served_app(settings) as served:
            ids = [(await served.post(RESPONSES, BODY | {"seed": i}))["id"] for i in range(9)]
            statuses = [(await served.client.get(f"{RESPONSES}/{one}")).status_code for one in ids]
            assert statuses[0] == 404
            assert statuses[-1] == 200
            assert served.app.state.service.stored.used <= 16_000

    run(work())


def test_a_required_tool_is_called_and_its_result_returned() -> None:
    async def work() -> None:
        async with served_app(eos=True) as served:
            served.llm.intake.tokenizer.chat_template = HERMES
            body = BODY | {
                "tools": [TOOL, {"type": "web_search"}], "tool_choice": "required", "max_output_tokens": 160,
                "parallel_tool_calls": False,
            }  # fmt: skip
            whole = await served.post(RESPONSES, body)
            (call,) = whole["output"]
            assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
            assert json.loads(call["arguments"])["town"] in ("Ulm", "Bonn")
            assert whole["status"] == "completed"
            events = await stream(served, body)
            assert content_of(events[-1]["response"]) == content_of(whole)
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
            await served.post(
                RESPONSES, BODY | {"previous_response_id": whole["id"], "input": [result], "tools": [TOOL]}
            )
            await served.check_idle()

    run(work())


def test_a_schema_is_followed() -> None:
    async def work() -> None:
        async with served_app(eos=True) as served:
            text = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
            body = BODY | {"text": text, "max_output_tokens": 80}
            whole = await served.post(RESPONSES, body)
            person = json.loads(whole["output"][0]["content"][0]["text"])
            assert set(person) == {"name", "age"}
            assert whole["text"] == text
            assert content_of((await stream(served, body))[-1]["response"]) == content_of(whole)

    run(work())


def test_beside_tools_an_answer_is_a_call_or_follows_the_schema() -> None:
    """What agents with a type for their result send: tools, and a form of the text."""

    async def work() -> None:
        async with served_app(eos=True) as served:
            served.llm.intake.tokenizer.chat_template = HERMES + "{# </think> #}"
            text = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
            body = BODY | {"tools": [TOOL], "text": text, "max_output_tokens": 200}
            kinds = set()
            for seed in range(8):
                whole = await served.post(RESPONSES, body | {"seed": seed, "temperature": 2})
                kinds |= {item["type"] for item in whole["output"]}
                for item in whole["output"] if whole["status"] == "completed" else ():
                    if item["type"] == "message":
                        assert set(json.loads(item["content"][0]["text"])) == {"name", "age"}
                    else:
                        assert json.loads(item["arguments"])["town"] in ("Ulm", "Bonn")
            assert kinds <= {"message", "function_call"}
            assert kinds

    run(work())


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"], ["message.output_text.logprobs"]])
def test_reasoning_is_an_item_of_its_own_and_comes_back(include: list[str]) -> None:
    async def work() -> None:
        async with served_app(eos=True) as served:
            served.llm.intake.tokenizer.chat_template = THINKING
            format_ = {"text": {"format": THOUGHT}, "include": include, "return_token_ids": True}
            body = BODY | format_ | {"max_output_tokens": 80}
            whole = await served.post(RESPONSES, body)
            Response.model_validate(published(whole))
            reasoning, message = whole["output"]
            assert set(reasoning["content"][0]["text"]) <= set("abc")
            (part,) = message["content"]
            assert set(part["text"]) <= set("def")
            spent = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
            assert spent == len("<think>\n\n</think>") + len(reasoning["content"][0]["text"])
            if "message.output_text.logprobs" in include:
                assert len(part["logprobs"]) == len(whole["token_ids"]) - spent
            events = await stream(served, body)
            assert content_of(events[-1]["response"]) == content_of(whole)
            more = BODY | {"input": "so?", "previous_response_id": whole["id"], "return_token_ids": True}
            continued = await served.post(RESPONSES, more)
            prompt = served.llm.intake.decode(continued["prompt_token_ids"])
            assert f"<think>\n{reasoning['content'][0]['text']}\n</think>\n\n{part['text']}" in prompt
            if "reasoning.encrypted_content" in include:
                sealed = {name: value for name, value in reasoning.items() if name != "content"}
                items = [
                    {"role": "user", "content": "hello"},
                    sealed,
                    message,
                    {"role": "user", "content": "so?"},
                ]
                same = await served.post(RESPONSES, BODY | {"input": items, "return_token_ids": True})
                assert same["prompt_token_ids"] == continued["prompt_token_ids"]

    run(work())


def test_an_answer_that_exceeds_the_context_is_ended_by_it() -> None:
    async def work() -> None:
        async with served_app() as served:
            whole = await served.post(
                RESPONSES, BODY | {"max_output_tokens": 10**6, "ignore_eos": True, "receipt": True}
            )
            assert whole["status"] == "incomplete"
            tokens = whole["usage"]["total_tokens"]
            assert tokens == served.llm.max_model_len
            assert whole["receipt"]["max_tokens"] if "max_tokens" in whole["receipt"] else whole["receipt"]
            status, error = await served.refusal(RESPONSES, BODY | {"input": "x" * 5000})
            assert (status, error["param"], error["code"]) == (400, "input", "context_length_exceeded")

    run(work())


def test_errors_name_the_fields_of_responses() -> None:
    async def work() -> None:
        async with served_app() as served:
            bad = {"type": "json_schema", "name": "x", "schema": {"type": "soup"}}
            status, error = await served.refusal(RESPONSES, BODY | {"text": {"format": bad}})
            assert (status, error["param"]) == (400, "text.format")
            status, error = await served.refusal(RESPONSES, BODY | {"model": "other"})
            assert (status, error["code"]) == (404, "model_not_found")
            await served.check_idle()

    run(work())


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_number_that_no_reply_can_hold_is_refused(stream: bytes) -> None:
    """Metadata and tools are repeated in the response."""

    async def work() -> None:
        async with served_app() as served:
            raw = b'{"input": "a", "metadata": {"b": 1e400}, "stream": ' + stream + b"}"
            reply = await served.client.post(
                RESPONSES, content=raw, headers={"Content-Type": "application/json"}
            )
            assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_json")
            assert "1e400 is too large" in error_of(reply)["message"]

    run(work())


def test_a_stream_that_fails_ends_with_an_event() -> None:
    async def work() -> None:
        async with served_app() as served:
            body = BODY | {"stream": True, "max_output_tokens": 400, "ignore_eos": True}
            streaming = asyncio.create_task(served.client.post(RESPONSES, json=body))
            while not (await served.llm.stats())["output_tokens"]:
                await asyncio.sleep(0.005)
            await served.worker.abort_all()
            events = named_events((await streaming).text)
            assert events[-1]["type"] == "response.failed"
            assert EVENTS.validate_python(events[-1]).response.error.code == "server_error"
            assert served.app.state.service.stored.used == 0

    run(work())
