"""Recycled candidates: for each token, the top 8 of the last row that followed it.

Every replayed row has logits; its most probable tokens are remembered under the row's input token and tell
what may follow that token next time. Memory is fixed when the table is made. Host only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WIDTH = 8
"""Candidates kept per token."""
NUM_LEVELS = 8
"""Levels of a probability: one for each bit, the first above 1/2, the last below 1/128."""
NUM_ROW_CLASSES = WIDTH + 2 * NUM_LEVELS
"""Classes of a row's candidates, see `row_classes`."""

Candidates = tuple[list[int], list[int]]
"""(ids, classes) of a row, most probable first."""


def row_classes(probs: npt.ArrayLike | None, num_rows: int = 1) -> npt.NDArray[np.uint8]:
    """[T, 8]: the class of each candidate of rows with these probabilities, most probable first.

    By level of the probability, the first candidate's apart; by rank where the probability is unknown: None,
    or zero, negative or not a number.
    """
    ranks = np.arange(WIDTH, dtype=np.uint8)
    if probs is None:
        return np.broadcast_to(ranks, (num_rows, WIDTH))
    values = np.asarray(probs, dtype=np.float64).reshape(-1, WIDTH)
    known = values > 0.0
    bits = np.floor(-np.log2(values, out=np.zeros_like(values), where=known))
    levels = np.clip(bits, 0, NUM_LEVELS - 1) + NUM_LEVELS * (ranks > 0)
    return np.where(known, WIDTH + levels, ranks).astype(np.uint8)


class RecycleTable:
    """Candidates by token id, as arrays of V rows: `WIDTH` token ids and the class of each.

    Takes `nbytes` = 40 bytes per token of the vocabulary (6 MB for 152 thousand tokens) from the start and
    never more. One owner; not for use from several threads.
    """

    def __init__(self, vocab: int) -> None:
        self._ids = np.full((vocab, WIDTH), -1, dtype=np.int32)
        self._classes = np.zeros((vocab, WIDTH), dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._ids.nbytes + self._classes.nbytes

    @property
    def num_known(self) -> int:
        """Tokens that have candidates."""
        return int(np.count_nonzero(self._ids[:, 0] >= 0))

    def remember(
        self, tokens: Sequence[int], top_ids: npt.ArrayLike, top_probs: npt.ArrayLike | None = None
    ) -> None:
        """Replace the candidates of `tokens` [T] by rows [T, 8], most probable first; -1 pads a short row.

        `top_probs` [T, 8]; None where only the order is known. Of equal tokens the last one's row stays.
        """
        if not len(tokens):
            return
        last = {token: i for i, token in enumerate(tokens)}
        keys, rows = list(last), list(last.values())
        self._ids[keys] = np.asarray(top_ids, dtype=np.int32)[rows]
        self._classes[keys] = row_classes(top_probs, len(tokens))[rows]

    def candidates(self, token: int) -> Candidates:
        """The row that last followed `token`; its ids are -1 if none did."""
        return self._ids[token].tolist(), self._classes[token].tolist()

    def clear(self) -> None:
        """Forget all candidates: after a replacement of the weights they are another model's."""
        self._ids.fill(-1)
        self._classes.fill(0)


__all__ = ["NUM_LEVELS", "NUM_ROW_CLASSES", "WIDTH", "Candidates", "RecycleTable", "row_classes"]
