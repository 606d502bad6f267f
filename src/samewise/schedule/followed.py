"""Describe the frame in flight and the one after it: all that is known before the first has landed."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from samewise.follow_up import FollowedSequence, FrameToFollow
from samewise.schedule.drafts import max_tree_nodes
from samewise.schedule.limits import Limits
from samewise.schedule.order import prompts_by_priority
from samewise.schedule.paging import Paging
from samewise.types import Sequence, Span

DRAFT_SHARE = 4
"""A fourth of a frame's rows is kept from prompts, for drafts. Set by hand."""


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
        self._members: list[tuple[Sequence, FollowedSequence]] = []
        self._inputs, self._parents = array("i"), array("i")
        self.num_judged = 0

    def add(self, seq: Sequence, span: Span) -> None:
        """A sequence of the frame in flight."""
        num_rows, given, num_tokens = len(span.inputs), span.given, len(seq.tokens)
        if num_rows < given:
            self._inputs.extend(span.inputs)
        else:
            self.num_judged += 1
            self._inputs.extend(seq.tokens[span.start :])  # the span's own may still be on the device
            self._inputs.extend(span.inputs[given:])
            num_new = num_rows - given + 1
            self._paging.reserve(seq, min(num_tokens + num_new, seq.max_len) + self._max_nodes)
        self._parents.extend(span.parents)
        self._append(seq, num_rows, given, len(span.parents), span.start, max(0, given - num_rows))

    def add_new(self, seq: Sequence) -> None:
        """A sequence that has no rows in the frame in flight."""
        self._append(seq, 0, 0, 0, seq.kv_len, seq.given)

    def _append(
        self, seq: Sequence, num_rows: int, given: int, num_parents: int, start: int, next_given: int
    ) -> None:
        stop_ids = seq.request.sampling.stop_ids
        member = FollowedSequence(
            seq.request.id, num_rows, given, num_parents, start, next_given, 0, seq.max_len, 0, len(stop_ids)
        )
        self._members.append((seq, member))

    def give_rows(self) -> bool:
        """Rows for the sequences that read known tokens: by priority, then those that waited longest first.

        False where there are too few rows for the others, or too few pages.
        """
        left = self._max_rows - self.num_judged
        if left < 0:
            return False
        left -= min(left // DRAFT_SHARE, self.num_judged * self._max_nodes)
        places = {seq.request.id: i for i, (seq, member) in enumerate(self._members) if member.next_given}
        reading = sorted((self._members[i][0] for i in places.values()), key=lambda seq: seq.last_served)
        for seq in prompts_by_priority(reading):
            i = places[seq.request.id]
            member = self._members[i][1]
            num = min(left, member.next_given)
            if not self._paging.grow(seq, member.start + member.num_rows + num):
                return False
            self._members[i] = seq, member._replace(next_rows=num)
            left -= num
        return True

    def frame(self) -> FrameToFollow:
        """What was collected."""
        limits, sequences, stop_ids = self._limits, array("q"), array("i")
        next_inputs = array("i")
        for seq, member in self._members:
            sequences.extend(member._replace(num_pages=len(seq.pages)))
            stop_ids.extend(seq.request.sampling.stop_ids)
            start = member.start + member.num_rows
            next_inputs.extend(seq.tokens[start : start + member.next_rows])
        return FrameToFollow(
            [member.seq_id for _, member in self._members], self.num_judged, sequences, self._inputs,
            self._parents, next_inputs, b"".join([seq.pages for seq, _ in self._members]), stop_ids,
            limits.page, self._max_nodes, min(limits.max_depth, limits.max_draft, limits.max_rows - 1),
            self._max_rows,
        )  # fmt: skip


__all__ = ["DRAFT_SHARE", "frame_to_follow"]
