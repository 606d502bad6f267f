"""From a sequence to what is asked of others about it: an Ask, the next Span, the one after that. Pure.

Host only.
"""

from __future__ import annotations

from samewise.types import Ask, Sequence, Span


def must_land(span: Span) -> bool:
    """Whether nothing can be planned behind it: how far its guesses hold, or a token the next choice depends
    on, is yet to be seen."""
    rows = len(span.inputs)
    return rows > span.given or (span.sampling.edited and rows >= span.given)


def ask_of(seq: Sequence, room: int) -> Ask:
    """What a proposer may know of a sequence."""
    request = seq.request
    return Ask(
        request.id, seq.tokens, seq.prompt_len, seq.draft, seq.kv_len, seq.pages, request.sampling, room,
        request.salt if request.share else None, seq.guide,
    )  # fmt: skip


def span_of(seq: Sequence, rows: int, given: int) -> Span:
    """The next `rows` rows of a sequence: known tokens first, then guesses."""
    request, start, tokens = seq.request, seq.kv_len, seq.tokens
    if rows == 1:
        inputs: tuple[int, ...] = (tokens[start],)
    else:
        inputs = tuple(tokens[start : start + rows]) + tuple(seq.draft[: max(0, rows - given)])
    span = Span(
        request.id, start, inputs, given, seq.pages, request.sampling, tokens, seq.prompt_len,
        drafter=seq.drafter, guide=seq.guide,
    )  # fmt: skip
    return span if seq.score_next is None else _with_targets(span, seq, seq.score_next)


def _with_targets(span: Span, seq: Sequence, first: int) -> Span:
    """Ask for the log-probabilities owed of prompt tokens from `first` on that this span's rows predict."""
    start, end = span.start, span.start + len(span.inputs)
    if end < first or first >= seq.prompt_len:
        return span
    row = max(0, first - 1 - start)
    return span._replace(
        targets=tuple(seq.tokens[start + row + 1 : min(end + 1, seq.prompt_len)]),
        target_row=row,
        target_tops=seq.request.prompt_logprobs or 0,
    )


def continued(seq: Sequence, flying: Span | None, last: int, left: int) -> Span | None:
    """What a sequence wants next if its span in flight, whose last row is `last`, turns out as it must."""
    request, tokens = seq.request, seq.tokens
    if flying is None:
        given = seq.given
        return None if seq.draft else span_of(seq, min(left, given), given)
    rows = len(flying.inputs)
    start, given = flying.start + rows, flying.given - rows
    if given > 0:  # a prompt still being read
        inputs = tuple(tokens[start : start + min(left, given)])
        span = Span(
            request.id, start, inputs, given, seq.pages, request.sampling, tokens, seq.prompt_len,
            guide=seq.guide,
        )  # fmt: skip
        owed = seq.score_next
        return span if owed is None else _with_targets(span, seq, owed + len(flying.targets))
    if len(tokens) + 1 >= seq.most:
        return None  # about to end
    return Span(request.id, start, (0,), 1, seq.pages, request.sampling, tokens, seq.prompt_len, source=last)


__all__ = ["ask_of", "continued", "must_land", "span_of"]
