"""The live feed: what frames were used for, one sampler for all, silence when nobody listens."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import pytest

from samewise import AsyncLLM, SamplingParams
from samewise.engine.frame_log import FrameLog, FrameRecord
from samewise.errors import MachineError
from samewise.serve.feed import Feed, Meter
from samewise.testing import Jitter, Scripted, tiny_engine
from samewise.types import Sampling, Span

T = TypeVar("T")
STATS: dict[str, Any] = {"output_tokens": 0, "drafters": {}, "running": 0, "waiting": 0, "contract": "sw-1"}


def go(work: Coroutine[Any, Any, T]) -> T:
    async def timed() -> T:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(timed())


# ---- the record


def span(start: int, inputs: int, given: int, prompt_len: int) -> Span:
    return Span(0, start, (7,) * inputs, given, array("i"), Sampling(), [], prompt_len)


@pytest.mark.parametrize(
    ("spans", "size", "wanted"),
    [
        ([span(0, 5, 9, 9)], 16, (5, 0, 0, 11)),  # a piece of a prompt
        ([span(5, 4, 4, 9)], 4, (4, 0, 0, 0)),  # the last of it
        ([span(9, 1, 1, 9)], 16, (0, 1, 0, 15)),  # a token of the answer
        ([span(9, 6, 1, 9)], 16, (0, 1, 5, 10)),  # and a draft behind it
        ([span(0, 12, 12, 9)], 16, (9, 3, 0, 4)),  # preempted: its answer is read again
        ([span(8, 3, 1, 9), span(0, 2, 2, 2), span(4, 1, 1, 2)], 8, (3, 1, 2, 2)),
        ([], 16, (0, 0, 0, 16)),
    ],
)
def test_every_row_of_a_frame_is_accounted_for(spans: list[Span], size: int, wanted: tuple[int, ...]) -> None:
    frame_log = FrameLog()
    frame_log.landed(spans, size, 3, 1.5)
    (use,) = frame_log.since(0)
    assert use == FrameRecord(1, *wanted, 3, 1.5)
    assert sum(wanted) == size


def test_the_record_is_bounded_and_knows_where_a_listener_left_off() -> None:
    frame_log = FrameLog(kept=4)
    for i in range(10):
        frame_log.landed([span(i, 1, 1, 0)], 1, 1, float(i))
    assert frame_log.number == 10
    assert [use.number for use in frame_log.since(0)] == [7, 8, 9, 10]
    assert [use.number for use in frame_log.since(8)] == [9, 10]
    assert frame_log.since(10) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engines_record_adds_up_to_its_counters(ahead: bool) -> None:
    def twice(ask: Any) -> list[int]:
        return [ask.tokens[-1]] * 2

    make = (lambda _: Scripted(twice)) if not ahead else None
    engine = tiny_engine(ahead=ahead, make_proposer=make, proposer="none")
    for i in range(3):
        engine.add([40 + i] * (9 * i + 1), Sampling(), max_tokens=12)
    while not engine.idle:
        engine.step()
    seen = engine.live()
    stats, frames = seen["stats"], seen["frames"]
    assert len(frames) == stats["frames"]
    assert sum(use.prompt for use in frames) == stats["prompt_tokens"]
    assert sum(use.guess for use in frames) == stats["guessed"] == (0 if ahead else stats["guessed"])
    assert sum(use.committed for use in frames) == stats["output_tokens"] == 36
    assert sum(use.padding for use in frames) == stats["padded_rows"]
    assert sum(use.prompt + use.known + use.guess for use in frames) == stats["rows"]
    assert [use.when for use in frames] == sorted(use.when for use in frames)
    assert engine.live(frames[-2].number)["frames"] == frames[-1:]


# ---- the meter


def test_rates_are_taken_over_a_window_and_add_up() -> None:
    meter = Meter(window=2.0)
    tally = {"drafts": 0, "guessed": 0, "accepted": 0}
    assert meter.read(STATS, 10.0)["tokens_per_second"] == 0
    now = STATS | {
        "output_tokens": 50,
        "drafters": {"ngram": tally | {"drafts": 10, "guessed": 40, "accepted": 30}},
    }
    seen = meter.read(now, 11.0)
    assert seen["tokens_per_second"] == 50
    assert seen["proposers"]["ngram"] == {
        "guessed": 40, "accepted": 30, "rate": 0.75, "tokens_per_second": 40.0
    }  # fmt: skip
    assert seen["proposers"]["none"] == {
        "guessed": 0, "accepted": 0, "rate": None, "tokens_per_second": 10.0
    }  # fmt: skip
    assert meter.read(now, 12.0)["tokens_per_second"] == 25
    assert meter.read(now, 20.0)["tokens_per_second"] < 6
    assert meter.read(now, 23.0)["tokens_per_second"] == 0


def test_the_timeline_is_there_when_the_proposer_has_one() -> None:
    assert "timeline" not in Meter().read(STATS, 0.0)
    assert "timeline" not in Meter().read(STATS | {"skip": None}, 0.0)
    sets = {"attention": [3], "mlp": [4, 5]}
    one = {"event": "optimise", "tokens": 64, "score": 31.5, "rate": 0.7, "set": sets, "more": "than asked"}
    many = [one | {"tokens": i} for i in range(100)]
    seen = Meter().read(STATS | {"skip": {"timeline": many}}, 0.0)
    assert len(seen["timeline"]) == 64
    assert seen["timeline"][-1] == {
        "event": "optimise", "tokens": 99, "score": 31.5, "rate": 0.7, "set": sets
    }  # fmt: skip
    bare = Meter().read(STATS | {"skip": {"timeline": [{"event": "accumulate", "tokens": 3}]}}, 0.0)
    assert bare["timeline"] == [
        {"event": "accumulate", "tokens": 3, "score": None, "rate": None, "set": None}
    ]


# ---- the feed


class Source:
    """An engine to look at, made of numbers."""

    def __init__(self) -> None:
        self.looks: list[int] = []
        self.stats = dict(STATS)
        self.frames: list[FrameRecord] = []
        self.broken = False

    def land(self, num: int = 1) -> None:
        for _ in range(num):
            self.frames.append(FrameRecord(len(self.frames) + 1, 0, 1, 2, 1, 3, 0.0))
        self.stats["output_tokens"] += 3 * num

    async def look(self, since: int) -> dict[str, Any]:
        self.looks.append(since)
        if self.broken:
            raise MachineError("the engine has stopped: a planted bug")
        return {"stats": dict(self.stats), "frames": [use for use in self.frames if use.number > since]}


async def told(snapshots: AsyncIterator[Any]) -> Any:
    return await asyncio.wait_for(anext(snapshots), 5)


def test_nothing_is_computed_while_nobody_listens() -> None:
    async def work() -> None:
        source = Source()
        feed = Feed(source.look, every=0.005)
        await asyncio.sleep(0.03)
        assert source.looks == []
        async with aclosing(feed.snapshots()) as snapshots:
            await told(snapshots)
            assert feed.listeners == 1
        assert feed.listeners == 0
        await asyncio.sleep(0.01)
        before = len(source.looks)
        await asyncio.sleep(0.03)
        assert len(source.looks) == before
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "samewise-live"]

    go(work())


def test_one_sampler_for_all_and_every_listener_gets_every_frame() -> None:
    async def work() -> None:
        source = Source()
        source.land(3)
        feed = Feed(source.look, facts=lambda: {"dtype": "float32"}, every=0.01)
        found: list[list[int]] = [[] for _ in range(5)]

        async def listen(i: int) -> None:
            async with aclosing(feed.snapshots()) as snapshots:
                async for seen in snapshots:
                    assert seen is not None
                    found[i] += [frame["number"] for frame in seen["frames"]]
                    await asyncio.sleep(0.02 * i)  # some read more slowly than samples are taken
                    if found[i][-1:] == [40]:
                        return

        listening = [asyncio.create_task(listen(i)) for i in range(5)]
        while len(source.frames) < 40:
            await asyncio.sleep(0.004)
            source.land()
        await asyncio.gather(*listening)
        assert found == [list(range(1, 41))] * 5
        assert source.looks == sorted(source.looks), "each look asks only for what is new"
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == "samewise-live"]
        assert all(task.cancelling() for task in tasks)

    go(work())


def test_what_is_long_is_told_once_and_silence_is_kept() -> None:
    async def work() -> None:
        source = Source()
        source.stats["skip"] = {"timeline": [{"event": "accumulate", "tokens": 1}]}
        feed = Feed(source.look, facts=lambda: {"dtype": "float32"}, every=0.005, quiet=0.05)
        async with aclosing(feed.snapshots()) as snapshots:
            first = await told(snapshots)
            assert first["facts"] == {"dtype": "float32"}
            assert first["timeline"][0]["event"] == "accumulate"
            assert first["frames"] == []
            assert await told(snapshots) is None, "nothing changed, so only a sign of life"
            source.land()
            second = await told(snapshots)
            assert not {"facts", "timeline"} & second.keys()
            assert second["frames"] == [
                {"number": 1, "prompt": 0, "known": 1, "guess": 2, "padding": 1, "committed": 3}
            ]
            source.stats["skip"] = {"timeline": [{"event": "accelerate", "tokens": 9}]}
            seen = await told(snapshots)
            while "timeline" not in seen:
                seen = await told(snapshots)
            assert seen["timeline"][0]["event"] == "accelerate"

    go(work())


@pytest.mark.parametrize("how", ["close", "break"])
def test_the_end_is_told(how: str) -> None:
    async def work() -> None:
        source = Source()
        feed = Feed(source.look, every=0.005)
        async with aclosing(feed.snapshots()) as snapshots:
            await told(snapshots)
            if how == "close":
                feed.close()
            else:
                source.broken = True
            last = await told(snapshots)
            while last is None or "over" not in last:
                last = await told(snapshots)
            assert ("shutting down" if how == "close" else "a planted bug") in last["over"]
            with pytest.raises(StopAsyncIteration):
                await anext(snapshots)
        if how == "close":
            assert [seen async for seen in feed.snapshots()] == [last]

    go(work())


def test_events_are_server_sent_events() -> None:
    async def work() -> None:
        feed = Feed(Source().look, every=0.005, quiet=0.02)
        async with aclosing(feed.events()) as events:
            first = await told(events)
            assert first.startswith(b"data: {")
            assert first.endswith(b"\n\n")
            assert json.loads(first[6:])["contract"] == "sw-1"
            assert await told(events) == b": still here\n\n"

    go(work())


def test_over_a_real_engine() -> None:
    async def work() -> None:
        async with AsyncLLM.over(tiny_engine(make_proposer=Jitter)) as llm:
            feed = Feed(llm.live, every=0.01)
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            async with aclosing(feed.snapshots()) as snapshots:
                asking = asyncio.create_task(llm.generate("a question", params))
                committed = 0
                async for seen in snapshots:
                    assert seen is not None
                    committed += sum(frame["committed"] for frame in seen["frames"])
                    if committed == 60:
                        break
                assert seen["contract"] == llm.contract.id
                assert seen["proposers"]["jitter"]["accepted"] > 0
                await asking

    go(work())
