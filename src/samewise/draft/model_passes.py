"""Passes of a draft model: the tokens of a pass stay on the device, where the next pass takes them.

On CUDA a pass is one copy and one captured graph, which also ranks the logits of plain greedy rows. Results
are copied to the host behind each pass, so that the next pass can be launched before they are known.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from samewise.draft.model_pacing import Choice
from samewise.draft.tuning import DEFAULTS, ModelTuning
from samewise.execute.pack import pack_frame
from samewise.execute.runner import PASS_LIMITS, Runner
from samewise.execute.sampling import Sampler
from samewise.execute.sampling_rows import SamplingRow
from samewise.execute.staging import PassInputs
from samewise.types import NUM_CANDIDATES


def max_pass_rows(cuda: bool, max_num_seqs: int, tuning: ModelTuning = DEFAULTS.model) -> int:
    """Rows of the widest pass. On CUDA one of the few sizes that are captured."""
    rows = max(tuning.cuda_pass_rows if cuda else tuning.cpu_pass_rows, max_num_seqs)
    return min(size for size in PASS_LIMITS.fast_rows if size >= rows) if cuda else rows


class _Pending(NamedTuple):
    """A launched pass: the rows that are wanted of it, and where their results will be."""

    rows: list[int]
    host: torch.Tensor  # [R, 2 + NUM_CANDIDATES] int32
    copied: torch.cuda.Event | None


class RankedPasses:
    """Runs passes of a draft model over one runner. At most two are under way at once."""

    @torch.inference_mode()
    def __init__(
        self, runner: Runner, sampler: Sampler, max_rows: int, tuning: ModelTuning = DEFAULTS.model
    ) -> None:
        self.runner, self._sampler, self._tuning = runner, sampler, tuning
        self.cuda = runner.device.type == "cuda"
        self._path = runner.fast_path(runner.model)
        if self.cuda:
            self._path.after = self._rank_greedy
            self._path.pool = torch.cuda.graph_pool_handle()
        self.max_rows = max_rows
        # By row of the last pass: its token, the bits of its confidence, and its candidates.
        shape = (max_rows, 2 + NUM_CANDIDATES)
        self._outputs = torch.zeros(shape, dtype=torch.int32, device=runner.device)
        self._hosts = [torch.zeros(shape, dtype=torch.int32, pin_memory=self.cuda) for _ in range(2)]
        self._pending: deque[_Pending] = deque()

    def recover(self) -> None:
        """Drop passes whose results were not taken."""
        self._pending = deque()

    @torch.inference_mode()
    def warm(self) -> None:
        """On CUDA: compile and capture the passes of every size."""
        for size in [size for size in PASS_LIMITS.fast_rows if size <= self.max_rows] if self.cuda else ():
            self.runner.fast(pack_frame([], self.runner.staging(size)), self._path)

    @torch.inference_mode()
    def read(self, inputs: PassInputs) -> None:
        """A pass that only writes KV."""
        self.runner.fast(inputs, self._path)

    @torch.inference_mode()
    def launch(self, inputs: PassInputs, rows: list[int], sampled: list[SamplingRow]) -> None:
        """Start a pass whose tokens in `rows` are wanted; `sampled`: those that are not plain greedy."""
        logits = self.runner.fast(inputs, self._path)
        if not self.cuda:
            self._rank_rows(logits, rows, sampled)
        elif sampled:
            self._rank_block(logits.float(), sampled)
        host = self._hosts[0][: inputs.num_rows]
        self._hosts.reverse()
        host.copy_(self._outputs[: inputs.num_rows], non_blocking=True)
        copied = None
        if self.cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._pending.append(_Pending(rows, host, copied))

    def take(self) -> list[Choice]:
        """Wait for the oldest pass under way: the choices of its rows, in the order given."""
        rows, host, copied = self._pending.popleft()
        if copied is not None:
            copied.synchronize()
        results = host.numpy()[rows]
        tokens, confidences = results[:, 0].tolist(), results[:, 1].view(np.float32).tolist()
        num = self._tuning.num_alternatives
        return [
            Choice(token, confidence, tuple(other for other in ids if other != token)[:num])
            for token, confidence, ids in zip(tokens, confidences, results[:, 2:].tolist(), strict=True)
        ]

    def _rank_greedy(self, logits: torch.Tensor) -> None:
        """Choose the likeliest token of every row. Captured with the pass."""
        choice, num = self._sampler.sample(logits, []), logits.shape[0]
        self.runner.fast_tokens[:num].copy_(choice.tokens)
        outputs = self._outputs[:num]
        outputs[:, 0].copy_(choice.tokens)
        outputs[:, 1].copy_(choice.logprobs.exp().view(torch.int32))
        outputs[:, 2:].copy_(self._sampler.candidates(logits))

    def _rank_block(self, logits: torch.Tensor, sampled: list[SamplingRow]) -> None:
        """Choose the token of every row, with noise and edits where rows have them."""
        num = logits.shape[0]
        self._store(self._outputs[:num], logits, sampled)
        self.runner.fast_tokens[:num].copy_(self._outputs[:num, 0])

    def _store(self, outputs: torch.Tensor, logits: torch.Tensor, sampled: list[SamplingRow]) -> None:
        ids, shares = self._sampler.top_choices(logits, sampled, self._tuning.num_alternatives + 1)
        outputs[:, 0].copy_(ids[:, 0])
        outputs[:, 1].copy_(shares[:, 0].float().contiguous().view(torch.int32))
        outputs[:, 2:].copy_(ids[:, :1].expand(-1, NUM_CANDIDATES))
        outputs[:, 2 : 2 + ids.shape[1]].copy_(ids)

    def _rank_rows(self, logits: torch.Tensor, rows: list[int], sampled: list[SamplingRow]) -> None:
        """On a CPU: choose the tokens of these rows; alternatives only where a token is unsure."""
        picked = (logits if len(rows) == logits.shape[0] else logits[rows]).float()
        outputs = torch.zeros(len(rows), self._outputs.shape[1], dtype=torch.int32)
        if sampled:
            index = {row: i for i, row in enumerate(rows)}
            self._store(outputs, picked, [row._replace(row=index[row.row]) for row in sampled])
        else:
            choice = self._sampler.sample(picked, [])
            confidence = choice.logprobs.exp()
            outputs[:, 0] = choice.tokens
            outputs[:, 1] = confidence.contiguous().view(torch.int32)
            outputs[:, 2:] = outputs[:, :1]
            unsure = (confidence < self._tuning.sure_probability).nonzero()[:, 0]
            if len(unsure):
                outputs[unsure, 2:] = self._sampler.candidates(picked[unsure])
        self._outputs[rows] = outputs
        self.runner.fast_tokens[rows] = outputs[:, 0]


__all__ = ["RankedPasses", "max_pass_rows"]
