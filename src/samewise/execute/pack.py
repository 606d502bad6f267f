"""Pack spans into a frame, or asks into a fast pass: fill a staging buffer and send it.

A pass always has the buffer's `num_rows` rows. Rows left over are padding: they see no keys and write to the
trash page. Bits do not depend on a row's index (the probe checks it), so spans are placed in the given order.

Buffers are filled by `native.packer` in C++, or here in Python where no compiler is installed: the reference,
which gives the same numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, repeat

import numpy as np

from samewise.errors import InvariantBroken
from samewise.execute.staging import PassInputs, StagingBuffer
from samewise.follow_up import FollowUp
from samewise.kernels.attention.base import PAGE
from samewise.kv.pages import TRASH
from samewise.types import ROOT, Ask, Span


def pack_frame(
    spans: list[Span],
    staging: StagingBuffer,
    keep: list[int] | None = None,
    moves: Sequence[tuple[int, int]] = (),
) -> PassInputs:
    """Place spans in consecutive rows. With `keep`, logits are computed for these rows only.

    `moves`: slots (from, to) whose K and V the pass moves before anything else, at most `staging.max_moves`.
    """
    packer = staging.packer
    if packer is None:
        return _pack_frame(spans, staging, keep, moves)
    num_keep = -1 if keep is None else len(keep)
    tables = [span.pages for span in spans]
    end = packer.pack(
        staging.address, len(spans), numbers_of(spans, moves, keep or ()), tables, num_keep, len(moves)
    )
    return staging.copy(end, with_keep=keep is not None)


def pack_follow_up(follow_up: FollowUp, staging: StagingBuffer, keep: list[int] | None = None) -> PassInputs:
    """The same for a frame that is given as numbers, which only the C++ packer takes."""
    if staging.packer is None:
        raise InvariantBroken("a frame is given as numbers, and there is no packer in C++")
    if keep is not None:
        follow_up = follow_up.with_keep(keep)
    end = staging.packer.pack_follow_up(staging.address, follow_up, -1 if keep is None else len(keep))
    return staging.copy(end, with_keep=keep is not None)


def numbers_of(
    spans: list[Span], moves: Sequence[tuple[int, int]] = (), keep: Sequence[int] = ()
) -> list[int]:
    """A frame as the C++ packer takes it: see `Packer.pack`."""
    numbers: list[int] = []
    tokens: list[int] = []
    parents: list[int] = []
    for span in spans:
        inputs, nodes = span.inputs, span.parents
        source = -1 if span.source is None else span.source
        numbers += (len(inputs), span.given, span.start, source, len(span.pages), len(nodes))
        tokens += inputs
        parents += nodes
    numbers += tokens
    numbers += parents
    numbers += keep
    numbers += chain.from_iterable(moves)
    return numbers


def pack_fast(
    asks: list[Ask], staging: StagingBuffer, sources: list[int] | None = None, ahead: int = 0
) -> PassInputs:
    """One row per ask: its last known or drafted token.

    With `sources` the token is the one sampled by that row of the previous pass, still on the device: it
    stands `ahead` positions after the last token the host knows.
    """
    packer = staging.packer
    if packer is None:
        return _pack_fast(asks, staging, sources, ahead)
    numbers: list[int] = []
    tokens: list[int] = []
    tables: list[array[int]] = []
    for ask, source in zip(asks, sources or repeat(-1, len(asks)), strict=True):
        known, draft, pages = ask.tokens, ask.draft, ask.pages
        numbers += (1, 1, len(known) + len(draft) - 1 + ahead, source, len(pages), 0)
        tokens.append(draft[-1] if draft else known[-1])
        tables.append(pages)
    end = packer.pack(staging.address, len(asks), numbers + tokens, tables)
    return staging.copy(end, with_keep=False)


# -- in Python -----------------------------------------------------------------------------------------


def _pack_frame(
    spans: list[Span], staging: StagingBuffer, keep: list[int] | None, moves: Sequence[tuple[int, int]]
) -> PassInputs:
    tokens: list[int] = []
    sources: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts: list[int] = []
    tables = []
    tails = _Tails()
    start = 0
    for span in spans:
        rows, pages, first = len(span.inputs), span.pages, span.start
        tokens += span.inputs
        if rows == 1:
            sources.append(-1 if span.source is None else span.source)
            positions.append(first)
            slots.append(pages[first // PAGE] * PAGE + first % PAGE)
            starts.append(start)
        else:
            span_positions = range(first, first + rows)
            span_slots = [pages[p // PAGE] * PAGE + p % PAGE for p in span_positions]
            if span.parents:
                tails.add(span, len(tokens) - rows + span.given, span_slots[span.given :])
                positions += [*span_positions[: span.given], *tails.positions(span)]
            else:
                positions += span_positions
            sources += [-1] * rows
            slots += span_slots
            starts += [start] * rows
        tables.append(pages)
        start += len(pages)
    return _fill(staging, tokens, sources, positions, slots, starts, b"".join(tables), keep, tails, moves)


class _Tails:
    """The tails of a pass's rows: where the rows of draft trees find their ancestors' K and V.

    A tail is a list of slots, by position, from the row's ancestor after the root to the row itself. A row
    that follows its parent immediately shares its parent's list, one slot longer.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.starts: list[int] = []  # of each of these rows: the first key that its tail holds
        self.lists: list[int] = []  # of each: where its list begins in `slots`
        self.slots: list[int] = []

    def add(self, span: Span, first_row: int, slots: list[int]) -> None:
        """The tails of a tree whose guesses are in consecutive rows from `first_row` on, with these slots."""
        begin = len(self.slots)
        for node, (parent, slot) in enumerate(zip(span.parents, slots, strict=True)):
            if node == 0 or parent != node - 1:
                begin = len(self.slots)
                self.slots += _path(span.parents, slots, parent)
            self.slots.append(slot)
            self.lists.append(begin)
        self.rows += range(first_row, first_row + len(slots))
        self.starts += [span.start + span.given] * len(slots)

    @staticmethod
    def positions(span: Span) -> list[int]:
        """The position of each guess: one after its parent's."""
        root = span.start + span.given - 1
        positions: list[int] = []
        for parent in span.parents:
            positions.append((root if parent == ROOT else positions[parent]) + 1)
        return positions


def _path(parents: tuple[int, ...], slots: list[int], node: int) -> list[int]:
    """The slots from the first level down to a node."""
    path: list[int] = []
    while node != ROOT:
        path.append(slots[node])
        node = parents[node]
    return path[::-1]


def _pack_fast(asks: list[Ask], staging: StagingBuffer, sources: list[int] | None, ahead: int) -> PassInputs:
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts: list[int] = []
    start = 0
    for ask in asks:
        position = len(ask.tokens) + len(ask.draft) - 1 + ahead
        tokens.append(ask.draft[-1] if ask.draft else ask.tokens[-1])
        positions.append(position)
        slots.append(ask.pages[position // PAGE] * PAGE + position % PAGE)
        starts.append(start)
        start += len(ask.pages)
    tables = b"".join(ask.pages for ask in asks)
    return _fill(staging, tokens, sources or [-1] * len(asks), positions, slots, starts, tables)


def _fill(
    staging: StagingBuffer,
    tokens: list[int],
    sources: list[int],
    positions: list[int],
    slots: list[int],
    starts: list[int],
    pages: bytes,
    keep: list[int] | None = None,
    tails: _Tails | None = None,
    moves: Sequence[tuple[int, int]] = (),
) -> PassInputs:
    used, rows = len(tokens), staging.num_rows
    if used > rows:
        raise InvariantBroken(f"{used} rows for a pass of {rows}")
    for name, values, padding in (
        ("tokens", tokens, 0),
        ("source", sources, -1),
        ("positions", positions, 0),
        ("slots", slots, TRASH),
        ("page_start", starts, 0),
    ):
        field = staging.field(name)
        field[:used] = values
        field[used:] = padding
    lengths = staging.field("lengths")
    np.add(staging.field("positions")[:used], 1, out=lengths[:used])
    lengths[used:] = 0
    tail_start, tail = staging.field("tail_start"), staging.field("tail")
    tail_start[:] = lengths
    tail[:] = 0
    table = np.frombuffer(pages, dtype=np.int32)
    if tails is not None and tails.rows:
        tail_start[tails.rows] = tails.starts
        tail[tails.rows] = np.add(tails.lists, len(table), dtype=np.int32)
        table = np.concatenate((table, np.array(tails.slots, dtype=np.int32)))
    if staging.plan is not None:
        staging.plan.write(lengths, staging.field("page_start"), tail_start, tail, staging.work_list)
    return staging.send(table, keep, moves)


__all__ = ["numbers_of", "pack_fast", "pack_follow_up", "pack_frame"]
