"""How likely suffix matches are right, and how many of their tokens are worth verifying.

Host only; numbers in, numbers out.
"""

from __future__ import annotations

from samewise.draft.cost_model import AcceptanceRate, FrameCosts, MissRatio
from samewise.draft.tuning import DEFAULTS, Tuning


class MatchEstimates:
    """The chance that the token after a match is accepted: by the match's length, scaled per sequence.

    A sequence whose matches missed more or less often than those of all sequences keeps that ratio.
    """

    def __init__(self, tuning: Tuning = DEFAULTS) -> None:
        self._auto, self._costs = tuning.auto, tuning.cost_model
        trials = self._auto.match_prior_trials
        self._by_length = [
            AcceptanceRate(trials * chance, trials, self._costs.rate_memory)
            for chance in self._auto.match_prior
        ]
        self._by_sequence: dict[int, MissRatio] = {}

    def chance(self, seq_id: int, length: int) -> float:
        """That the token after a match of this length is accepted."""
        chance, ratio = self._rate(length).value, self._by_sequence.get(seq_id)
        return chance if ratio is None else ratio.chance(chance)

    def token_chances(self, seq_id: int, length: int, num: int) -> list[float]:
        """For each of the next tokens, that it and all before it are accepted; cut where that is too low.

        Each accepted token makes the match one longer. Tokens far beyond the match's length count less.
        """
        tuning, chances, chance = self._auto, list[float](), 1.0
        for i in range(num):
            chance *= self.chance(seq_id, length + i)
            chance *= tuning.far_factor if i >= tuning.far_per_match * length else 1.0
            if chance < tuning.min_chance:
                break
            chances.append(chance)
        return chances

    def expected_after_next(self, seq_id: int, length: int, num: int) -> float:
        """Accepted tokens to expect from drafts that start one frame from now.

        The next token is then already committed; only those after it can be drafted.
        """
        expected, chance = 0.0, self.chance(seq_id, length)
        for i in range(1, num + 1):
            chance *= self.chance(seq_id, length + i)
            if chance < self._auto.min_chance:
                break
            expected += chance
        return expected

    def observe_draft(self, seq_id: int, length: int, drafted: int, accepted: int) -> None:
        """Learn from a draft that came from a match of this length."""
        for i in range(min(accepted + 1, drafted)):
            self.observe(seq_id, length + i, right=i < accepted)

    def observe(self, seq_id: int, length: int, *, right: bool) -> None:
        """Learn from one token after a match of this length."""
        rate = self._rate(length)
        ratio = self._by_sequence.get(seq_id)
        if ratio is None:
            prior, memory = self._costs.miss_prior, self._costs.miss_memory
            ratio = self._by_sequence[seq_id] = MissRatio(prior, prior, memory)
        ratio.observe(rate.value, right=right)
        rate.observe(1, int(right))

    def forget(self, seq_id: int) -> None:
        """Drop a sequence's ratio."""
        self._by_sequence.pop(seq_id, None)

    def recover(self) -> None:
        """Drop the ratios of all sequences."""
        self._by_sequence = {}

    def table(self) -> list[float]:
        """Acceptance by match length."""
        return [round(rate.value, 3) for rate in self._by_length]

    def _rate(self, length: int) -> AcceptanceRate:
        return self._by_length[min(length, len(self._by_length) - 1)]


def num_worth_verifying(
    chances: list[float], live: int, frames: FrameCosts, price_factor: float, min_gain: float
) -> int:
    """How many drafted tokens, the likeliest first, bring most over the price of their rows, in seconds.

    A frame's padding is filled at once: where a token makes the frame larger, the rows behind it are free.
    `min_gain`: seconds that any draft must bring, because the next frame waits for its verdict.
    """
    now = frames.cost(live) or 1e-9
    best_num, best_gain = 0, min_gain
    num, brought = 0, 0.0
    while num < len(chances):
        free = frames.padding(live + num) or frames.padding(live + num + 1) + 1
        filled = min(num + free, len(chances))
        brought += sum(chances[num:filled]) * now / live  # a token takes that long without drafts
        num = filled
        gain = brought - price_factor * (frames.cost(live + num) - now)
        if gain >= best_gain:
            best_num, best_gain = num, gain
    return best_num


__all__ = ["MatchEstimates", "num_worth_verifying"]
