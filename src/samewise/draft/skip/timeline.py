"""The history of the layer set, for stats() and the benchmark's picture. Host only."""

from __future__ import annotations

from typing import Any, NamedTuple

from samewise.types import LayerSet

# SWIFT's phases: context accumulation and layer-set optimisation (phase 1), acceleration (phase 2).
ACCUMULATE = "accumulate"
OPTIMISE = "optimise"
ACCELERATE = "accelerate"


class Event(NamedTuple):
    """The state of the search after it changed."""

    phase: str
    num_tokens: int  # committed when it happened
    throughput: float  # tokens per second that the set promises
    match_rate: float  # how often the set predicted committed tokens
    skipped: LayerSet

    def as_dict(self) -> dict[str, Any]:
        """With the keys of stats()."""
        sets = {"attention": sorted(self.skipped.attention), "mlp": sorted(self.skipped.mlp)}
        return {
            "event": self.phase,
            "tokens": self.num_tokens,
            "score": self.throughput,
            "rate": self.match_rate,
            "set": sets,
        }


class Timeline:
    """The first event and the latest ones."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self.events: list[Event] = []

    @property
    def phase(self) -> str:
        """The current phase."""
        return self.events[-1].phase

    def add(self, event: Event) -> None:
        """Append; the oldest but the first are dropped."""
        self.events.append(event)
        del self.events[1 : max(1, len(self.events) - self._max_events)]


__all__ = ["ACCELERATE", "ACCUMULATE", "OPTIMISE", "Event", "Timeline"]
