"""When a frame should run, which sequences it serves, and in which order.

A request's priority orders it among the requests of its own owner only, so that no owner gains by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable

from samewise.schedule.limits import Limits
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


def share_places(sequences: Iterable[Sequence]) -> list[Sequence]:
    """The sequences in the order of their places, which those of each owner share by priority.

    Notes the new places: a sequence that another one has gone before stands where that one stood, so an owner
    has no more early places than its requests have by arrival.
    """
    in_order = sorted(sequences, key=lambda seq: seq.place)
    shared = _by_priority(in_order, lambda seq: seq.request.owner)
    if shared is not in_order:
        for seq, place in zip(shared, [seq.place for seq in in_order], strict=True):
            seq.place = place
    return shared


def prompts_by_priority(order: list[Sequence]) -> list[Sequence]:
    """This order of sequences that read prompts, with the lower priorities first.

    Where requests have owners it stays as it is: places alone say which one goes first.
    """
    return order if any(seq.request.owner for seq in order) else _by_priority(order, lambda _: None)


def _by_priority(order: list[Sequence], group: Callable[[Sequence], Hashable]) -> list[Sequence]:
    """The sequences of each group by priority, at the places of the group; equals stay in their order."""
    if not any(seq.request.priority for seq in order):
        return order
    queues: dict[Hashable, deque[Sequence]] = {}
    for seq in sorted(order, key=lambda seq: seq.request.priority):
        queues.setdefault(group(seq), deque()).append(seq)
    return [queues[group(seq)].popleft() for seq in order]


def serving_order(running: list[Sequence], step: int, max_rows: int) -> list[Sequence]:
    """Sequences in the order they are served. Any order will do where there are rows for all."""
    wanted = sum(len(seq.tokens) - seq.kv_len + len(seq.draft) for seq in running)
    if wanted <= max_rows:
        return running
    generating = sum(1 + len(seq.draft) for seq in running if seq.request.verify and not seq.prefilling)
    # Where generating sequences leave no row for a prompt, one that waited long enough goes first.
    late = step - PATIENCE if generating >= max_rows else -1
    order = sorted(
        running, key=lambda seq: (seq.last_served > late, seq.prefilling, seq.last_served, seq.place)
    )
    if any(seq.request.owner for seq in order):
        return order
    return _by_priority(order, lambda seq: (seq.last_served > late, seq.prefilling))


__all__ = [
    "PATIENCE",
    "frame_due",
    "prompts_by_priority",
    "serving_order",
    "share_places",
    "widest_frame",
]
