"""Sampling of drafts with their confidence and their alternatives."""

from __future__ import annotations

from typing import NamedTuple

import torch

from samewise.draft.tuning import DEFAULTS, SkipTuning
from samewise.execute.sampling import Sampler, SamplerOutput
from samewise.execute.sampling_rows import SamplingRow
from samewise.types import Ask

TokenChoices = tuple[list[int], list[float]]
"""The likeliest tokens at one place, best first, and the confidence of each."""


class _Pass(NamedTuple):
    """Choices of some rows of one pass."""

    asks: list[Ask]  # of all rows
    rows: list[int]
    ids: torch.Tensor  # [rows, num]
    confidences: torch.Tensor  # [rows, num]


class ConfidenceSampler:
    """Samples the drafts of fast passes and keeps the choices of every row until they are taken.

    Confidence is the probability of a greedy token; of a sampled one, its share among logits plus noise.
    """

    def __init__(self, sampler: Sampler, *, on_cpu: bool, tuning: SkipTuning = DEFAULTS.skip) -> None:
        self._sampler, self._on_cpu, self._tuning = sampler, on_cpu, tuning
        self._passes: list[_Pass] = []

    def sample(self, asks: list[Ask], logits: torch.Tensor, sampled: list[SamplingRow]) -> SamplerOutput:
        """The token of every row; `sampled`: the rows that are not plain greedy."""
        output = self._sampler.sample(logits, [])  # replaced below for rows that are not greedy
        rows, sampled_rows = list(range(len(asks))), [row.row for row in sampled]
        if self._on_cpu:  # ranking alternatives takes longer than a look at the probability
            probabilities = output.logprobs.exp()
            limit = self._tuning.sure_probability
            sure = [i for i, p in enumerate(probabilities.tolist()) if p > limit and i not in sampled_rows]
            if sure:
                self._passes.append(_Pass(asks, sure, output.tokens[sure, None], probabilities[sure, None]))
            rows = [i for i in rows if i not in sure]
        if rows:
            index = {row: i for i, row in enumerate(rows)}
            moved = [row._replace(row=index[row.row]) for row in sampled]
            some = logits[rows] if len(rows) < len(asks) else logits
            ids, confidences = self._sampler.top_choices(some, moved, self._tuning.num_alternatives + 1)
            if sampled_rows:
                output.tokens[sampled_rows] = ids[[index[row] for row in sampled_rows], 0]
            self._passes.append(_Pass(asks, rows, ids, confidences))
        return output

    def clear(self) -> None:
        """Drop the choices of passes that were not taken."""
        self._passes.clear()

    def take(self) -> dict[int, list[TokenChoices]]:
        """By sequence, the choices of each pass since the last call, in order."""
        choices: dict[int, list[TokenChoices]] = {}
        for one in self._passes:
            lists = zip(one.rows, one.ids.tolist(), one.confidences.tolist(), strict=True)
            for row, ids, confidences in lists:
                choices.setdefault(one.asks[row].seq_id, []).append((ids, confidences))
        self._passes.clear()
        return choices


__all__ = ["ConfidenceSampler", "TokenChoices"]
