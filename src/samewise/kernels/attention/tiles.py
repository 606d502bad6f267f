"""The work list of a pass on CUDA: which rows are read together, and which contexts several programs share.

A *tile* is a run of rows of one sequence: at consecutive positions (a prompt chunk, a draft; a decode row is
a tile of one), or any nodes of a draft tree. The keys that all its rows share are read once for all of them.
The last keys are read once per *chain*: rows of a tile, each one key longer than the one before, that find
every key in the same slot. A tile without tails is one chain. A tile is *uncut*, walked from end to end by
one program per KV head, or *cut*: one program per split of its keys and KV head leaves a partial result, and
the last program to finish folds the results in order. Bits depend on neither, so both are chosen for speed
alone.

The work list is int32, of a fixed size for a number of rows: HEADER_LEN counts, then one column after the
other. In a pass of many rows a second list follows, of *wide* tiles for long runs of rows without tails;
these are uncut.

`TilePlan.write` is the reference, and used where no C++ compiler is installed; tiles.cpp writes the same
numbers. Host only: numpy, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

HEADER_LEN = 3
"""Counts before the columns: pieces, tiles up to the last cut one, and pieces of those tiles. A piece is what
one program per KV head walks: one split of a cut tile, or an uncut tile."""

COLUMNS = (
    "tile_row",  # its first row
    "tile_count",  # its number of rows
    "tile_chain_count",  # rows of its first chain
    "tile_shortest",  # the smallest length of its rows
    "tile_shared",  # all its rows find the keys before this one through the pages
    "tile_chain_length",  # length of its first row
    "tile_longest",  # the largest length of its rows
    "tile_tail_start",  # the first key that its first chain finds through a tail
    "tile_pages",  # index of its sequence's first page number
    "tile_split",  # its first split that any layer sees
    "tile_slot",  # the workspace slot of its first partial result; -1: uncut
    "tile_piece",  # pieces before it
    "tile_chains",  # its number of chains
    "tile_tail",  # index of the slot of key `tile_tail_start`; any number in a tile without tails
    "chain_count",  # as for the first chain; of the others, at the index of the chain's first row
    "chain_tail_start",
    "chain_tail",
)
"""Columns of the work list, each as long as the pass has rows. All values of a tile stand at its index:
the device reads them at once, none through another. Those of its further chains are read after its shared
keys."""


class _PassRows(NamedTuple):
    """The rows of a pass, as `Rows` has them."""

    lengths: Ints
    page_start: Ints
    tail_start: Ints
    tail: Ints
    continues: Bools | None  # [R - 1] whether the next row is in the row's chain; None: there are no tails


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

    def write(self, lengths: Ints, page_start: Ints, tail_start: Ints, tail: Ints, work_list: Ints) -> None:
        """Write the lists for rows of these lengths (0: padding), page starts and tails to `work_list`."""
        has_tail = tail_start < lengths
        rows = _PassRows(lengths, page_start, tail_start, tail, None)
        if has_tail.any():
            rows = rows._replace(continues=_continues_chain(rows))
        if self.num_lists(len(lengths)) == 1:
            self._write_list(*self._make_tiles(rows, self.tile_rows), rows, work_list)
            return
        row, count = self._make_tiles(rows, self.wide_rows)
        narrow_list, wide_list = work_list.reshape(2, -1)
        is_wide = (count > 2 * self.tile_rows) & (lengths[row] > 0)
        if rows.continues is not None:
            is_wide &= ~np.logical_or.reduceat(has_tail, row)
        self._write_list(*self._subdivide(row[~is_wide], count[~is_wide]), rows, narrow_list)
        self._write_list(row[is_wide], count[is_wide], rows, wide_list, uncut=True)

    def _subdivide(self, row: Ints, count: Ints) -> tuple[Ints, Ints]:
        """Runs of rows as tiles of at most `tile_rows`."""
        num_tiles = (count + (self.tile_rows - 1)) // self.tile_rows
        run = np.arange(len(row)).repeat(num_tiles)
        offset = (np.arange(len(run)) - (num_tiles.cumsum() - num_tiles)[run]) * self.tile_rows
        return row[run] + offset, np.minimum(count[run] - offset, self.tile_rows)

    def _write_list(
        self, row: Ints, count: Ints, rows: _PassRows, work_list: Ints, *, uncut: bool = False
    ) -> None:
        columns = work_list[HEADER_LEN:].reshape(len(COLUMNS), len(rows.lengths))
        num_tiles = len(row)
        if not num_tiles:
            work_list[:HEADER_LEN] = 0
            return
        shortest, longest, shared = _extremes(row, count, rows)
        first_split: Ints | int = 0
        if self.window is not None:
            first_split = np.maximum(shortest - self.window, 0) // self.split
        splits = (longest + (self.split - 1)) // self.split - first_split
        if splits.min() < splits.max():
            order = np.argsort(-splits, kind="stable")  # longest first: the last programs to start end soon
            row, count, splits = row[order], count[order], splits[order]
            shortest, longest, shared = shortest[order], longest[order], shared[order]
            first_split = first_split if isinstance(first_split, int) else first_split[order]
        columns[0, :num_tiles] = row
        columns[1:3, :num_tiles] = count
        columns[3:6, :num_tiles] = shortest
        columns[6:8, :num_tiles] = longest
        columns[8, :num_tiles] = rows.page_start[row]
        columns[9, :num_tiles] = first_split
        columns[12, :num_tiles] = 1
        if rows.continues is not None:
            columns[4, :num_tiles] = shared
            _write_chains(row, count, rows, rows.continues, columns)
        cut = None if uncut else self.cut(splits, len(rows.lengths))
        if cut is None:
            columns[10, :num_tiles] = -1
            columns[11, :num_tiles] = np.arange(num_tiles)
            work_list[:HEADER_LEN] = num_tiles, 0, 0
        else:
            self._write_pieces(cut & (splits > 0), num_tiles, columns, splits, work_list)

    def num_concurrent(self, num_rows: int) -> int:
        """Programs of a pass of `num_rows` rows that the device runs at the same time."""
        return self.concurrent_programs * (2 if num_rows >= self.busy_rows else 1)

    def cut(self, splits: Ints, num_rows: int) -> Bools | None:
        """Which tiles to cut, given their numbers of splits, longest first; None: none of them."""
        mean_splits = int(splits.sum()) * self.kv_heads / self.num_concurrent(num_rows)
        threshold = max(1.0, self.cut_threshold * mean_splits)
        return splits > threshold if splits[0] > threshold else None

    def _write_pieces(self, cut: Bools, num_tiles: int, columns: Ints, splits: Ints, work_list: Ints) -> None:
        """Write counts, slots and pieces of a pass with cut tiles. Tiles beyond `num_slots` stay uncut."""
        slots = splits * columns[1, :num_tiles] * cut
        slot_ends = slots.cumsum()
        cut = cut & (slot_ends <= self.num_slots)
        pieces = np.where(cut, splits, 1)
        piece_ends = pieces.cumsum()
        columns[10, :num_tiles] = np.where(cut, slot_ends - slots, -1)
        columns[11, :num_tiles] = piece_ends - pieces
        cut_tiles = cut.nonzero()[0]
        last = cut_tiles[-1] if len(cut_tiles) else -1
        work_list[:HEADER_LEN] = piece_ends[-1], last + 1, piece_ends[last] if last >= 0 else 0

    def _make_tiles(self, rows: _PassRows, max_rows: int) -> tuple[Ints, Ints]:
        """First row and number of rows of each tile, in order. Padding has tiles of its own."""
        lengths, page_start = rows.lengths, rows.page_start
        index = np.arange(len(lengths), dtype=np.int32)
        previous, current = lengths[:-1], lengths[1:]
        same_pages = page_start[1:] == page_start[:-1]
        if rows.continues is None:
            joins = (current - previous == 1) & (previous > 0) & same_pages
        else:
            joins = rows.continues | (rows.tail_start[1:] < current) & (previous > 0) & same_pages
        joins |= current + previous == 0
        if not np.count_nonzero(joins):
            return index, index * 0 + 1
        run_start = index.copy()
        run_start[1:] *= ~joins
        row = ((index - np.maximum.accumulate(run_start)) % max_rows == 0).nonzero()[0]
        count = np.empty_like(row)
        np.subtract(row[1:], row[:-1], out=count[:-1])
        count[-1] = len(lengths) - row[-1]
        return row, count


def _continues_chain(rows: _PassRows) -> Bools:
    """[R - 1] whether the next row is one key longer and finds all keys of the row in the same slots."""
    lengths, tail_start = rows.lengths, rows.tail_start
    previous = lengths[:-1]
    one_longer = (
        (lengths[1:] - previous == 1) & (previous > 0) & (rows.page_start[1:] == rows.page_start[:-1])
    )
    same_tail = (tail_start[1:] == tail_start[:-1]) & (rows.tail[1:] == rows.tail[:-1])
    same_slots = np.where(tail_start[:-1] < previous, same_tail, tail_start[1:] >= previous)
    return np.asarray(one_longer & same_slots)


def _extremes(row: Ints, count: Ints, rows: _PassRows) -> tuple[Ints, Ints, Ints]:
    """Of each tile's rows: the smallest and the largest length, and the smallest start of a tail."""
    lengths = rows.lengths
    if rows.continues is None:
        shortest = lengths[row]
        return shortest, lengths[row + (count - 1)], shortest
    edges = np.empty(2 * len(row), np.intp)  # of tiles in order, with gaps between them where some are wide
    edges[::2] = row
    np.add(row, count, out=edges[1::2])
    if edges[-1] == len(lengths):
        edges = edges[:-1]
    shortest, shared = (np.minimum.reduceat(x, edges)[::2] for x in (lengths, rows.tail_start))
    return shortest, np.maximum.reduceat(lengths, edges)[::2], shared


def _write_chains(row: Ints, count: Ints, rows: _PassRows, continues: Bools, columns: Ints) -> None:
    """Write the chains of the tiles."""
    num_rows, num_tiles = len(rows.lengths), len(row)
    begins = np.ones(num_rows + 1, np.bool_)
    np.logical_not(continues, out=begins[1:-1])
    begins[row] = True
    begins[row + count] = True
    borders = begins.nonzero()[0]
    start, last = borders[:-1], borders[1:] - 1
    columns[14, start] = last + 1 - start
    columns[15, start] = rows.tail_start[last]
    columns[16, start] = rows.tail[last]
    chains_before = begins.cumsum()
    columns[2, :num_tiles] = columns[14, row]
    columns[5, :num_tiles] = rows.lengths[row]
    columns[7, :num_tiles] = columns[15, row]
    columns[12, :num_tiles] += chains_before[row + (count - 1)] - chains_before[row]
    columns[13, :num_tiles] = columns[16, row]


__all__ = ["COLUMNS", "HEADER_LEN", "TilePlan"]
