"""The live feed: what the engine is doing, sampled a few times a second, for the web page.

One sampler serves all listeners and runs only while there is one. It reads counters that the engine keeps
anyway, so its cost is a fraction of a frame. A slow listener misses samples but no frames, as far back as
the engine's frame log reaches.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from samewise.engine.frame_log import KEPT, FrameRecord
from samewise.errors import SamewiseError
from samewise.openai.errors import ApiError
from samewise.openai.stream import encode_event

Json = dict[str, Any]
LiveStats = Callable[[int], Awaitable[Json]]
"""The engine's counters and its frames after a number: AsyncLLM.live."""

MAX_TIMELINE = 64
"""Newest events of the layer search's timeline that are sent. Set by hand: more than the page shows."""


@dataclass(frozen=True, slots=True)
class FeedTimes:
    """Times of the feed in seconds, set by hand for smooth updates and readable rates."""

    sample: float = 0.25  # between two samples
    window: float = 2.0  # over which a rate is taken
    keep_alive: float = 15.0  # without news, after which a comment keeps the connection open


FEED_TIMES = FeedTimes()


class RateMeter:
    """Turns successive engine statistics into rates. Owned by a LiveFeed."""

    def __init__(self, window: float = FEED_TIMES.window) -> None:
        self._window = window
        self._points: deque[tuple[float, dict[str, int]]] = deque()

    def read(self, stats: Json, now: float) -> Json:
        """A snapshot without its frames."""
        # Guesses without a drafter's name are those of the engine's only proposer.
        drafters = {name or stats["proposer"]: counts for name, counts in stats["drafters"].items()}
        tokens = _tokens_by_proposer(drafters, stats["output_tokens"])
        rates = self._rates(now, tokens)
        snapshot: Json = {
            "tokens_per_second": round(sum(rates.values()), 1),
            "proposers": {name: _proposer(drafters.get(name, {}), rates[name]) for name in sorted(tokens)},
            "running": stats["running"],
            "waiting": stats["waiting"],
            "contract": stats["contract"],
        }
        timeline = (stats.get("skip") or {}).get("timeline")
        if timeline is not None:
            snapshot["timeline"] = [_timeline_event(event) for event in timeline[-MAX_TIMELINE:]]
        return snapshot

    def _rates(self, now: float, tokens: dict[str, int]) -> dict[str, float]:
        """Tokens per second by proposer, over the window that ends now."""
        points = self._points
        points.append((now, tokens))
        while len(points) > 2 and points[1][0] <= now - self._window:
            points.popleft()
        then, before = points[0]
        seconds = now - then
        if seconds <= 0:
            return dict.fromkeys(tokens, 0.0)
        return {name: max(0, num - before.get(name, 0)) / seconds for name, num in tokens.items()}


def _tokens_by_proposer(drafters: dict[str, Json], num_tokens: int) -> dict[str, int]:
    """Tokens committed so far, by the proposer of their draft; tokens without a draft count for "none".

    A verified draft commits its accepted tokens and one token of the target model.
    """
    tokens = {name: counts["accepted"] + counts["drafts"] for name, counts in drafters.items()}
    undrafted = num_tokens - sum(tokens.values())
    return tokens | {"none": max(0, undrafted) + tokens.get("none", 0)}


def _proposer(counts: Json, rate: float) -> Json:
    guessed, accepted = counts.get("guessed", 0), counts.get("accepted", 0)
    drafts = counts.get("drafts", 0)
    return {
        "drafts": drafts,
        "guessed": guessed,
        "accepted": accepted,
        "rate": round(accepted / guessed, 4) if guessed else None,
        "nodes": round(guessed / drafts, 2) if drafts else None,
        "depth": round(accepted / drafts, 2) if drafts else None,
        "depths": counts.get("depths", []),
        "tokens_per_second": round(rate, 1),
    }


def _timeline_event(event: Json) -> Json:
    return {name: event.get(name) for name in ("event", "tokens", "score", "rate", "set")}


def _frame(record: FrameRecord) -> Json:
    return {
        "number": record.number,
        "prompt": record.prompt,
        "known": record.known,
        "guess": record.guess,
        "padding": record.padding,
        "committed": record.committed,
        "drafts": record.drafts,
    }


class LiveFeed:
    """Snapshots for any number of listeners in one event loop, from one sampler.

    A listener's first snapshot is complete. Later ones follow when a number has changed, and repeat the long
    parts (the timeline, the contract's facts) only when those have changed.
    """

    def __init__(
        self,
        live_stats: LiveStats,
        *,
        facts: Callable[[], Json] = dict,
        times: FeedTimes = FEED_TIMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live_stats, self._facts = live_stats, facts
        self._times, self._clock = times, clock
        self._listeners = 0
        self._sampler: asyncio.Task[None] | None = None
        self._frames: deque[FrameRecord] = deque(maxlen=KEPT)
        self._sample: Json | None = None
        self._changed = asyncio.Event()  # replaced at every change; listeners wait on the current one
        self._over: str | None = None  # the reason why there will be no more samples

    @property
    def listeners(self) -> int:
        """Number of listeners."""
        return self._listeners

    async def snapshots(self) -> AsyncGenerator[Json | None]:
        """New snapshots as they come; None after `keep_alive` seconds without one. Ends with the engine."""
        self._join()
        try:
            sent: Json = {}
            number = 0
            while self._over is None:
                changed, sample = self._changed, self._sample
                frames = [record for record in self._frames if record.number > number]
                if sample is not None and (frames or sample != sent):
                    yield _changes(sample, sent) | {"frames": [_frame(record) for record in frames]}
                    sent, number = sample, frames[-1].number if frames else number
                elif not await _is_set_within(changed, self._times.keep_alive):
                    yield None
            yield {"over": self._over}
        finally:
            self._leave()

    async def events(self) -> AsyncGenerator[bytes]:
        """The snapshots as server-sent events."""
        async with aclosing(self.snapshots()) as snapshots:
            async for snapshot in snapshots:
                yield b": still here\n\n" if snapshot is None else encode_event(snapshot)

    # ---- the sampler

    async def _run(self) -> None:
        meter, number = RateMeter(self._times.window), 0
        try:
            while True:
                live = await self._live_stats(number)
                self._frames.extend(live["frames"])
                number = self._frames[-1].number if self._frames else 0
                sample = meter.read(live["stats"], self._clock()) | {"facts": self._facts()}
                if live["frames"] or sample != self._sample:
                    self._sample = sample
                    self._wake()
                await asyncio.sleep(self._times.sample)
        except SamewiseError as error:  # the engine has stopped or is not loaded yet
            self._over = ApiError.of(error).message
            self._wake()

    def _join(self) -> None:
        self._listeners += 1
        if self._sampler is None or self._sampler.done():
            self._over = self._sample = None
            self._frames.clear()
            self._sampler = asyncio.get_running_loop().create_task(self._run(), name="samewise-live")

    def _leave(self) -> None:
        self._listeners -= 1
        if self._listeners == 0 and self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _changes(sample: Json, sent: Json) -> Json:
    """A sample, without its long parts where they were sent already."""
    return {
        name: value
        for name, value in sample.items()
        if name not in {"facts", "timeline"} or sent.get(name) != value
    }


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


__all__ = ["FeedTimes", "LiveFeed", "RateMeter"]
