"""openai-python, the current major, against a server that it does not know."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from shop import Shop, go, shop, until

import openai
from openai import AsyncOpenAI
from samewise.serve.settings import Keys, ServeSettings

HELLO: Any = [{"role": "user", "content": "hello"}]
NAME = "tiny-llama"


@asynccontextmanager
async def client(
    settings: ServeSettings | None = None, **engine: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Shop]]:
    async with (
        shop(settings, real=True, **engine) as here,
        AsyncOpenAI(base_url=f"{here.url}/v1", api_key="secret", max_retries=0) as made,
    ):
        yield made, here


def test_chat() -> None:
    async def work() -> None:
        async with client() as (openai_, here):
            asked: Any = {"model": NAME, "messages": HELLO, "max_completion_tokens": 8, "temperature": 0}
            one = await openai_.chat.completions.create(**asked)
            assert one.choices[0].message.role == "assistant"
            assert one.choices[0].finish_reason == "length"
            assert one.system_fingerprint == here.llm.contract.id
            assert one.usage is not None
            assert one.usage.completion_tokens == 8
            assert one.usage.prompt_tokens_details is not None
            assert one.usage.completion_tokens_details is not None
            assert one.usage.completion_tokens_details.accepted_prediction_tokens is not None
            assert one._request_id
            text, usage, roles = "", None, 0
            stream = await openai_.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
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

    go(work())


def test_the_streaming_helper_puts_it_together() -> None:
    async def work() -> None:
        async with client() as (openai_, _):
            asked: Any = {
                "model": NAME, "messages": HELLO, "max_completion_tokens": 9, "seed": 2, "logprobs": True,
                "logit_bias": {"70": 100}, "extra_body": {"stop_token_ids": [70], "min_tokens": 8},
            }  # fmt: skip
            one = await openai_.chat.completions.create(**asked)
            async with openai_.chat.completions.stream(**asked) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == one.choices[0].message.content
            assert final.choices[0].logprobs is not None
            assert one.choices[0].logprobs is not None
            assert [part.logprob for part in final.choices[0].logprobs.content or []] == [
                part.logprob for part in one.choices[0].logprobs.content or []
            ]

    go(work())


def test_completions() -> None:
    async def work() -> None:
        async with client() as (openai_, _):
            asked: Any = {"model": NAME, "prompt": ["hello", "you"], "max_tokens": 8, "n": 2, "seed": 7}
            one = await openai_.completions.create(**asked, logprobs=2)
            assert [choice.index for choice in one.choices] == [0, 1, 2, 3]
            assert len({choice.text for choice in one.choices}) == 4  # n are not clones
            logprobs = one.choices[0].logprobs
            assert logprobs is not None
            assert len(logprobs.token_logprobs or []) == 8
            again = await openai_.completions.create(**asked)
            assert [choice.text for choice in again.choices] == [choice.text for choice in one.choices]
            other = await openai_.completions.create(**(asked | {"seed": 8}))
            assert [choice.text for choice in other.choices] != [choice.text for choice in one.choices]
            texts = [""] * 4
            async for chunk in await openai_.completions.create(**asked, stream=True):
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == [choice.text for choice in one.choices]

    go(work())


def test_stop_and_our_own_fields() -> None:
    async def work() -> None:
        async with client() as (openai_, _):
            asked: Any = {"model": NAME, "prompt": "hello", "max_tokens": 30, "temperature": 0}
            text = (await openai_.completions.create(**asked)).choices[0].text
            stop = next(c for c in text[4:] if c.isprintable())
            one = await openai_.completions.create(**asked, stop=stop, extra_body={"return_token_ids": True})
            assert one.choices[0].finish_reason == "stop"
            assert one.choices[0].text == text[: text.index(stop)]
            assert one.choices[0].model_extra is not None
            assert one.choices[0].model_extra["token_ids"]
            free = await openai_.completions.create(**asked, extra_body={"verify": False, "top_k": 5})
            assert free.choices

    go(work())


def test_models() -> None:
    async def work() -> None:
        async with client() as (openai_, _):
            assert [card.id async for card in openai_.models.list()] == [NAME]
            assert (await openai_.models.retrieve(NAME)).id == NAME

    go(work())


def test_errors_have_their_classes() -> None:
    async def work() -> None:
        async with client(ServeSettings(keys=Keys.of(["secret"])), max_queued=1, max_num_seqs=1) as (
            openai_,
            here,
        ):
            ask = openai_.chat.completions.create
            with pytest.raises(openai.BadRequestError, match="temperature") as bad:
                await ask(model=NAME, messages=HELLO, temperature=-1)
            assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
            with pytest.raises(openai.NotFoundError) as lost:
                await ask(model="other", messages=HELLO)
            assert lost.value.code == "model_not_found"
            with pytest.raises(openai.NotFoundError, match="/v1/responses is not served"):
                await openai_.responses.create(model=NAME, input="hi")
            with pytest.raises(openai.AuthenticationError) as closed:
                await openai_.with_options(api_key="wrong").models.list()
            assert closed.value.code == "invalid_api_key"
            crowd = [
                ask(model=NAME, messages=HELLO, max_tokens=60, extra_body={"ignore_eos": True})
                for _ in range(8)
            ]
            found = await asyncio.gather(*crowd, return_exceptions=True)
            assert any(isinstance(one, openai.RateLimitError) for one in found)
            await here.quiet()
            here.worker._draining = True
            with pytest.raises(openai.InternalServerError) as gone:
                await ask(model=NAME, messages=HELLO)
            assert gone.value.status_code == 503

    go(work())


def test_the_client_comes_back_when_the_queue_was_full() -> None:
    async def work() -> None:
        async with client(max_queued=2, max_num_seqs=2) as (openai_, _):
            patient = openai_.with_options(max_retries=20)
            ask = [
                patient.completions.create(model=NAME, prompt=f"{i}", max_tokens=20, temperature=0)
                for i in range(8)
            ]
            assert len(await asyncio.gather(*ask)) == 8

    go(work())


def test_cancelling_gives_the_pages_back() -> None:
    async def work() -> None:
        async with client() as (openai_, here):
            asked: Any = {
                "model": NAME,
                "prompt": "hello",
                "max_tokens": 400,
                "extra_body": {"ignore_eos": True},
            }
            stream = await openai_.completions.create(**asked, stream=True)
            async for _ in stream:
                break
            await stream.close()
            await until(lambda: here.llm._engine.idle)
            task = asyncio.create_task(openai_.completions.create(**asked))
            await until(lambda: here.worker.num_jobs == 1)
            task.cancel()
            await until(lambda: here.llm._engine.idle and not here.worker.num_jobs)
            await here.quiet()
            assert here.llm._engine.scheduler.counters.aborted == 2

    go(work())


def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    async def work() -> None:
        async with client() as (openai_, here):
            stream = await openai_.completions.create(
                model=NAME, prompt="hello", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            first = await anext(aiter(stream))
            assert first.choices
            await here.worker.dismiss()
            with pytest.raises(openai.APIError, match="shutting down"):
                _ = [chunk async for chunk in stream]

    go(work())
