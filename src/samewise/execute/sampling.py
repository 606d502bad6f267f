"""Sampler: logits, the tokens before and noise → the next token and its log-probability.

One rule for greedy and sampled: argmax(edited logits / temperature + Gumbel(seed, index, position, token));
temperature 0 is plain argmax; equal scores go to the lowest id. Edits (`logit_edits`) come first, then, on
logits divided by temperature, min-p, top-k and top-p (`filters`). Log-probabilities are the model's own,
before any of this.

The frame rule: a row's result depends on its own logits and its own SamplingRow, bit for bit, never on its
index or the other rows. Two ways to keep it:

- CPU: exp, log and sums of one row at a time (`kernels.cpu_sampling`). Exact operations (comparisons, sums of
  integers, single additions and divisions) may see any shape.
- CUDA: exp and log are the same function of every element, in any block [R, V]. Sums are sums of integers, so
  the order of summation cannot show (`kernels.sampling`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import sub, truediv
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samewise.execute.filters import gaps, mass_bits, max_gap, max_gaps, min_p_gap
from samewise.execute.logit_edits import LogitEditor, elementwise, send
from samewise.execute.sampling_rows import SamplingRow
from samewise.kernels import noise
from samewise.kernels.cpu_sampling import Floats, Ints, RowMath, RowScale, RowStats, pick_row_math
from samewise.types import NUM_CANDIDATES, Sampling, TopLogprobs

RANK_ROWS = 32
"""Rows that are ranked at once, to bound the memory that it takes. No result depends on it."""

MIN_TEMPERATURE = 1e-5
"""Lower temperatures above 0 are raised to this: dividing by them would overflow float32."""


class SamplerOutput(NamedTuple):
    """A token for every row and its log-probability: the model's own, or the processed one if asked for."""

    tokens: Tensor  # [R] int64
    logprobs: Tensor  # [R] float32


class _Scale(NamedTuple):
    """A row's largest logit and the log of the sum of exp(logit - largest)."""

    top: Tensor  # [R] float32
    log_sum: Tensor  # [R] float32

    def logprobs(self, logits: Tensor) -> Tensor:
        """Logits, one per row (or of columns [R, 1]) → log-probabilities. Of a certain token +0.0, always."""
        return elementwise(sub, elementwise(sub, logits, self.top), self.log_sum)


class Sampler:
    """Samples tokens, scores given ones, ranks the likeliest. Keeps no state between calls.

    `by_row`: rows are processed one at a time, by `row_math`. On CPU; by default it is chosen by the device.
    """

    def __init__(
        self,
        vocab: int,
        device: torch.device,
        *,
        by_row: bool | None = None,
        row_math: RowMath | None = None,
    ) -> None:
        self._vocab, self._device = vocab, device
        self._by_row = device.type == "cpu" if by_row is None else by_row
        self._row_math = (row_math or pick_row_math()) if self._by_row else None
        self._editor = LogitEditor(vocab, device, unpack_on_host=self._by_row)

    @property
    def name(self) -> str:
        """For the contract: which functions compute exp and log."""
        return "triton" if self._row_math is None else self._row_math.name

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """A token for every row of [R, V] float32; rows without a SamplingRow get the plain argmax.

        On CUDA and without SamplingRows the logits may also be of the model's 16-bit dtype: the result is
        the same.
        """
        rows = [row for row in rows if not row.sampling.plain]
        output = self._sample(logits, rows)
        if processed := [row for row in rows if row.sampling.processed]:
            at = self._send(np.array([row.row for row in processed]))
            values = self._logprobs(self.processed(logits, processed), output.tokens[at])
            output.logprobs.index_copy_(0, at, values)
        return output

    def _sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        if self._row_math is not None:
            return self._sample_by_row(logits, rows, self._row_math)
        tokens, top, log_sum = self._measure(logits)
        if not rows:
            # The chosen logit is the largest. Subtracted, not negated: a certain token has +0.0, never -0.0.
            return SamplerOutput(tokens, 0.0 - log_sum)
        tokens = self._sample_block(logits, rows)
        chosen = logits.gather(1, tokens[:, None])[:, 0].float()
        return SamplerOutput(tokens, _Scale(top, log_sum).logprobs(chosen))

    def processed(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """[len(rows), V]: what these rows' tokens are drawn from, but for the noise.

        Logits after edits, divided by the temperature; -inf where a filter excludes the token.
        """
        if self._row_math is not None:
            return torch.stack([self._processed_row(logits[row.row : row.row + 1], row) for row in rows])
        at = self._send(np.array([row.row for row in rows]))
        rows = [row._replace(row=i) for i, row in enumerate(rows)]
        edited, _, _ = self._prepared(logits[at], rows)
        return divided(edited, [row.sampling.temperature for row in rows])

    def with_processed(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """[R, V], where rows that ask for processed log-probabilities hold `processed`."""
        rows = [row for row in rows if row.sampling.processed and not row.sampling.plain]
        if not rows:
            return logits
        at = self._send(np.array([row.row for row in rows]))
        return logits.index_copy(0, at, self.processed(logits, rows))

    def score(
        self,
        logits: Tensor,
        rows: Sequence[int],
        targets: Sequence[int],
        divisors: Sequence[float] | None = None,
    ) -> Tensor:
        """Log-probability of targets[i] under row rows[i]: float32, the bits `sample` gives that token.

        `divisors`: a temperature for each row by which its logits are divided first.
        """
        if not rows:
            return torch.empty(0, dtype=torch.float32, device=logits.device)
        if divisors is not None and any(divisor != 1.0 for divisor in divisors):
            return self._logprobs(
                divided(logits[self._send(np.array(rows))], divisors), self._send(np.array(targets))
            )
        scale = self._scale(logits, rows)
        where = self._send(np.array([rows, targets]))
        return scale.logprobs(logits[where[0], where[1]])

    def top(self, logits: Tensor, rows: Sequence[int], nums: Sequence[int]) -> list[TopLogprobs]:
        """The nums[i] likeliest tokens of row rows[i] (-1: all), by falling value, then by rising id."""
        counts = [self._vocab if num < 0 else min(num, self._vocab) for num in nums]
        max_count = max(counts, default=0)
        if max_count == 0:
            return [() for _ in counts]
        found = self._top(logits, rows, max_count)
        return [
            tuple(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
            for (ids, values), count in zip(found, counts, strict=True)
        ]

    def _top(self, logits: Tensor, rows: Sequence[int], num: int) -> list[tuple[Ints, Floats]]:
        """The `num` likeliest ids of these rows and their log-probabilities, in order."""
        if self._row_math is not None:
            return self._row_math.top(logits, self._row_scale(logits, rows, self._row_math), num)
        scale = self._scale(logits, rows)
        selected = logits[self._send(np.array(rows))]
        values = _Scale(scale.top[:, None], scale.log_sum[:, None]).logprobs(selected)
        # topk leaves the order of equal values open: take every value that could belong, and sort those.
        floor = values.topk(num).values[:, -1:]
        row, token = (values >= floor).nonzero().unbind(1)
        value_of = values[row, token].cpu().numpy()
        row_of, token_of = row.cpu().numpy(), token.cpu().numpy()
        ends = np.searchsorted(row_of, np.arange(len(rows) + 1))
        parts = [slice(ends[i], ends[i + 1]) for i in range(len(rows))]
        return [_in_order(token_of[part], value_of[part]) for part in parts]

    def ranks(self, logits: Tensor, rows: Sequence[int], tokens: Tensor) -> list[int]:
        """The place of tokens[i] in row rows[i], counted from 1, in the order of `top`.

        Comparisons and counts are exact, so no other row shows in them.
        """
        if not rows:
            return []
        if self._row_math is not None:
            of_rows = self._row_scale(logits, rows, self._row_math)
            on_host: list[int] = self._row_math.ranks(
                logits, of_rows, tokens.to(torch.int64).numpy()
            ).tolist()
            return on_host
        scale, ids = self._scale(logits, rows), torch.arange(self._vocab, device=logits.device)
        at, tokens = self._send(np.array(rows)), tokens.to(logits.device, torch.int64)
        ranks: list[Tensor] = []
        for start in range(0, len(rows), RANK_ROWS):
            part = slice(start, start + RANK_ROWS)
            row_scale = _Scale(scale.top[part, None], scale.log_sum[part, None])
            values, token = row_scale.logprobs(logits[at[part]]), tokens[part, None]
            own = values.gather(1, token)
            before = (values > own) | ((values == own) & (ids < token))
            ranks.append(before.sum(1) + 1)
        in_order: list[int] = torch.cat(ranks).tolist()
        return in_order

    def alternatives(
        self, logits: Tensor, rows: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[TopLogprobs]:
        """What is shown of row rows[i] beside its token: the likeliest tokens, or those that are named."""
        named = [(i, sampling.logprob_token_ids) for i, sampling in enumerate(samplings)]
        flat = [(rows[i], token) for i, tokens in named for token in tokens]
        values: list[float] = self.score(logits, [r for r, _ in flat], [t for _, t in flat]).tolist()
        left, tops = iter(values), dict[int, TopLogprobs]()
        for i, tokens in named:
            if tokens:
                pairs = [(token, next(left)) for token in tokens]
                tops[i] = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
        ranked = [(i, samplings[i].top_logprobs) for i, tokens in named if not tokens]
        nums = [(i, num) for i, num in ranked if num]
        found = self.top(logits, [rows[i] for i, _ in nums], [num for _, num in nums])
        tops |= dict(zip([i for i, _ in nums], found, strict=True))
        return [tops.get(i, ()) for i in range(len(rows))]

    def top_choices(self, logits: Tensor, rows: Sequence[SamplingRow], num: int) -> tuple[Tensor, Tensor]:
        """The `num` best choices of every row with their confidence: [R, num] ids and shares.

        For drafts only: no bit of it is promised. A share is the softmax of the scores the argmax is taken
        of: the model's probability when greedy, scaled logits plus noise when sampled.
        """
        rows = [row for row in rows if not row.sampling.plain]
        if self._row_math is not None:
            scores = logits.clone() if rows else logits
            for row in rows:
                scores[row.row] = self._row_scores(logits[row.row : row.row + 1], row, self._row_math)
        else:
            scores = self._block_scores(logits, rows) if rows else logits
        best, ids = scores.topk(num)
        return ids, (best - scores.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)

    def candidates(self, logits: Tensor) -> Tensor:
        """The most probable ids of every row of [R, V], the first of them first: int32 [R, NUM_CANDIDATES].

        For drafts only: no bit of it is promised. -1 where the vocabulary is smaller.
        """
        if self._row_math is not None:
            return self._row_math.top_ids(logits, NUM_CANDIDATES)
        from samewise.kernels import sampling as kernels

        return kernels.top_candidates(logits)

    # ── by row: CPU ──────────────────────────────────────────────────────────────────────────────

    def _sample_by_row(self, logits: Tensor, rows: Sequence[SamplingRow], row_math: RowMath) -> SamplerOutput:
        stats = row_math.stats(logits)
        tokens = torch.from_numpy(stats.tokens)
        for row in rows:
            scores = self._row_scores(logits[row.row : row.row + 1], row, row_math)
            tokens[row.row] = int(scores.numpy().argmax())  # NumPy promises the first of equal maxima
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        return SamplerOutput(tokens, _scale_of(stats).logprobs(chosen))

    def _row_scores(self, logits: Tensor, row: SamplingRow, row_math: RowMath) -> Tensor:
        """[1, V] → the scores the argmax is taken of, [V]."""
        sampling = row.sampling
        if sampling.edited:
            logits = self._editor.apply(logits, [row._replace(row=0)])
        if sampling.temperature == 0.0:
            return logits[0]
        temperature = _temperature(sampling)
        limit = (
            max_gap(_row_gaps(logits[0], temperature), sampling, row_math) if sampling.filtered else math.inf
        )
        return row_math.scores(logits[0], temperature, _noise_key(row), limit)

    def _processed_row(self, logits: Tensor, row: SamplingRow) -> Tensor:
        """[1, V] → its row of `processed`, [V]."""
        sampling, row_math = row.sampling, self._row_math
        assert row_math is not None
        if sampling.edited:
            logits = self._editor.apply(logits, [row._replace(row=0)])
        result = divided(logits, [sampling.temperature])[0]
        if not sampling.filtered:
            return result
        gap = _row_gaps(logits[0], _temperature(sampling))
        excluded = torch.from_numpy(gap > np.float32(max_gap(gap, sampling, row_math)))
        return result.masked_fill(excluded, -math.inf)

    # ── by block: CUDA ───────────────────────────────────────────────────────────────────────────

    def _sample_block(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """[R, V] → [R] tokens. What a row did not ask for leaves its bits as they are."""
        from samewise.kernels import sampling as kernels  # needs triton, which only CUDA machines have

        return kernels.sample_tokens(*self._prepared(logits, rows))

    def _block_scores(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """[R, V] → the scores the argmax is taken of, [R, V]: plain logits where the temperature is 0."""
        logits, temperature, keys = self._prepared(logits, rows)
        noisy = noise.gumbel(keys, logits.shape[-1]) - gaps(logits, temperature)
        return torch.where(temperature > 0, noisy, logits)

    def _prepared(self, logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits after edits and filters, and the temperature [R, 1] and noise key [R, 2] of every row."""
        if edited := [row for row in rows if row.sampling.edited]:
            logits = self._editor.apply(logits, edited)
        if filtered := [row for row in rows if row.sampling.filtered]:
            logits = self._filtered(logits, filtered)
        num_rows = logits.shape[0]
        at = [row.row for row in rows]
        temperature = np.zeros((num_rows, 1), dtype=np.float32)
        temperature[at, 0] = [_temperature(row.sampling) for row in rows]
        keys = np.zeros((num_rows, 2), dtype=np.int64)
        keys[at] = [_noise_key(row) for row in rows]
        return logits, self._send(temperature), self._send(keys)

    def _filtered(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """A copy of [R, V] with min-p, top-k and top-p applied to these rows."""
        at = self._send(np.array([row.row for row in rows]))
        temperature = np.array([[_temperature(row.sampling)] for row in rows], dtype=np.float32)
        by_min_p = np.array([[min_p_gap(row.sampling)] for row in rows], dtype=np.float32)
        top_k = np.array([[row.sampling.top_k or self._vocab] for row in rows])
        top_p = np.array([[row.sampling.top_p] for row in rows])
        selected = logits[at]
        gap = gaps(selected, self._send(temperature))
        limit = max_gaps(gap, self._send(by_min_p), self._send(top_k), self._send(top_p))
        return logits.index_copy(0, at, selected.masked_fill_(gap > limit, -math.inf))

    def _measure(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R, V], also in 16 bits → argmax, largest logit, log of the sum of exp(logit - largest)."""
        from samewise.kernels import sampling as kernels

        return kernels.row_stats(logits, mass_bits(logits))

    # ── both ─────────────────────────────────────────────────────────────────────────────────────

    def _logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Log-probability of targets[i] under row i of [R, V]."""
        scale = self._scale(logits, range(logits.shape[0]))
        return scale.logprobs(logits.gather(1, targets[:, None])[:, 0])

    def _scale(self, logits: Tensor, rows: Sequence[int]) -> _Scale:
        """Of the given rows, in that order."""
        if self._row_math is None:
            _, top, log_sum = self._measure(logits)
            where = self._send(np.array(rows))
            return _Scale(top[where], log_sum[where])
        rows_scale = self._row_scale(logits, rows, self._row_math)
        return _Scale(torch.from_numpy(rows_scale.top), torch.from_numpy(rows_scale.log_sum))

    def _row_scale(self, logits: Tensor, rows: Sequence[int], row_math: RowMath) -> RowScale:
        unique, inverse = np.unique(np.array(rows), return_inverse=True)
        selected = logits if len(unique) == logits.shape[0] else logits[torch.from_numpy(unique)]
        stats = row_math.stats(selected)
        return RowScale(np.array(rows, dtype=np.int64), stats.top[inverse], stats.log_sum[inverse])

    def _send(self, array: npt.NDArray[Any]) -> Tensor:
        return send(array, self._device)


def divided(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """[R, V] divided by a temperature for each row; where that is 0 the row is as it was."""
    by = np.array([[max(t, MIN_TEMPERATURE) if t > 0.0 else 1.0] for t in temperatures], dtype=np.float32)
    return elementwise(truediv, logits, send(by, logits.device))


def _scale_of(stats: RowStats) -> _Scale:
    return _Scale(torch.from_numpy(stats.top), torch.from_numpy(stats.log_sum))


def _row_gaps(logits: Tensor, temperature: float) -> npt.NDArray[np.float32]:
    """(largest - logit) / temperature of [V], in float32."""
    row = logits.numpy()
    with np.errstate(all="ignore"):
        gaps: npt.NDArray[np.float32] = (row.max() - row) / np.float32(temperature)
    return gaps


def _temperature(sampling: Sampling) -> float:
    return max(sampling.temperature, MIN_TEMPERATURE) if sampling.temperature > 0.0 else 0.0


def _noise_key(row: SamplingRow) -> tuple[int, int]:
    return noise.key(row.sampling.seed, row.sampling.index, row.position)


def _in_order(ids: Ints, values: Floats) -> tuple[Ints, Floats]:
    """By falling value, then by rising id."""
    order = np.lexsort((ids, -values))
    return ids[order], values[order]


__all__ = ["Sampler", "SamplerOutput", "divided"]
