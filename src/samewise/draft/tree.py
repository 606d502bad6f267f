"""Draft trees: guesses that share their beginnings, grown best-first by estimated probability.

Trees of all sequences grow together: a node is added wherever it is most probable, and only the nodes that
pay for their rows are kept. Pure: what may follow a path is asked of the caller. No clock, no torch. Host
only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from samewise.draft.estimates import chance
from samewise.draft.tuning import DEFAULTS
from samewise.types import ROOT

Siblings = list[tuple[float, int]]
"""(log-odds, token) of the children of one node, most probable first."""
State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guesses for one sequence: node i is `tokens[i]` after the tokens of its ancestors.

    `probs`: the estimated probability that the node and all its ancestors are right. Nodes stand depth
    first, the likeliest child first, so the likeliest chain comes first and a parent before its children.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

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


class Limit(NamedTuple):
    """The most nodes and levels of a sequence's tree."""

    seq_id: int
    max_nodes: int
    max_depth: int


@dataclass(frozen=True, slots=True)
class RowPrices:
    """What nodes cost: `seconds[n]` of a frame with n nodes of all sequences, at most the last n.

    `live`: tokens that a frame commits without any node, one for each sequence; as a multiple of what a node
    with probability 1 brings, where estimates are known to be off.
    """

    live: float
    seconds: Sequence[float]

    @classmethod
    def free(cls, live: float, max_nodes: int) -> RowPrices:
        """Nodes cost nothing."""
        return cls(live, [1.0] * (max_nodes + 1))

    def can_pay(self, num: int, expected: float, prob: float, best: float) -> bool:
        """Whether more nodes of this probability, after `num`, could bring more tokens per second."""
        tokens = self.live + expected
        for seconds in self.seconds[num + 1 :]:
            tokens += prob
            if tokens > best * seconds:
                return True
        return False


@dataclass(slots=True)
class GrownTree(Generic[State]):
    """A tree while it grows, its nodes as they came, and the states of its expanded nodes."""

    limit: Limit
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)

    def depth_first(self, num_nodes: int) -> DraftTree:
        """The most probable nodes, of equals those that came first; the likeliest child first."""
        order = sorted(range(len(self.probs)), key=self.probs.__getitem__, reverse=True)[:num_nodes]
        children: dict[int, list[int]] = {}
        for node in reversed(order):
            children.setdefault(self.parents[node], []).append(node)
        place, waiting = {ROOT: ROOT}, children.get(ROOT, [])[:]
        nodes: list[int] = []
        while waiting:
            node = waiting.pop()
            place[node] = len(nodes)
            nodes.append(node)
            waiting += children.get(node, ())
        return DraftTree(
            tuple([self.tokens[node] for node in nodes]),
            tuple([place[self.parents[node]] for node in nodes]),
            tuple([self.probs[node] for node in nodes]),
        )


class Root(NamedTuple, Generic[State]):
    """Where a tree starts: a sequence's limit, the state at its end, and the candidates there."""

    limit: Limit
    state: State
    siblings: Siblings


def grow(
    roots: list[Root[State]],
    expand: Callable[[int, State, int], tuple[State, Siblings]],
    prices: RowPrices,
    min_prob: float = 0.0,
    patience: float = DEFAULTS.trees.patience,
    check_nodes: int = DEFAULTS.trees.check_nodes,
) -> list[GrownTree[State]]:
    """Trees of nodes of at least `min_prob`, as long as more of them could pay.

    `expand(i, state, token)` gives the state of root i's sequence after one more token, and its candidates.
    Children of one node enter the heap one at a time; of equals the one pushed first is first.
    """
    trees = [GrownTree[State](root.limit) for root in roots]
    # A child to add: minus its probability, a serial number, its tree, its parent, the parent's probability
    # and state, the child's place among its siblings, and these. A node to expand: minus a share of its
    # probability, a serial number, its tree, the node, its probability, the state before it, its token, None.
    heap: list[tuple[float, int, int, int, float, State, int, Siblings | None]] = []
    serial = 0
    for i, root in enumerate(roots):
        trees[i].states[ROOT] = root.state
        if root.limit.max_depth > 0 and root.siblings and (prob := chance(root.siblings[0][0])) >= min_prob:
            heappush(heap, (-prob, serial, i, ROOT, 1.0, root.state, 0, root.siblings))
        serial += 1
    num, expected = 0, 0.0
    best = prices.live / prices.seconds[0]
    while heap and num < len(prices.seconds) - 1:
        if num % check_nodes == 0 and not prices.can_pay(num, expected, -heap[0][0], best):
            break
        priority, _, i, node, above, state, place, waiting = heappop(heap)
        tree = trees[i]
        if len(tree.tokens) >= tree.limit.max_nodes:
            continue
        serial += 2
        if waiting is None:
            state, waiting = expand(i, state, place)
            tree.states[node] = state
            place = 0
        else:
            token, depth = waiting[place][1], 1 + (tree.depths[node] if node >= 0 else 0)
            if depth < tree.limit.max_depth:
                added = len(tree.tokens)
                heappush(heap, (patience * priority, serial - 1, i, added, -priority, state, token, None))
            tree.tokens.append(token)
            tree.parents.append(node)
            tree.probs.append(-priority)
            tree.depths.append(depth)
            num += 1
            expected += -priority
            best = max(best, (prices.live + expected) / prices.seconds[num])
            place += 1
        if place < len(waiting) and (prob := above * chance(waiting[place][0])) >= min_prob:
            heappush(heap, (-prob, serial, i, node, above, state, place, waiting))
    return trees


def cut(trees: list[GrownTree[State]], prices: RowPrices) -> tuple[list[DraftTree], float]:
    """The most probable nodes of all trees that bring most tokens per second, and the tokens they bring.

    Of equals, those of earlier trees are kept, and in a tree those that came first.
    """
    nodes = [(prob, i) for i, tree in enumerate(trees) for prob in sorted(tree.probs, reverse=True)]
    nodes.sort(key=lambda node: node[0], reverse=True)  # stable
    best, best_num, best_expected, expected = prices.live / prices.seconds[0], 0, 0.0, 0.0
    for num, (prob, _) in enumerate(nodes, 1):
        expected += prob
        throughput = (prices.live + expected) / prices.seconds[num]
        if throughput > best:
            best, best_num, best_expected = throughput, num, expected
    counts = [0] * len(trees)
    for _, i in nodes[:best_num]:
        counts[i] += 1
    kept = [tree.depth_first(count) for tree, count in zip(trees, counts, strict=True)]
    return kept, best_expected


__all__ = ["DraftTree", "GrownTree", "Limit", "Root", "RowPrices", "Siblings", "cut", "grow"]
