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
            masks: list[bytes | None] = []
            if span.guide is not None:
                # Computed here, after the frame was started: a CUDA device works meanwhile.
                masks = span.guide.masks(span.inputs[given:])
            if sampling.edited:
                prompt, output = span.tokens[: span.prompt_len], span.tokens[span.prompt_len :]
            for i in range(given - 1, num):
                before = output + list(span.inputs[given : i + 1]) if sampling.edited else output
                mask = masks[i - given + 1] if masks else None
                rows.append(
                    SamplingRow(logit_rows[first + i], sampling, prompt, before, span.start + i + 1, mask)
                )
        first += num
    return rows


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
