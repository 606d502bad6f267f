"""The layer set that drafts are made with, and how well its drafts hold up.

The first token of a draft is always drafted, whatever its confidence, so the acceptance of first tokens shows
how good the set still is: against what it promised when it was chosen, and against its own acceptance later.
"""

from __future__ import annotations

import math

from samewise.draft.cost_model import AcceptanceRate, Calibration
from samewise.draft.skip.search import Search
from samewise.draft.tuning import DEFAULTS, Tuning
from samewise.execute.runner import FastPath
from samewise.types import LayerSet


class ActiveSet:
    """The search's incumbent in use. Everything here is about this set and starts anew with the next one."""

    def __init__(self, search: Search, tuning: Tuning = DEFAULTS) -> None:
        self._search, self._tuning, self._costs = search, tuning.skip, tuning.cost_model
        self.path: FastPath | None = None
        self.revision = 0  # how many sets were in use before
        self.promised = 1.0  # acceptance of first tokens by what was known when the set was chosen
        self.greedy, self.sampled = self._calibration(None), self._calibration(None)
        self.restart()

    @property
    def skipped(self) -> LayerSet:
        """The sublayers it leaves out; empty: there is nothing to draft with."""
        return self._search.best.skipped

    @property
    def ready(self) -> bool:
        """Whether anything is skipped."""
        return len(self.skipped) > 0

    def use(self, path: FastPath | None) -> None:
        """The incumbent has changed: draft through this path."""
        self.path = path
        self.restart()
        self.promised = rate = self._search.best.rate
        self.greedy, self.sampled = self._calibration(rate), self._calibration(rate)
        self.revision += 1

    def restart(self) -> None:
        """Measure the acceptance of first tokens anew."""
        self.first_tokens = AcceptanceRate(0.0, 0.0, self._tuning.first_token_memory)
        self.usual_rate: float | None = None  # acceptance of first tokens once it was settled

    @property
    def measured(self) -> bool:
        """Whether enough first tokens were verified to judge the set."""
        return self.first_tokens.trials >= self._tuning.min_first_tokens

    @property
    def typical_chance(self) -> float:
        """The chance of a token whose confidence is not known yet."""
        if not self.measured:
            return max(self._tuning.min_prior_chance, self._search.best.rate)
        return self.first_tokens.smoothed

    def is_broken(self, rate: float, trials: float) -> bool:
        """Whether this rate is so far below the promised one that the set must be dropped."""
        tuning, promised = self._tuning, self.promised
        deviation = _deviation(promised, tuning.min_first_tokens, trials)
        return rate < min(tuning.broken_share * promised, promised - tuning.num_deviations * deviation)

    def has_fallen(self) -> bool:
        """Whether first tokens are accepted clearly less often than usual: the topic may have changed."""
        tuning, usual = self._tuning, self.usual_rate
        if usual is None:
            return False
        deviation = _deviation(usual, tuning.min_first_tokens, tuning.first_token_memory)
        drop = min(max(tuning.min_drop, tuning.num_deviations * deviation), usual / 2)
        return self.first_tokens.value < usual - drop

    def _calibration(self, rate: float | None) -> Calibration:
        return Calibration(rate, self._costs)


def _deviation(rate: float, trials: float, other_trials: float) -> float:
    """Standard deviation of the difference between two measurements of one rate."""
    return math.sqrt(rate * (1.0 - rate) * (1.0 / trials + 1.0 / other_trials))


__all__ = ["ActiveSet"]
