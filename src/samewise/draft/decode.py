"""The proposer `decode`, LLM-42's fast path: drafts by regular decoding of the target model.

With quantized weights over the same KV a pass is cheaper, and drafts are wrong a little more often.
"""

from __future__ import annotations

from samewise.draft.base import Drafter
from samewise.draft.fast_passes import FastPasses, Perturb
from samewise.draft.quantized import QuantizedCopy
from samewise.execute.runner import FastPath, Runner
from samewise.execute.sampling import Sampler
from samewise.types import Ask, Proposal


class Decode(Drafter):
    """Drafts by fast passes through the target model, or through `path`, or through a quantized copy."""

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
        self._passes = FastPasses(runner, sampler, chain=chain, perturb=perturb)
        self._path, self._copy = path if copy is None else copy.path, copy
        self._renewed = False

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The next token of every ask, or the next few."""
        return self._passes.draft(asks, self.name, self._path)

    def warm(self, max_num_seqs: int) -> None:
        """On CUDA: capture the passes now, not while the first requests wait."""
        self._passes.warm(max_num_seqs, self._path)

    def renew(self, contract_id: str) -> None:  # noqa: ARG002 - any replacement of weights counts
        """Quantize the replaced weights. The first call is for the weights that the copy was made of."""
        if self._copy is not None and self._renewed:
            self._copy.requantize()
        self._renewed = True


__all__ = ["Decode"]
