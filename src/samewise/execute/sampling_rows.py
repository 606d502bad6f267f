"""SamplingRow: what sampling one row depends on beyond its logits; made of spans, or of asks.

Host only. Rows of plain greedy requests are left out: their token is the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from samewise.types import Ask, Sampling, Span

LogitRows = range | dict[int, int]
"""A row of a frame → its row among the logits, where only some rows' logits were computed."""


class SamplingRow(NamedTuple):
    """The sampling parameters of one row of logits, and the tokens before it."""

    row: int
    sampling: Sampling
    prompt: Sequence[int]  # counted by the repetition penalty
    output: Sequence[int]  # counted by every penalty: committed tokens, then drafted ones
    position: int  # absolute position of the token being sampled
    mask: bytes | None = None  # the grammar's allowed token ids: a bit per id, lowest first


def rows_of_spans(spans: list[Span], logit_rows: LogitRows) -> list[SamplingRow]:
    """A row for every token a frame has to sample: from each span's last given row on."""
    rows: list[SamplingRow] = []
    first = 0
    for span in spans:
        sampling, given, num = span.sampling, span.given, len(span.inputs)
        if not sampling.plain and num >= given:
            prompt: list[int] = []
            output: list[int] = []
            if sampling.edited:
                prompt, output = span.tokens[: span.prompt_len], span.tokens[span.prompt_len :]
            paths = _paths(span)
            # Masks are computed here, after the frame was started: a CUDA device works meanwhile.
            masks = _masks(span, paths) if span.guide is not None else [None] * len(paths)
            for row, (path, mask) in enumerate(zip(paths, masks, strict=True), start=first + given - 1):
                before = [*output, *path] if sampling.edited else output
                position = span.start + given + len(path)
                rows.append(SamplingRow(logit_rows[row], sampling, prompt, before, position, mask))
        first += num
    return rows


def _paths(span: Span) -> list[tuple[int, ...]]:
    """The guesses that each row follows, from the last given row on: none, then each row's own path."""
    guesses = span.inputs[span.given :]
    if not span.parents:
        return [guesses[:i] for i in range(len(guesses) + 1)]
    paths: list[tuple[int, ...]] = [()]
    for guess, parent in zip(guesses, span.parents, strict=True):
        paths.append((*paths[parent + 1], guess))
    return paths


def _masks(span: Span, paths: list[tuple[int, ...]]) -> list[bytes | None]:
    """The grammar's mask of each row."""
    assert span.guide is not None
    if not span.parents:
        return span.guide.masks(paths[-1])
    return [span.guide.mask(path) for path in paths]


def rows_of_asks(asks: list[Ask], ahead: int = 0) -> list[SamplingRow]:
    """A row per ask, for the token `ahead` positions after the next one.

    With `ahead` above 0 the tokens between are on the device only, so penalties cannot count them.
    """
    rows: list[SamplingRow] = []
    for row, ask in enumerate(asks):
        if ask.sampling.plain:
            continue
        prompt: list[int] = []
        output: list[int] = []
        if ask.sampling.edited:
            prompt, output = ask.tokens[: ask.prompt_len], ask.tokens[ask.prompt_len :] + ask.draft
        position = len(ask.tokens) + len(ask.draft) + ahead
        mask = ask.guide.mask(tuple(ask.draft)) if ask.guide is not None else None
        rows.append(SamplingRow(row, ask.sampling, prompt, output, position, mask))
    return rows


__all__ = ["LogitRows", "SamplingRow", "rows_of_asks", "rows_of_spans"]
