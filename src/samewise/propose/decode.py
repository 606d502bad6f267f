"""The fast path: the whole model, one token for every live sequence, at whatever batch is live.

This is what other engines call decoding. Its bits depend on load, so it only ever proposes; a request
that opted out of verification takes its tokens as they come.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from samewise.run.frame import pack_fast
from samewise.run.runner import Runner
from samewise.sampling import Draw, Sampler
from samewise.types import Ask, Proposal, TopLogprobs, Verdict

Perturb = Callable[[torch.Tensor], torch.Tensor]


class Decode:
    """One guess per ask and call, written to scratch KV above `kv_len`.

    `perturb` may bend the draft's logits; tests use it to make drafts disagree.
    """

    name = "decode"

    def __init__(self, runner: Runner, sampler: Sampler, perturb: Perturb | None = None) -> None:
        self._runner, self._sampler, self._perturb = runner, sampler, perturb

    @torch.inference_mode()
    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The next token of every ask, by regular decoding."""
        if not asks:
            return []
        logits = self._runner.fast(pack_fast(asks, self._runner.tray(len(asks)))).float()
        if self._perturb is not None:
            logits = self._perturb(logits)
        picks = self._sampler.pick(logits, _draws(asks))
        tops = self._tops(logits, asks)
        tokens: list[int] = picks.tokens.tolist()
        logprobs: list[float] = picks.logprobs.tolist()
        return [
            Proposal(ask.seq_id, (token,), (logprob,), top)
            for ask, token, logprob, top in zip(asks, tokens, logprobs, tops, strict=True)
        ]

    def observe(self, verdicts: list[Verdict]) -> None:
        """Nothing to learn yet."""

    def forget(self, seq_id: int) -> None:
        """Nothing to forget."""

    def _tops(self, logits: torch.Tensor, asks: list[Ask]) -> list[tuple[TopLogprobs, ...]]:
        wanted = [(i, ask.sampling.top_logprobs) for i, ask in enumerate(asks) if ask.sampling.top_logprobs]
        found: dict[int, tuple[TopLogprobs, ...]] = dict.fromkeys(range(len(asks)), ((),))
        if wanted:
            tops = self._sampler.top(logits, [i for i, _ in wanted], [n for _, n in wanted if n])
            found |= {i: (top,) for (i, _), top in zip(wanted, tops, strict=True)}
        return [found[i] if ask.sampling.top_logprobs is not None else () for i, ask in enumerate(asks)]


def _draws(asks: list[Ask]) -> list[Draw]:
    draws: list[Draw] = []
    for row, ask in enumerate(asks):
        if not ask.sampling.plain:
            output = ask.tokens[ask.prompt_len :] + ask.draft
            position = len(ask.tokens) + len(ask.draft)
            draws.append(Draw(row, ask.sampling, ask.tokens[: ask.prompt_len], output, position))
    return draws


__all__ = ["Decode"]
