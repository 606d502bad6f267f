"""Shapes of draft trees, shared by the benchmarks of frames and of attention."""

from __future__ import annotations

import heapq

import numpy as np

from samewise.types import ROOT


def best_first_tree(num_nodes: int, seed: int, max_depth: int = 8) -> tuple[int, ...]:
    """The parents of a random draft tree, depth first, the likeliest child first.

    Nodes are added best first, as a drafter adds them: the likelihoods of a node's children fall by rank, at
    a random rate.
    """
    rng = np.random.default_rng(seed)
    nodes: list[tuple[int, int, float]] = []  # parent, depth, likelihood
    heap: list[tuple[float, int, int]] = []  # minus the likelihood, parent, depth

    def offer_children(parent: int, depth: int, likelihood: float) -> None:
        best = rng.uniform(0.3, 0.9)
        for rank in range(4):
            heapq.heappush(heap, (-likelihood * best * (1 - best) ** rank, parent, depth))

    offer_children(ROOT, 1, 1.0)
    while len(nodes) < num_nodes:
        likelihood, parent, depth = heapq.heappop(heap)
        nodes.append((parent, depth, likelihood))
        if depth < max_depth:
            offer_children(len(nodes) - 1, depth + 1, -likelihood)
    return depth_first([parent for parent, _, _ in nodes])


def depth_first(parents: list[int]) -> tuple[int, ...]:
    """The same tree in depth-first order. Children come in the order of their indices."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    place, ordered, stack = {ROOT: ROOT}, [], children.get(ROOT, [])[::-1]
    while stack:
        node = stack.pop()
        place[node] = len(ordered)
        ordered.append(place[parents[node]])
        stack += children.get(node, [])[::-1]
    return tuple(ordered)


def depths(parents: tuple[int, ...]) -> list[int]:
    """The depth of every node; the root's children have 1."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 if parent == ROOT else levels[parent] + 1)
    return levels
