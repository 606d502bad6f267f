"""`samewise bench --timeline`: one task after the other, and what `skip` makes of it, as a picture.

The picture is SWIFT's own, over committed tokens: phases as bands, topics as marks, how often guesses are
right, how many tokens a frame brings, and how many sublayers are left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from samewise.answers import Desk
from samewise.bench.report import pyplot
from samewise.engine import Engine
from samewise.params import SamplingParams

COLOURS = {"accumulate": "#d9d9d9", "optimise": "#fdd49e", "accelerate": "#c7e9c0"}
WINDOW = 48  # tokens over which a point of the curves is taken


@dataclass(frozen=True, slots=True)
class Point:
    """How it went over the last few tokens."""

    tokens: int
    acceptance: float | None
    tokens_per_frame: float
    tokens_per_second: float


@dataclass(slots=True)
class Timeline:
    """A run over tasks, one behind the other."""

    points: list[Point] = field(default_factory=list)
    topics: list[tuple[int, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    search: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For the last line."""
        points = [
            {"tokens": p.tokens, "acceptance": p.acceptance, "tokens_per_frame": p.tokens_per_frame,
             "tokens_per_second": p.tokens_per_second}
            for p in self.points
        ]  # fmt: skip
        return {
            "points": points, "topics": self.topics, "events": self.events, "search": self.search,
            "seconds": self.seconds,
        }  # fmt: skip


def record(
    engine: Engine,
    asked: dict[str, list[list[int]]],
    batch: int,
    most: int,
    params: dict[str, SamplingParams] | None = None,
) -> Timeline:
    """Answer the tasks one after the other, `batch` questions at a time, and take notes.

    Greedily, unless `params` says otherwise of a task.
    """
    desk, line = Desk(engine), Timeline()
    last, since = _counters(engine), time.perf_counter()
    began = since
    greedy = SamplingParams(temperature=0, max_tokens=most, share=False)
    for task, prompts in asked.items():
        line.topics.append((int(_counters(engine)["tokens"]), task))
        for i in range(0, len(prompts), batch):
            for prompt in prompts[i : i + batch]:
                desk.submit(desk.ask(prompt, (params or {}).get(task, greedy)))
            while not engine.idle:
                desk.step()
                now = _counters(engine)
                if now["tokens"] - last["tokens"] >= WINDOW:
                    line.points.append(_point(last, now, time.perf_counter() - since))
                    last, since = now, time.perf_counter()
    report = engine.stats().get("skip", {})
    line.events, line.search = report.get("timeline", []), report.get("search", {})
    line.seconds = time.perf_counter() - began
    return line


def _counters(engine: Engine) -> dict[str, float]:
    counts = engine.scheduler.counts
    tally = counts.drafters.get("skip")
    return {
        "tokens": counts.output_tokens,
        "frames": counts.frames,
        "guessed": tally.guessed if tally else 0,
        "accepted": tally.accepted if tally else 0,
    }


def _point(before: dict[str, float], now: dict[str, float], seconds: float) -> Point:
    made = {name: now[name] - before[name] for name in now}
    acceptance = made["accepted"] / made["guessed"] if made["guessed"] else None
    return Point(
        int(now["tokens"]), acceptance, made["tokens"] / max(1.0, made["frames"]), made["tokens"] / seconds
    )


def plot(line: Timeline, path: Path, title: str, layers: int) -> None:
    """Draw it."""
    plt = pyplot()
    figure, (upper, middle, lower) = plt.subplots(
        3, 1, figsize=(10, 6.5), sharex=True, height_ratios=(3, 3, 1.6)
    )
    end = max([1, *(p.tokens for p in line.points[-1:]), *(e["tokens"] for e in line.events[-1:])])
    for axis in (upper, middle, lower):
        _bands(axis, line.events, end)
        for tokens, _ in line.topics[1:]:
            axis.axvline(tokens, color="black", linewidth=0.8, linestyle=":")
    for tokens, topic in line.topics:
        upper.annotate(topic, (tokens, 1.03), xycoords=("data", "axes fraction"), fontsize="small")
    right = [p for p in line.points if p.acceptance is not None]
    upper.plot([p.tokens for p in right], [p.acceptance for p in right], ".-", color="#225ea8")
    upper.set_ylim(0, 1.02)
    upper.set_ylabel("guesses right")
    middle.plot(
        [p.tokens for p in line.points], [p.tokens_per_frame for p in line.points], ".-", color="#7a0177"
    )
    middle.set_ylim(bottom=0)
    middle.set_ylabel("tokens per frame")
    steps = [(e["tokens"], len(e["set"]["attention"]), len(e["set"]["mlp"])) for e in line.events]
    for place, name in ((1, "attention"), (2, "MLP")):
        xs, ys = [s[0] for s in steps] + [end], [s[place] for s in steps] + [steps[-1][place] if steps else 0]
        lower.step(xs, ys, where="post", label=name)
    lower.set_ylim(0, layers)
    lower.set_ylabel(f"left out, of {layers}")
    lower.set_xlabel("committed tokens")
    lower.legend(fontsize="small", loc="upper left", ncols=2)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    middle.legend(handles, list(COLOURS), fontsize="small", loc="upper left", ncols=3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bands(axis: Any, events: list[dict[str, Any]], end: int) -> None:
    for event, following in pairwise([*events, {"tokens": end}]):
        axis.axvspan(
            event["tokens"], following["tokens"], color=COLOURS[event["event"]], alpha=0.6, linewidth=0
        )


__all__ = ["Point", "Timeline", "plot", "record"]
