"""The output of bench/h200.py: lines of text, a table, a picture, the JSON of the last line."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

import peers
from samewise.bench.report import pyplot
from samewise.errors import MachineError

Figures = dict[str, Any]


def median_run(runs: list[Figures]) -> Figures:
    """The median of each figure over the repeats; the windows of all of them."""
    result: Figures = {}
    for name in runs[0]:
        values = [run[name] for run in runs if run[name] is not None]
        if name == "ms_windows":
            result[name] = [run[name] for run in runs]
        elif values and isinstance(values[0], int | float):
            result[name] = statistics.median(values)
        else:
            result[name] = values[0] if values else None
    return result


def case_line(row: Figures) -> str:
    """One case (lengths and load) as a line of text."""
    parts = [f"{row['lengths']}, {row['live']} live: ceiling {row['ceiling_ms']:.2f}"]
    parts += [f"{mode} {_cell(figures, mode)}" for mode, figures in row["modes"].items()]
    first = next(iter(row["modes"].values()))
    parts.append(
        f"prompts {first['prompt_tok_s']:.0f} tokens/s, device waits {_share(first['device_waits'])}"
    )
    return ", ".join(parts)


def case_table(report: Figures) -> Table:
    """A row per case, with vLLM's figures where they were measured at the same shape and lengths."""
    modes = list(dict.fromkeys(mode for row in report["cases"] for mode in row["modes"]))
    table = Table(title="milliseconds per decode step (over unverified)", caption=peers.SOURCE)
    ours, theirs = ("prompt tok/s", "tok/s", "host ms", "device waits"), ("vLLM", "vLLM invariant")
    for heading in ("prompt/output", "live", "ceiling", *modes, *theirs, *ours):
        table.add_column(heading, justify="left" if heading == "prompt/output" else "right")
    for row in report["cases"]:
        known = (peers.ORDINARY, peers.INVARIANT) if _comparable(report, row) else ({}, {})
        first = next(iter(row["modes"].values()))
        table.add_row(
            row["lengths"], str(row["live"]), f"{row['ceiling_ms']:.2f}",
            *(_cell(row["modes"].get(mode), mode) for mode in modes),
            *(_ms(by_live.get(row["live"])) for by_live in known),
            f"{first['prompt_tok_s']:,.0f}", f"{first['tok_s']:,.0f}", _ms(first["host_ms"]),
            _share(first["device_waits"]),
        )  # fmt: skip
    return table


def draw(report: Figures, path: Path) -> None:
    """Milliseconds per step by live sequences at the first lengths: our modes, vLLM twice, the ceiling."""
    plt = pyplot()
    rows = [row for row in report["cases"] if row["lengths"] == report["cases"][0]["lengths"]]
    figure, axis = plt.subplots(figsize=(8, 5))
    lives = [row["live"] for row in rows]
    axis.plot(
        lives,
        [row["ceiling_ms"] for row in rows],
        color="gray",
        linestyle=":",
        label="ceiling: reading the weights and the KV",
    )
    for mode, style in (("verified", "o-"), ("unverified", "s--"), ("10%", "^:")):
        points = [(r["live"], r["modes"][mode]["ms"]) for r in rows if r["modes"].get(mode, {}).get("ms")]
        if points:
            axis.plot(*zip(*points, strict=True), style, label="10% verified" if mode == "10%" else mode)
    if _comparable(report, rows[0]):
        names = ("vLLM 0.24.0, ordinary", "vLLM 0.24.0, batch-invariant")
        for name, known, color in zip(names, (peers.ORDINARY, peers.INVARIANT), ("C4", "C3"), strict=True):
            axis.plot(list(known), list(known.values()), "x-", color=color, alpha=0.7, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lives, [str(live) for live in lives])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("live sequences")
    axis.set_ylabel("ms per decode step")
    axis.set_title(f"{report['device']}, {report['shape']}, {report['dtype']}, {rows[0]['lengths']}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def summary(report: Figures) -> Figures:
    """The JSON of the last line: everything but the single measurements."""
    cases = [
        {name: row[name] for name in ("lengths", "live", "context", "ceiling_ms")}
        | {"modes": {mode: _compact(figures) for mode, figures in row["modes"].items()}}
        for row in report["cases"]
    ]
    own = {"own": _compact(report["own"])} if "own" in report else {}
    sizes = {"sizes": shorten_sizes(report["sizes"])} if "sizes" in report else {}
    rounded: Figures = json.loads(json.dumps(report | {"cases": cases} | own | sizes), parse_float=_round)
    return rounded


def _comparable(report: Figures, row: Figures) -> bool:
    """Whether vLLM's figures were measured at this shape and these lengths."""
    return report["shape"] == "8B, 32 layers" and (row["prompt"], row["output"]) == peers.MEASURED_AT


def _cell(figures: Figures | None, mode: str) -> str:
    if figures is None:
        return "–"
    ratio = figures["over_unverified"] if mode != "unverified" else None
    return _ms(figures["ms"]) + (f" ({ratio:.3f})" if ratio else "")


def _compact(figures: Figures) -> Figures:
    """The figures without single measurements, absent values and expected values."""
    expected = {"preempted": 0, "over_unverified": 1.0}
    dropped = ("ms_windows", "context", "tok_s_is")
    present = {name: value for name, value in figures.items() if name not in dropped and value is not None}
    return {name: value for name, value in present.items() if expected.get(name) != value}


def _round(text: str) -> float:
    return float(f"{float(text):.5g}")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def shorten_sizes(sizes: list[int]) -> str:
    """Frame sizes as text; above twelve, only the first two and the last."""
    shown = sizes if len(sizes) <= 12 else [*sizes[:2], "…", sizes[-1]]
    return ", ".join(str(size) for size in shown)


def save_picture(report: Figures, out: Path) -> str:
    """Draw to `out`/h200.png; returns a line that says where, or why there is none."""
    try:
        draw(report, out / "h200.png")
        return f"picture: {out / 'h200.png'}"
    except MachineError as error:
        return f"no picture: {error}; later, --draw {out / 'h200.json'}"
