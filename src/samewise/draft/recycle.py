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


def max_tables(vocab: int, max_bytes: int) -> int:
    """Tables that fit into this memory; at least one."""
    return max(1, max_bytes // (vocab * WIDTH * np.dtype(np.int32).itemsize))


class RecycleTable:
    """Candidates by token id, as an array of V rows. `used`: when it was last used, as RecycleTables counts.

    Takes `nbytes` = 32 bytes per token of the vocabulary and never more. One owner.
    """

    def __init__(self, vocab: int) -> None:
        self._ids = np.full((vocab, WIDTH), -1, dtype=np.int32)
        self.used = 0

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
    """A table for each of the salts that were used last. One owner.

    Time is a count of uses. A running sequence's table is used with each of its frames, so that newer salts
    take the tables of those that have ended.
    """

    def __init__(self, vocab: int, max_tables: int) -> None:
        self._vocab, self._max_tables = vocab, max_tables
        self._tables: OrderedDict[bytes, RecycleTable] = OrderedDict()  # the one used longest ago first
        self._now = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.nbytes for table in self._tables.values())

    def open(self, salt: bytes) -> int:
        """Make the salt's table, or keep it: it is the latest now. Returns the time."""
        self._now += 1
        if salt not in self._tables:
            self._tables[salt] = RecycleTable(self._vocab)
        self._tables[salt].used = self._now
        self._tables.move_to_end(salt)
        while len(self._tables) > self._max_tables:
            self._tables.popitem(last=False)
        return self._now

    def use(self, salt: bytes, last: int) -> int:
        """Keep the salt's table for a sequence that last had rows for it at `last`. Returns the time.

        One that was dropped is made again where a table is free or was not used since: with more sequences
        than tables some go without, and tables do not change hands with every frame.
        """
        if salt in self._tables or len(self._tables) < self._max_tables:
            return self.open(salt)
        if next(iter(self._tables.values())).used < last:
            return self.open(salt)
        self._now += 1
        return self._now

    def get(self, salt: bytes | None) -> RecycleTable | None:
        """The salt's table; None if it was never made or was dropped."""
        return None if salt is None else self._tables.get(salt)

    def clear(self) -> None:
        """Drop all tables: after a replacement of the weights their candidates are another model's."""
        self._tables.clear()


__all__ = ["WIDTH", "Ids", "RecycleTable", "RecycleTables", "max_tables"]
