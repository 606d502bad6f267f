"""The proposer `model`, SpecDec's drafter: a small model with weights, runner and KV pages of its own.

It has the target model's vocabulary. It reads each sequence in pieces, a bounded number of rows per pass, so
a long prompt does not delay the engine's step; it drafts for a sequence once it has read it to the end.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import torch

from samewise.draft.base import Drafter
from samewise.draft.tuning import DEFAULTS, ModelTuning
from samewise.execute.pack import pack_frame
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler
from samewise.execute.sampling_rows import rows_of_asks
from samewise.kernels.attention.base import PAGE
from samewise.kv.pages import PagePool
from samewise.types import Ask, Proposal, Span


@dataclass(slots=True)
class _Progress:
    """How far the draft model has read one sequence."""

    tokens: list[int] = field(default_factory=list)  # whose KV is written, drafts included
    num_committed: int = 0  # of these, known to be committed tokens of the sequence
    pages: array[int] = field(default_factory=lambda: array("i"))


class DraftModel(Drafter):
    """Drafts by regular decoding of the draft model, one pass per call. Owns the draft model's pages."""

    name = "model"

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        num_pages: int,
        max_len: int,
        tuning: ModelTuning = DEFAULTS.model,
    ) -> None:
        self._runner, self._sampler, self._max_len = runner, sampler, max_len
        self._read_rows, self._num_pages = tuning.read_rows, num_pages
        self.recover()

    def recover(self) -> None:
        """Drop all sequences and take all pages back."""
        self._pool = PagePool(self._num_pages)
        self._progress: dict[int, _Progress] = {}

    @torch.inference_mode()
    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The next token of every sequence that this pass reads to its end."""
        spans, ended = self._plan(asks)
        if not spans:
            return []
        num_rows = sum(len(span.inputs) for span in spans)
        logits = self._runner.fast(pack_frame(spans, self._runner.fast_staging(num_rows)))
        for span in spans:
            self._progress[span.seq_id].tokens[span.start :] = span.inputs
        if not ended:
            return []
        last_rows = torch.tensor([row for _, row in ended], device=logits.device)
        output = self._sampler.sample(logits[last_rows].float(), rows_of_asks([ask for ask, _ in ended]))
        tokens: list[int] = output.tokens.tolist()
        return [
            Proposal(ask.seq_id, (token,), drafter=self.name, more=True)
            for (ask, _), token in zip(ended, tokens, strict=True)
        ]

    def forget(self, seq_id: int) -> None:
        """Free the sequence's pages."""
        progress = self._progress.pop(seq_id, None)
        for page in progress.pages if progress is not None else ():
            self._pool.release(page)
            self._pool.free(page)

    def _plan(self, asks: list[Ask]) -> tuple[list[Span], list[tuple[Ask, int]]]:
        """The spans of this pass, nearly read sequences first; and each ask read to its end, with its row."""
        spans: list[Span] = []
        ended: list[tuple[Ask, int]] = []
        rows_left = max(self._read_rows, len(asks))
        row = 0
        unread = [(ask, self._num_unread(ask)) for ask in asks]
        for ask, num_unread in sorted(unread, key=lambda pair: pair[1]):
            progress = self._progress[ask.seq_id]
            num_rows = min(num_unread, rows_left)
            start = len(ask.tokens) + len(ask.draft) - num_unread
            if num_rows == 0 or not self._take_pages(progress, start + num_rows):
                continue
            inputs = [*ask.tokens[start:], *ask.draft[max(0, start - len(ask.tokens)) :]][:num_rows]
            spans.append(
                Span(
                    ask.seq_id,
                    start,
                    tuple(inputs),
                    num_rows,
                    progress.pages,
                    ask.sampling,
                    ask.tokens,
                    ask.prompt_len,
                )
            )
            row += num_rows
            rows_left -= num_rows
            if num_rows == num_unread:
                ended.append((ask, row - 1))
        return spans, ended

    def _num_unread(self, ask: Ask) -> int:
        """Tokens of the sequence and its draft still to be read, at least the last one.

        What was read before and turned out otherwise (a rejected draft) is dropped.
        """
        progress = self._progress.setdefault(ask.seq_id, _Progress())
        read, tokens = progress.tokens, ask.tokens
        max_same = min(len(read), len(tokens) + len(ask.draft) - 1)
        num_same = min(progress.num_committed, max_same)
        while num_same < max_same:
            token = tokens[num_same] if num_same < len(tokens) else ask.draft[num_same - len(tokens)]
            if read[num_same] != token:
                break
            num_same += 1
        progress.num_committed = min(num_same, len(tokens))
        del read[num_same:]
        return len(tokens) + len(ask.draft) - num_same

    def _take_pages(self, progress: _Progress, length: int) -> bool:
        """Whether there are pages for so many tokens; if not, the sequence goes without drafts."""
        if length > self._max_len:
            return False
        while len(progress.pages) * PAGE < length:
            page = self._pool.take()
            if page is None:
                return False
            progress.pages.append(page)
        return True


__all__ = ["DraftModel"]
