"""`/v1/completions` over a tiny model."""

import asyncio
from typing import Any

import pytest
from served_app import (
    COMPLETIONS,
    run,
    served_app,
)

from samewise import LLM, SamplingParams
from samewise.testing import tiny_engine

LONG = {"prompt": "hello", "temperature": 0, "max_tokens": 400, "ignore_eos": True}


def engine_answer(prompt: Any, **params: Any) -> Any:
    """The same request to the engine, without a server."""
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 6} | params)
    return LLM.over(tiny_engine()).generate(prompt, sampling, use_tqdm=False)[0]


def test_a_completion_equals_the_engines_own_answer() -> None:
    wanted = engine_answer("hello", seed=3, temperature=1, n=2, logprobs=2)

    async def work() -> None:
        async with served_app() as served:
            body = await served.complete(seed=3, temperature=1, n=2, logprobs=2, return_token_ids=True)
            assert body["object"] == "text_completion"
            assert body["id"].startswith("cmpl-")
            assert body["model"] == "tiny-llama"
            assert body["system_fingerprint"] == served.llm.contract.id
            assert [choice["index"] for choice in body["choices"]] == [0, 1]
            for choice, one in zip(body["choices"], wanted.outputs, strict=True):
                assert choice["text"] == one.text
                assert choice["token_ids"] == one.token_ids
                assert choice["prompt_token_ids"] == wanted.prompt_token_ids
                assert choice["logprobs"]["token_logprobs"] == one.token_logprobs  # bit for bit
                assert choice["seed"] == 3
                assert choice["finish_reason"] == "length"
            assert body["usage"]["prompt_tokens"] == 5
            assert body["usage"]["completion_tokens"] == 12

    run(work())


def test_a_prompt_is_a_text_texts_token_ids_or_lists_of_token_ids() -> None:
    async def work() -> None:
        async with served_app() as served:
            (ids,) = [(await served.post("/tokenize", {"prompt": "hello"}))["tokens"]]
            alone = (await served.complete("hello"))["choices"][0]["text"]
            assert (await served.complete(ids))["choices"][0]["text"] == alone
            for several in (["hello", "you", "there"], [ids, ids, ids]):
                body = await served.complete(several, n=2)
                assert [choice["index"] for choice in body["choices"]] == list(range(6))
                assert body["choices"][0]["text"] == body["choices"][1]["text"] == alone
            await served.check_idle()

    run(work())


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs_returns_the_prompts_logprobs(max_tokens: int, as_ids: bool) -> None:
    """lm-evaluation-harness scores texts this way."""
    wanted = engine_answer("hello there", max_tokens=max_tokens, logprobs=1, prompt_logprobs=1)
    scores = [
        next(iter(entry.values())).logprob for entry in wanted.prompt_logprobs[1:]
    ] + wanted.outputs[0].token_logprobs  # fmt: skip

    async def work() -> None:
        async with served_app() as served:
            prompt = wanted.prompt_token_ids if as_ids else "hello there"
            request = {"max_tokens": max_tokens, "logprobs": 1, "echo": True, "temperature": 0}
            body = await served.complete(prompt, **request)
            (choice,) = body["choices"]
            table = choice["logprobs"]
            assert choice["text"] == "hello there" + wanted.outputs[0].text
            assert table["token_logprobs"] == [None, *scores]
            assert table["top_logprobs"][0] is None
            assert [len(top) for top in table["top_logprobs"][1:]] >= [1] * len(scores)
            assert len({len(column) for column in table.values()}) == 1
            assert "".join(table["tokens"][: len("hello there")]) == "hello there"
            assert table["text_offset"][:3] == [0, 1, 2]
            assert body["usage"]["completion_tokens"] == max_tokens
            streamed = await served.events(COMPLETIONS, {"prompt": prompt} | request)
            columns: dict[str, list[Any]] = {name: [] for name in table}
            for event in streamed:
                for name, column in event["choices"][0]["logprobs"].items():
                    columns[name] += column
            assert columns == table
            assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]

    run(work())


def test_usage_can_be_returned_in_every_chunk() -> None:
    async def work() -> None:
        async with served_app() as served:
            request = {"prompt": ["hello", "you"], "max_tokens": 5, "temperature": 0}
            events = await served.events(
                COMPLETIONS,
                request | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            )
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            assert counts[-1] == 10
            assert events[-1]["usage"]["total_tokens"] == 18
            plain = await served.events(COMPLETIONS, request)
            assert all("usage" not in event for event in plain)
            texts = ["", ""]
            for event in plain:
                texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
            body = await served.post(COMPLETIONS, request)
            assert texts == [choice["text"] for choice in body["choices"]]

    run(work())


def prediction_tokens(body: dict[str, Any]) -> tuple[int, int]:
    details = body["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def test_usage_counts_cached_tokens_and_those_of_a_prediction() -> None:
    async def work() -> None:
        async with served_app(proposer="ngram") as served:
            request = {"max_tokens": 60, "ignore_eos": True}
            first = await served.complete("ab" * 40, **request)
            again = await served.complete("ab" * 40, **request)
            assert first["choices"][0]["text"] == again["choices"][0]["text"]
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert prediction_tokens(again) == (0, 0)  # drafts that were not the caller's do not count
            text = first["choices"][0]["text"]
            guess = {"type": "content", "content": [{"type": "text", "text": text}]}
            answers = [
                await served.complete("ab" * 40, **request, prediction=guess, proposer=name)
                for name in ("ngram", "none")
            ]
            assert {one["choices"][0]["text"] for one in answers} == {first["choices"][0]["text"]}
            counts = prediction_tokens(answers[0])
            assert counts == prediction_tokens(answers[1])
            streamed = {"prompt": "ab" * 40, "temperature": 0, **request, "prediction": guess}
            for option in ("include_usage", "continuous_usage_stats"):
                events = await served.events(COMPLETIONS, streamed | {"stream_options": {option: True}})
                assert prediction_tokens(events[-1]) == counts
            neither = {"include_usage": False, "continuous_usage_stats": True}
            events = await served.events(COMPLETIONS, streamed | {"stream_options": neither})
            assert not any(event.get("usage") for event in events)

    run(work())


def test_sampling_fields_reach_the_engine() -> None:
    async def work() -> None:
        async with served_app(eos=True) as served:
            text = (await served.complete(max_tokens=40, ignore_eos=True))["choices"][0]["text"]
            stop = next(c for c in text[5:] if c.isprintable())
            body = await served.complete(max_tokens=40, ignore_eos=True, stop=[stop])
            (choice,) = body["choices"]
            assert choice["text"] == text[: text.index(stop)]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
            kept = await served.complete(
                max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=True
            )
            assert kept["choices"][0]["text"] == text[: text.index(stop) + 1]
            only = await served.complete(max_tokens=4, allowed_token_ids=[70, 71], return_token_ids=True)
            assert set(only["choices"][0]["token_ids"]) <= {70, 71}
            biased = await served.complete(max_tokens=4, logit_bias={"70": 100}, return_token_ids=True)
            assert biased["choices"][0]["token_ids"] == [70] * 4
            ended = await served.complete(
                max_tokens=40, stop_token_ids=[70], logit_bias={"70": 100}, min_tokens=3
            )
            assert ended["usage"]["completion_tokens"] == 4
            assert ended["choices"][0]["stop_reason"] == 70
            scored = await served.complete(prompt_logprobs=1)
            listed = scored["choices"][0]["prompt_logprobs"]
            assert listed[0] is None
            assert all("logprob" in entry for one in listed[1:] for entry in one.values())
            free = await served.complete(verify=False)
            assert free["choices"][0]["text"]

    run(work())


def test_the_checkpoints_defaults_are_used() -> None:
    engine_defaults = {"temperature": 0.0}

    async def work() -> None:
        async with served_app() as served:
            served.llm._engine.loaded.generation.update(engine_defaults)  # type: ignore[attr-defined]
            wanted = (await served.complete(max_tokens=8))["choices"][0]["text"]
            body = await served.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 8})
            assert body["choices"][0]["text"] == wanted
            hot = await served.post(
                COMPLETIONS, {"prompt": "hello", "max_tokens": 8, "temperature": 2, "seed": 1}
            )
            assert hot["choices"][0]["text"] != wanted

    run(work())


def test_several_prompts_are_submitted_together_or_not_at_all() -> None:
    async def work() -> None:
        async with served_app() as served:
            status, error = await served.refusal(COMPLETIONS, LONG | {"prompt": ["a", "b", "", "d"]})
            assert (status, error["param"]) == (400, "prompt")
            await served.check_idle()
            frames = served.llm._engine.scheduler.counters.frames
            await served.complete([f"{i}" for i in range(16)], max_tokens=8, proposer="none")
            # One after the other they would take 8 frames each.
            assert served.llm._engine.scheduler.counters.frames - frames < 32

    run(work())


def test_concurrent_requests_get_the_bits_of_single_ones() -> None:
    """Streamed and whole, beside unverified ones, with a KV cache too small for all."""

    async def work() -> None:
        async with served_app(on_port=True, kv_memory=2**18, max_num_seqs=16) as served:
            requests = [
                {"prompt": f"question {i}", "max_tokens": 150, "seed": i, "logprobs": 1} for i in range(6)
            ]
            alone = [await served.post(COMPLETIONS, body) for body in requests]

            async def again(i: int, stream: bool) -> None:
                wanted = alone[i]["choices"][0]
                if not stream:
                    choice = (await served.post(COMPLETIONS, requests[i]))["choices"][0]
                    assert choice == wanted
                    return
                parts = [event["choices"][0] for event in await served.events(COMPLETIONS, requests[i])]
                assert "".join(part["text"] for part in parts) == wanted["text"]
                bits = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
                assert bits == wanted["logprobs"]["token_logprobs"]

            unverified = [served.complete("noise", verify=False, max_tokens=30) for _ in range(6)]
            await asyncio.gather(
                *(again(i, stream) for i in range(6) for stream in (False, True)), *unverified
            )
            assert served.llm._engine.scheduler.counters.preempted > 0
            await served.check_idle()

    run(work())
