"""Draft trees: guesses that share their beginnings, grown best-first by estimated probability.

Pure: what may follow a path is asked of the caller. No clock, no torch. Host only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeVar

from samewise.draft.estimates import chance

ROOT = -1
"""The parent of a first token: the last committed one."""

PATIENCE = 0.4
"""A node is expanded once nothing in the heap exceeds this share of its probability.

About what the best child of a node has on average. At 1.0 half of the nodes are expanded for nothing: a tree
of 16 costs 1.7 times as much and brings no more (bench/drafts.py).
"""

Siblings = list[tuple[float, int]]
"""(log-odds, token) of the children of one node, most probable first."""
State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guesses for one sequence: node i is `tokens[i]` after the tokens of its ancestors.

    `probs`: the estimated probability that the node and all its ancestors are right. Nodes stand in falling
    order of it, a parent before its children, so any first n nodes are a tree too.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def expected_tokens(self) -> float:
        """Tokens that verifying the tree commits, as estimated: its right path and one more."""
        return 1.0 + sum(self.probs)

    def first(self, num_nodes: int) -> DraftTree:
        """The tree of the first nodes."""
        return DraftTree(self.tokens[:num_nodes], self.parents[:num_nodes], self.probs[:num_nodes])

    def path(self, truth: Sequence[int]) -> list[int]:
        """The nodes that agree with the tokens that came, from the first on."""
        nodes, parent = [], ROOT
        for token in truth:
            for i in range(parent + 1, len(self.tokens)):
                if self.tokens[i] == token and self.parents[i] == parent:
                    nodes.append(i)
                    parent = i
                    break
            else:
                break
        return nodes


def grow(
    root: State,
    siblings: Siblings,
    expand: Callable[[State, int], tuple[State, Siblings]],
    max_nodes: int,
    min_prob: float = 0.0,
) -> tuple[DraftTree, dict[int, State]]:
    """A tree of up to `max_nodes` nodes, each of at least `min_prob`, and the states of its expanded nodes.

    `root` is the state at the sequence's end and `siblings` its candidates; `expand` gives both after one
    more token. Children of one node enter the heap one at a time; of equals the one pushed first is first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    states = {ROOT: root}
    # A child to add: minus its probability, a serial number, its parent, the parent's probability and state,
    # the child's place among its siblings, and these. A node to expand: minus a share of its probability, a
    # serial number, the node, its probability, the state before it, its token, None.
    heap: list[tuple[float, int, int, float, State, int, Siblings | None]] = []
    if siblings and (prob := chance(siblings[0][0])) >= min_prob:
        heap.append((-prob, 0, ROOT, 1.0, root, 0, siblings))
    serial = 0
    while heap and len(tokens) < max_nodes:
        priority, _, node, above, state, place, waiting = heappop(heap)
        serial += 2
        if waiting is None:
            state, waiting = expand(state, place)
            states[node] = state
            place = 0
        else:
            token = waiting[place][1]
            heappush(heap, (PATIENCE * priority, serial - 1, len(tokens), -priority, state, token, None))
            tokens.append(token)
            parents.append(node)
            probs.append(-priority)
            place += 1
        if place < len(waiting) and (prob := above * chance(waiting[place][0])) >= min_prob:
            heappush(heap, (-prob, serial, node, above, state, place, waiting))
    return _in_order(DraftTree(tuple(tokens), tuple(parents), tuple(probs)), states)


def _in_order(tree: DraftTree, states: dict[int, State]) -> tuple[DraftTree, dict[int, State]]:
    """The nodes in falling order of their probabilities; no child's exceeds its parent's."""
    probs = tree.probs
    order = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)  # stable: of equals the earlier
    place = [0] * len(order) + [ROOT]  # the root, -1, stays itself
    for i, node in enumerate(order):
        place[node] = i
    ordered = DraftTree(
        tuple([tree.tokens[node] for node in order]),
        tuple([place[tree.parents[node]] for node in order]),
        tuple([probs[node] for node in order]),
    )
    return ordered, {place[node]: state for node, state in states.items()}


__all__ = ["PATIENCE", "ROOT", "DraftTree", "Siblings", "grow"]
