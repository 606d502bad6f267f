"""Draft trees for the laws: shapes made around right tokens, proposed by the loop or by follow-ups."""

import ctypes
import random
from array import array

import numpy as np
from law_helpers import PAGE, KnownAnswers

from samewise.draft.base import Proposer
from samewise.execute.pack import numbers_of
from samewise.follow_up import FollowUp
from samewise.types import ROOT, Proposal, Sampling, Span, Truth
from samewise.verify.judge import judge


class KnownTrees(Proposer):
    """Trees `shape(right_tokens)`, a list of (token, parent), of up to `num` right tokens."""

    name = "known"
    wants_candidates = True

    def __init__(self, known, *, num, shape):
        self._known, self._num, self._shape = known, num, shape

    def propose(self, asks):
        proposals = []
        for ask in asks:
            right = tuple(self._known.continuation(ask)[: min(self._num, ask.room)])
            if right:
                tokens, parents = zip(*self._shape(right), strict=True)
                proposals.append(Proposal(ask.seq_id, tokens, drafter=self.name, parents=parents))
        return proposals


def other(token, by=1):
    return (token + by) % 256


def wrong_chain_first(right):
    """A wrong chain, then the right one: its KV has to be moved."""
    num = len(right)
    wrong = [(other(token), i - 1) for i, token in enumerate(right)]
    return [*wrong, *((token, ROOT if i == 0 else num + i - 1) for i, token in enumerate(right))]


def siblings_everywhere(right):
    """After each right node two wrong ones, before it another wrong one."""
    nodes, parent = [], ROOT
    for token in right:
        nodes += [
            (other(token), parent),
            (token, parent),
            (other(token, 2), parent),
            (other(token, 3), parent),
        ]
        parent = len(nodes) - 3
    return nodes


def level_by_level(right):
    """All nodes of one level, then those of the next, as a breadth-first tree has them."""
    nodes, parent = [], ROOT
    for token in right:
        start = len(nodes)
        nodes += [(other(token), parent), (other(token, 2), parent), (token, parent)]
        parent = start + 2
    return nodes


def leaves_only(right):
    """Many first tokens, the right one last."""
    return [(other(right[0], i), ROOT) for i in range(5, 0, -1)] + [(right[0], ROOT)]


def wrong_everywhere(right):
    return [(other(right[0]), ROOT), (other(right[0], 2), ROOT), (right[-1], 0), (other(right[0], 3), 1)]


def random_shape(right):
    """Right and wrong nodes in any order, some of them far from where they belong."""
    pick = random.Random(sum(right))
    nodes, at = [], ROOT
    todo = list(right)
    while todo and len(nodes) < 20:
        if pick.random() < 0.4:
            nodes.append((todo[0], at))
            at = len(nodes) - 1
            todo.pop(0)
        else:
            parent = pick.choice([ROOT, *range(len(nodes))])
            nodes.append((pick.randrange(256), parent))
    return nodes


SHAPES = [wrong_chain_first, siblings_everywhere, level_by_level, leaves_only, wrong_everywhere, random_shape]


def known_trees(cases, expected, **settings):
    known = KnownAnswers.of(cases, expected)
    return lambda _: KnownTrees(known, **settings)


class FollowedTrees(KnownTrees):
    """The same trees, also as follow-ups: judged and packed here in Python, as drafter.cpp does in C++."""

    def __init__(self, known, *, num, shape, max_nodes):
        super().__init__(known, num=num, shape=shape)
        self._max_nodes, self._prompts, self._drafted = max_nodes, {}, []

    def propose(self, asks):
        for ask in asks:
            self._prompts[ask.seq_id] = tuple(ask.tokens[: ask.prompt_len])
        num = self._max_nodes
        return [p._replace(tokens=p.tokens[:num], parents=p.parents[:num]) for p in super().propose(asks)]

    def plan_follow_up(self, frame):
        known = all(seq_id in self._prompts for seq_id in frame.seq_ids)
        return FollowPlan(self, frame) if known else None

    def take_follow_up(self):
        return [p for p in self._drafted if p.tokens]

    def draft(self, seq_id, length, max_depth, room, stop_ids):
        """The next tree of a sequence that has this many tokens now."""
        max_nodes = min(room, self._max_nodes)
        right = self._known.after(self._prompts[seq_id], length)[: min(self._num, max(0, max_depth))]
        nodes = usable(self._shape(tuple(right)) if right else [], max_depth, stop_ids)[: max(0, max_nodes)]
        tokens, parents = zip(*nodes, strict=True) if nodes else ((), ())
        return Proposal(seq_id, tokens, drafter=self.name, parents=parents)


def usable(nodes, max_depth, stop_ids):
    """The nodes (token, parent) of at most so many levels, none after a stop id, counted anew."""
    depths, places, kept = [], {ROOT: ROOT}, []
    for node, (token, parent) in enumerate(nodes):
        depths.append(1 if parent == ROOT else depths[parent] + 1)
        ended = parent != ROOT and nodes[parent][0] in stop_ids
        if depths[node] <= max_depth and parent in places and not ended:
            places[node] = len(kept)
            kept.append((token, places[parent]))
    return kept


class FollowPlan:
    def __init__(self, proposer, frame):
        self.frame, self._proposer = frame, proposer

    def run(self, outputs):
        frame = self.frame
        num = len(frame.inputs) * outputs.row_len
        rows = np.ctypeslib.as_array((ctypes.c_int32 * num).from_address(outputs.address))
        truth = rows.reshape(-1, outputs.row_len)[:, 0].tolist()
        spans, moves, drafted = [], [], []
        for span, max_len, stop_ids in followed_spans(frame):
            verdict = judge(span, Truth(tuple(truth[: len(span.inputs)]), ()))
            length, room = verdict.kv_len + 1, len(span.pages) * PAGE
            if length >= max_len or length > room or not stop_ids.isdisjoint(verdict.tokens):
                return None
            first = span.start + 1
            moves += [
                (slot(span, first + node), slot(span, first + i))
                for i, node in enumerate(verdict.path)
                if node != i
            ]
            max_depth = min(frame.max_depth, max_len - length - 1)
            max_nodes = min(frame.max_nodes, room - length)
            draft = self._proposer.draft(span.seq_id, length, max_depth, max_nodes, stop_ids)
            spans.append(span._replace(
                start=verdict.kv_len, inputs=(verdict.tokens[-1], *draft.tokens), parents=parents_of(draft)
            ))  # fmt: skip
            drafted.append(draft)
            truth = truth[len(span.inputs) :]
        self._proposer._drafted = drafted
        numbers = np.array(numbers_of(spans, moves), np.int32)
        num_rows = sum(len(span.inputs) for span in spans)
        return FollowUp(len(spans), numbers, num_rows, len(moves), frame.pages)


def followed_spans(frame):
    """(span, max_len, stop_ids) of the sequences of a frame."""
    pages = array("i", frame.pages).tolist()
    inputs, parents, stops = frame.inputs.tolist(), frame.parents.tolist(), frame.stop_ids.tolist()
    names = ("seq_id", "num_rows", "num_parents", "start", "max_len", "num_pages", "num_stop_ids")
    for seq_id, rows, num_parents, start, max_len, num_pages, num_stops in zip(
        *(frame.column(name) for name in names), strict=True
    ):
        table, pages = array("i", pages[:num_pages]), pages[num_pages:]
        yield (
            Span(seq_id, start, tuple(inputs[:rows]), 1, table, Sampling(), [], 0,
                 parents=tuple(parents[:num_parents])),
            max_len,
            frozenset(stops[:num_stops]),
        )  # fmt: skip
        inputs, parents, stops = inputs[rows:], parents[num_parents:], stops[num_stops:]


def slot(span, position):
    return span.pages[position // PAGE] * PAGE + position % PAGE


def parents_of(draft):
    """A chain has none."""
    return () if list(draft.parents) == list(range(-1, len(draft.parents) - 1)) else draft.parents


def followed_trees(cases, expected, **settings):
    known = KnownAnswers.of(cases, expected)
    # A frame holds all sequences.
    return lambda parts: FollowedTrees(known, max_nodes=parts.runner.widest // len(cases) - 1, **settings)
