"""The fast path: the whole model, one token for every live sequence, at whatever batch is live.

This is what other engines call decoding. Its bits depend on load, so it only ever proposes; a request
that opted out of verification takes its tokens as they come. Guesses may also come from other weights over
the same KV, with fewer bits: whatever they say, the replay has the last word.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from samewise.draft.base import Drafter
from samewise.draft.quantized import QuantizedCopy
from samewise.execute.pack import pack_fast
from samewise.execute.runner import PASS_LIMITS, FastPath, Runner
from samewise.execute.sampling import Sampler, SamplerOutput
from samewise.execute.sampling_rows import SamplingRow, rows_of_asks
from samewise.types import Ask, Proposal, TopLogprobs

Perturb = Callable[[torch.Tensor], torch.Tensor]


class Decode(Drafter):
    """Guesses by regular decoding, written to scratch KV above `kv_len`.

    One pass per call, or `chain` of them one behind the other on a device that runs beside the host: then
    each takes its inputs from the answers of the one before, and the host waits once. `perturb` may bend the
    draft's logits; `path` leads through other weights.
    """

    name = "decode"

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        perturb: Perturb | None = None,
        *,
        path: FastPath | None = None,
        copy: QuantizedCopy | None = None,
        chain: int = 1,
    ) -> None:
        self._runner, self._sampler, self._perturb = runner, sampler, perturb
        self._path, self._chain = path if copy is None else copy.path, min(chain, PASS_LIMITS.max_chain)
        self._copy, self._renewed = copy, False

    @torch.inference_mode()
    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The next token of every ask, or the next few."""
        if not asks:
            return []
        # The next choice of a penalised row depends on tokens the host has yet to see.
        lens = [1 if ask.sampling.edited else min(ask.room, self._chain) for ask in asks]
        found: list[tuple[list[int], SamplerOutput]] = []
        tops: list[tuple[TopLogprobs, ...]] = [() for _ in asks]
        rows: dict[int, int] = {}  # where each ask stood in the pass before
        for ahead in range(max(lens)):
            live = [i for i in range(len(asks)) if lens[i] > ahead]
            sources = [rows[i] for i in live] if ahead else None
            logits = self._logits([asks[i] for i in live], sources, ahead)
            draws = rows_of_asks([asks[i] for i in live], ahead)
            picks = self._choose([asks[i] for i in live], logits, draws)
            for i, top in zip(live, self._tops(logits, [asks[i] for i in live]), strict=True):
                tops[i] += top
            if max(lens) > ahead + 1:
                self._runner.guesses[: len(live)].copy_(picks.tokens[: len(live)])
            found.append((live, picks))
            rows = {i: row for row, i in enumerate(live)}
        tokens: list[list[int]] = [[] for _ in asks]
        logprobs: list[list[float]] = [[] for _ in asks]
        for live, picks in found:
            said, values = picks.tokens.tolist(), picks.logprobs.tolist()
            for row, i in enumerate(live):
                tokens[i].append(said[row])
                logprobs[i].append(values[row])
        return [
            Proposal(ask.seq_id, tuple(tokens[i]), tuple(logprobs[i]), tops[i], self.name, more=True)
            for i, ask in enumerate(asks)
        ]

    def _choose(self, asks: list[Ask], logits: torch.Tensor, draws: list[SamplingRow]) -> SamplerOutput:  # noqa: ARG002 - for heirs
        """The guess of every row. Whoever wants to know more of a pass looks here."""
        return self._sampler.sample(logits, draws)

    def warm(self, max_num_seqs: int) -> None:
        """On CUDA: capture the passes of up to so many sequences now, not while they wait."""
        runner = self._runner
        if runner.device.type == "cuda":
            sizes = sorted({runner.fast_staging(rows).num_rows for rows in range(1, max_num_seqs + 1)})
            for size in sizes:
                runner.fast(pack_fast([], runner.staging(size)), self._path)

    def renew(self, contract_id: str) -> None:  # noqa: ARG002 - any replacement counts
        """Quantize replaced weights again; the first call follows the copy that was just made."""
        if self._copy is not None and self._renewed:
            self._copy.requantize()
        self._renewed = True

    def _logits(self, asks: list[Ask], sources: list[int] | None, ahead: int) -> torch.Tensor:
        runner = self._runner
        batch = pack_fast(asks, runner.fast_staging(len(asks)), sources, ahead)
        logits = runner.fast(batch, self._path)[: len(asks)].float()
        return logits if self._perturb is None else self._perturb(logits)

    def _tops(self, logits: torch.Tensor, asks: list[Ask]) -> list[tuple[TopLogprobs, ...]]:
        wanted = [(i, ask.sampling.top_logprobs) for i, ask in enumerate(asks) if ask.sampling.top_logprobs]
        found: dict[int, tuple[TopLogprobs, ...]] = dict.fromkeys(range(len(asks)), ((),))
        if wanted:
            tops = self._sampler.top(logits, [i for i, _ in wanted], [n for _, n in wanted if n])
            found |= {i: (top,) for (i, _), top in zip(wanted, tops, strict=True)}
        return [found[i] if ask.sampling.top_logprobs is not None else () for i, ask in enumerate(asks)]


__all__ = ["Decode"]
