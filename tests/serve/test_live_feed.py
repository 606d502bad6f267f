"""The live feed: rates, one sampler for all listeners, and no work without a listener."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import pytest

from samewise import AsyncLLM, SamplingParams
from samewise.engine.frame_log import FrameRecord
from samewise.errors import MachineError
from samewise.serve.live_feed import FeedTimes, LiveFeed, RateMeter
from samewise.testing import Jitter, tiny_engine

T = TypeVar("T")
STATS: dict[str, Any] = {"output_tokens": 0, "drafters": {}, "running": 0, "waiting": 0, "contract": "sw-1"}


def run(work: Coroutine[Any, Any, T]) -> T:
    async def timed() -> T:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(timed())


# ---- rates


def test_rates_are_taken_over_a_window_and_add_up() -> None:
    meter = RateMeter(window=2.0)
    counts = {"drafts": 0, "guessed": 0, "accepted": 0, "depths": []}
    assert meter.read(STATS, 10.0)["tokens_per_second"] == 0
    now = STATS | {
        "output_tokens": 50,
        "drafters": {
            "ngram": counts | {"drafts": 10, "guessed": 40, "accepted": 30, "depths": [0, 0, 0, 10]}
        },
    }
    snapshot = meter.read(now, 11.0)
    assert snapshot["tokens_per_second"] == 50
    assert snapshot["proposers"]["ngram"] == {
        "drafts": 10, "guessed": 40, "accepted": 30, "rate": 0.75, "nodes": 4.0, "depth": 3.0,
        "depths": [0, 0, 0, 10], "tokens_per_second": 40.0,
    }  # fmt: skip
    assert snapshot["proposers"]["none"] == {
        "drafts": 0, "guessed": 0, "accepted": 0, "rate": None, "nodes": None, "depth": None,
        "depths": [], "tokens_per_second": 10.0,
    }  # fmt: skip
    assert meter.read(now, 12.0)["tokens_per_second"] == 25
    assert meter.read(now, 20.0)["tokens_per_second"] < 6
    assert meter.read(now, 23.0)["tokens_per_second"] == 0


def test_the_timeline_is_sent_where_the_proposer_has_one() -> None:
    assert "timeline" not in RateMeter().read(STATS, 0.0)
    assert "timeline" not in RateMeter().read(STATS | {"skip": None}, 0.0)
    sets = {"attention": [3], "mlp": [4, 5]}
    one = {"event": "optimise", "tokens": 64, "score": 31.5, "rate": 0.7, "set": sets, "other": "not sent"}
    many = [one | {"tokens": i} for i in range(100)]
    snapshot = RateMeter().read(STATS | {"skip": {"timeline": many}}, 0.0)
    assert len(snapshot["timeline"]) == 64
    assert snapshot["timeline"][-1] == {
        "event": "optimise", "tokens": 99, "score": 31.5, "rate": 0.7, "set": sets
    }  # fmt: skip
    bare = RateMeter().read(STATS | {"skip": {"timeline": [{"event": "accumulate", "tokens": 3}]}}, 0.0)
    assert bare["timeline"] == [
        {"event": "accumulate", "tokens": 3, "score": None, "rate": None, "set": None}
    ]


# ---- the feed


class FakeEngine:
    """Statistics and frames of an engine, set by the test."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.stats = dict(STATS)
        self.frames: list[FrameRecord] = []
        self.broken = False

    def land(self, num: int = 1) -> None:
        for _ in range(num):
            self.frames.append(FrameRecord(len(self.frames) + 1, 0, 1, 2, 1, 3, 0.0, ((2, 1),)))
        self.stats["output_tokens"] += 3 * num

    async def live(self, since: int) -> dict[str, Any]:
        self.calls.append(since)
        if self.broken:
            raise MachineError("the engine has stopped: a planted bug")
        return {"stats": dict(self.stats), "frames": [use for use in self.frames if use.number > since]}


async def next_of(snapshots: AsyncIterator[Any]) -> Any:
    return await asyncio.wait_for(anext(snapshots), 5)


async def news_of(snapshots: AsyncIterator[Any]) -> Any:
    """The next that is no keep-alive."""
    while (one := await next_of(snapshots)) is None:
        pass
    return one


def test_nothing_is_sampled_without_a_listener() -> None:
    async def work() -> None:
        engine = FakeEngine()
        feed = LiveFeed(engine.live, times=FeedTimes(sample=0.005))
        await asyncio.sleep(0.03)
        assert engine.calls == []
        async with aclosing(feed.snapshots()) as snapshots:
            await next_of(snapshots)
            assert feed.listeners == 1
        assert feed.listeners == 0
        await asyncio.sleep(0.01)
        before = len(engine.calls)
        await asyncio.sleep(0.03)
        assert len(engine.calls) == before
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "samewise-live"]

    run(work())


def test_one_sampler_gives_every_listener_every_frame() -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.land(3)
        feed = LiveFeed(engine.live, facts=lambda: {"dtype": "float32"}, times=FeedTimes(sample=0.01))
        numbers: list[list[int]] = [[] for _ in range(5)]

        async def listen(i: int) -> None:
            async with aclosing(feed.snapshots()) as snapshots:
                async for snapshot in snapshots:
                    assert snapshot is not None
                    numbers[i] += [frame["number"] for frame in snapshot["frames"]]
                    await asyncio.sleep(0.02 * i)  # some read more slowly than the feed samples
                    if numbers[i][-1:] == [40]:
                        return

        listening = [asyncio.create_task(listen(i)) for i in range(5)]
        while len(engine.frames) < 40:
            await asyncio.sleep(0.004)
            engine.land()
        await asyncio.gather(*listening)
        assert numbers == [list(range(1, 41))] * 5
        assert engine.calls == sorted(engine.calls), "each call asks for new frames only"
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == "samewise-live"]
        assert all(task.cancelling() for task in tasks)

    run(work())


def test_long_parts_are_sent_once_and_nothing_without_changes() -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.stats["skip"] = {"timeline": [{"event": "accumulate", "tokens": 1}]}
        feed = LiveFeed(
            engine.live, facts=lambda: {"dtype": "float32"}, times=FeedTimes(sample=0.005, keep_alive=0.05)
        )
        async with aclosing(feed.snapshots()) as snapshots:
            first = await next_of(snapshots)
            assert first["facts"] == {"dtype": "float32"}
            assert first["timeline"][0]["event"] == "accumulate"
            assert first["frames"] == []
            assert await next_of(snapshots) is None, "nothing changed: only the keep-alive"
            engine.land()
            second = await news_of(snapshots)
            assert not {"facts", "timeline"} & second.keys()
            assert second["frames"] == [
                {
                    "number": 1, "prompt": 0, "known": 1, "guess": 2, "padding": 1, "committed": 3,
                    "drafts": ((2, 1),),
                }
            ]  # fmt: skip
            engine.stats["skip"] = {"timeline": [{"event": "accelerate", "tokens": 9}]}
            snapshot = await news_of(snapshots)
            while "timeline" not in snapshot:
                snapshot = await news_of(snapshots)
            assert snapshot["timeline"][0]["event"] == "accelerate"

    run(work())


def test_the_feed_ends_with_the_engine() -> None:
    async def work() -> None:
        engine = FakeEngine()
        feed = LiveFeed(engine.live, times=FeedTimes(sample=0.005))
        async with aclosing(feed.snapshots()) as snapshots:
            await next_of(snapshots)
            engine.broken = True
            last = await next_of(snapshots)
            while last is None or "over" not in last:
                last = await next_of(snapshots)
            assert last["over"] == "the engine failed; the server's log says how"
            with pytest.raises(StopAsyncIteration):
                await anext(snapshots)

    run(work())


def test_events_are_server_sent_events() -> None:
    async def work() -> None:
        feed = LiveFeed(FakeEngine().live, times=FeedTimes(sample=0.005, keep_alive=0.02))
        async with aclosing(feed.events()) as events:
            first = await next_of(events)
            assert first.startswith(b"data: {")
            assert first.endswith(b"\n\n")
            assert json.loads(first[6:])["contract"] == "sw-1"
            assert await next_of(events) == b": still here\n\n"

    run(work())


def test_the_feed_follows_an_engine() -> None:
    async def work() -> None:
        async with AsyncLLM.over(tiny_engine(make_proposer=Jitter)) as llm:
            feed = LiveFeed(llm.live, times=FeedTimes(sample=0.01))
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            async with aclosing(feed.snapshots()) as snapshots:
                asking = asyncio.create_task(llm.generate("a question", params))
                committed = 0
                async for snapshot in snapshots:
                    assert snapshot is not None
                    committed += sum(frame["committed"] for frame in snapshot["frames"])
                    if committed == 60:
                        break
                assert snapshot["contract"] == llm.contract.id
                assert snapshot["proposers"]["jitter"]["accepted"] > 0
                await asking

    run(work())
