"""AsyncLLM: the bits of LLM, requests sent together, readers, refusals."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aio_cases import LONG, SHORT, assert_idle, bits, paced_llm, run_async, wait_until

from samewise import LLM, AsyncLLM, SamplingParams
from samewise.errors import BadParameter, BadPrompt, MachineError, QueueFull
from samewise.llm import aio
from samewise.outputs import RequestOutput
from samewise.testing import Scripted, tiny_engine


def test_generate_and_stream_give_the_bits_of_llm() -> None:
    params = SamplingParams(max_tokens=10, seed=3, n=2, logprobs=2)
    (expected,) = LLM.over(tiny_engine()).generate("hello", params, use_tqdm=False)

    async def work() -> None:
        async with paced_llm() as llm:
            output = await llm.generate("hello", params)
            assert bits(output) == bits(expected)
            assert output.finished
            assert output.contract == llm.contract.id == expected.contract
            chunks = [chunk async for chunk in llm.stream("hello", params)]
            for choice in expected.outputs:
                own = [chunk for chunk in chunks if chunk.index == choice.index]
                assert [t for chunk in own for t in chunk.token_ids] == choice.token_ids
                assert [v for chunk in own for v in chunk.token_logprobs] == choice.token_logprobs
                assert "".join(chunk.text for chunk in own) == choice.text
                assert own[-1].finish_reason == choice.finish_reason
            await assert_idle(llm)

    run_async(work())


def test_concurrent_requests_give_the_bits_they_give_alone() -> None:
    prompts = [f"{'word ' * (i % 5)}{i}" for i in range(24)]
    params = [SamplingParams(max_tokens=4 + i % 9, temperature=float(i % 2), seed=i) for i in range(24)]

    async def work() -> None:
        async with paced_llm(max_num_seqs=7) as llm:
            alone = [bits(await llm.generate(p, s)) for p, s in zip(prompts, params, strict=True)]

            async def generate_late(i: int) -> list[Any]:
                await asyncio.sleep(0.003 * (i * 7 % 5))
                return bits(await llm.generate(prompts[i], params[i]))

            assert await asyncio.gather(*(generate_late(i) for i in range(24))) == alone
            await assert_idle(llm)

    run_async(work())


def test_requests_sent_together_start_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "GATHER", aio.GatherTimes(expected=20.0))

    async def work() -> None:
        async with paced_llm(proposer="none") as llm:
            check, numbers = llm.intake.check, iter(range(8))

            def slow_check(*arguments: Any) -> Any:
                time.sleep(next(numbers) * 0.02)
                return check(*arguments)

            llm.intake.check = slow_check  # type: ignore[method-assign]
            await asyncio.gather(*(llm.generate("hello", SHORT, salt=b"%d" % i) for i in range(8)))
            together = (await llm.stats())["frames"]
            llm.intake.check = check  # type: ignore[method-assign]
            began = time.monotonic()
            await llm.generate("hello", SHORT, salt=b"alone")
            assert time.monotonic() - began < 10  # no other request is on its way
            assert together <= (await llm.stats())["frames"] - together + 3
            assert not llm._expected

    run_async(work())


def test_an_expected_request_that_never_arrives_is_not_waited_for_long() -> None:
    async def work() -> None:
        async with paced_llm() as llm:
            llm._expected.add(object())  # a request that stays on its way
            assert (await llm.generate("hello", SHORT)).finished

    run_async(work())


def test_the_event_loop_runs_while_a_step_runs() -> None:
    ticks, proposals = [0], [0]

    def wait_for_ticks(_: object) -> list[int]:
        """Block the engine's thread until the event loop has run twenty more times."""
        proposals[0] += 1
        end, target = time.monotonic() + 20, ticks[0] + 20
        while ticks[0] < target:
            assert time.monotonic() < end, "the event loop waits for the step"
            time.sleep(0.001)
        return []

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.001)
            ticks[0] += 1

    async def work() -> None:
        async with paced_llm(make_proposer=lambda _: Scripted(wait_for_ticks)) as llm:
            ticker = asyncio.create_task(tick())
            await asyncio.gather(*(llm.generate(f"{i}", SHORT) for i in range(2)))
            ticker.cancel()
        assert proposals[0] >= 4

    run_async(work())


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda llm: llm.generate(""), BadPrompt, "the prompt is empty"),
        (lambda llm: llm.generate([1, 999]), BadPrompt, "holds 999"),
        (lambda llm: llm.generate([1] * 600), BadPrompt, "max_model_len is 512"),
        (lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[999])), BadParameter, "999"),
        (lambda llm: anext(llm.stream("")), BadPrompt, "the prompt is empty"),
        (lambda llm: anext(llm.stream([-1])), BadPrompt, "holds -1"),
        (lambda llm: llm.chat_prompt([]), BadPrompt, "the conversation is empty"),
    ],
)
def test_a_bad_request_is_refused_in_the_callers_task(
    ask: Callable[[AsyncLLM], Awaitable[Any]], error: type[Exception], message: str
) -> None:
    async def work() -> None:
        async with paced_llm() as llm:
            with pytest.raises(error, match=message):
                await ask(llm)
            assert llm.failure is None
            await assert_idle(llm)
            assert (await llm.generate("a", SHORT)).finished

    run_async(work())


@pytest.mark.parametrize("n", [1, 3])
def test_a_full_queue_refuses_requests_and_answers_the_others(n: int) -> None:
    async def work() -> None:
        async with paced_llm(max_queued=2, max_num_seqs=1) as llm:
            asked = [llm.generate(f"{i}", SHORT.clone(n=n)) for i in range(8)]
            results = await asyncio.gather(*asked, return_exceptions=True)
            refused = [result for result in results if isinstance(result, QueueFull)]
            answered = [result for result in results if isinstance(result, RequestOutput)]
            assert len(refused) + len(answered) == 8
            assert refused
            await assert_idle(llm)
            assert (await llm.generate("a", SHORT)).finished

    run_async(work())


def test_requests_with_different_salts_share_no_prefix() -> None:
    async def work() -> None:
        async with paced_llm() as llm:
            prompt = await llm.chat_prompt([{"role": "user", "content": "a question of some length"}])
            one = await llm.generate(prompt, SHORT, salt=b"one")
            two = await llm.generate(prompt, SHORT, salt=b"two")
            again = await llm.generate(prompt, SHORT, salt=b"one")
            assert bits(one) == bits(two) == bits(again)
            assert [out.num_cached_tokens for out in (one, two)] == [0, 0]
            assert again.num_cached_tokens > 0

    run_async(work())


def test_without_parameters_the_defaults_are_those_of_llm() -> None:
    engine = tiny_engine()
    engine.loaded.generation["temperature"] = 0.0  # type: ignore[index]
    engine.loaded.generation["max_new_tokens"] = 5  # type: ignore[index]
    (expected,) = LLM.over(engine).generate("hello", use_tqdm=False)

    async def work() -> None:
        async with AsyncLLM.over(engine) as llm:
            assert bits(await llm.generate("hello")) == bits(expected)

    run_async(work())


def test_a_reader_that_is_not_streamed_receives_no_chunks() -> None:
    async def work() -> None:
        async with paced_llm() as llm:
            with await llm.open("hello", SHORT, streamed=False) as reader:
                assert await reader.next_chunks() == []
                assert reader.finished
                assert bits(reader.output()) == bits(await llm.generate("hello", SHORT))
            await assert_idle(llm)

    run_async(work())


def test_a_reader_tells_a_pause_from_the_end() -> None:
    async def work() -> None:
        async with paced_llm() as llm:
            with await llm.open("hello", SHORT) as reader:
                found = []
                while (chunks := await reader.next_chunks(0.0001)) != []:
                    found.append(chunks)
                assert None in found
                assert (
                    sum(len(chunk.token_ids) for chunks in found for chunk in chunks or ())
                    == reader.num_tokens
                )
            await assert_idle(llm)

    run_async(work())


def test_a_reader_returns_the_chunks_before_its_error() -> None:
    async def work() -> None:
        async with paced_llm() as llm:
            with await llm.open("hello", LONG) as reader:
                await wait_until(lambda: bool(reader._mailbox._items))
                reader.fail(MachineError("a planted error"))
                assert await reader.next_chunks()
                with pytest.raises(MachineError, match="a planted error"):
                    await reader.next_chunks()
                assert await reader.next_chunks() == []
                assert not reader.finished
            await assert_idle(llm)
            with await llm.open("hello", SHORT.clone(logprobs=1, prompt_logprobs=1)) as reader:
                (first, *_) = await reader.next_chunks()
                known = reader.prompt_output()
                assert first.seed == reader.output().outputs[0].seed
                assert len(known.prompt_logprobs or []) == len(known.prompt_token_ids)
                while await reader.next_chunks():
                    pass
                assert reader.finished
                assert reader.output().prompt_logprobs == known.prompt_logprobs
            await assert_idle(llm)

    run_async(work())


def test_an_async_llm_states_its_limits_config_and_report() -> None:
    async def work() -> None:
        async with paced_llm() as llm:
            assert llm.alive
            assert llm.max_model_len == 512
            assert llm.config.model == "tiny-llama"
            assert llm.report.frames > 0
            assert llm.intake.decode(llm.intake.encode("é!")) == "é!"
            with pytest.raises(BadPrompt, match="holds 999"):
                llm.intake.decode([999])
        assert not llm.alive

    run_async(work())


def test_a_request_with_speculate_false_gets_no_drafts() -> None:
    async def work() -> None:
        async with paced_llm(proposer="ngram") as llm:
            asked = LONG.clone(max_tokens=60)
            one = await llm.generate("ab" * 20, asked)
            two = await llm.generate("ab" * 20, asked.clone(speculate=False))
            assert bits(one) == bits(two)
            assert one.metrics.num_guessed_tokens > 0
            assert two.metrics.num_guessed_tokens == 0

    run_async(work())
