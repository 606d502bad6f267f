"""The time that the layer-set search may take. Host only; numbers in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass

from samewise.draft.tuning import SearchTuning


@dataclass(slots=True)
class SearchBudget:
    """Seconds that the search may take: a share of the time that passes while it is open."""

    tuning: SearchTuning
    saved: float = 0.0  # may be spent
    spent: float = 0.0
    active: float = 0.0  # seconds so far, without idle gaps
    step_seconds: float = 0.0  # of a scoring step, lately
    _last: float = 0.0

    def tick(self, now: float, *, searching: bool) -> None:
        """Time has passed since the last call."""
        passed = min(now - self._last, self.tuning.max_gap) if self._last else 0.0
        self._last = now
        self.active += passed
        self.saved += self.tuning.share * passed * searching

    def affords(self, seconds: float) -> bool:
        """Whether its share of all the time so far covers what was spent and this much more."""
        return not seconds or self.tuning.share * self.active >= self.spent + seconds

    def exclude(self, now: float) -> None:
        """The time since the last call counts neither as spent nor as passed."""
        self._last = now

    def charge(self, now: float, *, scored: bool) -> None:
        """A step of the search took the time since the last tick."""
        taken = now - self._last
        if scored:
            self.step_seconds = (taken + (self.step_seconds or taken)) / 2
        self.spent += taken
        self.active += taken
        self.saved -= taken
        self._last = now


__all__ = ["SearchBudget"]
