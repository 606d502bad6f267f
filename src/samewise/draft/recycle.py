"""Recycled candidates: for each token, the top 8 of the last row that followed it.

Every replayed row has logits; its most probable tokens are remembered under the row's input token and tell
what may follow that token next time. Memory of a table is fixed when it is made. Host only.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from samewise.types import NUM_CANDIDATES

WIDTH = NUM_CANDIDATES
"""Candidates kept per token. A candidate's class is its rank: its place among them."""

Ids = npt.NDArray[np.int32]
"""[T, 8]: candidates of rows, most probable first; -1 pads a short row."""


class RecycleTable:
    """Candidates by token id, as an array of V rows.

    Takes `nbytes` = 32 bytes per token of the vocabulary and never more. One owner.
    """

    def __init__(self, vocab: int) -> None:
        self._ids = np.full((vocab, WIDTH), -1, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self._ids.nbytes

    def remember(self, tokens: list[int], ids: Ids) -> None:
        """Replace the candidates of `tokens` [T] by `ids` [T, 8]. Of equal tokens the last one's row stays.

        Tokens outside of the vocabulary are left out.
        """
        vocab = len(self._ids)
        last = {token: i for i, token in enumerate(tokens) if 0 <= token < vocab}
        if last:
            self._ids[list(last)] = ids[list(last.values())]

    def candidates(self, token: int) -> list[int]:
        """The row that last followed `token`; empty if none did."""
        row: list[int] = self._ids[token].tolist() if 0 <= token < len(self._ids) else [-1]
        return row if row[0] >= 0 else []


class RecycleTables:
    """A table for each of the latest salts. One owner."""

    def __init__(self, vocab: int, max_tables: int) -> None:
        self._vocab, self._max_tables = vocab, max_tables
        self._tables: OrderedDict[bytes, RecycleTable] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.nbytes for table in self._tables.values())

    def open(self, salt: bytes) -> None:
        """Make the salt's table, or keep it: it is the latest now."""
        if salt not in self._tables:
            self._tables[salt] = RecycleTable(self._vocab)
        self._tables.move_to_end(salt)
        while len(self._tables) > self._max_tables:
            self._tables.popitem(last=False)

    def get(self, salt: bytes | None) -> RecycleTable | None:
        """The salt's table; None if it was never made or was dropped."""
        return None if salt is None else self._tables.get(salt)

    def clear(self) -> None:
        """Drop all tables: after a replacement of the weights their candidates are another model's."""
        self._tables.clear()


__all__ = ["WIDTH", "Ids", "RecycleTable", "RecycleTables"]
