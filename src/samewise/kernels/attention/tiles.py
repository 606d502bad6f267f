"""The work list of a pass on CUDA: which rows are read together, and which contexts several programs share.

A *tile* is a run of rows at consecutive positions of one sequence (a prompt chunk, a draft; a decode row is a
tile of one): its keys are read once for all of them. A tile is *uncut*, walked from end to end by one program
per KV head, or *cut*: one program per split of its keys and KV head leaves a partial result, and the last
program to finish folds the results in order. Bits depend on neither, so both are chosen for speed alone.

The work list is int32, of a fixed size for a number of rows: HEADER_LEN counts, then one column after the
other. In a pass of many rows a second list follows, of *wide* tiles for long runs of rows; these are uncut.

Host only: numpy, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

HEADER_LEN = 3
"""Counts before the columns: pieces, tiles up to the last cut one, and pieces of those tiles. A piece is what
one program per KV head walks: one split of a cut tile, or an uncut tile."""

COLUMNS = (
    "tile_row",  # its first row
    "tile_count",  # its number of rows
    "tile_length",  # the first row's length
    "tile_pages",  # index of its sequence's first page number
    "tile_split",  # its first split that any layer sees
    "tile_slot",  # the workspace slot of its first partial result; -1: uncut
    "tile_piece",  # pieces before it
)
"""Columns of the work list, each as long as the pass has rows. All values of a tile stand at its index: the
device reads them at once, none through another."""


@dataclass(frozen=True)
class TilePlan:
    """Lays out passes of one model for the Triton attention kernel.

    Bits depend on `split` alone; the other values change speed and memory.
    """

    tile_rows: int  # rows of a tile, at most
    split: int  # keys of a split
    window: int | None  # the widest of the layers'; None if a layer has none
    kv_heads: int  # the fewest of the layers'
    num_slots: int  # partial results (one row, one split, all heads) the workspace has room for
    slot_len: int  # float32 elements of one, in the widest layer
    num_arrivals: int  # counters, each of a tile and a KV head: how many of its pieces are done
    concurrent_programs: int  # programs the device runs at the same time; twice as many in a busy pass
    busy_rows: int = 64  # rows from which on a pass is busy: its programs have half as many warps
    wide_rows: int = 0  # rows of a wide tile, at most; 0: no wide tiles
    wide_from: int = 129  # rows of a pass from which on it may have wide tiles
    cut_threshold: float = 1.5  # a tile with more than this many times a program's mean splits is cut

    @property
    def workspace_len(self) -> int:
        """Float32 elements of scratch: partial results, then arrivals, which are zero between passes."""
        return self.num_slots * self.slot_len + self.num_arrivals

    def num_lists(self, num_rows: int) -> int:
        """Lists of a pass of `num_rows` rows: one, or a second one of wide tiles."""
        return 2 if self.wide_rows and num_rows >= self.wide_from else 1

    def work_list_len(self, num_rows: int) -> int:
        """Elements of the work lists of a pass of `num_rows` rows."""
        return self.num_lists(num_rows) * (HEADER_LEN + len(COLUMNS) * num_rows)

    def write(self, lengths: Ints, page_start: Ints, work_list: Ints) -> None:
        """Write the lists for rows of these lengths (0: padding) and page starts to `work_list`."""
        if self.num_lists(len(lengths)) == 1:
            tiles = self._make_tiles(lengths, page_start, self.tile_rows)
            self._write_list(*tiles, lengths, page_start, work_list)
            return
        row, count = self._make_tiles(lengths, page_start, self.wide_rows)
        narrow_list, wide_list = work_list.reshape(2, -1)
        is_wide = (count > 2 * self.tile_rows) & (lengths[row] > 0)
        narrow_tiles = self._subdivide(row[~is_wide], count[~is_wide])
        self._write_list(*narrow_tiles, lengths, page_start, narrow_list)
        self._write_list(row[is_wide], count[is_wide], lengths, page_start, wide_list, uncut=True)

    def _subdivide(self, row: Ints, count: Ints) -> tuple[Ints, Ints]:
        """Runs of rows as tiles of at most `tile_rows`."""
        num_tiles = (count + (self.tile_rows - 1)) // self.tile_rows
        run = np.arange(len(row)).repeat(num_tiles)
        offset = (np.arange(len(run)) - (num_tiles.cumsum() - num_tiles)[run]) * self.tile_rows
        return row[run] + offset, np.minimum(count[run] - offset, self.tile_rows)

    def _write_list(
        self, row: Ints, count: Ints, lengths: Ints, page_start: Ints, work_list: Ints, *, uncut: bool = False
    ) -> None:
        columns = work_list[HEADER_LEN:].reshape(len(COLUMNS), len(lengths))
        num_tiles = len(row)
        if not num_tiles:
            work_list[:HEADER_LEN] = 0
            return
        first_split: Ints | int = 0
        if self.window is not None:
            first_split = np.maximum(lengths[row] - self.window, 0) // self.split
        splits = (lengths[row + (count - 1)] + (self.split - 1)) // self.split - first_split
        if splits.min() < splits.max():
            order = np.argsort(-splits, kind="stable")  # longest first: the last programs to start end soon
            row, count, splits = row[order], count[order], splits[order]
            first_split = first_split if isinstance(first_split, int) else first_split[order]
        columns[0, :num_tiles] = row
        columns[1, :num_tiles] = count
        columns[2, :num_tiles] = lengths[row]
        columns[3, :num_tiles] = page_start[row]
        columns[4, :num_tiles] = first_split
        cut = None if uncut else self.cut(splits, len(lengths))
        if cut is None:
            columns[5, :num_tiles] = -1
            columns[6, :num_tiles] = np.arange(num_tiles)
            work_list[:HEADER_LEN] = num_tiles, 0, 0
        else:
            self._write_pieces(cut & (splits > 0), num_tiles, columns, splits, work_list)

    def cut(self, splits: Ints, num_rows: int) -> Bools | None:
        """Which tiles to cut, given their numbers of splits, longest first; None: none of them."""
        programs = self.concurrent_programs * (2 if num_rows >= self.busy_rows else 1)
        mean_splits = int(splits.sum()) * self.kv_heads / programs
        threshold = max(1.0, self.cut_threshold * mean_splits)
        return splits > threshold if splits[0] > threshold else None

    def _write_pieces(self, cut: Bools, num_tiles: int, columns: Ints, splits: Ints, work_list: Ints) -> None:
        """Write counts, slots and pieces of a pass with cut tiles. Tiles beyond `num_slots` stay uncut."""
        slots = splits * columns[1, :num_tiles] * cut
        slot_ends = slots.cumsum()
        cut = cut & (slot_ends <= self.num_slots)
        pieces = np.where(cut, splits, 1)
        piece_ends = pieces.cumsum()
        columns[5, :num_tiles] = np.where(cut, slot_ends - slots, -1)
        columns[6, :num_tiles] = piece_ends - pieces
        cut_tiles = cut.nonzero()[0]
        last = cut_tiles[-1] if len(cut_tiles) else -1
        work_list[:HEADER_LEN] = piece_ends[-1], last + 1, piece_ends[last] if last >= 0 else 0

    def _make_tiles(self, lengths: Ints, page_start: Ints, max_rows: int) -> tuple[Ints, Ints]:
        """First row and number of rows of each tile, in order. Padding has tiles of its own."""
        index = np.arange(len(lengths), dtype=np.int32)
        previous, current = lengths[:-1], lengths[1:]
        same_pages = page_start[1:] == page_start[:-1]
        continues = (current - previous == 1) & (previous > 0) & same_pages | (current + previous == 0)
        if not np.count_nonzero(continues):
            return index, index * 0 + 1
        run_start = index.copy()
        run_start[1:] *= ~continues
        row = ((index - np.maximum.accumulate(run_start)) % max_rows == 0).nonzero()[0]
        count = np.empty_like(row)
        np.subtract(row[1:], row[:-1], out=count[:-1])
        count[-1] = len(lengths) - row[-1]
        return row, count


__all__ = ["COLUMNS", "HEADER_LEN", "TilePlan"]
