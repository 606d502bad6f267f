"""How many replicas, with what, and how they end: read once, checked once, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from samewise.errors import BadParameter


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleSettings:
    """The replicas of one application. Cores are what Ray counts when it places them, not a limit."""

    replicas: int = 1  # that always run; with `max_replicas`, the fewest
    max_replicas: int | None = None  # Ray Serve adds replicas up to this many under load; None: `replicas`
    num_cpus: float = 1  # cores of a replica; on CPU also its threads
    num_gpus: float = 0  # devices of a replica: 0, or 1
    resources: Mapping[str, float] = field(default_factory=dict)  # of Ray, by name
    drain_seconds: float = 5.0  # for answers to end on a replica that is stopped; the rest goes on elsewhere
    max_ongoing: int | None = None  # requests a replica holds at once; None: twice its `max_num_seqs`
    routers: int = 1  # processes that serve HTTP; only of `app`

    def __post_init__(self) -> None:
        for name in ("replicas", "routers"):
            if getattr(self, name) < 1:
                raise BadParameter(f"{name}={getattr(self, name)}: give 1 or more", param=name)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise BadParameter(
                f"max_replicas={self.max_replicas} is less than replicas={self.replicas}; give more",
                param="max_replicas",
            )
        if self.num_cpus <= 0:
            raise BadParameter(f"num_cpus={self.num_cpus}: give more than 0 cores", param="num_cpus")
        if self.num_gpus not in (0, 1):
            raise BadParameter(
                f"num_gpus={self.num_gpus}: an engine has one device; give 0 or 1, and more replicas",
                param="num_gpus",
            )
        if not 0 <= self.drain_seconds < float("inf"):
            raise BadParameter(
                f"drain_seconds={self.drain_seconds}: give seconds, 0 or more", param="drain_seconds"
            )
        if self.max_ongoing is not None and self.max_ongoing < 1:
            raise BadParameter(f"max_ongoing={self.max_ongoing}: give 1 or more", param="max_ongoing")

    def num_places(self, max_num_seqs: int) -> int:
        """Requests that a replica holds at once, which runs so many of them."""
        return self.max_ongoing or 2 * max_num_seqs

    @property
    def most(self) -> int:
        """Replicas that may run at once."""
        return self.max_replicas or self.replicas


__all__ = ["ScaleSettings"]
