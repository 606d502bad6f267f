"""The numbers an engine reports about itself."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from samewise.draft.base import Proposer
from samewise.draft.cost_model import FrameCosts
from samewise.schedule.scheduler import Scheduler


@dataclass(slots=True)
class Times:
    """Seconds, since the engine was built. Owned by the Engine."""

    stepped: float = 0.0  # spent in step()
    waited: float = 0.0  # of those, waiting for the device
    began: float = field(default_factory=time.monotonic)


def stats_of(
    scheduler: Scheduler, proposer: Proposer, frame_costs: FrameCosts, times: Times, contract_id: str
) -> dict[str, Any]:
    """Counters since the engine was built, and its state now."""
    counters = dataclasses.asdict(scheduler.counters)
    counters["tokens_per_frame"] = counters["output_tokens"] / max(1, counters["frames"])
    counters["acceptance"] = counters["accepted"] / max(1, counters["guessed"])
    counters["recomputed_share"] = counters["rolled_back"] / max(1, counters["guessed"])
    for counts in (counters, *counters["drafters"].values()):
        _add_means(counts)
    return (
        counters
        | {"auto": {}}
        | proposer.stats()
        | {
            "proposer": proposer.name,
            "frame_seconds": frame_costs.curve.table(),
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "pages": scheduler.limits.num_pages - 1,
            "pages_available": scheduler.index.num_available,
            "pages_indexed": scheduler.index.num_indexed,
            "contract": contract_id,
            "step_seconds": times.stepped,
            "wait_seconds": times.waited,
            "uptime": time.monotonic() - times.began,
        }
    )


def _add_means(counts: dict[str, Any]) -> None:
    """Add the mean draft tree: its nodes, and the length of the path that was accepted."""
    drafts = max(1, counts["drafts"])
    counts["nodes_per_draft"] = counts["guessed"] / drafts
    counts["accepted_depth"] = counts["accepted"] / drafts


__all__ = ["Times", "stats_of"]
