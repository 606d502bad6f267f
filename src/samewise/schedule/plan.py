"""Pure functions from a sequence to its Ask, its next Span, and the Span after the one in flight."""

from __future__ import annotations

from samewise.types import MAX_TREE_NODES, ROOT, Ask, Sequence, Span

_CHAIN = list(range(ROOT, MAX_TREE_NODES))  # parents of a draft whose guesses follow one another


def must_land(span: Span) -> bool:
    """Whether the next span of the sequence depends on this span's tokens.

    True where guesses are verified, or where the next choice needs the host (`Sampling.edited`).
    """
    rows = len(span.inputs)
    return rows > span.given or (span.sampling.edited and rows >= span.given)


def ask_of(seq: Sequence, room: int, max_nodes: int = 0) -> Ask:
    """What a proposer is told about a sequence."""
    request = seq.request
    return Ask(
        request.id, seq.tokens, seq.prompt_len, seq.draft, seq.kv_len, seq.pages, request.sampling, room,
        request.salt if request.share else None, seq.guide, max_nodes, request.prediction,
    )  # fmt: skip


def span_of(seq: Sequence, rows: int, given: int) -> Span:
    """The next `rows` rows of a sequence: known tokens first, then guesses."""
    request, start, tokens = seq.request, seq.kv_len, seq.tokens
    parents: tuple[int, ...] = ()
    if rows == 1:
        inputs: tuple[int, ...] = (tokens[start],)
    else:
        num = max(0, rows - given)
        inputs = (*tokens[start : start + rows], *seq.draft[:num])
        if num <= MAX_TREE_NODES and (nodes := seq.parents[:num]) != _CHAIN[:num]:
            parents = tuple(nodes)
    span = Span(
        request.id, start, inputs, given, seq.pages, request.sampling, tokens, seq.prompt_len,
        drafter=seq.drafter, guide=seq.guide, parents=parents,
    )  # fmt: skip
    return span if seq.score_next is None else _with_targets(span, seq, seq.score_next)


def _with_targets(span: Span, seq: Sequence, first: int) -> Span:
    """The span with targets: the prompt tokens from `first` on that its rows predict."""
    start, end = span.start, span.start + len(span.inputs)
    if end < first or first >= seq.prompt_len:
        return span
    row = max(0, first - 1 - start)
    return span._replace(
        targets=tuple(seq.tokens[start + row + 1 : min(end + 1, seq.prompt_len)]),
        target_row=row,
        target_tops=seq.request.prompt_logprobs,
    )


def continued(seq: Sequence, in_flight: Span | None, last_row: int, left: int) -> Span | None:
    """A sequence's span after the one in flight, whose last row in its frame is `last_row`; None: no span.

    `left`: rows the frame has left.
    """
    request, tokens = seq.request, seq.tokens
    if in_flight is None:
        given = seq.given
        return None if seq.draft else span_of(seq, min(left, given), given)
    rows = len(in_flight.inputs)
    start, given = in_flight.start + rows, in_flight.given - rows
    if given > 0:  # the prompt is still being read
        inputs = tuple(tokens[start : start + min(left, given)])
        span = Span(
            request.id, start, inputs, given, seq.pages, request.sampling, tokens, seq.prompt_len,
            guide=seq.guide,
        )  # fmt: skip
        scored = seq.score_next
        return span if scored is None else _with_targets(span, seq, scored + len(in_flight.targets))
    if len(tokens) + 1 >= seq.max_len:
        return None  # the token in flight is its last one
    return Span(
        request.id, start, (0,), 1, seq.pages, request.sampling, tokens, seq.prompt_len, source=last_row
    )


__all__ = ["ask_of", "continued", "must_land", "span_of"]
