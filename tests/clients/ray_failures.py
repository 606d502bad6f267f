"""Run by test_replicas.py in a process of its own: replicas are stopped, or lose their engine, under streams.

Its last line is JSON: what was seen.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from ray import serve

from samewise import AsyncLLM, SamplingParams
from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.scale import ScaleSettings
from samewise.scale.cluster import deployed
from samewise.scale.deploy import BuildEngine, engines

folder, marks = sys.argv[1], Path(sys.argv[2])
config = EngineConfig.of(model=folder, device="cpu", kv_memory="4MiB", max_num_seqs=16, proposer="none")
NUM_STREAMS = 12
seen: dict[str, object] = {}


def long_params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=800, ignore_eos=True, temperature=1, seed=number, logprobs=1)


async def long_answer(llm: AsyncLLM, number: int) -> object:
    """A streamed answer of many tokens: of more seconds than a replica has to end."""
    tokens: list[int] = []
    logprobs: list[float] = []
    async for chunk in llm.stream(f"{number}: once upon a time", long_params(number)):
        tokens += chunk.token_ids
        logprobs += chunk.token_logprobs
    return tokens, logprobs


class LostOnce:
    """Builds engines: the first is lost when a file appears, as after an error of its device."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self) -> Engine:
        engine = BuildEngine(config)()
        mark = self._path.with_suffix(".built")
        with suppress(FileExistsError):
            mark.touch(exist_ok=False)
            threading.Thread(target=self._lose, args=(engine,), daemon=True).start()
        return engine

    def _lose(self, engine: Engine) -> None:
        while not self._path.exists():
            time.sleep(0.05)
        engine._calls.lose(RuntimeError("CUDA error: as a device would say"))


async def names_of(llm: AsyncLLM) -> set[str]:
    """Names of the two replicas that report."""
    while len(names := set((await llm.stats())["replicas"])) != 2:
        await asyncio.sleep(0.2)
    return names


async def stream_until_replaced(
    llm: AsyncLLM, change: Callable[[], object], num_replaced: int
) -> dict[str, object]:
    """Stream long answers again and again until `change` was called and so many replicas were replaced."""
    wanted = await asyncio.gather(*(long_answer(llm, number) for number in range(NUM_STREAMS)))
    before = await names_of(llm)
    replaced: list[bool] = []
    others: list[int] = []
    num_answers = 0

    async def ask(number: int) -> None:
        nonlocal num_answers
        while not replaced:
            if await long_answer(llm, number) != wanted[number]:
                others.append(number)
            num_answers += 1

    asking = [asyncio.ensure_future(ask(number)) for number in range(NUM_STREAMS)]
    await asyncio.sleep(1)
    await asyncio.to_thread(change)
    async with asyncio.timeout(240):
        while len(before - (now := await names_of(llm))) < num_replaced:
            await asyncio.sleep(0.2)
    replaced.append(True)
    await asyncio.gather(*asking)
    stats = await llm.stats()
    return {
        "replaced": sorted(before - now), "failovers": stats["failovers"], "others": others,
        "num_answers": num_answers,
    }  # fmt: skip


with deployed(config, ScaleSettings(replicas=2, drain_seconds=0.5), None, what="the test") as drained:

    def deploy_again() -> None:
        """Every replica is stopped, with half a second for its answers, and replaced."""
        scale = ScaleSettings(replicas=2, drain_seconds=0.5)
        serve.run(engines(replace(config, seed=1), scale), name=drained.name, route_prefix=None)

    with closing(drained.load()) as llm:
        seen["drained"] = asyncio.run(stream_until_replaced(llm, deploy_again, 2))

lose = marks / "lose"
with (
    deployed(config, ScaleSettings(replicas=2), None, what="the test", make_engine=LostOnce(lose)) as lost,
    closing(lost.load()) as llm,
):
    seen["lost"] = asyncio.run(stream_until_replaced(llm, lose.touch, 1))
print(json.dumps(seen))
