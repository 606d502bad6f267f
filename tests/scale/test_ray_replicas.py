"""A router and its replicas over real connections, without Ray: whatever fails between them, equal bits."""

import asyncio
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self

import pytest
from served_replicas import ServedReplicas, remote_over

from samewise import AsyncLLM, SamplingParams
from samewise.engine import Engine
from samewise.errors import BadParameter
from samewise.llm.any_engine import AnyEngine
from samewise.scale.ray_replicas import RayReplicas
from samewise.scale.remote_engine import RemoteEngine
from samewise.scale.wire import LIMITS, ChannelLimits
from samewise.testing import tiny_engine
from samewise.text.grammar import CompiledGrammar
from samewise.types import Delta, Finish, Grammar, Request, Sampling

pytest.importorskip("msgpack", reason="msgpack comes with ray")

NUM = 12
QUICK = ChannelLimits(unheard=2)
"""Where a job has to be given up by time, it should not take half a minute."""


def make_engine() -> Engine:
    return tiny_engine(max_num_seqs=16, proposer="none")


def params_of(number: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=number, max_tokens=60, ignore_eos=True, logprobs=2, n=1 + number % 2,
        prompt_logprobs=1 if number % 3 == 0 else None, presence_penalty=0.5,
    )  # fmt: skip


async def answer(llm: AsyncLLM, number: int) -> list[Any]:
    output = await llm.generate(f"{number}: once upon a time", params_of(number))
    return [
        output.prompt_logprobs,
        [(c.text, c.token_ids, c.token_logprobs, c.logprobs, c.finish_reason) for c in output.outputs],
    ]


async def answers(llm: AsyncLLM) -> list[list[Any]]:
    return list(await asyncio.gather(*(answer(llm, number) for number in range(NUM))))


@pytest.fixture(scope="module")
def wanted() -> list[list[Any]]:
    async def alone() -> list[list[Any]]:
        async with AsyncLLM.over(make_engine()) as llm:
            return await answers(llm)

    return asyncio.run(asyncio.wait_for(alone(), 60))


def idle(engines: list[Engine]) -> bool:
    """Whether the engines have nothing to do, and all their pages."""
    stats = [engine.stats() for engine in engines]
    return all(engine.idle for engine in engines) and all(
        (each["running"], each["waiting"]) == (0, 0) and each["pages_available"] == each["pages"]
        for each in stats
    )


async def until(done: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def ask_while(
    during: Callable[[RemoteEngine, ServedReplicas], Any] | None,
    engines: list[Engine],
    limits: ChannelLimits = LIMITS,
) -> tuple[list[list[Any]], dict[str, Any], ServedReplicas]:
    """The answers of these engines as replicas, the statistics after them, and the replicas, closed."""

    async def main(engine: RemoteEngine, served: ServedReplicas) -> tuple[list[list[Any]], dict[str, Any]]:
        async with AsyncLLM.over(engine) as llm:
            asking = asyncio.ensure_future(answers(llm))
            if during is not None:
                await until(lambda: sum(len(asked.tokens) for asked in engine._asked.values()) > 60)
                await during(engine, served)
            got = await asking
            await until(lambda: idle(engines))
            return got, await llm.stats()

    with remote_over(engines, limits) as (engine, served):
        got, stats = asyncio.run(asyncio.wait_for(main(engine, served), 90))
    for engine_there in engines:
        engine_there.check()
    return got, stats, served


def test_answers_over_connections_are_those_of_one_engine(wanted: list[list[Any]]) -> None:
    got, stats, served = ask_while(None, [make_engine(), make_engine()])
    assert got == wanted
    assert stats["failovers"] == 0
    assert {name for name, _ in served.jobs} == {"r0", "r1"}


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("side", ["router", "replica"])
def test_answers_go_on_when_one_side_loses_the_connection(
    wanted: list[list[Any]], side: str, num_replicas: int
) -> None:
    """The other side still believes in the connection, and what it sends there is lost."""

    async def cut(_: RemoteEngine, served: ServedReplicas) -> None:
        assert await asyncio.to_thread(served.cut, "r0", side) == 1

    got, stats, _ = ask_while(cut, [make_engine() for _ in range(num_replicas)], QUICK)
    assert got == wanted
    assert stats["failovers"] > 0


def test_a_replica_whose_engine_is_lost_gets_no_more(wanted: list[list[Any]]) -> None:
    engines = [make_engine(), make_engine()]

    async def main(engine: RemoteEngine, served: ServedReplicas) -> list[list[Any]]:
        async with AsyncLLM.over(engine) as llm:
            first = await answers(llm)
            assert first == wanted
            asking = asyncio.ensure_future(answers(llm))
            await until(lambda: sum(len(asked.tokens) for asked in engine._asked.values()) > 60)
            engines[0]._calls.lose(RuntimeError("CUDA error: as a device would say"))
            assert await asking == wanted
            num_before = len(served.jobs)
            assert await answers(llm) == wanted
            assert {name for name, _ in served.jobs[num_before:]} == {"r1"}
            # Asked all the same, it refuses at once, and is avoided then.
            engine._failed.clear()
            num_before = len(served.jobs)
            again = await answers(llm)
            assert "r0" in {name for name, _ in served.jobs[num_before:]}
            assert "r0" in engine._failed
            return again

    with remote_over(engines) as (engine, served):
        assert asyncio.run(asyncio.wait_for(main(engine, served), 90)) == wanted


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_grammar_that_every_replica_refuses_ends_its_request(num_replicas: int) -> None:
    with remote_over([make_engine() for _ in range(num_replicas)]) as (engine, served):
        engine.add(Request(engine.new_id(), (65, 66), Sampling(grammar=Grammar.regex("(a")), 4))
        deltas: list[Delta] = []
        while not deltas:
            deltas = engine.step()
        assert deltas[0].finish is Finish.ERROR
        assert deltas[0].error is not None
        assert deltas[0].error.param == "grammar"
        assert [name for name, _ in served.jobs] == (["r0", "r1"] if num_replicas == 2 else ["r0", "r0"])


class SlowIntake:
    """Compiles no grammar in time."""

    def start_compiling(self, grammar: Grammar, *, owner: bytes | None) -> Future[CompiledGrammar]:
        raise BadParameter("grammar=regex: it takes more than 2 seconds to compile", param="grammar")

    def stop_compiling(self) -> None: ...


def test_a_grammar_that_one_machine_is_too_slow_for_is_answered_by_another() -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=40, grammar=Grammar.regex("[a-d]{9,30}"))

    async def ask(engine: AnyEngine) -> list[str]:
        async with AsyncLLM.over(engine) as llm:
            return [choice.text for choice in (await llm.generate("once", params)).outputs]

    wanted = asyncio.run(asyncio.wait_for(ask(make_engine()), 60))
    with remote_over([make_engine(), make_engine()]) as (engine, served):
        served.servers["r0"]._intake = SlowIntake()  # type: ignore[assignment]
        assert asyncio.run(asyncio.wait_for(ask(engine), 60)) == wanted
        assert [name for name, _ in served.jobs] == ["r0", "r1"]


class NotedRoster:
    """A roster that notes what it is told."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def options(self, **_: Any) -> Self:
        return self

    async def call(self, *said: Any) -> dict[str, Any]:
        self.told.put(said)
        return {}


@pytest.mark.parametrize("kept", ["an application", None])
def test_the_roster_hears_again_and_again_that_a_server_runs(kept: str | None) -> None:
    roster = NotedRoster()
    replicas = RayReplicas(roster, roster, kept=kept)  # type: ignore[arg-type]  # stand-ins
    told = [roster.told.get(timeout=60) for _ in range(6)]
    replicas.close()
    assert told.count(("keep", "an application")) == (2 if kept else 0)


def test_a_request_that_is_dropped_leaves_nothing_on_replicas() -> None:
    engines = [make_engine()]
    with remote_over(engines) as (engine, served):
        for number in range(8):
            engine.add(Request(engine.new_id(), (65, 66), Sampling(), 100))
            if number % 2:  # after it began, and before
                engine.step()
        for number in range(8):
            engine.abort(number)
        asyncio.run(until(lambda: idle(engines) and served.open["r0"] == 0))
        assert not served.servers["r0"]._server._jobs
