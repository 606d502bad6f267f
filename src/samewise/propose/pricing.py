"""What passes without some sublayers cost: measured where they were run, reckoned where they were not.

A pass takes a fixed time, whatever is left out, and the rest in proportion to the bytes it reads: weights,
and KV as long as it is now. Two measurements, of the whole and of a set, tell the two apart.

Host only; numbers in, numbers out.
"""

from __future__ import annotations

from samewise.costs import Curve, Frames
from samewise.propose.search import Prices
from samewise.types import LayerSet

FRESH = 0.3  # the weight of a new measurement of the fixed share


class Pricing:
    """Prices of draft passes. `weights` are each layer's bytes (attention, MLP), `rest` those of all else."""

    def __init__(
        self, weights: list[tuple[float, float]], rest: float, kv_bytes: float, frames: Frames, most: int
    ) -> None:
        self._weights, self._rest, self._kv_bytes = weights, rest, kv_bytes
        self._frames, self._most = frames, most
        self._whole = Curve()  # seconds of a pass with nothing left out, by number of sequences
        self._fixed = 0.1  # the share of it that nothing can be left out of
        self._context = 0.0  # bytes of KV that each attention reads now

    @property
    def known(self) -> bool:
        """Whether a whole pass was ever timed."""
        return self._whole.known

    def see(self, num_tokens: int) -> None:
        """So many tokens of context are live, in all."""
        self._context = num_tokens * self._kv_bytes

    def observe_whole(self, live: int, seconds: float) -> None:
        """A pass with nothing left out took so long."""
        self._whole.observe(live, max(seconds, 1e-9))

    def observe(self, live: int, skipped: LayerSet, seconds: float) -> None:
        """A pass without these took so long."""
        left, whole = self._left(skipped), self._whole.at(live)
        if left < 1.0 and whole > 0:
            fixed = (seconds / whole - left) / (1.0 - left)
            self._fixed += FRESH * (min(0.9, max(0.0, fixed)) - self._fixed)

    def seconds(self, skipped: LayerSet, live: int) -> float:
        """What a pass without these is expected to take."""
        return self._whole.at(live) * (self._fixed + (1.0 - self._fixed) * self._left(skipped))

    def prices(self, live: int) -> Prices:
        """For the search: of a sublayer of each kind, of all else, and of frames."""
        whole, layers = self._whole.at(live), len(self._weights)
        each = whole * (1.0 - self._fixed) / self._total
        attention = each * (sum(a for a, _ in self._weights) / layers + self._context)
        mlp = each * sum(m for _, m in self._weights) / layers
        frames = tuple(self._frames.cost(live * (k + 1)) for k in range(self._most + 1))
        return Prices(live, self._fixed * whole + each * self._rest, attention, mlp, frames)

    @property
    def _total(self) -> float:
        return self._rest + sum(a + m + self._context for a, m in self._weights)

    def _left(self, skipped: LayerSet) -> float:
        """The share of a whole pass's bytes that is left."""
        out = sum(self._weights[i][0] + self._context for i in skipped.attention)
        out += sum(self._weights[i][1] for i in skipped.mlp)
        return max(1e-3, 1.0 - out / self._total)


__all__ = ["Pricing"]
