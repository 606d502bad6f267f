"""Pack spans into a frame, or asks into a fast pass: fill a staging buffer and send it.

A pass always has the buffer's `num_rows` rows. Rows left over are padding: they see no keys and write to the
trash page. Bits do not depend on a row's index (the probe checks it), so spans are placed in the given order.
"""

from __future__ import annotations

import numpy as np

from samewise.errors import InvariantBroken
from samewise.execute.staging import PassInputs, StagingBuffer
from samewise.kernels.attention.base import PAGE
from samewise.kv.pages import TRASH
from samewise.types import Ask, Span


def pack_frame(spans: list[Span], staging: StagingBuffer, keep: list[int] | None = None) -> PassInputs:
    """Place spans in consecutive rows. With `keep`, logits are computed for these rows only."""
    tokens: list[int] = []
    sources: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts: list[int] = []
    tables = []
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
            sources += [-1] * rows
            positions += span_positions
            slots += [pages[p // PAGE] * PAGE + p % PAGE for p in span_positions]
            starts += [start] * rows
        tables.append(pages)
        start += len(pages)
    return _fill(staging, tokens, sources, positions, slots, starts, b"".join(tables), keep)


def pack_fast(
    asks: list[Ask], staging: StagingBuffer, sources: list[int] | None = None, ahead: int = 0
) -> PassInputs:
    """One row per ask: its last known or drafted token.

    With `sources` the token is the one sampled by that row of the previous pass, still on the device: it
    stands `ahead` positions after the last token the host knows.
    """
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
    if staging.plan is not None:
        staging.plan.write(lengths, staging.field("page_start"), staging.work_list)
    return staging.send(np.frombuffer(pages, dtype=np.int32), keep)


__all__ = ["pack_fast", "pack_frame"]
