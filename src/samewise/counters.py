"""Counters of an engine. Host only."""

from __future__ import annotations

from dataclasses import dataclass, field

from samewise.types import MAX_TREE_DEPTH


@dataclass(slots=True)
class DrafterCounters:
    """What became of one proposer's drafts: trees, of which one path is accepted, or nothing."""

    drafts: int = 0
    guessed: int = 0  # nodes of all trees
    accepted: int = 0  # nodes of all accepted paths
    depths: list[int] = field(default_factory=list)
    """Drafts by the length of their accepted path: how many had none, one, … `MAX_TREE_DEPTH` or more."""

    def add(self, nodes: int, depth: int) -> None:
        """Count a verified draft of `nodes` guesses, of which a path of `depth` was accepted."""
        self.drafts += 1
        self.guessed += nodes
        self.accepted += depth
        depth, depths = min(depth, MAX_TREE_DEPTH), self.depths
        if depth >= len(depths):
            depths.extend([0] * (depth + 1 - len(depths)))
        depths[depth] += 1


@dataclass(slots=True)
class Counters:
    """Totals since the engine was built. Written by the Scheduler, read by proposers and statistics."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0  # ended with an error
    recoveries: int = 0  # times all sequences started again because a call was cut short
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    unverified_tokens: int = 0
    frames: int = 0
    follow_ups: int = 0  # frames that were started by one call as soon as the frame before them landed
    rows: int = 0
    padded_rows: int = 0
    drafts: int = 0  # draft trees verified
    guessed: int = 0  # their nodes
    accepted: int = 0
    rolled_back: int = 0
    drafters: dict[str, DrafterCounters] = field(default_factory=dict)

    def add_draft(self, drafter: str, nodes: int, accepted: int) -> None:
        """Count a verified draft of one proposer: its guesses, and how many of them were accepted."""
        self.drafts += 1
        self.guessed += nodes
        self.accepted += accepted
        self.rolled_back += nodes - accepted
        counters = self.drafters.get(drafter)
        if counters is None:
            counters = self.drafters[drafter] = DrafterCounters()
        counters.add(nodes, accepted)


__all__ = ["Counters", "DrafterCounters"]
