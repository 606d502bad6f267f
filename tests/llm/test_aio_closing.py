"""AsyncLLM: closing, failures of the engine's thread, several event loops."""

import asyncio
import threading
from typing import Any

import pytest
from aio_cases import LONG, SHORT, bits, run_async, wait_until

from samewise import AsyncLLM
from samewise.errors import InvariantBroken, MachineError
from samewise.llm.aio import _EngineCall
from samewise.testing import Scripted, paced, tiny_engine


def test_closing_ends_every_reader_with_an_error() -> None:
    async def work() -> None:
        llm = AsyncLLM.over(paced(tiny_engine(), 0.02))
        tasks = [asyncio.create_task(llm.generate(f"{i}", LONG)) for i in range(3)]
        await wait_until(lambda: llm._engine.scheduler.counters.output_tokens >= 6)
        await asyncio.to_thread(llm.close)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, MachineError) and "has stopped" in str(result) for result in results)
        with pytest.raises(MachineError, match="the engine has stopped"):
            await llm.generate("a", SHORT)
        llm.close()
        assert llm.failure is None

    run_async(work())


def test_closing_fails_calls_that_are_still_queued() -> None:
    gate = threading.Event()

    async def work() -> None:
        llm = AsyncLLM.over(tiny_engine())
        llm._calls.put(_EngineCall(lambda: gate.wait(20) and None, lambda _: None))
        await wait_until(llm._calls.empty)
        closing = asyncio.create_task(asyncio.to_thread(llm.close))
        await wait_until(lambda: llm._calls.qsize() == 1)
        late = asyncio.create_task(llm.stats())
        await wait_until(lambda: llm._calls.qsize() == 2)
        gate.set()
        await closing
        with pytest.raises(MachineError, match="has stopped"):
            await asyncio.wait_for(late, 20)

    run_async(work())


class FailingProposer(Scripted):
    """Raises an error that no engine survives in its first proposal, once the gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(lambda _: [])
        self.gate, self.inside = gate, threading.Event()

    def propose(self, asks: list[Any]) -> list[Any]:
        if asks:
            self.inside.set()
            self.gate.wait(20)
            raise InvariantBroken("a planted bug")
        return []


def test_a_failure_in_the_engine_reaches_every_reader() -> None:
    gate = threading.Event()
    gate.set()

    async def work() -> None:
        llm = AsyncLLM.over(tiny_engine(make_proposer=lambda _: FailingProposer(gate)))
        results = await asyncio.gather(
            *(llm.generate(f"{i}", LONG) for i in range(3)), return_exceptions=True
        )
        assert all(isinstance(result, MachineError) and "a planted bug" in str(result) for result in results)
        assert isinstance(llm.failure, InvariantBroken)
        assert not llm.alive
        for call in (llm.generate("a", SHORT), llm.stats()):
            with pytest.raises(MachineError, match=r"has stopped: a planted bug"):
                await call
        llm.close()

    run_async(work())


def test_a_failure_reaches_a_call_queued_meanwhile() -> None:
    gate = threading.Event()
    failing = FailingProposer(gate)

    async def work() -> None:
        llm = AsyncLLM.over(tiny_engine(make_proposer=lambda _: failing))
        first = asyncio.create_task(llm.generate("first", LONG))
        await wait_until(failing.inside.is_set)
        second = asyncio.create_task(llm.generate("second", LONG))
        await wait_until(lambda: llm._calls.qsize() > 0)
        gate.set()
        with pytest.raises(MachineError, match="a planted bug"):
            await asyncio.wait_for(first, 20)
        with pytest.raises(MachineError, match="a planted bug"):
            await asyncio.wait_for(second, 20)

    run_async(work())


def test_two_event_loops_may_share_one_engine() -> None:
    llm = AsyncLLM.over(tiny_engine())
    try:
        results: list[Any] = [None, None]

        def reader(i: int) -> None:
            results[i] = bits(asyncio.run(llm.generate("the same question", SHORT)))

        threads = [threading.Thread(target=reader, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert results[0] is not None
        assert results[0] == results[1]
    finally:
        llm.close()


def test_the_engine_goes_on_after_an_event_loop_was_closed() -> None:
    llm = AsyncLLM.over(tiny_engine())
    try:

        async def start() -> None:
            stream = llm.stream("hello", LONG)
            await anext(stream)

        asyncio.run(start())
        assert asyncio.run(llm.generate("a", SHORT)).finished
        assert llm.failure is None
    finally:
        llm.close()
