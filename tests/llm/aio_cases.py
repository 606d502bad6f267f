"""Helpers that the tests of AsyncLLM share."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from samewise import AsyncLLM, SamplingParams
from samewise.outputs import RequestOutput
from samewise.testing import paced, tiny_engine

T = TypeVar("T")
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def run_async(work: Coroutine[Any, Any, T], seconds: float = 60) -> T:
    """Run a coroutine; fail if it takes too long."""

    async def timed() -> T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(timed())


@asynccontextmanager
async def paced_llm(step_seconds: float = 0.003, **settings: Any) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM over a tiny engine, each step of which takes at least `step_seconds`."""
    async with AsyncLLM.over(paced(tiny_engine(**settings), step_seconds)) as llm:
        yield llm


async def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        await asyncio.sleep(0.005)


async def in_engine_thread(llm: AsyncLLM, look: Callable[[], T]) -> T:
    return await llm._call(look)


async def assert_idle(llm: AsyncLLM) -> None:
    """After a moment no request runs or waits, no page is held and no reader is registered."""
    engine = llm._engine
    for _ in range(2000):
        if await in_engine_thread(llm, lambda: engine.scheduler.idle):
            break
        await asyncio.sleep(0.002)
    stats = await llm.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["pages_available"] == stats["pages"]
    await in_engine_thread(llm, engine.check)
    assert not await in_engine_thread(llm, lambda: dict(llm._readers))
    assert not await in_engine_thread(llm, lambda: dict(llm._loop._open))


def bits(output: RequestOutput) -> list[tuple[list[int], list[str]]]:
    """Token ids and exact log-probabilities of every choice."""
    return [(o.token_ids, [v.hex() for v in o.token_logprobs]) for o in output.outputs]
