"""AsyncLLM: a request whose reader ends early is aborted, and others keep their bits."""

import asyncio
import threading

import pytest
from aio_cases import LONG, SHORT, assert_idle, bits, paced_llm, run_async, wait_until

from samewise import AsyncLLM
from samewise.llm.aio import _EngineCall
from samewise.testing import Scripted


@pytest.mark.parametrize("how", ["generate", "stream", "break"])
def test_a_request_whose_reader_ends_early_is_aborted(how: str) -> None:
    async def leave_early(llm: AsyncLLM) -> None:
        stream = llm.stream("hello", LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    async def read_all(llm: AsyncLLM) -> None:
        async for _ in llm.stream("hello", LONG):
            pass

    async def work() -> None:
        async with paced_llm(0.02) as llm:
            if how == "break":
                await leave_early(llm)
            else:
                reading = llm.generate("hello", LONG) if how == "generate" else read_all(llm)
                task = asyncio.ensure_future(reading)
                await wait_until(lambda: llm._engine.scheduler.counters.output_tokens >= 3)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await assert_idle(llm)
            stats = await llm.stats()
            assert stats["aborted"] == 1
            assert stats["output_tokens"] < 300
            assert bits(await llm.generate("hello", SHORT))

    run_async(work())


def test_a_cancelled_request_is_aborted_within_one_step() -> None:
    gate, steps = threading.Event(), [0]

    def count_steps(_: object) -> list[int]:
        steps[0] += 1
        if steps[0] == 5:
            gate.wait(20)
        return []

    async def work() -> None:
        async with paced_llm(make_proposer=lambda _: Scripted(count_steps)) as llm:
            task = asyncio.create_task(llm.generate("hello", LONG))
            await wait_until(lambda: steps[0] == 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()
            await assert_idle(llm)
            assert steps[0] <= 6

    run_async(work())


def test_a_request_cancelled_before_the_engine_takes_it_is_aborted() -> None:
    gate = threading.Event()

    async def work() -> None:
        async with paced_llm() as llm:
            llm._calls.put(_EngineCall(lambda: gate.wait(20) and None, lambda _: None))
            await wait_until(llm._calls.empty)
            task = asyncio.create_task(llm.generate("hello", LONG))
            await wait_until(lambda: llm._calls.qsize() > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()
            await assert_idle(llm)
            assert (await llm.stats())["output_tokens"] < 300

    run_async(work())


def test_cancelling_changes_no_bit_of_other_requests() -> None:
    async def work() -> None:
        async with paced_llm() as llm:
            expected = bits(await llm.generate("not cancelled", LONG.clone(max_tokens=40)))
            cancelled = [asyncio.create_task(llm.generate(f"{i} cancelled", LONG)) for i in range(5)]
            kept = asyncio.create_task(llm.generate("not cancelled", LONG.clone(max_tokens=40)))
            await wait_until(lambda: llm._engine.scheduler.counters.output_tokens >= 60)
            for task in cancelled:
                task.cancel()
            assert bits(await kept) == expected
            await asyncio.gather(*cancelled, return_exceptions=True)
            await assert_idle(llm)

    run_async(work())
