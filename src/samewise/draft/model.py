"""A small model guesses for a large one: its own weights, its own runner, its own pages, the same vocabulary.

It reads what the sequence says as the sequence goes on, a bounded number of rows at a time, so a long prompt
delays nobody; until it has caught up with a sequence it has nothing to say about it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import torch

from samewise.draft.base import Drafter
from samewise.execute.pack import pack_frame
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler
from samewise.execute.sampling_rows import rows_of_asks
from samewise.kernels.attention.base import PAGE
from samewise.kv.pages import PagePool
from samewise.types import Ask, Proposal, Span

READ_ROWS = 64  # read in one pass, of all sequences together


@dataclass(slots=True)
class _Reader:
    """How far the draft model has read one sequence."""

    read: list[int] = field(default_factory=list)  # tokens whose KV is there
    sure: int = 0  # of those, known to be what the sequence says
    pages: array[int] = field(default_factory=lambda: array("i"))


class DraftModel(Drafter):
    """Guesses by regular decoding of a draft model, one pass per call."""

    name = "model"

    def __init__(self, runner: Runner, sampler: Sampler, num_pages: int, max_len: int) -> None:
        self._runner, self._sampler, self._max_len = runner, sampler, max_len
        self._pool = PagePool(num_pages)
        self._readers: dict[int, _Reader] = {}

    @torch.inference_mode()
    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The next token of every sequence the draft model has read to its end in this pass."""
        spans, done = self._plan(asks)
        if not spans:
            return []
        rows = sum(len(span.inputs) for span in spans)
        logits = self._runner.fast(pack_frame(spans, self._runner.fast_staging(rows)))
        for span in spans:
            self._readers[span.seq_id].read[span.start :] = span.inputs
        if not done:
            return []
        last = torch.tensor([row for _, row in done], device=logits.device)
        picks = self._sampler.sample(logits[last].float(), rows_of_asks([ask for ask, _ in done]))
        tokens: list[int] = picks.tokens.tolist()
        return [
            Proposal(ask.seq_id, (token,), drafter=self.name, more=True)
            for (ask, _), token in zip(done, tokens, strict=True)
        ]

    def forget(self, seq_id: int) -> None:
        """The sequence is gone, and so are its pages."""
        reader = self._readers.pop(seq_id, None)
        for page in reader.pages if reader is not None else ():
            self._pool.release(page)
            self._pool.free(page)

    def _plan(self, asks: list[Ask]) -> tuple[list[Span], list[tuple[Ask, int]]]:
        """What to read in this pass, and for whom it ends at the last token (with that token's row)."""
        spans: list[Span] = []
        done: list[tuple[Ask, int]] = []
        left = max(READ_ROWS, len(asks))
        row = 0
        lagging = [(ask, self._lag(ask)) for ask in asks]
        for ask, lag in sorted(lagging, key=lambda pair: pair[1]):
            reader = self._readers[ask.seq_id]
            rows = min(lag, left)
            start = len(ask.tokens) + len(ask.draft) - lag
            if rows == 0 or not self._fit(reader, start + rows):
                continue
            text = [*ask.tokens[start:], *ask.draft[max(0, start - len(ask.tokens)) :]][:rows]
            spans.append(
                Span(
                    ask.seq_id,
                    start,
                    tuple(text),
                    rows,
                    reader.pages,
                    ask.sampling,
                    ask.tokens,
                    ask.prompt_len,
                )
            )
            row += rows
            left -= rows
            if rows == lag:
                done.append((ask, row - 1))
        return spans, done

    def _lag(self, ask: Ask) -> int:
        """How many tokens of the sequence are still to be read; at least its last one."""
        reader = self._readers.setdefault(ask.seq_id, _Reader())
        read, tokens = reader.read, ask.tokens
        known = min(len(read), len(tokens) + len(ask.draft) - 1)
        same = min(reader.sure, known)
        while same < known:
            said = tokens[same] if same < len(tokens) else ask.draft[same - len(tokens)]
            if read[same] != said:
                break
            same += 1
        reader.sure = min(same, len(tokens))
        del read[same:]
        return len(tokens) + len(ask.draft) - same

    def _fit(self, reader: _Reader, length: int) -> bool:
        """Pages for so many tokens; without them the sequence does without guesses."""
        if length > self._max_len:
            return False
        while len(reader.pages) * PAGE < length:
            page = self._pool.take()
            if page is None:
                return False
            reader.pages.append(page)
        return True


__all__ = ["READ_ROWS", "DraftModel"]
