"""The gate: what waits, what a pause stops, and what a caller that leaves calls off."""

import asyncio

import pytest
from aio_cases import assert_idle, paced_llm, run_async, wait_until
from llm_cases import PROMPT
from test_update_modes import SAMPLED, check_tokens, weights

from samewise.llm.gate import Gate


def test_work_waits_for_quiet_and_keeps_requests_outside() -> None:
    gate, done = Gate(), list[str]()
    gate.when_quiet(1, lambda: done.append("update"))
    gate.hold(lambda: done.append("request"))
    gate.settle(idle=False)
    assert not done
    gate.settle(idle=True)
    assert done == ["update", "request"]


def test_called_off_work_opens_the_gate() -> None:
    gate, done = Gate(), list[str]()
    key = object()
    gate.when_quiet(key, lambda: done.append("pause"), pauses=True)
    gate.hold(lambda: done.append("request"))
    assert gate.paused
    assert gate.call_off(key)
    assert not gate.call_off(key)
    assert not gate.paused
    gate.settle(idle=False)
    assert done == ["request"]


def test_a_pause_runs_the_updates_that_wait_and_not_the_pauses() -> None:
    gate, done = Gate(), list[str]()
    gate.when_quiet(1, lambda: done.append("pause"), pauses=True)
    gate.when_quiet(2, lambda: done.append("update"))
    gate.freeze()
    gate.settle(idle=False)
    assert done == ["update"]
    gate.resume()
    assert done == ["update", "pause"]
    assert (gate.paused, gate.frozen) == (False, False)


def test_an_update_that_waits_is_made_when_a_pause_stops_the_rest() -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            running = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._readers))
            update = asyncio.create_task(llm.update_weights(weights(1), mode="wait"))
            await wait_until(lambda: bool(llm._held))
            await llm.pause("keep")
            await asyncio.wait_for(update, 20)
            assert llm.weights_version == 1
            assert not running.done()
            await llm.resume()
            check_tokens(await running, SAMPLED, [0, 1])
            await assert_idle(llm)

    run_async(scenario())


def test_a_pause_that_waits_lets_what_another_pause_stopped_end() -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            running = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._readers))
            await llm.pause("keep")
            later = asyncio.create_task(llm.generate(PROMPT, SAMPLED.clone(seed=9)))
            await llm.pause("wait")
            stats = await llm.stats()
            assert (stats["running"], stats["waiting"]) == (0, 0)
            assert (await running).outputs[0].finish_reason == "length"
            assert llm.paused
            assert not later.done()
            await llm.resume()
            await later

    run_async(scenario())


@pytest.mark.parametrize("what", ["update", "pause"])
def test_a_caller_that_leaves_calls_off_what_waits(what: str) -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            running = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._readers))
            work = llm.update_weights(weights(1), mode="wait") if what == "update" else llm.pause("wait")
            task = asyncio.create_task(work)  # type: ignore[arg-type]
            await wait_until(lambda: bool(llm._held))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_until(lambda: not llm._held)
            assert not llm.paused
            early = await llm.generate(PROMPT, SAMPLED.clone(max_tokens=1))  # the gate is open again
            assert not running.done()
            await running
            assert (early.weights_version, llm.weights_version) == (0, 0)
            await assert_idle(llm)

    run_async(scenario())
