"""The proposer of an audit: drafts the recorded tokens of receipts, to be verified like any other draft."""

from __future__ import annotations

from samewise.draft.base import Proposer
from samewise.draft.build import ProposerParts
from samewise.types import Ask, Proposal


class RecordedTokens(Proposer):
    """Drafts the answers that receipts record. Owns the recorded answer of each live sequence."""

    name = "recorded"

    def __init__(self, frame_rows: int) -> None:
        self._frame_rows = frame_rows
        self._answers: dict[int, tuple[int, ...]] = {}  # by sequence id

    def record(self, seq_id: int, answer: tuple[int, ...]) -> None:
        """Set the recorded answer of a sequence."""
        self._answers[seq_id] = answer

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The next recorded tokens: for each sequence an equal share of a frame, at least a quarter of it."""
        rows = max(self._frame_rows // 4, self._frame_rows // max(1, len(asks)))
        return [Proposal(ask.seq_id, self._next(ask, rows - 1), drafter=self.name) for ask in asks]

    def forget(self, seq_id: int) -> None:
        """Drop the answer of a sequence that has finished or was aborted."""
        self._answers.pop(seq_id, None)

    def _next(self, ask: Ask, max_tokens: int) -> tuple[int, ...]:
        answer = self._answers.get(ask.seq_id, ())
        start = len(ask.tokens) - ask.prompt_len + len(ask.draft)
        # The last token needs no draft: verifying the one before it computes it.
        return answer[start : min(start + max_tokens, len(answer) - 1)]


def make_recorded_tokens(parts: ProposerParts) -> RecordedTokens:
    """The `make_proposer` of an engine that audits."""
    return RecordedTokens(parts.runner.widest)


__all__ = ["RecordedTokens", "make_recorded_tokens"]
