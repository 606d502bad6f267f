"""One timed run over some prompts, and the median of several. Host only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Prompts = Sequence[Sequence[int]]  # token ids


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run over some prompts."""

    tokens: int
    seconds: float
    first_token: float | None = None  # seconds from arrival, the median over requests
    per_token: float | None = None  # seconds per token after the first, the median over requests
    counters: dict[str, float] = field(default_factory=dict)  # of the engine, what this run added

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Backend(Protocol):
    """Answers prompts greedily, all at once, each up to `max_tokens` tokens or its end."""

    name: str
    about: str  # version and arithmetic

    def run(self, prompts: Prompts, max_tokens: int) -> Measurement:
        """Answer and measure."""
        ...


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def joined(parts: Sequence[Measurement]) -> Measurement:
    """Several runs, one after the other, as one."""
    counters: dict[str, float] = {}
    for part in parts:
        for name, value in part.counters.items():
            counters[name] = counters.get(name, 0.0) + value
    return Measurement(
        sum(part.tokens for part in parts),
        sum(part.seconds for part in parts),
        median(part.first_token for part in parts),
        median(part.per_token for part in parts),
        counters,
    )


__all__ = ["Backend", "Measurement", "Prompts", "joined", "median"]
