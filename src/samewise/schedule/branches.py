"""Spans for the branches of a draft: other continuations that share its first tokens."""

from __future__ import annotations

from samewise.schedule.paging import Paging
from samewise.types import Sequence, Span


def branch_spans(seq: Sequence, draft: Span, left: int, paging: Paging, page: int) -> list[Span]:
    """Spans for a sequence's branches, in pages of their own, while there are rows and free pages.

    Each repeats the known tokens and the draft up to its fork, so that its KV is canonical and can be kept as
    it is if it wins. `left`: rows the frame has left; `page`: tokens of a page.
    """
    if not seq.branches or len(draft.inputs) != seq.given + len(seq.draft):
        return []
    shared, partial = divmod(seq.kv_len, page)
    spans: list[Span] = []
    for branch in seq.branches:
        inputs = (*draft.inputs[: draft.given + branch.at], *branch.tokens)
        lent = paging.lend(seq, seq.kv_len + len(inputs)) if len(inputs) <= left else None
        if lent is None:
            break
        copy = (seq.pages[shared], lent[0]) if partial else None
        number = len(seq.branch_pages)
        spans.append(
            draft._replace(
                inputs=inputs, pages=seq.pages[:shared] + lent, branch=number, copy=copy, targets=()
            )
        )
        left -= len(inputs)
    return spans


__all__ = ["branch_spans"]
