"""The live feed: what the engine is doing, a few times a second, for whoever watches.

One sampler for all listeners. It runs while somebody listens and not otherwise, and asks the engine's
thread for numbers it keeps anyway, so watching costs a fraction of a frame. A listener that reads
slowly skips samples but no frames, as far back as the engine remembers them. Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from samewise.engine.frame_log import KEPT, FrameRecord
from samewise.errors import SamewiseError

EVERY = 0.25
"""Seconds between two samples."""
WINDOW = 2.0
"""Seconds over which a rate is taken."""
QUIET = 15.0
"""Seconds of silence after which a comment shows that the line is still open."""
TIMELINE = 64
"""Events of the timeline that are shown: the newest."""

Look = Callable[[int], Awaitable[dict[str, Any]]]
"""The engine's counters and its frames after a number: AsyncLLM.live."""

Json = dict[str, Any]


class Meter:
    """Turns successive looks at an engine into what a person wants to know. Owned by a Feed."""

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        self._points: deque[tuple[float, dict[str, int]]] = deque()

    def read(self, stats: Json, now: float) -> Json:
        """A snapshot without its frames."""
        # A proposer that does not sign its guesses is the engine's only one.
        drafters = {name or stats["proposer"]: tally for name, tally in stats["drafters"].items()}
        earned = _earned(drafters, stats["output_tokens"])
        rates = self._rates(now, earned)
        found: Json = {
            "tokens_per_second": round(sum(rates.values()), 1),
            "proposers": {name: _proposer(drafters.get(name, {}), rates[name]) for name in sorted(earned)},
            "running": stats["running"],
            "waiting": stats["waiting"],
            "contract": stats["contract"],
        }
        timeline = (stats.get("skip") or {}).get("timeline")
        if timeline is not None:
            found["timeline"] = [_event(one) for one in timeline[-TIMELINE:]]
        return found

    def _rates(self, now: float, earned: dict[str, int]) -> dict[str, float]:
        """Tokens per second by whose guesses brought them, over the window that ends now."""
        points = self._points
        points.append((now, earned))
        while len(points) > 2 and points[1][0] <= now - self._window:
            points.popleft()
        then, before = points[0]
        seconds = now - then
        if seconds <= 0:
            return dict.fromkeys(earned, 0.0)
        return {name: max(0, num - before.get(name, 0)) / seconds for name, num in earned.items()}


def _earned(drafters: dict[str, Json], tokens: int) -> dict[str, int]:
    """Tokens made public so far, by proposer; those that no guess was made for count for "none".

    A replayed draft yields its accepted guesses and one token of the replay's own.
    """
    earned = {name: tally["accepted"] + tally["drafts"] for name, tally in drafters.items()}
    plain = tokens - sum(earned.values())
    return earned | {"none": max(0, plain) + earned.get("none", 0)}


def _proposer(tally: Json, rate: float) -> Json:
    guessed, accepted = tally.get("guessed", 0), tally.get("accepted", 0)
    return {
        "guessed": guessed,
        "accepted": accepted,
        "rate": round(accepted / guessed, 4) if guessed else None,
        "tokens_per_second": round(rate, 1),
    }


def _event(one: Json) -> Json:
    return {name: one.get(name) for name in ("event", "tokens", "score", "rate", "set")}


def _frame(use: FrameRecord) -> Json:
    return {
        "number": use.number,
        "prompt": use.prompt,
        "known": use.known,
        "guess": use.guess,
        "padding": use.padding,
        "committed": use.committed,
    }


class Feed:
    """Snapshots for any number of listeners on one event loop, from one sampler.

    A listener is told everything at first, and after that the numbers whenever one of them changed;
    what is long and seldom changes (the timeline, the contract's facts) only when it did.
    """

    def __init__(
        self,
        look: Look,
        *,
        facts: Callable[[], Json] = dict,
        every: float = EVERY,
        quiet: float = QUIET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self._facts = look, facts
        self._every, self._quiet, self._clock = every, quiet, clock
        self._listeners = 0
        self._sampler: asyncio.Task[None] | None = None
        self._frames: deque[FrameRecord] = deque(maxlen=KEPT)
        self._sample: Json | None = None
        self._news = asyncio.Event()
        self._over: str | None = None  # why there will be no more samples
        self._closed = False

    @property
    def listeners(self) -> int:
        """How many are listening."""
        return self._listeners

    def close(self) -> None:
        """End every stream, now and from now on: the server is going."""
        self._closed = True
        self._end("the server is shutting down")

    async def snapshots(self) -> AsyncGenerator[Json | None]:
        """What is new, whenever something is; None after a long silence. Ends when the engine does."""
        self._join()
        try:
            told: Json = {}
            number = 0
            while self._over is None:
                news, sample = self._news, self._sample
                fresh = [use for use in self._frames if use.number > number]
                if sample is not None and (fresh or sample != told):
                    yield _since(sample, told) | {"frames": [_frame(use) for use in fresh]}
                    told, number = sample, fresh[-1].number if fresh else number
                elif not await _within(news, self._quiet):
                    yield None
            yield {"over": self._over}
        finally:
            self._leave()

    async def events(self) -> AsyncGenerator[bytes]:
        """The same as server-sent events."""
        async with aclosing(self.snapshots()) as snapshots:
            async for snapshot in snapshots:
                if snapshot is None:
                    yield b": still here\n\n"
                else:
                    yield b"data: " + json.dumps(snapshot, separators=(",", ":")).encode() + b"\n\n"

    # ---- inside

    async def _run(self) -> None:
        """The sampler."""
        meter, number = Meter(), 0
        try:
            while True:
                seen = await self._look(number)
                self._frames.extend(seen["frames"])
                number = self._frames[-1].number if self._frames else 0
                sample = meter.read(seen["stats"], self._clock()) | {"facts": self._facts()}
                if seen["frames"] or sample != self._sample:
                    self._sample = sample
                    self._wake()
                await asyncio.sleep(self._every)
        except SamewiseError as error:  # the engine is gone, or not there yet; its watchers are told
            self._end(str(error))

    def _join(self) -> None:
        self._listeners += 1
        if (self._sampler is None or self._sampler.done()) and not self._closed:
            self._over = self._sample = None
            self._frames.clear()
            self._sampler = asyncio.get_running_loop().create_task(self._run(), name="samewise-live")

    def _leave(self) -> None:
        self._listeners -= 1
        if self._listeners == 0 and self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None

    def _end(self, why: str) -> None:
        self._over = why
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _since(sample: Json, told: Json) -> Json:
    """A sample, without its long parts where they were told already."""
    return {
        name: value
        for name, value in sample.items()
        if name not in {"facts", "timeline"} or told.get(name) != value
    }


async def _within(news: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(news.wait(), seconds)
    except TimeoutError:
        return False
    return True


__all__ = ["Feed", "Meter"]
