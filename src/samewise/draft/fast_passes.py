"""Fast passes: regular decoding, one token per live sequence and pass, at the number of rows that are live.

Their bits depend on the load, so their tokens are only ever drafts (or belong to requests that opted out of
verification). KV is written above `kv_len`, where verification overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from samewise.execute.pack import pack_fast
from samewise.execute.runner import PASS_LIMITS, FastPath, Runner
from samewise.execute.sampling import Sampler, SamplerOutput
from samewise.execute.sampling_rows import SamplingRow, rows_of_asks
from samewise.types import Ask, Proposal, TopLogprobs

Perturb = Callable[[torch.Tensor], torch.Tensor]
Sample = Callable[[list[Ask], torch.Tensor, list[SamplingRow]], SamplerOutput]


class FastPasses:
    """Drafts by fast passes: one per call, or up to `chain` of them launched before the host waits.

    In a chain each pass takes its input tokens on the device from the pass before. `perturb` changes the
    logits; `sample` replaces the sampler.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        *,
        chain: int = 1,
        perturb: Perturb | None = None,
        sample: Sample | None = None,
    ) -> None:
        self._runner, self._sampler, self._perturb = runner, sampler, perturb
        self._sample = sample or (lambda _, logits, rows: sampler.sample(logits, rows))
        self._chain = min(chain, PASS_LIMITS.max_chain)

    @torch.inference_mode()
    def draft(
        self, asks: list[Ask], drafter: str, path: FastPath | None = None, *, logprobs: bool = True
    ) -> list[Proposal]:
        """The next token of every ask, or the next few, through a path (by default the target model)."""
        # Penalties count all tokens before a row; those of a chain are not on the host yet.
        lens = [1 if ask.sampling.edited else min(ask.room, self._chain) for ask in asks]
        outputs: list[tuple[list[int], SamplerOutput]] = []  # of each pass: the asks in it, and their tokens
        tops: list[tuple[TopLogprobs, ...]] = [() for _ in asks]
        ranks: list[tuple[int, ...]] = [() for _ in asks]
        rows: dict[int, int] = {}  # ask → its row in the pass before
        for ahead in range(max(lens, default=0)):
            live = [i for i in range(len(asks)) if lens[i] > ahead]
            live_asks = [asks[i] for i in live]
            logits = self._logits(live_asks, [rows[i] for i in live] if ahead else None, ahead, path)
            sampled = rows_of_asks(live_asks, ahead)
            output = self._sample(live_asks, logits, sampled)
            if logprobs:
                processed = self._sampler.with_processed(logits, sampled)
                for row, rank, top in self._shown(processed, live_asks, output.tokens):
                    ranks[live[row]] += (rank,)
                    tops[live[row]] += (top,)
            if max(lens) > ahead + 1:
                self._runner.fast_tokens[: len(live)].copy_(output.tokens[: len(live)])
            outputs.append((live, output))
            rows = {i: row for row, i in enumerate(live)}
        tokens: list[list[int]] = [[] for _ in asks]
        values: list[list[float]] = [[] for _ in asks]
        for live, output in outputs:
            pass_tokens, pass_logprobs = output.tokens.tolist(), output.logprobs.tolist()
            for row, i in enumerate(live):
                tokens[i].append(pass_tokens[row])
                if logprobs:
                    values[i].append(pass_logprobs[row])
        return [
            Proposal(
                ask.seq_id, tuple(tokens[i]), tuple(values[i]), tops[i], drafter, more=True, ranks=ranks[i]
            )
            for i, ask in enumerate(asks)
        ]

    def warm(self, max_num_seqs: int, path: FastPath | None) -> None:
        """On CUDA: capture the passes of up to so many sequences."""
        runner = self._runner
        if runner.device.type == "cuda":
            sizes = sorted({runner.fast_staging(rows).num_rows for rows in range(1, max_num_seqs + 1)})
            for size in sizes:
                runner.fast(pack_fast([], runner.staging(size)), path)

    def _logits(
        self, asks: list[Ask], sources: list[int] | None, ahead: int, path: FastPath | None
    ) -> torch.Tensor:
        runner = self._runner
        inputs = pack_fast(asks, runner.fast_staging(len(asks)), sources, ahead)
        logits = runner.fast(inputs, path)[: len(asks)].float()
        return logits if self._perturb is None else self._perturb(logits)

    def _shown(
        self, logits: torch.Tensor, asks: list[Ask], tokens: torch.Tensor
    ) -> list[tuple[int, int, TopLogprobs]]:
        """(row, rank of its token, alternatives) of the asks whose log-probabilities are shown."""
        rows = [row for row, ask in enumerate(asks) if ask.sampling.top_logprobs is not None]
        if not rows:
            return []
        ranks = self._sampler.ranks(logits, rows, tokens[rows])
        tops = self._sampler.alternatives(logits, rows, [asks[row].sampling for row in rows])
        return list(zip(rows, ranks, tops, strict=True))


__all__ = ["FastPasses", "Perturb", "Sample"]
