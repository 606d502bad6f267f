"""Draft trees for the laws: shapes made around right tokens, proposed by the loop or by follow-ups."""

import ctypes
import random
from array import array

import numpy as np
from law_helpers import PAGE, KnownAnswers

from samewise.draft.base import Proposer
from samewise.execute.pack import numbers_of
from samewise.follow_up import FollowedSequence, FollowUp
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
    """The same trees, also as follow-ups: judged and packed here in Python, as follow_up.h does in C++."""

    def __init__(self, known, *, num, shape, max_nodes):
        super().__init__(known, num=num, shape=shape)
        self._max_nodes, self._prompts, self._drafted = max_nodes, {}, []

    def meet(self, asks):
        for ask in asks:
            self._prompts[ask.seq_id] = tuple(ask.tokens[: ask.prompt_len])

    def propose(self, asks):
        num = self._max_nodes
        return [p._replace(tokens=p.tokens[:num], parents=p.parents[:num]) for p in super().propose(asks)]

    def plan_follow_up(self, frame):
        reading = frame.column("next_given")
        known = all(
            rows or seq_id in self._prompts for seq_id, rows in zip(frame.seq_ids, reading, strict=True)
        )
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
        spans, moves, drafted, known = [], [], [], frame.next_inputs.tolist()
        share = (frame.max_rows - len(known)) // frame.num_judged - 1
        for span, row, stop_ids in followed_spans(frame):
            own, truth = truth[: row.num_rows], truth[row.num_rows :]
            if row.next_given and not row.next_rows:
                continue
            if row.next_given:
                start, inputs = row.start + row.num_rows, tuple(known[: row.next_rows])
                spans.append(span._replace(start=start, inputs=inputs, given=row.next_given))
                known = known[row.next_rows :]
                continue
            verdict = judge(span, Truth(tuple(own[row.given - 1 :]), ()))
            moves += moves_after(span, verdict)
            length, room = verdict.kv_len + 1, len(span.pages) * PAGE
            if length > room:
                return None
            if length >= row.max_len or not stop_ids.isdisjoint(verdict.tokens):
                continue
            max_depth = min(frame.max_depth, row.max_len - length - 1)
            max_nodes = min(frame.max_nodes, room - length, share)
            draft = self._proposer.draft(span.seq_id, length, max_depth, max_nodes, stop_ids)
            spans.append(span._replace(
                start=verdict.kv_len, inputs=(verdict.tokens[-1], *draft.tokens), given=1,
                parents=parents_of(draft),
            ))  # fmt: skip
            drafted.append(draft)
        if not spans:
            return None
        self._proposer._drafted = drafted
        numbers = np.array(numbers_of(spans, moves), np.int32)
        num_rows = sum(len(span.inputs) for span in spans)
        pages = np.array([page for span in spans for page in span.pages], np.int32)
        return FollowUp(len(spans), numbers, num_rows, len(moves), pages, bool(frame.next_inputs))


def followed_spans(frame):
    """(span, row, stop_ids) of the sequences of a frame."""
    pages = array("i", frame.pages).tolist()
    inputs, parents, stops = frame.inputs.tolist(), frame.parents.tolist(), frame.stop_ids.tolist()
    num = len(FollowedSequence._fields)
    for first in range(0, len(frame.sequences), num):
        row = FollowedSequence(*frame.sequences[first : first + num])
        table, pages = array("i", pages[: row.num_pages]), pages[row.num_pages :]
        tree, parents = tuple(parents[: row.num_parents]), parents[row.num_parents :]
        own, inputs = tuple(inputs[: row.num_rows]), inputs[row.num_rows :]
        yield (
            Span(row.seq_id, row.start, own, row.given, table, Sampling(), [], 0, parents=tree),
            row,
            frozenset(stops[: row.num_stop_ids]),
        )
        stops = stops[row.num_stop_ids :]


def moves_after(span, verdict):
    first = span.start + span.given
    return [
        (slot(span, first + node), slot(span, first + i)) for i, node in enumerate(verdict.path) if node != i
    ]


def slot(span, position):
    return span.pages[position // PAGE] * PAGE + position % PAGE


def parents_of(draft):
    """A chain has none."""
    return () if list(draft.parents) == list(range(-1, len(draft.parents) - 1)) else draft.parents


def followed_trees(cases, expected, **settings):
    known = KnownAnswers.of(cases, expected)
    # A frame holds all sequences.
    return lambda parts: FollowedTrees(known, max_nodes=parts.runner.widest // len(cases) - 1, **settings)
