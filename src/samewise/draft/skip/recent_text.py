"""The text that layer sets are scored on: what was committed lately.

It comes from live sequences, at their positions and over their canonical KV, and from the ends of recent
answers, read again. Rows are placed in pages of the search, so canonical KV is only read. Host only.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from samewise.draft.tuning import DEFAULTS, SearchTuning
from samewise.kernels.attention.base import PAGE
from samewise.types import Ask, Sampling, Span


class TextPiece(NamedTuple):
    """A run of committed text, and the tokens that its rows from `first_row` on have to predict."""

    span: Span  # its rows are in the search's pages
    first_row: int
    targets: tuple[int, ...]
    # Of an answer that has ended: it lacks its context, so targets must be predicted anew.
    ended: bool = False


class RecentText:
    """Live sequences and recent answers as text to score on. `pages`: where the rows of a pass are placed."""

    def __init__(self, pages: range, tuning: SearchTuning = DEFAULTS.search) -> None:
        self._pages, self._tuning = pages, tuning
        self.window = min(tuning.window, len(pages) * PAGE)
        """Rows of all pieces together, at most."""
        self._piece_len = tuning.piece_pages * PAGE
        self._turn = 0
        self._answers: deque[tuple[int, ...]] = deque(maxlen=tuning.recent_answers)

    @property
    def num_answers(self) -> int:
        """Ended answers that are kept."""
        return len(self._answers)

    def add_answer(self, tokens: list[int], prompt_len: int) -> None:
        """Keep the end of an answer that has ended."""
        if len(tokens) - prompt_len >= self._piece_len:
            self._answers.append(tuple(tokens[-self._piece_len :]))

    def forget_answers(self) -> None:
        """Drop the ended answers: they were about another topic."""
        self._answers.clear()

    def gather(self, asks: list[Ask]) -> list[TextPiece]:
        """Pieces of the text committed last, as many rows as the window has; [] if there is too little.

        Live sequences come first, another one each time, and share the window evenly.
        """
        pieces: list[TextPiece] = []
        rows_left, free_pages = self.window, list(self._pages)
        self._turn += 1
        order = asks[self._turn % len(asks) :] + asks[: self._turn % len(asks)]
        rows_each = min(self._piece_len, max(PAGE, self.window // len(asks)))
        for ask in order:
            if ask.guide is not None:  # the grammar's masks at earlier positions are not known any more
                continue
            piece = _live_piece(ask, min(rows_left, rows_each + PAGE - 1), free_pages)
            if piece is not None:
                pieces.append(piece)
                rows_left -= len(piece.span.inputs)
        num = min(rows_left, len(free_pages) * PAGE) // self._piece_len
        pieces += [_ended_piece(tokens, free_pages) for tokens in list(reversed(self._answers))[:num]]
        enough = sum(len(piece.targets) for piece in pieces) >= self._tuning.min_targets
        return pieces if enough else []


def _live_piece(ask: Ask, max_rows: int, free_pages: list[int]) -> TextPiece | None:
    """The end of a live sequence from a page border on, over its own pages before that; None if too short."""
    end = len(ask.tokens) - 1  # the last token is only a target
    start = -(-max(end - max_rows, 0) // PAGE) * PAGE
    num_rows = end - start
    first_row = max(0, ask.prompt_len - 1 - start)  # tokens of the prompt are no targets
    num_pages = -(-num_rows // PAGE)
    if num_rows - first_row < PAGE // 2 or num_pages > len(free_pages):
        return None
    own_pages = array("i", [free_pages.pop() for _ in range(num_pages)])
    inputs, targets = tuple(ask.tokens[start:end]), tuple(ask.tokens[start + first_row + 1 : end + 1])
    pages = ask.pages[: start // PAGE] + own_pages
    span = Span(ask.seq_id, start, inputs, num_rows, pages, ask.sampling, ask.tokens, ask.prompt_len)
    return TextPiece(span, first_row, targets)


def _ended_piece(tokens: tuple[int, ...], free_pages: list[int]) -> TextPiece:
    """The end of a recent answer, read as if it began there. Its first half only gives context."""
    pages = array("i", [free_pages.pop() for _ in range(-(-len(tokens) // PAGE))])
    span = Span(-1, 0, tokens, len(tokens), pages, Sampling(), list(tokens), 1)
    first_row = len(tokens) // 2
    return TextPiece(span, first_row, tokens[first_row:], ended=True)


__all__ = ["RecentText", "TextPiece"]
