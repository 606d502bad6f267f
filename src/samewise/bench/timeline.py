"""`samewise bench --timeline`: the proposer `skip` over one task after the other, as a picture.

The picture is that of the SWIFT paper, over committed tokens: phases as bands, tasks as marks, acceptance of
drafts and agreement of the layer set on committed text, tokens per frame, and the sublayers that are skipped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from samewise.bench.report import pyplot
from samewise.engine import Engine
from samewise.llm.step_loop import StepLoop
from samewise.params import SamplingParams

COLOURS = {"accumulate": "#c9ccd1", "optimise": "#f7c27b", "accelerate": "#a5d6a0"}
BLUE, RED, PURPLE, GREY = "#1f4e8c", "#c2410c", "#6b2c91", "#5f6670"
POINT_TOKENS = 48  # committed tokens per point of the curves: enough for a steady acceptance
LABEL_WIDTH = 0.09  # share of the picture's width that a phase's name needs


@dataclass(frozen=True, slots=True)
class Point:
    """Rates over the last POINT_TOKENS tokens."""

    tokens: int
    acceptance: float | None
    tokens_per_frame: float
    tokens_per_second: float


@dataclass(slots=True)
class Timeline:
    """A run over tasks, one after the other. `topics` are the tasks, each with the token it began at."""

    points: list[Point] = field(default_factory=list)
    topics: list[tuple[int, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    search: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """As the last line of `samewise bench` holds it."""
        points = [
            {"tokens": p.tokens, "acceptance": p.acceptance, "tokens_per_frame": p.tokens_per_frame,
             "tokens_per_second": p.tokens_per_second}
            for p in self.points
        ]  # fmt: skip
        return {
            "points": points, "topics": self.topics, "events": self.events, "search": self.search,
            "seconds": self.seconds,
        }  # fmt: skip


def record(engine: Engine, prompts: dict[str, list[list[int]]], batch: int, max_tokens: int) -> Timeline:
    """Answer the tasks one after the other, `batch` questions at a time, greedily, and record the rates."""
    loop, line = StepLoop(engine), Timeline()
    last, since = _counters(engine), time.perf_counter()
    began = since
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, share=False)
    for task, questions in prompts.items():
        line.topics.append((int(_counters(engine)["tokens"]), task))
        for i in range(0, len(questions), batch):
            for prompt in questions[i : i + batch]:
                loop.submit(loop.intake.check(prompt, greedy))
            while not engine.idle:
                loop.step()
                now = _counters(engine)
                if now["tokens"] - last["tokens"] >= POINT_TOKENS:
                    line.points.append(_point(last, now, time.perf_counter() - since))
                    last, since = now, time.perf_counter()
    report = engine.stats().get("skip", {})
    line.events, line.search = report.get("timeline", []), report.get("search", {})
    line.seconds = time.perf_counter() - began
    return line


def _counters(engine: Engine) -> dict[str, float]:
    counters = engine.scheduler.counters
    skip = counters.drafters.get("skip")
    return {
        "tokens": counters.output_tokens,
        "frames": counters.frames,
        "guessed": skip.guessed if skip else 0,
        "accepted": skip.accepted if skip else 0,
    }


def _point(before: dict[str, float], now: dict[str, float], seconds: float) -> Point:
    change = {name: now[name] - before[name] for name in now}
    acceptance = change["accepted"] / change["guessed"] if change["guessed"] else None
    per_frame = change["tokens"] / max(1.0, change["frames"])
    return Point(int(now["tokens"]), acceptance, per_frame, change["tokens"] / seconds)


def plot(line: Timeline, path: Path, title: str, layers: int) -> None:
    """Draw the timeline of a model with this many layers."""
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
    _acceptance(axes[1], line)
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
    """Runs of equal phases: name, first token, token after the last."""
    phases: list[tuple[str, int, int]] = []
    for event, following in pairwise([*events, {"tokens": end}]):
        name, first = event["event"], event["tokens"]
        if phases and phases[-1][0] == name:
            first = phases.pop()[1]
        phases.append((name, first, following["tokens"]))
    return phases


def _strip(axis: Any, phases: list[tuple[str, int, int]], end: int) -> None:
    """The phases by name, where a name has room."""
    for name, first, last in phases:
        axis.axvspan(first, last, color=COLOURS[name], linewidth=0)
        if last - first > LABEL_WIDTH * end:
            axis.text((first + last) / 2, 0.5, name, ha="center", va="center", fontsize=9)
    axis.set_ylim(0, 1)
    axis.set_yticks([])
    axis.tick_params(bottom=False)
    axis.spines[:].set_visible(False)


def _acceptance(axis: Any, line: Timeline) -> None:
    """Acceptance of drafts, and agreement of the layer set with committed text when it was scored."""
    accepted = [(p.tokens, p.acceptance) for p in line.points if p.acceptance is not None]
    axis.plot(*_curve(accepted), ".-", color=BLUE, label="of drafted tokens")
    scored = [(e["tokens"], e["rate"]) for e in line.events if any(e["set"].values())]
    axis.plot([x for x, _ in scored], [y for _, y in scored], "x", color=RED, markersize=6,
              label="of committed text, when scored")  # fmt: skip
    axis.set_ylim(0, 1.04)
    axis.set_ylabel("share right")
    axis.legend(fontsize=9, loc="lower left", edgecolor="none")


def _curve(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Each value at the middle of the tokens it was measured over."""
    return [tokens - POINT_TOKENS / 2 for tokens, _ in points], [value for _, value in points]


def _sets(axis: Any, events: list[dict[str, Any]], end: int, layers: int) -> None:
    """The skipped sublayers, layer by layer: attention below, MLPs above."""
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
    axis.set_ylabel("skipped")


__all__ = ["Point", "Timeline", "plot", "record"]
