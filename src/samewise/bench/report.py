"""What was found, to read and to look at: tables, pictures, one line of JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from samewise.bench.contend import Sample
from samewise.errors import MachineError


@dataclass(frozen=True, slots=True)
class Cell:
    """All runs of one contender on one task at one batch size."""

    contender: str
    task: str
    batch: int
    samples: tuple[Sample, ...]

    @property
    def rate(self) -> float:
        """Tokens per second, the median run."""
        return statistics.median(sample.rate for sample in self.samples)

    def total(self, name: str) -> float:
        """A counter over all runs."""
        return sum(sample.counters.get(name, 0.0) for sample in self.samples)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        guessed, frames = self.total("guessed"), self.total("frames")
        return {
            "contender": self.contender, "task": self.task, "batch": self.batch, "tokens_per_s": self.rate,
            "runs": [round(sample.rate, 2) for sample in self.samples],
            "tokens": sum(sample.tokens for sample in self.samples),
            "tokens_per_frame": self.total("output_tokens") / frames if frames else None,
            "acceptance": self.total("accepted") / guessed if guessed else None,
            "guessed": guessed, "accepted": self.total("accepted"),
            "time_to_first_token": middle(sample.first_token for sample in self.samples),
            "time_per_output_token": middle(sample.per_token for sample in self.samples),
        }  # fmt: skip


def middle(found: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in found if value is not None]
    return statistics.median(known) if known else None


def table(cells: Iterable[Cell], baseline: str | None) -> Table:
    """A row per task and batch size, a column per contender; the ratio to the baseline beside each."""
    found = list(cells)
    names = list(dict.fromkeys(cell.contender for cell in found))
    view = Table(title="tokens per second" + (f" (times {baseline})" if baseline in names else ""))
    for heading in ("batch", "task", *names):
        view.add_column(heading, justify="left" if heading == "task" else "right")
    for batch in dict.fromkeys(cell.batch for cell in found):
        by_task: dict[str, dict[str, Cell]] = {}
        for cell in found:
            if cell.batch == batch:
                by_task.setdefault(cell.task, {})[cell.contender] = cell
        for task, row in by_task.items():
            base = row[baseline].rate if baseline in row else None
            view.add_row(str(batch), task, *(_said(row.get(name), base) for name in names))
        means = {name: mean_rate(found, name, batch) for name in names}
        base = means.get(baseline or "")
        said = [f"{means[n]:.1f}" + (f" ({means[n] / base:.2f})" if base else "") for n in names]
        view.add_row(str(batch), "[bold]all[/]", *said, end_section=True)
    return view


def mean_rate(cells: Iterable[Cell], contender: str, batch: int) -> float:
    """The mean over tasks."""
    rates = [cell.rate for cell in cells if (cell.contender, cell.batch) == (contender, batch)]
    return statistics.mean(rates) if rates else 0.0


def over_best(cells: Iterable[Cell]) -> dict[tuple[int, str], tuple[str, float]]:
    """By batch and task, the best fixed choice there, and how `auto` compares with it run by run (median).

    Runs are compared in pairs, because both of a pair had the machine as it was just then.
    """
    found = list(cells)
    compared: dict[tuple[int, str], tuple[str, float]] = {}
    for mine in found:
        place = mine.batch, mine.task
        here = [cell for cell in found if (cell.batch, cell.task) == place and cell is not mine]
        fixed = [cell for cell in here if cell.total("frames") and cell.contender != "unverified"]
        if mine.contender == "auto" and fixed:
            best = max(fixed, key=lambda cell: cell.rate)
            pairs = zip(mine.samples, best.samples, strict=True)
            compared[place] = best.contender, statistics.median(a.rate / b.rate for a, b in pairs)
    return compared


def auto_over_best(cells: Iterable[Cell]) -> Table:
    """The same, to look at."""
    compared = over_best(cells)
    view = Table(title="auto over the best fixed choice, run by run")
    view.add_column("task")
    batches = list(dict.fromkeys(batch for batch, _ in compared))
    for batch in batches:
        view.add_column(f"batch {batch}", justify="right")
    for task in dict.fromkeys(task for _, task in compared):
        row = [compared.get((batch, task)) for batch in batches]
        view.add_row(task, *(f"{one[1]:.2f} ({one[0]})" if one else "–" for one in row))
    return view


def speculation(cells: Iterable[Cell]) -> Table:
    """Acceptance and tokens per frame, over all tasks."""
    view = Table(title="speculation")
    for heading in ("proposer", "batch", "guessed", "accepted", "tokens per frame", "rows padded"):
        view.add_column(heading, justify="left" if heading == "proposer" else "right")
    found = [cell for cell in cells if cell.total("frames")]
    for name, batch in dict.fromkeys((cell.contender, cell.batch) for cell in found):
        mine = [cell for cell in found if (cell.contender, cell.batch) == (name, batch)]
        guessed, accepted, frames, tokens, rows, padded = (
            sum(cell.total(counter) for cell in mine)
            for counter in ("guessed", "accepted", "frames", "output_tokens", "rows", "padded_rows")
        )
        view.add_row(
            name, str(batch), f"{guessed:.0f}",
            f"{accepted / guessed:.1%}" if guessed else "–",
            f"{tokens / frames:.2f}", f"{padded / max(1.0, rows + padded):.0%}",
        )  # fmt: skip
    return view


def plot(cells: Iterable[Cell], path: Path, title: str) -> None:
    """Bars: tokens per second by task, a panel per batch size."""
    found = list(cells)
    names = list(dict.fromkeys(cell.contender for cell in found))
    batches = list(dict.fromkeys(cell.batch for cell in found))
    plt = pyplot()
    figure, axes = plt.subplots(len(batches), 1, figsize=(10, 3.2 * len(batches)), squeeze=False)
    for axis, batch in zip(axes[:, 0], batches, strict=True):
        tasks = list(dict.fromkeys(cell.task for cell in found if cell.batch == batch))
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            rates = {c.task: c.rate for c in found if (c.contender, c.batch) == (name, batch)}
            places = [j + i * width for j in range(len(tasks))]
            axis.bar(places, [rates.get(task, 0.0) for task in tasks], width, label=name)
        axis.set_xticks([j + 0.4 - width / 2 for j in range(len(tasks))], tasks)
        axis.set_ylabel(f"tokens/s, batch {batch}")
    axes[0, 0].margins(y=0.2)  # room for the names
    axes[0, 0].legend(ncols=4, fontsize="small", loc="upper left")
    axes[0, 0].set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_overhead(points: list[tuple[float, float, float]], path: Path, title: str) -> None:
    """Throughput relative to unverified decoding, and the share of guesses thrown away, by mismatch rate."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4))
    rates = [100 * rate for rate, _, _ in points]
    axis.plot(rates, [relative for _, relative, _ in points], "o-", label="throughput / unverified")
    axis.plot(rates, [lost for _, _, lost in points], "s--", label="guesses recomputed")
    axis.set_xlabel("injected mismatches, % of guesses")
    axis.set_ylim(bottom=0)
    axis.legend()
    axis.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def pyplot() -> Any:
    """Matplotlib without a screen; MachineError where it is not there."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise MachineError("a picture needs matplotlib; run: pip install 'samewise[bench]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _said(cell: Cell | None, base: float | None) -> str:
    if cell is None:
        return "–"
    return f"{cell.rate:.1f}" + (f" ({cell.rate / base:.2f})" if base else "")


__all__ = [
    "Cell",
    "auto_over_best",
    "mean_rate",
    "middle",
    "over_best",
    "plot",
    "plot_overhead",
    "pyplot",
    "speculation",
    "table",
]
