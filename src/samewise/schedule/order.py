"""When a frame should run, which sequences it serves, and in which order."""

from __future__ import annotations

from collections.abc import Iterable

from samewise.schedule.limits import Limits
from samewise.schedule.owners import without_crowds
from samewise.types import Sequence

PATIENCE = 4
"""Steps without a row after which a sequence is served before generating ones. Set by hand."""


def frame_due(running: Iterable[Sequence], step: int, limits: Limits) -> bool:
    """Whether a frame should run: it is full, a prompt waits, no draft grows, or one waited too long.

    Notes in each sequence since which step it waits for a frame.
    """
    drafting, rows, oldest = False, 0, step
    for seq in running:
        if seq.prefilling:
            return True
        if seq.drafting:
            drafting = True
        elif seq.request.verify:
            if seq.ready_since is None:
                seq.ready_since = step
            oldest = min(oldest, seq.ready_since)
            rows += 1 + len(seq.draft)
    if not drafting:
        return True
    full = rows >= (limits.canonical_rows or limits.max_rows)
    return full or (rows > 0 and step - oldest >= limits.deadline)


def widest_frame(running: Iterable[Sequence], limits: Limits) -> int:
    """Rows of the widest frame now: fewer while sequences generate, whose next tokens wait for it to end.

    Where requests have owners, a quarter, so that a newcomer waits less. Not less than 16 rows, nor on CUDA
    than the canonical number: there shorter frames take as long.
    """
    running = list(running)
    shared = limits.shared_rows or limits.max_rows
    if not any(seq.request.owner for seq in running):
        return limits.max_rows if all(seq.prefilling for seq in running) else shared
    canonical = limits.canonical_rows or limits.max_rows
    return min(limits.max_rows, max(16, canonical if canonical < limits.max_rows else 0, shared // 4))


def serving_order(running: list[Sequence], step: int, max_rows: int) -> list[Sequence]:
    """Sequences in the order they are served. Any order will do where there are rows for all."""
    running = without_crowds(running, step)
    wanted = sum(len(seq.tokens) - seq.kv_len + len(seq.draft) for seq in running)
    if wanted <= max_rows:
        return running
    generating = sum(1 + len(seq.draft) for seq in running if seq.request.verify and not seq.prefilling)
    # Where generating sequences leave no row for a prompt, one that waited long enough goes first.
    late = step - PATIENCE if generating >= max_rows else -1
    return sorted(
        running,
        key=lambda seq: (seq.last_served > late, seq.prefilling, seq.last_served, seq.request.id),
    )


__all__ = ["PATIENCE", "frame_due", "serving_order", "widest_frame"]
