"""openai-python against the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from served_app import ServedApp, run, served_app, wait_until

import openai
from openai import AsyncOpenAI
from samewise.serve.settings import Keys, ServeSettings

HELLO: Any = [{"role": "user", "content": "hello"}]
NAME = "tiny-llama"


@asynccontextmanager
async def client(
    settings: ServeSettings | None = None, **engine: Any
) -> AsyncIterator[tuple[AsyncOpenAI, ServedApp]]:
    async with (
        served_app(settings, on_port=True, **engine) as served,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0) as openai_client,
    ):
        yield openai_client, served


def test_chats_whole_and_streamed() -> None:
    async def work() -> None:
        async with client() as (openai_, served):
            request: Any = {"model": NAME, "messages": HELLO, "max_completion_tokens": 8, "temperature": 0}
            one = await openai_.chat.completions.create(**request)
            assert one.choices[0].message.role == "assistant"
            assert one.choices[0].finish_reason == "length"
            assert one.system_fingerprint == served.llm.contract.id
            assert one.usage is not None
            assert one.usage.completion_tokens == 8
            assert one.usage.prompt_tokens_details is not None
            assert one.usage.completion_tokens_details is not None
            assert one.usage.completion_tokens_details.accepted_prediction_tokens is not None
            assert one._request_id
            predicted = await openai_.chat.completions.create(
                **request, prediction={"type": "content", "content": one.choices[0].message.content}
            )
            assert predicted.choices[0].message == one.choices[0].message
            text, usage, roles = "", None, 0
            stream = await openai_.chat.completions.create(
                **request, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                if chunk.choices:
                    text += chunk.choices[0].delta.content or ""
                    roles += chunk.choices[0].delta.role == "assistant"
                else:
                    usage = chunk.usage
            assert text == one.choices[0].message.content
            assert roles == 1
            assert usage is not None
            assert usage.total_tokens == one.usage.total_tokens

    run(work())


def test_the_streaming_helper_joins_the_answer() -> None:
    async def work() -> None:
        async with client() as (openai_, _):
            request: Any = {
                "model": NAME, "messages": HELLO, "max_completion_tokens": 9, "seed": 2, "logprobs": True,
                "logit_bias": {"70": 100}, "extra_body": {"stop_token_ids": [70], "min_tokens": 8},
            }  # fmt: skip
            one = await openai_.chat.completions.create(**request)
            async with openai_.chat.completions.stream(**request) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == one.choices[0].message.content
            assert final.choices[0].logprobs is not None
            assert one.choices[0].logprobs is not None
            assert [part.logprob for part in final.choices[0].logprobs.content or []] == [
                part.logprob for part in one.choices[0].logprobs.content or []
            ]

    run(work())


def test_completions_are_reproducible() -> None:
    async def work() -> None:
        async with client() as (openai_, _):
            request: Any = {"model": NAME, "prompt": ["hello", "you"], "max_tokens": 8, "n": 2, "seed": 7}
            one = await openai_.completions.create(**request, logprobs=2)
            assert [choice.index for choice in one.choices] == [0, 1, 2, 3]
            assert len({choice.text for choice in one.choices}) == 4
            logprobs = one.choices[0].logprobs
            assert logprobs is not None
            assert len(logprobs.token_logprobs or []) == 8
            again = await openai_.completions.create(**request)
            assert [choice.text for choice in again.choices] == [choice.text for choice in one.choices]
            other = await openai_.completions.create(**(request | {"seed": 8}))
            assert [choice.text for choice in other.choices] != [choice.text for choice in one.choices]
            texts = [""] * 4
            async for chunk in await openai_.completions.create(**request, stream=True):
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == [choice.text for choice in one.choices]

    run(work())


def test_stop_strings_and_extra_fields() -> None:
    async def work() -> None:
        async with client() as (openai_, _):
            request: Any = {"model": NAME, "prompt": "hello", "max_tokens": 30, "temperature": 0}
            text = (await openai_.completions.create(**request)).choices[0].text
            stop = next(c for c in text[4:] if c.isprintable())
            one = await openai_.completions.create(
                **request, stop=stop, extra_body={"return_token_ids": True}
            )
            assert one.choices[0].finish_reason == "stop"
            assert one.choices[0].text == text[: text.index(stop)]
            assert one.choices[0].model_extra is not None
            assert one.choices[0].model_extra["token_ids"]
            free = await openai_.completions.create(**request, extra_body={"verify": False, "top_k": 5})
            assert free.choices

    run(work())


def test_models_are_listed() -> None:
    async def work() -> None:
        async with client() as (openai_, _):
            assert [card.id async for card in openai_.models.list()] == [NAME]
            assert (await openai_.models.retrieve(NAME)).id == NAME

    run(work())


def test_errors_are_raised_as_their_classes() -> None:
    async def work() -> None:
        async with client(ServeSettings(keys=Keys.of(["secret"])), max_queued=1, max_num_seqs=1) as (
            openai_,
            served,
        ):
            ask = openai_.chat.completions.create
            with pytest.raises(openai.BadRequestError, match="temperature") as bad:
                await ask(model=NAME, messages=HELLO, temperature=-1)
            assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
            with pytest.raises(openai.NotFoundError) as unknown:
                await ask(model="other", messages=HELLO)
            assert unknown.value.code == "model_not_found"
            with pytest.raises(openai.NotFoundError) as gone:
                await openai_.responses.retrieve("resp_0")
            assert gone.value.code == "response_not_found"
            with pytest.raises(openai.AuthenticationError) as denied:
                await openai_.with_options(api_key="wrong").models.list()
            assert denied.value.code == "invalid_api_key"
            requests = [
                ask(model=NAME, messages=HELLO, max_tokens=60, extra_body={"ignore_eos": True})
                for _ in range(8)
            ]
            results = await asyncio.gather(*requests, return_exceptions=True)
            assert any(isinstance(one, openai.RateLimitError) for one in results)
            await served.check_idle()
            served.worker._draining = True
            with pytest.raises(openai.InternalServerError) as draining:
                await ask(model=NAME, messages=HELLO)
            assert draining.value.status_code == 503

    run(work())


def test_the_client_retries_after_a_full_queue() -> None:
    async def work() -> None:
        async with client(max_queued=2, max_num_seqs=2) as (openai_, _):
            retrying = openai_.with_options(max_retries=20)
            ask = [
                retrying.completions.create(model=NAME, prompt=f"{i}", max_tokens=20, temperature=0)
                for i in range(8)
            ]
            assert len(await asyncio.gather(*ask)) == 8

    run(work())


def test_cancelling_frees_the_pages() -> None:
    async def work() -> None:
        async with client() as (openai_, served):
            request: Any = {
                "model": NAME,
                "prompt": "hello",
                "max_tokens": 400,
                "extra_body": {"ignore_eos": True},
            }
            stream = await openai_.completions.create(**request, stream=True)
            async for _ in stream:
                break
            await stream.close()
            await wait_until(lambda: served.llm._engine.idle)
            task = asyncio.create_task(openai_.completions.create(**request))
            await wait_until(lambda: served.llm._engine.scheduler.num_running == 1)
            task.cancel()
            await wait_until(lambda: served.llm._engine.idle and not served.worker.num_active)
            await served.check_idle()
            assert served.llm._engine.scheduler.counters.aborted == 2

    run(work())


def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    async def work() -> None:
        async with client() as (openai_, served):
            stream = await openai_.completions.create(
                model=NAME, prompt="hello", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            first = await anext(aiter(stream))
            assert first.choices
            await served.worker.abort_all()
            with pytest.raises(openai.APIError, match="shutting down"):
                _ = [chunk async for chunk in stream]

    run(work())
