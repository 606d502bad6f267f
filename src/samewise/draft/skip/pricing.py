"""Seconds of passes that skip sublayers: measured for the set in use, estimated for all others.

A pass takes a fixed time whatever it skips, and the rest in proportion to the bytes it reads: weights, and
the KV at its present length. Two measurements, of the full pass and of the set in use, tell the two parts
apart.

From these prices follows how far drafts go. A pass takes nearly the same time for any number of sequences, so
that is decided for all together: the drafts that go on are those that, at the current throughput, bring most
over what their pass and their rows in the frame take. Host only; numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from samewise.draft.cost_model import CostCurve, FrameCosts, expected_tokens
from samewise.draft.skip.search import Prices
from samewise.draft.tuning import DEFAULTS, Tuning
from samewise.types import LayerSet


class PassPricing:
    """Prices of draft passes. `weights`: bytes of each layer's attention and MLP; `other`: of all else."""

    def __init__(
        self,
        weights: list[tuple[float, float]],
        other: float,
        kv_bytes: float,
        frames: FrameCosts,
        max_tokens: int,
        tuning: Tuning = DEFAULTS,
    ) -> None:
        self._weights, self._unskippable_bytes, self._kv_bytes = weights, other, kv_bytes
        self._frames, self._max_tokens, self._tuning = frames, max_tokens, tuning
        self._full_pass_seconds = CostCurve(
            tuning.cost_model
        )  # seconds of a full pass, by number of sequences
        self._full_pass_live = 0  # sequences there were when it was last measured
        self._fixed_share = tuning.skip.fixed_share  # of a full pass, that no skipping saves
        self._kv_bytes_read = 0.0  # bytes of KV that each attention reads now
        self._timed_set = LayerSet()  # the set in use, and the seconds of its passes
        self._set_seconds = CostCurve(tuning.cost_model)

    @property
    def known(self) -> bool:
        """Whether a full pass was ever timed."""
        return self._full_pass_seconds.known

    def set_context(self, num_tokens: int) -> None:
        """So many tokens of all live sequences have KV."""
        self._kv_bytes_read = num_tokens * self._kv_bytes

    def observe_full_pass(self, live: int, seconds: float) -> None:
        """A pass that skips nothing took so long, for so many sequences."""
        self._full_pass_seconds.observe(live, max(seconds, 1e-9))
        self._full_pass_live = live

    def observe_draft_pass(self, live: int, skipped: LayerSet, seconds: float) -> None:
        """A pass that skips these took so long, host time included."""
        if skipped != self._timed_set:
            self._timed_set, self._set_seconds = skipped, CostCurve(self._tuning.cost_model)
        self._set_seconds.observe(live, seconds)
        share, full = self._byte_share(skipped), self._full_pass_seconds.at(live)
        if live == self._full_pass_live and share < 1.0 and full > 0:
            tuning = self._tuning.skip
            fixed = (self._set_seconds.at(live) / full - share) / (1.0 - share)
            fixed = min(tuning.max_fixed_share, max(0.0, fixed))
            self._fixed_share += tuning.fixed_share_weight * (fixed - self._fixed_share)

    def pass_seconds(self, skipped: LayerSet, live: int) -> float:
        """Expected seconds of a pass that skips these."""
        if skipped == self._timed_set and self._set_seconds.known:
            return self._set_seconds.at(live)
        fixed = self._fixed_share
        return self._full_pass_seconds.at(live) * (fixed + (1.0 - fixed) * self._byte_share(skipped))

    def prices(self, live: int) -> Prices:
        """For the search: seconds of a sublayer of each kind, of all else, and of frames."""
        full, num_layers = self._full_pass_seconds.at(live), len(self._weights)
        per_byte = full * (1.0 - self._fixed_share) / self._total_bytes
        attention = per_byte * (sum(a for a, _ in self._weights) / num_layers + self._kv_bytes_read)
        mlp = per_byte * sum(m for _, m in self._weights) / num_layers
        frames = tuple(self._frames.cost(live * (k + 1)) for k in range(self._max_tokens + 1))
        return Prices(
            live, self._fixed_share * full + per_byte * self._unskippable_bytes, attention, mlp, frames
        )

    def throughput(self, skipped: LayerSet, live: int, chance: float) -> float:
        """Tokens per second of drafts that skip these, at the best length, which may be 0."""
        a_pass, frames = self.pass_seconds(skipped, live), self._frames
        return max(
            live * expected_tokens(chance, k) / max(k * a_pass + frames.cost(live * (k + 1)), 1e-9)
            for k in range(self._max_tokens + 1)
        )

    def num_worth_another_pass(
        self,
        skipped: LayerSet,
        reaches: Sequence[float],
        chance: float,
        rows: int,
        throughput: float,
        ahead: int,
    ) -> int:
        """How many drafts, the likeliest first, should go on by `ahead` tokens: those that bring most.

        `reaches`: each draft's chance to be right so far, highest first; `chance`: that of one more token;
        `rows`: of the frame as it is; `throughput`: tokens that the same time brings elsewhere. Where the
        next rows bring padding for further tokens, longer drafts are considered too.
        """
        frames, before = self._frames, self._frames.cost(rows)
        sums, best_num, best_gain = list(accumulate(reaches)), 0, 0.0
        for num in range(len(sums), 0, -max(1, len(sums) // self._tuning.skip.max_batch_splits)):
            a_pass = self.pass_seconds(skipped, num)
            num_filled = 1 + frames.padding(rows + num) // num
            for length in (ahead, min(self._max_tokens, max(ahead, num_filled))):
                brought = sums[num - 1] * (expected_tokens(chance, length) - 1.0)
                seconds = length * a_pass + frames.cost(rows + length * num) - before
                gain = brought - throughput * seconds
                if gain > best_gain:
                    best_num, best_gain = num, gain
        return best_num

    def row_seconds(self, rows: int, more: int) -> float:
        """Seconds of each of so many more rows in a frame."""
        return (self._frames.cost(rows + more) - self._frames.cost(rows)) / max(more, 1)

    @property
    def _total_bytes(self) -> float:
        """Read by a full pass."""
        return self._unskippable_bytes + sum(a + m + self._kv_bytes_read for a, m in self._weights)

    def _byte_share(self, skipped: LayerSet) -> float:
        """The share of a full pass's bytes that a pass without these reads."""
        saved = sum(self._weights[i][0] + self._kv_bytes_read for i in skipped.attention)
        saved += sum(self._weights[i][1] for i in skipped.mlp)
        return max(1e-3, 1.0 - saved / self._total_bytes)


__all__ = ["PassPricing"]
