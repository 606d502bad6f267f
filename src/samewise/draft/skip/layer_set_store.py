"""Layer sets that were found, kept in the user's cache for later processes, by contract and workload."""

from __future__ import annotations

import logging
from typing import Any

from samewise import user_cache
from samewise.types import LayerSet

log = logging.getLogger("samewise.skip")

FOLDER = "layersets"


class LayerSetStore:
    """One entry per (contract, workload): the set, and how often its drafts were right when it was scored."""

    def __init__(self, workload: str) -> None:
        self._workload = workload
        self.contract_id: str | None = None
        """Set once the engine is certified; without it nothing is read or written."""

    @property
    def _key(self) -> dict[str, str]:
        return {"contract": self.contract_id or "", "workload": self._workload}

    def load(self) -> tuple[LayerSet, float] | None:
        """The stored set and its match rate, or None. A damaged entry is ignored with a warning."""
        entry: Any = None if self.contract_id is None else user_cache.get(FOLDER, self._key)
        if entry is None:
            return None
        try:
            sets = [frozenset(int(i) for i in entry[name]) for name in ("attention", "mlp")]
            rate = min(1.0, max(0.0, float(entry.get("rate", 1.0))))
        except (TypeError, KeyError, ValueError, OverflowError):
            log.warning("ignoring a damaged layer set in the cache: %r", entry)
            return None
        return LayerSet(*sets), rate

    def save(self, skipped: LayerSet, rate: float) -> None:
        """Store this set, replacing what was there."""
        if self.contract_id is not None:
            entry = {"attention": sorted(skipped.attention), "mlp": sorted(skipped.mlp), "rate": rate}
            user_cache.put(FOLDER, self._key, entry)


__all__ = ["LayerSetStore"]
