"""How far a draft model has read each sequence, and which rows its next passes read. Host only."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from samewise.kernels.attention.base import PAGE
from samewise.kv.pages import PagePool
from samewise.types import Ask, Span


@dataclass(slots=True)
class _Progress:
    """How far one sequence was read."""

    tokens: list[int] = field(default_factory=list)  # whose KV is written, drafts included
    num_committed: int = 0  # of these, known to be committed tokens of the sequence
    pages: array[int] = field(default_factory=lambda: array("i"))


class ReadPlan(NamedTuple):
    """Passes that only read, in order, and the pass that reads sequences to their end."""

    early: list[list[Span]]
    last: list[Span]  # one per ask of `ended`, in their order
    ended: list[Ask]


class Reader:
    """Owns the draft model's page numbers and what it knows of each sequence.

    What was read and turned out otherwise (a rejected draft) is dropped and read again.
    """

    def __init__(self, num_pages: int, max_len: int) -> None:
        self._num_pages, self._max_len = num_pages, max_len
        self.recover()

    def recover(self) -> None:
        """Drop all sequences and take all pages back."""
        self._pool = PagePool(self._num_pages)
        self._progress: dict[int, _Progress] = {}

    def forget(self, seq_id: int) -> None:
        """Free the sequence's pages."""
        progress = self._progress.pop(seq_id, None)
        for page in progress.pages if progress is not None else ():
            self._pool.release(page)
            self._pool.free(page)

    def plan(self, asks: list[Ask], read_rows: int, pass_rows: int) -> ReadPlan:
        """Passes of at most `pass_rows` rows, `read_rows` in all, that read nearly read sequences first."""
        left = max(read_rows, len(asks))
        early: list[Span] = []
        ended: list[tuple[Ask, int]] = []
        for ask, num_unread in sorted(
            [(ask, self._num_unread(ask)) for ask in asks], key=lambda pair: pair[1]
        ):
            num = min(num_unread, left)
            if num == 0 or not self._take_pages(ask.seq_id, _length(ask) - num_unread + num):
                continue
            left -= num
            if num == num_unread:
                ended.append((ask, num))
            else:
                early.append(self._span(ask, num_unread, num))
        max_last = max(1, pass_rows // max(1, len(ended)))
        last: list[Span] = []
        for ask, num_unread in ended:
            num = min(num_unread, max_last)
            if num < num_unread:
                early.append(self._span(ask, num_unread, num_unread - num))
            last.append(self._span(ask, num, num))
        return ReadPlan(_in_passes(early, pass_rows), last, [ask for ask, _ in ended])

    def plan_prompts(self, asks: list[Ask], read_rows: int, pass_rows: int) -> list[list[Span]]:
        """Passes that read sequences up to their last token, which is read when drafts are wanted."""
        spans: list[Span] = []
        for ask in asks:
            num_unread = self._num_unread(ask)
            num = min(num_unread - 1, read_rows)
            if num > 0 and self._take_pages(ask.seq_id, _length(ask) - num_unread + num):
                spans.append(self._span(ask, num_unread, num))
                read_rows -= num
        return _in_passes(spans, pass_rows)

    def pages_for_draft(self, ask: Ask, num_passes: int) -> tuple[array[int], int]:
        """The sequence's pages, and how many of so many passes, one token each, they have room for."""
        length = _length(ask)
        self._take_pages(ask.seq_id, min(length + num_passes - 1, self._max_len))
        pages = self._progress[ask.seq_id].pages
        return pages, min(num_passes, min(len(pages) * PAGE, self._max_len) - length + 1)

    def note_read(self, spans: list[Span]) -> None:
        """The KV of these tokens is written."""
        for span in spans:
            self._progress[span.seq_id].tokens[span.start :] = span.inputs

    def note_drafted(self, ask: Ask, tokens: list[int]) -> None:
        """The KV of these drafted tokens, after the ask's own, is written."""
        self._progress[ask.seq_id].tokens[_length(ask) :] = tokens

    def _num_unread(self, ask: Ask) -> int:
        """Tokens of the sequence and its draft still to be read, at least the last one."""
        progress = self._progress.setdefault(ask.seq_id, _Progress())
        read, tokens = progress.tokens, ask.tokens
        max_same = min(len(read), _length(ask) - 1)
        num_same = min(progress.num_committed, max_same)
        while num_same < max_same:
            token = tokens[num_same] if num_same < len(tokens) else ask.draft[num_same - len(tokens)]
            if read[num_same] != token:
                break
            num_same += 1
        progress.num_committed = min(num_same, len(tokens))
        del read[num_same:]
        return _length(ask) - num_same

    def _span(self, ask: Ask, num_unread: int, num: int) -> Span:
        """The first `num` of the ask's last `num_unread` tokens."""
        start = _length(ask) - num_unread
        inputs = [*ask.tokens[start : start + num], *ask.draft[max(0, start - len(ask.tokens)) :]][:num]
        pages = self._progress[ask.seq_id].pages
        return Span(
            ask.seq_id, start, tuple(inputs), num, pages, ask.sampling, ask.tokens, ask.prompt_len
        )  # fmt: skip

    def _take_pages(self, seq_id: int, length: int) -> bool:
        """Whether there are pages for so many tokens; if not, the sequence goes without drafts."""
        if length > self._max_len:
            return False
        pages = self._progress[seq_id].pages
        while len(pages) * PAGE < length:
            page = self._pool.take()
            if page is None:
                return False
            pages.append(page)
        return True


def _length(ask: Ask) -> int:
    return len(ask.tokens) + len(ask.draft)


def _in_passes(spans: list[Span], pass_rows: int) -> list[list[Span]]:
    """Spans cut into passes of at most so many rows, in order."""
    passes: list[list[Span]] = []
    left = 0
    for span in spans:
        done = 0
        while done < len(span.inputs):
            if left == 0:
                passes.append([])
                left = pass_rows
            num = min(left, len(span.inputs) - done)
            inputs = span.inputs[done : done + num]
            passes[-1].append(span._replace(start=span.start + done, inputs=inputs, given=num))
            done += num
            left -= num
    return passes


__all__ = ["ReadPlan", "Reader"]
