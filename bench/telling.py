"""What bench/h200.py found, to read and to look at: lines, a table, a picture, the last line."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

import peers
from samewise.bench.report import pyplot
from samewise.errors import MachineError

Found = dict[str, Any]


def middle(runs: list[Found]) -> Found:
    """The median of each figure over repeats; the steps of all of them."""
    found: Found = {}
    for name in runs[0]:
        values = [run[name] for run in runs if run[name] is not None]
        if name == "ms_windows":
            found[name] = [run[name] for run in runs]
        elif values and isinstance(values[0], int | float):
            found[name] = statistics.median(values)
        else:
            found[name] = values[0] if values else None
    return found


def line(row: Found) -> str:
    """One length and load, as soon as it was measured."""
    said = [f"{row['lengths']}, {row['live']} live: ceiling {row['ceiling_ms']:.2f}"]
    said += [f"{mode} {_cell(seen, mode)}" for mode, seen in row["modes"].items()]
    first = next(iter(row["modes"].values()))
    said.append(f"prompts {first['prompt_tok_s']:.0f} tokens/s, device waits {_share(first['device_waits'])}")
    return ", ".join(said)


def table(found: Found) -> Table:
    """A row per length and load, vLLM's figures beside ours where they were measured at the same lengths."""
    modes = list(dict.fromkeys(mode for row in found["cases"] for mode in row["modes"]))
    view = Table(title="milliseconds per decode step (over unverified)", caption=peers.SOURCE)
    ours, theirs = ("prompt tok/s", "tok/s", "host ms", "device waits"), ("vLLM", "vLLM invariant")
    for heading in ("prompt/output", "live", "ceiling", *modes, *theirs, *ours):
        view.add_column(heading, justify="left" if heading == "prompt/output" else "right")
    for row in found["cases"]:
        known = (peers.ORDINARY, peers.INVARIANT) if _comparable(found, row) else ({}, {})
        first = next(iter(row["modes"].values()))
        view.add_row(
            row["lengths"], str(row["live"]), f"{row['ceiling_ms']:.2f}",
            *(_cell(row["modes"].get(mode), mode) for mode in modes),
            *(_ms(by_live.get(row["live"])) for by_live in known),
            f"{first['prompt_tok_s']:,.0f}", f"{first['tok_s']:,.0f}", _ms(first["host_ms"]),
            _share(first["device_waits"]),
        )  # fmt: skip
    return view


def draw(found: Found, path: Path) -> None:
    """Milliseconds per step over live sequences, first lengths: ours, vLLM's two curves, the ceiling."""
    plt = pyplot()
    rows = [row for row in found["cases"] if row["lengths"] == found["cases"][0]["lengths"]]
    figure, axis = plt.subplots(figsize=(8, 5))
    lives = [row["live"] for row in rows]
    axis.plot(
        lives, [row["ceiling_ms"] for row in rows], color="gray", linestyle=":", label="ceiling: reading it"
    )
    for mode, style in (("verified", "o-"), ("unverified", "s--"), ("10%", "^:")):
        points = [(r["live"], r["modes"][mode]["ms"]) for r in rows if r["modes"].get(mode, {}).get("ms")]
        if points:
            axis.plot(*zip(*points, strict=True), style, label="10% verified" if mode == "10%" else mode)
    if _comparable(found, rows[0]):
        names = ("vLLM 0.24.0, ordinary", "vLLM 0.24.0, batch-invariant")
        for name, known, color in zip(names, (peers.ORDINARY, peers.INVARIANT), ("C4", "C3"), strict=True):
            axis.plot(list(known), list(known.values()), "x-", color=color, alpha=0.7, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lives, [str(live) for live in lives])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("live sequences")
    axis.set_ylabel("ms per decode step")
    axis.set_title(f"{found['device']}, {found['shape']}, {found['dtype']}, {rows[0]['lengths']}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def short(found: Found) -> Found:
    """What the last line says: everything but the single measurements."""
    cases = [
        {name: row[name] for name in ("lengths", "live", "context", "ceiling_ms")}
        | {"modes": {mode: _without(seen) for mode, seen in row["modes"].items()}}
        for row in found["cases"]
    ]
    own = {"own": _without(found["own"])} if "own" in found else {}
    sizes = {"sizes": few(found["sizes"])} if "sizes" in found else {}
    rounded: Found = json.loads(json.dumps(found | {"cases": cases} | own | sizes), parse_float=_round)
    return rounded


def _comparable(found: Found, row: Found) -> bool:
    """Whether the peers' numbers were measured at this shape and these lengths."""
    return found["shape"] == "8B, 32 layers" and (row["prompt"], row["output"]) == peers.MEASURED_AT


def _cell(seen: Found | None, mode: str) -> str:
    if seen is None:
        return "–"
    ratio = seen["over_unverified"] if mode != "unverified" else None
    return _ms(seen["ms"]) + (f" ({ratio:.3f})" if ratio else "")


def _without(seen: Found) -> Found:
    """The figures alone; what went as it should is not worth a word."""
    quiet = {"preempted": 0, "over_unverified": 1.0}
    dropped = ("ms_windows", "context", "tok_s_is")
    told = {name: value for name, value in seen.items() if name not in dropped and value is not None}
    return {name: value for name, value in told.items() if name not in quiet or quiet[name] != value}


def _round(text: str) -> float:
    return float(f"{float(text):.5g}")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def few(sizes: list[int]) -> str:
    """Sizes, the middle left out where there are many."""
    shown = sizes if len(sizes) <= 12 else [*sizes[:2], "…", sizes[-1]]
    return ", ".join(str(size) for size in shown)


def picture(found: Found, out: Path) -> str:
    """Draw, or say why not: the numbers are not lost for want of a picture."""
    try:
        draw(found, out / "h200.png")
        return f"picture: {out / 'h200.png'}"
    except MachineError as error:
        return f"no picture: {error}; later, --draw {out / 'h200.json'}"
