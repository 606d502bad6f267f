"""`samewise bench --timeline`: one task after the other, and what `skip` makes of it, as a picture.

The picture is SWIFT's own, over committed tokens: phases as bands, topics as marks, how often guesses are
right and how often the set was on known text, how many tokens a frame brings, which sublayers are left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from samewise.bench.report import pyplot
from samewise.engine import Engine
from samewise.llm.answers import Desk
from samewise.params import SamplingParams

COLOURS = {"accumulate": "#c9ccd1", "optimise": "#f7c27b", "accelerate": "#a5d6a0"}
BLUE, RED, PURPLE, GREY = "#1f4e8c", "#c2410c", "#6b2c91", "#5f6670"
WINDOW = 48  # tokens over which a point of the curves is taken
ROOM = 0.09  # the share of the width a phase's name needs


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


def record(engine: Engine, asked: dict[str, list[list[int]]], batch: int, most: int) -> Timeline:
    """Answer the tasks one after the other, `batch` questions at a time, greedily, and take notes."""
    desk, line = Desk(engine), Timeline()
    last, since = _counters(engine), time.perf_counter()
    began = since
    greedy = SamplingParams(temperature=0, max_tokens=most, share=False)
    for task, prompts in asked.items():
        line.topics.append((int(_counters(engine)["tokens"]), task))
        for i in range(0, len(prompts), batch):
            for prompt in prompts[i : i + batch]:
                desk.submit(desk.ask(prompt, greedy))
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
    counts = engine.scheduler.counters
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
    figure, axes = plt.subplots(
        4, 1, figsize=(10, 7.2), sharex=True, height_ratios=(0.35, 2.6, 2.0, 2.4), layout="constrained"
    )
    end = max([1, *(p.tokens for p in line.points[-1:]), *(e["tokens"] for e in line.events[-1:])])
    phases = _phases(line.events, end)
    _strip(axes[0], phases, end)
    for axis in axes[1:]:
        for name, first, last in phases:
            axis.axvspan(first, last, color=COLOURS[name], alpha=0.22, linewidth=0)
        axis.spines[["top", "right"]].set_visible(False)
    for tokens, topic in line.topics:
        axes[0].annotate(topic, (tokens, 1.25), xycoords=("data", "axes fraction"), fontsize=10)
        for axis in axes if tokens else ():
            axis.axvline(tokens, color="black", linewidth=0.9, linestyle=(0, (2, 2)))
    _rightness(axes[1], line)
    axes[2].plot(*_curve([(p.tokens, p.tokens_per_frame) for p in line.points]), ".-", color=PURPLE)
    axes[2].set_ylim(bottom=0)
    axes[2].set_ylabel("tokens per frame")
    _sets(axes[3], line.events, end, layers)
    axes[3].set_xlim(0, end)
    axes[3].set_xlabel("committed tokens")
    figure.align_ylabels(axes)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _phases(events: list[dict[str, Any]], end: int) -> list[tuple[str, int, int]]:
    """Runs of one phase: its name, from where, to where."""
    found: list[tuple[str, int, int]] = []
    for event, following in pairwise([*events, {"tokens": end}]):
        name, first = event["event"], event["tokens"]
        if found and found[-1][0] == name:
            first = found.pop()[1]
        found.append((name, first, following["tokens"]))
    return found


def _strip(axis: Any, phases: list[tuple[str, int, int]], end: int) -> None:
    """The phases by name, where there is room for it."""
    for name, first, last in phases:
        axis.axvspan(first, last, color=COLOURS[name], linewidth=0)
        if last - first > ROOM * end:
            axis.text((first + last) / 2, 0.5, name, ha="center", va="center", fontsize=9)
    axis.set_ylim(0, 1)
    axis.set_yticks([])
    axis.tick_params(bottom=False)
    axis.spines[:].set_visible(False)


def _rightness(axis: Any, line: Timeline) -> None:
    """What came true of the guesses, and what the set promised on known text."""
    right = [(p.tokens, p.acceptance) for p in line.points if p.acceptance is not None]
    axis.plot(*_curve(right), ".-", color=BLUE, label="of the guesses")
    scored = [(e["tokens"], e["rate"]) for e in line.events if any(e["set"].values())]
    axis.plot([x for x, _ in scored], [y for _, y in scored], "x", color=RED, markersize=6,
              label="of known text, when scored")  # fmt: skip
    axis.set_ylim(0, 1.04)
    axis.set_ylabel("share right")
    axis.legend(fontsize=9, loc="lower left", edgecolor="none")


def _curve(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Every value over the middle of the tokens it was taken from."""
    return [tokens - WINDOW / 2 for tokens, _ in points], [value for _, value in points]


def _sets(axis: Any, events: list[dict[str, Any]], end: int, layers: int) -> None:
    """Which sublayers are left out, layer by layer: attention below, MLPs above."""
    for event, following in pairwise([*events, {"tokens": end}]):
        first, width = event["tokens"], following["tokens"] - event["tokens"]
        for kind, base in (("attention", 0), ("mlp", layers + 1)):
            for layer in event["set"][kind]:
                axis.broken_barh([(first, width)], (base + layer + 0.1, 0.8), color=GREY, linewidth=0)
    axis.set_ylim(0, 2 * layers + 1)
    axis.axhspan(layers, layers + 1, color="white", zorder=3)
    middles = (layers / 2, layers + 1 + layers / 2)
    axis.set_yticks(middles, [f"attention\n0–{layers - 1}", f"MLP\n0–{layers - 1}"])
    axis.tick_params(left=False)
    axis.set_ylabel("left out")


__all__ = ["Point", "Timeline", "plot", "record"]
