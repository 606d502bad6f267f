"""What passes without some sublayers cost: measured where they were run, reckoned where they were not.

A pass takes a fixed time, whatever is left out, and the rest in proportion to the bytes it reads: weights,
and KV as long as it is now. Two measurements, of the whole and of a set, tell the two apart. The set in use
needs no reckoning: every pass it drafts with is a measurement.

From prices follows how far drafts go. A pass takes nearly the same time however many sequences it is for, so
that is decided for all of them together: those go on who, at the pace tokens come anyway, bring most over
what their pass and their rows in the frame take.

Host only; numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from samewise.draft.cost_model import Curve, FrameCosts, expected
from samewise.draft.skip.search import Prices
from samewise.types import LayerSet

FRESH = 0.3  # the weight of a new measurement of the fixed share
LOOKS = 32  # into how many parts of a crowd one looks for who should go on


class Pricing:
    """Prices of draft passes. `weights` are each layer's bytes (attention, MLP), `rest` those of all else."""

    def __init__(
        self, weights: list[tuple[float, float]], rest: float, kv_bytes: float, frames: FrameCosts, most: int
    ) -> None:
        self._weights, self._rest, self._kv_bytes = weights, rest, kv_bytes
        self._frames, self._most = frames, most
        self._whole = Curve()  # seconds of a pass with nothing left out, by number of sequences
        self._fixed = 0.1  # the share of it that nothing can be left out of
        self._live = 0  # sequences there were when that was last measured
        self._context = 0.0  # bytes of KV that each attention reads now
        self._own, self._passes = LayerSet(), Curve()  # the set in use, and the seconds of its passes

    @property
    def known(self) -> bool:
        """Whether a whole pass was ever timed."""
        return self._whole.known

    def see(self, num_tokens: int) -> None:
        """So many tokens of context are live, in all."""
        self._context = num_tokens * self._kv_bytes

    def observe_whole(self, live: int, seconds: float) -> None:
        """A pass with nothing left out takes so long, for the number of sequences there are now."""
        self._whole.observe(live, max(seconds, 1e-9))
        self._live = live

    def drafted(self, live: int, skipped: LayerSet, seconds: float) -> None:
        """A pass that drafted without these took so long, whatever the host did for it included."""
        if skipped != self._own:
            self._own, self._passes = skipped, Curve()
        self._passes.observe(live, seconds)
        left, whole = self._left(skipped), self._whole.at(live)
        if live == self._live and left < 1.0 and whole > 0:
            fixed = (self._passes.at(live) / whole - left) / (1.0 - left)
            self._fixed += FRESH * (min(0.9, max(0.0, fixed)) - self._fixed)

    def seconds(self, skipped: LayerSet, live: int) -> float:
        """What a pass without these is expected to take."""
        if skipped == self._own and self._passes.known:
            return self._passes.at(live)
        return self._whole.at(live) * (self._fixed + (1.0 - self._fixed) * self._left(skipped))

    def prices(self, live: int) -> Prices:
        """For the search: of a sublayer of each kind, of all else, and of frames."""
        whole, layers = self._whole.at(live), len(self._weights)
        each = whole * (1.0 - self._fixed) / self._total
        attention = each * (sum(a for a, _ in self._weights) / layers + self._context)
        mlp = each * sum(m for _, m in self._weights) / layers
        frames = tuple(self._frames.cost(live * (k + 1)) for k in range(self._most + 1))
        return Prices(live, self._fixed * whole + each * self._rest, attention, mlp, frames)

    def pace(self, skipped: LayerSet, live: int, chance: float) -> float:
        """Tokens per second of drafts without these, at the best length: also none, where that is best."""
        a_pass, frames = self.seconds(skipped, live), self._frames
        return max(
            live * expected(chance, k) / max(k * a_pass + frames.cost(live * (k + 1)), 1e-9)
            for k in range(self._most + 1)
        )

    def going_on(
        self, skipped: LayerSet, reaches: Sequence[float], chance: float, rows: int, pace: float, ahead: int
    ) -> int:
        """How many drafts, the likeliest first, should have `ahead` more guesses: those that bring most.

        `reaches` are the chances that each is right so far, highest first, `chance` that of one guess more;
        the frame has so many `rows` as it is, and time brings `pace` tokens a second elsewhere. Where more
        guesses than that come with the next rows' padding, they are counted too.
        """
        frames, before = self._frames, self._frames.cost(rows)
        sums, best, most = list(accumulate(reaches)), 0, 0.0
        for num in range(len(sums), 0, -max(1, len(sums) // LOOKS)):
            a_pass = self.seconds(skipped, num)
            filled = 1 + frames.padding(rows + num) // num
            for far in (ahead, min(self._most, max(ahead, filled))):
                brought = sums[num - 1] * (expected(chance, far) - 1.0)
                gain = brought - pace * (far * a_pass + frames.cost(rows + far * num) - before)
                if gain > most:
                    best, most = num, gain
        return best

    def row(self, rows: int, more: int) -> float:
        """Seconds of each of so many more rows in a frame."""
        return (self._frames.cost(rows + more) - self._frames.cost(rows)) / max(more, 1)

    def copying(self, tokens: int) -> float:
        """What copying the KV of so many tokens takes: it is read and written at the speed weights are."""
        return 2.0 * tokens * self._kv_bytes * len(self._weights) * self._whole.at(1) / self._total

    @property
    def _total(self) -> float:
        return self._rest + sum(a + m + self._context for a, m in self._weights)

    def _left(self, skipped: LayerSet) -> float:
        """The share of a whole pass's bytes that is left."""
        out = sum(self._weights[i][0] + self._context for i in skipped.attention)
        out += sum(self._weights[i][1] for i in skipped.mlp)
        return max(1e-3, 1.0 - out / self._total)


__all__ = ["Pricing"]
