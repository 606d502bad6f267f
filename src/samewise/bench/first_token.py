"""Seconds to the first token of one prompt of a given length, every backend in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

from rich.table import Table

from samewise.bench.measurement import Backend, Measurement, Prompts


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Runs of one backend over prompts of `prompt_len` tokens, a token each."""

    backend: str
    prompt_len: int
    runs: tuple[float, ...]  # seconds

    @property
    def seconds(self) -> float:
        """The median run."""
        return statistics.median(self.runs)

    def as_json(self) -> dict[str, Any]:
        """As the last line of `samewise bench` holds it."""
        return {
            "contender": self.backend, "prompt_tokens": self.prompt_len, "seconds": self.seconds,
            "runs": [round(run, 4) for run in self.runs],
        }  # fmt: skip


def measure(
    backends: Sequence[Backend],
    questions: Iterable[Sequence[int]],
    prompt_len: int,
    repeats: int,
    run: Callable[[Backend, Prompts, int], Measurement | None] | None = None,
) -> list[FirstToken]:
    """Time every backend on the same prompts, another one in each repeat, after one that is not counted.

    A backend for which `run` (by default its own) returned None has no result.
    """
    run = run or (lambda backend, prompts, max_tokens: backend.run(prompts, max_tokens))
    runs: dict[str, list[float]] = {backend.name: [] for backend in backends}
    for number, prompt in enumerate(long_prompts(list(questions), prompt_len, repeats + 1)):
        for backend in backends:
            measured = run(backend, [prompt], 1)
            if measured is None:
                runs.pop(backend.name, None)
            elif number > 0:
                runs[backend.name].append(measured.seconds)
    return [FirstToken(name, prompt_len, tuple(of_backend)) for name, of_backend in runs.items()]


def long_prompts(questions: Prompts, length: int, num: int) -> list[list[int]]:
    """`num` prompts of `length` tokens: the questions one after the other, again and again.

    Each starts at another question or, when all have been first, at another token of it.
    """
    prompts = []
    for i in range(num):
        turn, skipped = i % len(questions), i // len(questions)
        tokens = chain.from_iterable(cycle([*questions[turn:], *questions[:turn]]))
        prompts.append(list(islice(tokens, skipped, skipped + length)))
    return prompts


def table(results: Sequence[FirstToken]) -> Table:
    """A row per backend, with its time over that of the first."""
    view = Table(title=f"first token of a prompt of {results[0].prompt_len} tokens")
    for heading in ("", "ms", f"over {results[0].backend}"):
        view.add_column(heading, justify="right" if heading else "left")
    for one in results:
        view.add_row(one.backend, f"{1e3 * one.seconds:.0f}", f"{one.seconds / results[0].seconds:.2f}")
    return view


__all__ = ["FirstToken", "long_prompts", "measure", "table"]
