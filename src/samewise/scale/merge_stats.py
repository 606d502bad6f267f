"""The statistics of several engines as those of one. Host only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

MEANS = {
    "tokens_per_frame": ("output_tokens", "frames"),
    "acceptance": ("accepted", "guessed"),
    "recomputed_share": ("rolled_back", "guessed"),
    "nodes_per_draft": ("guessed", "drafts"),
    "accepted_depth": ("accepted", "drafts"),
}
"""Statistics that are quotients of two counters."""

NOT_ADDED = ("frame_seconds", "uptime")
"""Statistics in which the engines' sum means nothing; the first engine's stand for all."""


def merge_stats(engines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counters are added, lists by place; what is not a number is the first engine's."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for stats in engines for name in stats):
        values = [stats[name] for stats in engines if name in stats]
        merged[name] = values[0] if name in NOT_ADDED else _merge(values)
    for name, (above, below) in MEANS.items():
        if name in merged and above in merged and below in merged:
            merged[name] = merged[above] / max(1, merged[below])
    return merged


def _merge(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return merge_stats([value for value in values if isinstance(value, dict)])
    if isinstance(first, list) and all(_is_number(item) for value in values for item in value):
        return [sum(items) for items in zip_longest(*values, fillvalue=0)]
    if _is_number(first):
        return sum(value for value in values if _is_number(value))
    return first


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


__all__ = ["MEANS", "NOT_ADDED", "merge_stats"]
