"""Counters of an engine. Host only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DrafterCounters:
    """What became of one proposer's drafts."""

    drafts: int = 0
    guessed: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the engine was built. Written by the Scheduler, read by proposers and statistics."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0  # ended with an error
    recoveries: int = 0  # times all sequences started again because a call was cut short
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    unverified_tokens: int = 0
    frames: int = 0
    rows: int = 0
    padded_rows: int = 0
    guessed: int = 0
    accepted: int = 0
    rolled_back: int = 0
    drafters: dict[str, DrafterCounters] = field(default_factory=dict)

    def add_draft(self, drafter: str, guessed: int, accepted: int) -> None:
        """Count a verified draft of one proposer."""
        self.guessed += guessed
        self.accepted += accepted
        self.rolled_back += guessed - accepted
        of_drafter = self.drafters.setdefault(drafter, DrafterCounters())
        of_drafter.drafts += 1
        of_drafter.guessed += guessed
        of_drafter.accepted += accepted


__all__ = ["Counters", "DrafterCounters"]
