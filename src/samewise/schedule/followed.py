"""Describe the frame in flight and the one after it: all that is known before the first has landed."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import chain

from samewise.follow_up import FollowedSequence, FrameToFollow
from samewise.schedule.drafts import max_tree_nodes
from samewise.schedule.limits import Limits
from samewise.schedule.order import prompts_by_priority
from samewise.schedule.paging import Paging
from samewise.types import Sequence, Span

DRAFT_SHARE = 4
"""A fourth of a frame's rows is kept from prompts, for drafts. Set by hand."""

NUM_ROWS, START, NEXT_GIVEN, NEXT_ROWS, NUM_PAGES, NUM_STOP_IDS = map(
    FollowedSequence._fields.index,
    ("num_rows", "start", "next_given", "next_rows", "num_pages", "num_stop_ids"),
)
"""Places of fields of a FollowedSequence. Every frame has one of each sequence, so they are made as lists: a
record takes several times as long."""


def frame_to_follow(
    spans: list[Span], running: Mapping[int, Sequence], paging: Paging, limits: Limits, max_rows: int
) -> FrameToFollow | None:
    """The frame of these spans, and its follow-up; None where that one needs the loop's decisions.

    A follow-up has all running sequences, those of the frame in flight first and in its order. A sequence
    that generates must be verified by its tokens alone; free pages are taken for its next draft.
    """
    if not all(map(_is_plain, running.values())):
        return None
    maker = _FrameMaker(paging, limits, len(running), max_rows)
    in_flight = {span.seq_id for span in spans}
    for span in spans:
        seq = running.get(span.seq_id)
        if seq is None or span.start + span.given != len(seq.tokens):
            return None
        maker.add(seq, span)
    for seq_id, seq in running.items():
        if seq_id not in in_flight:
            if seq.draft:
                return None
            maker.add_new(seq)
    return maker.frame() if maker.num_judged and maker.give_rows() else None


def _is_plain(seq: Sequence) -> bool:
    """Whether its next tokens follow from a frame's outputs alone, and its next rows from them."""
    request = seq.request
    scored = seq.score_next is not None and seq.score_next < seq.prompt_len
    return request.verify and request.speculate and seq.guide is None and not seq.drafting and not scored


class _FrameMaker:
    """Collects the sequences, and gives rows to those that read known tokens."""

    def __init__(self, paging: Paging, limits: Limits, num_running: int, max_rows: int) -> None:
        self._paging, self._limits, self._max_rows = paging, limits, max_rows
        self._max_nodes = max_tree_nodes(limits, num_running)
        self._seqs: list[Sequence] = []
        self._fields: list[list[int]] = []  # of each, those of a FollowedSequence
        self._inputs, self._parents = array("i"), array("i")
        self.num_judged = 0

    def add(self, seq: Sequence, span: Span) -> None:
        """A sequence of the frame in flight."""
        inputs, given, parents, tokens = span.inputs, span.given, span.parents, seq.tokens
        num_rows, num_tokens, next_given = len(inputs), len(tokens), 0
        if num_rows < given:
            self._inputs.extend(inputs)
            next_given = given - num_rows
        else:
            self.num_judged += 1
            if given == 1:
                self._inputs.append(tokens[-1])  # the span's own may still be on the device
            else:
                self._inputs.extend(tokens[span.start :])
            if num_rows > given:
                self._inputs.extend(inputs[given:])
            end = num_tokens + num_rows - given + 1
            self._paging.reserve(seq, min(end, seq.max_len) + self._max_nodes)
        if parents:
            self._parents.extend(parents)
        self._append(seq, num_rows, given, len(parents), span.start, next_given)

    def add_new(self, seq: Sequence) -> None:
        """A sequence that has no rows in the frame in flight."""
        self._append(seq, 0, 0, 0, seq.kv_len, seq.given)

    def _append(
        self, seq: Sequence, num_rows: int, given: int, num_parents: int, start: int, next_given: int
    ) -> None:
        request = seq.request
        num_stop_ids = len(request.sampling.stop_ids)
        self._seqs.append(seq)
        self._fields.append(
            [request.id, num_rows, given, num_parents, start, next_given, 0, seq.max_len, 0, num_stop_ids]
        )

    def give_rows(self) -> bool:
        """Rows for the sequences that read known tokens: by priority, then those that waited longest first.

        False where there are too few rows for the others, or too few pages.
        """
        left = self._max_rows - self.num_judged
        if left < 0:
            return False
        if self.num_judged == len(self._seqs):
            return True
        left -= min(left // DRAFT_SHARE, self.num_judged * self._max_nodes)
        places = {
            seq.request.id: fields
            for seq, fields in zip(self._seqs, self._fields, strict=True)
            if fields[NEXT_GIVEN]
        }
        reading = [seq for seq in self._seqs if seq.request.id in places]
        reading.sort(key=lambda seq: seq.last_served)
        for seq in prompts_by_priority(reading):
            fields = places[seq.request.id]
            num = min(left, fields[NEXT_GIVEN])
            if not self._paging.grow(seq, fields[START] + fields[NUM_ROWS] + num):
                return False
            fields[NEXT_ROWS] = num
            left -= num
        return True

    def frame(self) -> FrameToFollow:
        """What was collected."""
        limits, seqs = self._limits, self._seqs
        stop_ids, next_inputs = array("i"), array("i")
        for seq, fields in zip(seqs, self._fields, strict=True):
            fields[NUM_PAGES] = len(seq.pages)
            if fields[NUM_STOP_IDS]:
                stop_ids.extend(seq.request.sampling.stop_ids)
            if fields[NEXT_ROWS]:
                start = fields[START] + fields[NUM_ROWS]
                next_inputs.extend(seq.tokens[start : start + fields[NEXT_ROWS]])
        return FrameToFollow(
            [seq.request.id for seq in seqs], self.num_judged, array("q", chain.from_iterable(self._fields)),
            self._inputs, self._parents, next_inputs, b"".join([seq.pages for seq in seqs]), stop_ids,
            limits.page, self._max_nodes, min(limits.max_depth, limits.max_draft, limits.max_rows - 1),
            self._max_rows,
        )  # fmt: skip


__all__ = ["DRAFT_SHARE", "frame_to_follow"]
