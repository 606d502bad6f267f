"""The gate: what waits, what a pause stops, and what a caller that leaves calls off."""

import asyncio
import threading
from typing import Any

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


@pytest.mark.parametrize("end", ["idle", "frozen", "called off"])
def test_a_later_update_follows_those_that_wait(end: str) -> None:
    gate, done = Gate(), list[str]()
    gate.in_turn(0, lambda: done.append("none waits"))
    assert done.pop() == "none waits"
    gate.when_quiet(1, lambda: done.append("pause"), pauses=True)
    gate.in_turn(0, lambda: done.append("a pause waits"))
    assert done.pop() == "a pause waits"
    gate.when_quiet(2, lambda: done.append("first"))
    gate.in_turn(3, lambda: done.append("second"))
    gate.when_quiet(4, lambda: done.append("third"))
    gate.settle(idle=False)
    assert done == []
    if end == "frozen":
        gate.freeze()
    elif end == "called off":
        gate.call_off(2)
    gate.settle(idle=end == "idle")
    assert (
        done
        == {
            "idle": ["pause", "first", "second", "third"],
            "frozen": ["first", "second", "third"],
            "called off": ["second"],
        }[end]
    )


def test_a_pause_that_is_called_off_leaves_the_one_before_it_in_force() -> None:
    gate = Gate()
    gate.freeze()
    for key in (1, 2):
        gate.when_quiet(key, lambda: None, pauses=True)
    assert (gate.paused, gate.frozen) == (True, False)
    gate.call_off(2)
    assert (gate.paused, gate.frozen) == (True, False)  # the other one still lets requests end
    gate.call_off(1)
    assert (gate.paused, gate.frozen) == (True, True)
    gate.when_quiet(3, gate.freeze, pauses=True)
    gate.resume()
    gate.when_quiet(4, lambda: None, pauses=True)
    gate.call_off(4)
    assert (gate.paused, gate.frozen) == (False, False)


def test_a_pause_that_is_cancelled_stops_again_what_it_let_go_on() -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            running = asyncio.create_task(llm.generate(PROMPT, SAMPLED.clone(max_tokens=400)))
            await wait_until(lambda: bool(llm._readers))
            await llm.pause("keep")
            task = asyncio.create_task(llm.pause("wait"))
            await wait_until(lambda: bool(llm._held))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            frames = (await llm.stats())["frames"]  # behind the call that calls it off
            later = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._held))
            assert llm.paused
            assert (await llm.stats())["frames"] == frames
            assert not running.done()
            await llm.resume()
            await asyncio.gather(running, later)
            await assert_idle(llm)

    run_async(scenario())


@pytest.mark.parametrize("mode", ["keep", "abort", "wait", None])
def test_a_later_update_is_never_overwritten_by_one_that_waits(mode: str | None) -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            running = asyncio.create_task(llm.generate(PROMPT, SAMPLED.clone(max_tokens=400)))
            await wait_until(lambda: bool(llm._readers))
            first = asyncio.create_task(llm.update_weights(weights(1), mode="wait"))
            await wait_until(lambda: bool(llm._held))
            inside = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            contract = await llm.update_weights(weights(2), mode=mode)
            assert first.done()
            assert (llm.weights_version, llm.contract) == (2, contract)
            old, new = await asyncio.gather(running, inside)
            reason = old.outputs[0].finish_reason
            assert (reason, old.weights_version) == ("abort" if mode == "abort" else "length", 0)
            check_tokens(old, SAMPLED.clone(max_tokens=400), [0])
            assert new.weights_version == 2
            check_tokens(new, SAMPLED, [0, 1, 2])
            await assert_idle(llm)

    run_async(scenario())


def test_an_update_that_is_read_for_long_is_not_overtaken() -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            read, reading, go_on = llm._engine.read_update, threading.Event(), threading.Event()

            def slow(update: Any) -> Any:
                if update is first:
                    reading.set()
                    go_on.wait()
                return read(update)

            llm._engine.read_update = slow  # type: ignore[method-assign]
            first = weights(1)
            update = asyncio.create_task(llm.update_weights(first, mode="keep"))
            await wait_until(reading.is_set)
            later = asyncio.create_task(llm.update_weights(iter(weights(2).items()), mode="keep"))
            try:
                await asyncio.sleep(0)  # it begins
                await llm.stats()
            finally:
                go_on.set()
            _, contract = await asyncio.gather(update, later)
            assert llm.contract == contract

    run_async(scenario())
