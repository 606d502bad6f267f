"""openai-python, synchronous and asynchronous, against a server in a process of its own.

Single fields are tested in tests/serve; here are the library's helpers, errors, disconnects and shutdown.
"""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, Field
from server_process import NAME, ServerProcess, running_server

import openai
from openai import AsyncOpenAI, OpenAI

HELLO: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hello"}]
LONG: Any = {"model": NAME, "prompt": "hello", "max_tokens": 400, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


class Person(BaseModel):
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=99)


class Weather(BaseModel):
    """How it is outside."""

    town: Literal["Ulm", "Bonn"]


# ---- answers


def test_all_ways_of_asking_give_the_same_answer(client: OpenAI, server: ServerProcess) -> None:
    """Whole, streamed, through the helper, raw, and concurrent: text, bits and usage are equal."""
    request: Any = {
        "model": NAME, "messages": HELLO, "max_completion_tokens": 24, "seed": 5, "temperature": 0.8, "n": 2,
        "logprobs": True, "top_logprobs": 3, "stop": ["~~"], "user": "a user",
        # The helper raises if a length limit ends an answer, so a stop token ends it.
        "logit_bias": {"70": 100}, "extra_body": {"stop_token_ids": [70], "min_tokens": 8},
    }  # fmt: skip
    one = client.chat.completions.create(**request)
    assert [choice.index for choice in one.choices] == [0, 1]
    wanted = [_content_and_bits(choice) for choice in one.choices]
    assert wanted[0] != wanted[1]
    assert all(len(bits) <= 24 and all(len(tops) == 3 for _, tops in bits) for _, bits in wanted)

    texts, bits, usage = ["", ""], [[], []], None  # type: ignore[var-annotated]
    for chunk in client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
            bits[part.index] += _bits(part.logprobs)
        usage = chunk.usage or usage
    assert list(zip(texts, bits, strict=True)) == wanted
    assert one.usage is not None
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        one.usage.prompt_tokens,
        one.usage.completion_tokens,
    )

    with client.chat.completions.stream(**request) as stream:
        assert [_content_and_bits(choice) for choice in stream.get_final_completion().choices] == wanted
    raw = client.chat.completions.with_raw_response.create(**request, extra_headers={"X-Request-Id": "mine"})
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse().id == "chatcmpl-mine"
    assert [_content_and_bits(choice) for choice in raw.parse().choices] == wanted

    async def many() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
            return list(await asyncio.gather(*(other.chat.completions.create(**request) for _ in range(6))))

    for again in asyncio.run(many()):
        assert [_content_and_bits(choice) for choice in again.choices] == wanted
        assert again.system_fingerprint == one.system_fingerprint
    server.check_idle()


def _bits(logprobs: Any) -> list[Any]:
    return (
        [(one.logprob, [top.logprob for top in one.top_logprobs]) for one in logprobs.content or []]
        if logprobs
        else []
    )


def _content_and_bits(choice: Any) -> tuple[str, list[Any]]:
    return choice.message.content, _bits(choice.logprobs)


def test_a_derived_seed_is_returned_and_reproduces_the_answer(client: OpenAI) -> None:
    request: Any = {"model": NAME, "messages": HELLO, "max_completion_tokens": 16, "temperature": 1}
    one = client.chat.completions.create(**request)
    assert one.choices[0].model_extra is not None
    again = client.chat.completions.create(**request, seed=one.choices[0].model_extra["seed"])
    assert again.choices[0].message.content == one.choices[0].message.content


def test_answers_to_a_schema_are_parsed_into_objects(client: OpenAI) -> None:
    request: Any = {
        "model": NAME,
        "messages": HELLO,
        "seed": 1,
        "temperature": 0.7,
        "max_completion_tokens": 120,
    }
    parsed = client.chat.completions.parse(**request, response_format=Person)
    person = parsed.choices[0].message.parsed
    assert isinstance(person, Person)
    with client.chat.completions.stream(**request, response_format=Person) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == person
    free = client.chat.completions.create(**request, response_format={"type": "json_object"})
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content or ""), dict)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**request | {"max_completion_tokens": 2}, response_format=Person)


def test_required_tools_are_called(client: OpenAI) -> None:
    request: Any = {
        "model": NAME, "messages": HELLO, "max_completion_tokens": 120, "temperature": 0,
        "tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required",
        "parallel_tool_calls": False,
    }  # fmt: skip
    one = client.chat.completions.parse(**request).choices[0]
    assert one.finish_reason == "tool_calls"
    (call,) = one.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**request) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert streamed.id == call.id


def test_a_prompt_is_scored_without_generating(client: OpenAI) -> None:
    """`echo` with `max_tokens=0`: the prompt and its log-probabilities."""
    whole = client.completions.create(
        model=NAME, prompt="a frame of rows", max_tokens=0, logprobs=1, echo=True
    )
    assert whole.choices[0].text == "a frame of rows"
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.token_logprobs or [])[0] is None
    assert len(logprobs.token_logprobs or []) == len("a frame of rows")
    assert logprobs.text_offset == list(range(15))


# ---- errors


def test_errors_are_raised_as_their_classes(client: OpenAI, server: ServerProcess) -> None:
    chat, complete = client.chat.completions.create, client.completions.create
    with pytest.raises(openai.BadRequestError) as long:
        complete(model=NAME, prompt="x" * 4000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as empty:
        chat(model=NAME, messages=[])
    assert empty.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as refused:
        complete(model=NAME, prompt="x", suffix="y")
    assert (refused.value.param, refused.value.code) == ("suffix", "unsupported_parameter")
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as schema:
        chat(model=NAME, messages=HELLO, response_format=bad)
    assert schema.value.param == "response_format"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("gpt-4")
    assert (unknown.value.status_code, unknown.value.code) == (404, "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=NAME, input="x")
    with pytest.raises(openai.APIStatusError) as large:
        complete(model=NAME, prompt="x" * (9 * 2**20))
    assert large.value.status_code == 413
    assert large.value.request_id
    slow = LONG | {"n": 16, "extra_body": {"ignore_eos": True, "proposer": "none"}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(**slow)
    with pytest.raises(openai.APIConnectionError):
        OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0).models.list()
    server.check_idle()  # the request that timed out was aborted


# ---- disconnects and shutdown


def test_disconnects_free_the_pages(client: OpenAI, server: ServerProcess) -> None:
    aborted = server.metric("requests_aborted_total")
    for _ in range(3):
        with client.completions.create(**LONG, stream=True) as stream:
            next(iter(stream))
    server.check_idle()

    async def cancelled() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
            tasks = [asyncio.create_task(other.completions.create(**LONG)) for _ in range(4)]
            await asyncio.sleep(0.3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cancelled())
    server.check_idle()
    assert server.metric("requests_aborted_total") > aborted


def test_sigterm_under_load_completes_active_requests(folder: Path, tmp_path: Path) -> None:
    """Running and waiting requests get the same answers, new ones get 503, and the exit code is 0."""
    with running_server(folder, tmp_path / "log", "--kv-memory", "1MiB", "--max-num-seqs", "4") as server:
        address = f"{server.url}/v1"

        def ask(i: int) -> tuple[str, str]:
            with OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120) as client:
                undrafted = LONG["extra_body"] | {"proposer": "none"}  # repeated answers would be fast
                request: Any = LONG | {"prompt": f"question {i}", "max_tokens": 600, "seed": i}
                request["extra_body"] = undrafted
                if i % 2:
                    one = client.completions.create(**request).choices[0]
                    return one.text, one.finish_reason
                text, end = "", ""
                for chunk in client.completions.create(**request, stream=True):
                    text += chunk.choices[0].text
                    end = chunk.choices[0].finish_reason or end
                return text, end

        with ThreadPoolExecutor(10) as pool:
            wanted = list(pool.map(ask, range(10)))
            began = server.metric("requests_total")
            asking = [pool.submit(ask, i) for i in range(10)]
            while server.metric("requests_total") < began + 10:
                time.sleep(0.01)
            with OpenAI(base_url=address, api_key="none", max_retries=0) as late:
                server.process.send_signal(signal.SIGTERM)
                server.wait_for_log("draining")
                assert not all(one.done() for one in asking)  # otherwise nothing was drained
                with pytest.raises(openai.InternalServerError) as refused:
                    late.completions.create(**LONG)
                assert (refused.value.status_code, refused.value.code) == (503, "draining")
                assert refused.value.response.headers["retry-after"]
            assert httpx.get(f"{server.url}/ready").status_code == 503
            assert [one.result() for one in asking] == wanted
        assert {end for _, end in wanted} == {"length"}
        assert server.wait() == 0
        assert '"level": "error"' not in server.log.read_text()
