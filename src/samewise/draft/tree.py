"""Draft trees: guesses that share their beginnings, grown best-first by estimated probability.

Trees of all sequences grow together, and share a frame that takes longer for each row. Nodes are chosen so
that the sum over sequences of log(tokens per second) is largest (proportional fairness). A node's share is
its probability over the tokens that its sequence is expected to get without it: nodes are added by falling
share, as long as the logarithms they add outweigh the longer frame for all. The largest sum of tokens would
let a sequence whose guesses are bad wait for the others; for one sequence both choose the same nodes. Pure:
what may follow a path is asked of the caller. No clock, no torch. Host only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import log, log1p
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

    `live`: sequences in the frame, those without a tree among them. `gap`: seconds between such frames, with
    nodes or without. `own`: what a sequence gets without any node, as a multiple of what a node with
    probability 1 brings: 1, where estimates are not known to be off.
    """

    live: int
    seconds: Sequence[float]
    own: float = 1.0
    gap: float = 0.0

    @classmethod
    def free(cls, live: int, max_nodes: int, own: float = 1.0) -> RowPrices:
        """Nodes cost nothing."""
        return cls(live, [1.0] * (max_nodes + 1), own)

    def costs(self) -> list[float]:
        """Of frames with 0 nodes and more: what all sequences lose by them, in logarithms of their pace."""
        first, last, cost = self.seconds[0] + self.gap, self.seconds[0], 0.0
        costs = []
        for seconds in self.seconds:
            if seconds != last:  # most are equal, where rows are padded
                last, cost = seconds, self.live * log((seconds + self.gap) / first)
            costs.append(cost)
        return costs


def can_pay(costs: list[float], num: int, gain: float, share: float, num_trees: int, best: float) -> bool:
    """Whether nodes of at most this share, after `num` that gained so much, could bring more than `best`.

    They gain most where they are spread evenly over the trees.
    """
    last = len(costs) - 1
    for i in range(num + 1, last + 1):
        # Of equal costs the last one is met with most nodes.
        if (i == last or costs[i + 1] != costs[i]) and (
            gain + num_trees * log1p((i - num) * share / num_trees) > best + costs[i]
        ):
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
    """Trees of nodes of at least `min_prob`, by falling share, as long as more of them could pay.

    `expand(i, state, token)` gives the state of root i's sequence after one more token, and its candidates.
    Children of one node enter the heap one at a time; of equals the one pushed first is first.
    """
    trees = [GrownTree[State](root.limit) for root in roots]
    # Of each tree a heap. A child to add: minus its probability, a serial number, its parent, the parent's
    # probability and state, the child's place among its siblings, and these. A node to expand: minus a share
    # of its probability, a serial number, the node, its probability, the state before it, its token, None.
    heaps: list[list[tuple[float, int, int, float, State, int, Siblings | None]]] = [[] for _ in roots]
    tokens = [prices.own] * len(roots)  # expected of each sequence
    nexts: list[
        tuple[float, int]
    ] = []  # of each tree that can grow: minus the share of what is first, the tree
    serial = 0
    for i, root in enumerate(roots):
        trees[i].states[ROOT] = root.state
        if root.limit.max_depth > 0 and root.siblings and (prob := chance(root.siblings[0][0])) >= min_prob:
            heaps[i].append((-prob, serial, ROOT, 1.0, root.state, 0, root.siblings))
            heappush(nexts, (-prob / tokens[i], i))
        serial += 1
    num, gain, best, costs = 0, 0.0, 0.0, prices.costs()
    while nexts and num < len(costs) - 1:
        if num % check_nodes == 0 and not can_pay(costs, num, gain, -nexts[0][0], len(roots), best):
            break
        _, i = heappop(nexts)
        tree, heap = trees[i], heaps[i]
        if len(tree.tokens) >= tree.limit.max_nodes:
            continue
        priority, _, node, above, state, place, waiting = heappop(heap)
        serial += 2
        if waiting is None:
            state, waiting = expand(i, state, place)
            tree.states[node] = state
            place = 0
        else:
            token, depth = waiting[place][1], 1 + (tree.depths[node] if node >= 0 else 0)
            if depth < tree.limit.max_depth:
                added = len(tree.tokens)
                heappush(heap, (patience * priority, serial - 1, added, -priority, state, token, None))
            tree.tokens.append(token)
            tree.parents.append(node)
            tree.probs.append(-priority)
            tree.depths.append(depth)
            num += 1
            gain += log1p(-priority / tokens[i])
            tokens[i] += -priority
            best = max(best, gain - costs[num])
            place += 1
        if place < len(waiting) and (prob := above * chance(waiting[place][0])) >= min_prob:
            heappush(heap, (-prob, serial, node, above, state, place, waiting))
        if heap:
            heappush(nexts, (heap[0][0] / tokens[i], i))
    return trees


class _Candidate(NamedTuple):
    """A node that may be kept: its share, its tree, and its probability."""

    share: float
    tree: int
    prob: float


def cut(trees: list[GrownTree[State]], prices: RowPrices) -> tuple[list[DraftTree], float]:
    """The nodes of all trees that bring most in logarithms of tokens per second, and the tokens they bring.

    Of equals, those of earlier trees are kept, and in a tree those that came first.
    """
    nodes = []
    for i, tree in enumerate(trees):
        tokens = prices.own
        for prob in sorted(tree.probs, reverse=True):
            nodes.append(_Candidate(prob / tokens, i, prob))
            tokens += prob
    nodes.sort(key=lambda node: node.share, reverse=True)  # stable
    best, best_num, best_expected, gain, expected, costs = 0.0, 0, 0.0, 0.0, 0.0, prices.costs()
    for num, node in enumerate(nodes, 1):
        gain += log1p(node.share)
        expected += node.prob
        if gain - costs[num] > best:
            best, best_num, best_expected = gain - costs[num], num, expected
    counts = [0] * len(trees)
    for node in nodes[:best_num]:
        counts[node.tree] += 1
    kept = [tree.depth_first(count) for tree, count in zip(trees, counts, strict=True)]
    return kept, best_expected


__all__ = ["DraftTree", "GrownTree", "Limit", "Root", "RowPrices", "Siblings", "can_pay", "cut", "grow"]
