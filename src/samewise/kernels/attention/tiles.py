"""The work list of a pass on CUDA: which rows are read together, and which contexts several programs share.

A *tile* is a run of rows that stand at consecutive positions of one sequence (a prompt, a draft; a decode row
is a tile of one): its keys are read once for all of them. A tile is *whole*, walked from end to end by one
program per KV head, or *cut*: one program per split of its keys and KV head leaves a partial result, and the
last of them to arrive folds them in order. Bits depend on neither, so both are chosen for speed alone.

The list is int32, of a fixed size for a number of rows: a few counts, then one column behind the other. In a
pass of many rows a second list follows, of *wide* tiles for long runs of rows; they are always whole.

Host only: has never heard of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

HEAD = 3
"""Counters before the columns: pieces, tiles up to the last cut one, and the pieces of those."""

COLUMNS = (
    "tile_row",  # its first row
    "tile_count",  # its number of rows
    "tile_length",  # the first row's length
    "tile_pages",  # where its sequence's page numbers begin
    "tile_split",  # its first split that any layer looks at
    "tile_slot",  # the workspace slot of its first partial result; -1: whole
    "tile_piece",  # pieces of work before it (per KV head)
)
"""Each as long as the pass has rows. What a tile needs stands together, for the device to read at once."""


@dataclass(frozen=True)
class Plan:
    """How passes of one model are laid out."""

    tile_rows: int  # rows of a tile, at most
    split: int  # keys of a split
    window: int | None  # the widest of the layers'; None where one of them sees everything
    kv_heads: int  # the fewest of the layers'
    num_slots: int  # partial results (one row, one split, all heads) the workspace has room for
    slot_len: int  # float32 elements of one, in the widest layer
    num_arrivals: int  # counters, each of a tile and a KV head: how many pieces have left their result
    at_once: int  # programs the device runs at the same time; twice as many, half as wide, in a busy pass
    busy_from: int = 64  # rows of such a pass
    wide_rows: int = 0  # rows of a wide tile, at most; 0: there are none
    wide_from: int = 129  # rows of a pass from which on there may be wide tiles
    share: float = 1.5  # a tile is cut when it is this many times a program's fair share of the splits

    @property
    def workspace_len(self) -> int:
        """Float32 elements of scratch: partial results, then arrivals, which are zero between passes."""
        return self.num_slots * self.slot_len + self.num_arrivals

    def lists(self, num_rows: int) -> int:
        """How many lists a pass of so many rows has: one, or one more of wide tiles."""
        return 2 if self.wide_rows and num_rows >= self.wide_from else 1

    def work_len(self, num_rows: int) -> int:
        """Elements of the work lists for this many rows."""
        return self.lists(num_rows) * (HEAD + len(COLUMNS) * num_rows)

    def write(self, lengths: Ints, page_start: Ints, work: Ints) -> None:
        """Make the lists for rows of these lengths (0: padding) whose pages begin there, into `work`."""
        lists = self.lists(len(lengths))
        if lists == 1:
            self._write(*self._tiles(lengths, page_start, self.tile_rows), lengths, page_start, work)
            return
        row, count = self._tiles(lengths, page_start, self.wide_rows)
        narrow, wide = work.reshape(2, -1)
        long = (count > 2 * self.tile_rows) & (lengths[row] > 0)
        short = self._cut_short(row[~long], count[~long])
        self._write(*short, lengths, page_start, narrow)
        self._write(row[long], count[long], lengths, page_start, wide, whole=True)

    def _cut_short(self, row: Ints, count: Ints) -> tuple[Ints, Ints]:
        """Runs of rows as tiles of the usual size."""
        tiles = (count + (self.tile_rows - 1)) // self.tile_rows
        which = np.arange(len(row)).repeat(tiles)
        before = (np.arange(len(which)) - (tiles.cumsum() - tiles)[which]) * self.tile_rows
        return row[which] + before, np.minimum(count[which] - before, self.tile_rows)

    def _write(
        self, row: Ints, count: Ints, lengths: Ints, page_start: Ints, work: Ints, *, whole: bool = False
    ) -> None:
        columns = work[HEAD:].reshape(len(COLUMNS), len(lengths))
        tiles = len(row)
        if not tiles:
            work[:HEAD] = 0
            return
        first: Ints | int = 0
        if self.window is not None:
            first = np.maximum(lengths[row] - self.window, 0) // self.split
        splits = (lengths[row + (count - 1)] + (self.split - 1)) // self.split - first
        if splits.min() < splits.max():
            order = np.argsort(-splits, kind="stable")  # longest first: nobody waits for one begun last
            row, count, splits = row[order], count[order], splits[order]
            first = first if isinstance(first, int) else first[order]
        columns[0, :tiles] = row
        columns[1, :tiles] = count
        columns[2, :tiles] = lengths[row]
        columns[3, :tiles] = page_start[row]
        columns[4, :tiles] = first
        cut = None if whole else self.cut(splits, len(lengths))
        if cut is None:
            columns[5, :tiles] = -1
            columns[6, :tiles] = np.arange(tiles)
            work[:HEAD] = tiles, 0, 0
        else:
            self._pieces(cut & (splits > 0), tiles, columns, splits, work)

    def cut(self, splits: Ints, num_rows: int) -> Bools | None:
        """Which tiles of so many splits to cut, longest first, where there is room; None: none.

        Speed alone depends on it.
        """
        at_once = self.at_once * (2 if num_rows >= self.busy_from else 1)
        fair = int(splits.sum()) * self.kv_heads / at_once
        bar = max(1.0, self.share * fair)
        return splits > bar if splits[0] > bar else None

    def _pieces(self, cut: Bools, tiles: int, columns: Ints, splits: Ints, work: Ints) -> None:
        """The columns of a pass where tiles are cut."""
        slots = splits * columns[1, :tiles] * cut
        before = slots.cumsum()
        cut = cut & (before <= self.num_slots)
        pieces = np.where(cut, splits, 1)
        ends = pieces.cumsum()
        columns[5, :tiles] = np.where(cut, before - slots, -1)
        columns[6, :tiles] = ends - pieces
        which = cut.nonzero()[0]
        last = which[-1] if len(which) else -1
        work[:HEAD] = ends[-1], last + 1, ends[last] if last >= 0 else 0

    def _tiles(self, lengths: Ints, page_start: Ints, most: int) -> tuple[Ints, Ints]:
        """First row and number of rows of each tile, in order. Padding makes tiles of its own."""
        at = np.arange(len(lengths), dtype=np.int32)
        was, now = lengths[:-1], lengths[1:]
        follows = (now - was == 1) & (was > 0) & (page_start[1:] == page_start[:-1]) | (now + was == 0)
        if not np.count_nonzero(follows):
            return at, at * 0 + 1
        run = at.copy()
        run[1:] *= ~follows
        row = ((at - np.maximum.accumulate(run)) % most == 0).nonzero()[0]
        count = np.empty_like(row)
        np.subtract(row[1:], row[:-1], out=count[:-1])
        count[-1] = len(lengths) - row[-1]
        return row, count


__all__ = ["COLUMNS", "HEAD", "Plan"]
