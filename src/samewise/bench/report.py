"""Results as tables and pictures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from samewise.bench.engines import UNVERIFIED
from samewise.bench.measurement import Measurement, median
from samewise.errors import MachineError


@dataclass(frozen=True, slots=True)
class Cell:
    """All runs of one backend on one task at one batch size."""

    backend: str
    task: str
    batch: int
    runs: tuple[Measurement, ...]

    @property
    def rate(self) -> float:
        """Tokens per second, the median run."""
        return statistics.median(run.rate for run in self.runs)

    def total(self, name: str) -> float:
        """A counter over all runs."""
        return sum(run.counters.get(name, 0.0) for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        """As the last line of `samewise bench` holds it."""
        guessed, frames, drafts = self.total("guessed"), self.total("frames"), self.total("drafts")
        return {
            "contender": self.backend, "task": self.task, "batch": self.batch, "tokens_per_s": self.rate,
            "runs": [round(run.rate, 2) for run in self.runs],
            "tokens": sum(run.tokens for run in self.runs),
            "tokens_per_frame": self.total("output_tokens") / frames if frames else None,
            "acceptance": self.total("accepted") / guessed if guessed else None,
            "drafts": drafts, "guessed": guessed, "accepted": self.total("accepted"),
            "nodes_per_draft": guessed / drafts if drafts else None,
            "accepted_depth": self.total("accepted") / drafts if drafts else None,
            "time_to_first_token": median(run.first_token for run in self.runs),
            "time_per_output_token": median(run.per_token for run in self.runs),
        }  # fmt: skip


def table(cells: Sequence[Cell], baseline: str | None) -> Table:
    """A row per task and batch size, a column per backend; the ratio to the baseline beside each rate."""
    names = list(dict.fromkeys(cell.backend for cell in cells))
    view = Table(title="tokens per second" + (f" (times {baseline})" if baseline in names else ""))
    for heading in ("batch", "task", *names):
        view.add_column(heading, justify="left" if heading == "task" else "right")
    for batch in dict.fromkeys(cell.batch for cell in cells):
        rows: dict[str, dict[str, float]] = {}
        for cell in cells:
            if cell.batch == batch:
                rows.setdefault(cell.task, {})[cell.backend] = cell.rate
        for task, rates in rows.items():
            view.add_row(str(batch), task, *_with_ratios(rates, names, baseline))
        means = {name: mean_rate(cells, name, batch) for name in names}
        view.add_row(str(batch), "[bold]all[/]", *_with_ratios(means, names, baseline), end_section=True)
    return view


def _with_ratios(rates: dict[str, float], names: Sequence[str], baseline: str | None) -> list[str]:
    """Rates in the order of `names`, each with its ratio to the baseline's; a dash where there is none."""
    base = rates.get(baseline or "")
    ratios = {name: f" ({rate / base:.2f})" if base else "" for name, rate in rates.items()}
    return [f"{rates[name]:.1f}{ratios[name]}" if name in rates else "–" for name in names]


def mean_rate(cells: Iterable[Cell], backend: str, batch: int) -> float:
    """Tokens per second of a backend, the mean over tasks."""
    rates = [cell.rate for cell in cells if (cell.backend, cell.batch) == (backend, batch)]
    return statistics.mean(rates) if rates else 0.0


def auto_ratios(cells: Sequence[Cell]) -> dict[tuple[int, str], tuple[str, float]]:
    """By batch and task: the fastest fixed proposer, and the rate of `auto` over its rate.

    The ratio is the median over pairs of runs, because both of a pair met the same state of the machine.
    """
    ratios: dict[tuple[int, str], tuple[str, float]] = {}
    for auto in cells:
        fixed = [
            cell
            for cell in cells
            if (cell.batch, cell.task) == (auto.batch, auto.task) and cell is not auto
            if cell.total("frames") and cell.backend != UNVERIFIED
        ]
        if auto.backend == "auto" and fixed:
            best = max(fixed, key=lambda cell: cell.rate)
            pairs = zip(auto.runs, best.runs, strict=True)
            ratio = statistics.median(ours.rate / other.rate for ours, other in pairs)
            ratios[auto.batch, auto.task] = best.backend, ratio
    return ratios


def auto_table(cells: Sequence[Cell]) -> Table:
    """`auto_ratios` as a table."""
    ratios = auto_ratios(cells)
    view = Table(title="auto over the best fixed choice, run by run")
    view.add_column("task")
    batches = list(dict.fromkeys(batch for batch, _ in ratios))
    for batch in batches:
        view.add_column(f"batch {batch}", justify="right")
    for task in dict.fromkeys(task for _, task in ratios):
        row = [ratios.get((batch, task)) for batch in batches]
        view.add_row(task, *(f"{entry[1]:.2f} ({entry[0]})" if entry else "–" for entry in row))
    return view


def speculation_table(cells: Iterable[Cell]) -> Table:
    """The mean draft tree (its nodes, the depth accepted) and tokens per frame, over all tasks."""
    view = Table(title="speculation")
    for heading in ("proposer", "batch", "drafts", "nodes", "depth", "tokens per frame", "rows padded"):
        view.add_column(heading, justify="left" if heading == "proposer" else "right")
    of_engines = [cell for cell in cells if cell.total("frames")]
    for name, batch in dict.fromkeys((cell.backend, cell.batch) for cell in of_engines):
        group = [cell for cell in of_engines if (cell.backend, cell.batch) == (name, batch)]
        drafts, nodes, accepted, frames, tokens, rows, padded = (
            sum(cell.total(counter) for cell in group)
            for counter in ("drafts", "guessed", "accepted", "frames", "output_tokens", "rows", "padded_rows")
        )
        view.add_row(
            name, str(batch), f"{drafts:.0f}",
            f"{nodes / drafts:.1f}" if drafts else "–", f"{accepted / drafts:.2f}" if drafts else "–",
            f"{tokens / frames:.2f}", f"{padded / max(1.0, rows + padded):.0%}",
        )  # fmt: skip
    return view


def plot(cells: Sequence[Cell], path: Path, title: str) -> None:
    """Bars: tokens per second by task, a panel per batch size."""
    names = list(dict.fromkeys(cell.backend for cell in cells))
    batches = list(dict.fromkeys(cell.batch for cell in cells))
    plt = pyplot()
    figure, axes = plt.subplots(len(batches), 1, figsize=(10, 3.2 * len(batches)), squeeze=False)
    for axis, batch in zip(axes[:, 0], batches, strict=True):
        tasks = list(dict.fromkeys(cell.task for cell in cells if cell.batch == batch))
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            rates = {c.task: c.rate for c in cells if (c.backend, c.batch) == (name, batch)}
            places = [j + i * width for j in range(len(tasks))]
            axis.bar(places, [rates.get(task, 0.0) for task in tasks], width, label=name)
        axis.set_xticks([j + 0.4 - width / 2 for j in range(len(tasks))], tasks)
        axis.set_ylabel(f"tokens/s, batch {batch}")
    axes[0, 0].margins(y=0.2)  # room for the legend
    axes[0, 0].legend(ncols=4, fontsize="small", loc="upper left")
    axes[0, 0].set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_overhead(points: list[tuple[float, float, float]], path: Path, title: str) -> None:
    """Throughput over unverified decoding, and the share of drafted tokens rejected, by mismatch rate."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4))
    rates = [100 * rate for rate, _, _ in points]
    axis.plot(rates, [relative for _, relative, _ in points], "o-", label="throughput / unverified")
    axis.plot(rates, [lost for _, _, lost in points], "s--", label="drafted tokens recomputed")
    axis.set_xlabel("injected mismatches, % of drafted tokens")
    axis.set_ylim(bottom=0)
    axis.legend()
    axis.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def pyplot() -> Any:
    """Matplotlib without a display; MachineError where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise MachineError("a picture needs matplotlib; run: pip install 'samewise[bench]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


__all__ = [
    "Cell",
    "auto_ratios",
    "auto_table",
    "mean_rate",
    "plot",
    "plot_overhead",
    "pyplot",
    "speculation_table",
    "table",
]
