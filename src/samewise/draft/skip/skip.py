"""The proposer `skip`, SWIFT: self-speculation with a layer set that is found while requests are answered.

Drafts read canonical KV and write scratch KV; there is no second model and no second cache. Phase 1,
context-based layer-set optimisation, is the `LayerSetOptimiser`; phase 2, confidence-aware acceleration, the
`ConfidencePacing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samewise.draft.base import Drafter
from samewise.draft.fast_passes import FastPasses
from samewise.draft.skip.active_set import ActiveSet
from samewise.draft.skip.confidence import ConfidenceSampler
from samewise.draft.skip.optimiser import LayerSetOptimiser
from samewise.draft.skip.pacing import ConfidencePacing
from samewise.draft.skip.pricing import PassPricing
from samewise.types import Ask, LayerSet, Proposal, Verdict


class Skip(Drafter):
    """Drafts by fast passes that skip the sublayers of the active set.

    `standalone`: not used by `auto`, so `propose` runs the search step itself. `capture_seconds`: what the
    passes of a new set take to capture, which must have been saved before the set is used.
    """

    name = "skip"

    def __init__(
        self,
        passes: FastPasses,
        confidence: ConfidenceSampler,
        active: ActiveSet,
        optimiser: LayerSetOptimiser,
        pacing: ConfidencePacing,
        pricing: PassPricing,
        clock: Callable[[], float],
        *,
        standalone: bool = True,
        capture_seconds: float = 0.0,
    ) -> None:
        self._passes, self._confidence, self._pricing, self._clock = passes, confidence, pricing, clock
        self.active, self.optimiser, self._pacing = active, optimiser, pacing
        self._standalone, self._capture_seconds = standalone, capture_seconds
        self._used_revision = -1  # of the set that drafted last: its passes are captured
        self._num_passes = self._last_passes = 0  # of all calls, and of the last one

    @property
    def ready(self) -> bool:
        """Whether there is a set to draft with, and the time to prepare its passes was saved."""
        return self.active.ready and (
            self._used_revision == self.active.revision
            or self.optimiser.budget.affords(self._capture_seconds)
        )

    @property
    def quiet(self) -> bool:
        """True without a set, while no step of the search is due."""
        return not self.ready and not self._pacing.has_drafts and not self.optimiser.due

    @property
    def revision(self) -> int:
        """How often the set was changed."""
        return self.active.revision

    @property
    def possible(self) -> bool:
        """Whether the model has sublayers that may be skipped."""
        return self.optimiser.search.open

    @property
    def busy(self) -> bool:
        """Whether a step of the search is due."""
        return self.optimiser.due

    def on_step(self, asks: list[Ask]) -> None:
        """One step of the search, if it is due."""
        self.optimiser.on_step(asks)

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The next token of every ask, or the next few, as far as they pay."""
        self._last_passes = 0
        if self._standalone:
            self.on_step(asks)
        if not asks or not self.ready:
            return []
        asks = self._pacing.admit(asks)
        if not asks:
            return []
        self._confidence.clear()
        if self._used_revision != self.active.revision:
            self._used_revision = self.active.revision
            self.optimiser.budget.spent += self._capture_seconds
        began = self._clock()
        proposals = self._passes.draft(asks, self.name, self.active.path, logprobs=False)
        self._last_passes = max(len(proposal.tokens) for proposal in proposals)
        self._num_passes += self._last_passes
        seconds = (self._clock() - began) / self._last_passes
        self._pricing.observe_draft_pass(len(asks), self.active.skipped, seconds)
        return self._pacing.pace(asks, proposals, self._confidence.take())

    def passes_of(self, proposals: list[Proposal]) -> int:  # noqa: ARG002 - cut, and with alternatives added
        """Passes that the last call of `propose` took."""
        return self._last_passes

    def observe(self, verdicts: list[Verdict]) -> None:
        """Learn from verdicts, and check whether the set still fits the text."""
        self.optimiser.tick()
        for verdict in verdicts:
            self._pacing.observe(verdict, own=verdict.drafter == self.name)
        self.optimiser.check_acceptance()

    def warm(self, max_num_seqs: int) -> None:  # noqa: ARG002 - passes of a set are captured at first use
        """Capture the scoring pass, where it is captured."""
        if self.possible:
            self.optimiser.warm()

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's draft; its text may be scored on later."""
        self._pacing.forget(seq_id)
        self.optimiser.forget(seq_id)

    def recover(self) -> None:
        """Drop all drafts; the search goes on from its incumbent."""
        self._confidence.clear()
        self._pacing.recover()
        self.optimiser.recover()

    def renew(self, contract_id: str) -> None:
        """Use the sets stored for this contract; after replaced weights, search again."""
        self.optimiser.renew(contract_id)

    def fix_set(self, skipped: LayerSet, rate: float) -> None:
        """Draft with a set that is known to be good, of this match rate, without a search."""
        self.optimiser.fix(skipped, rate)

    def stats(self) -> dict[str, dict[str, Any]]:
        """The phase, the set, the timeline, and what the search cost."""
        active, timeline, best = self.active, self.optimiser.timeline, self.optimiser.search.best
        first_tokens = active.first_tokens
        report = {
            "phase": timeline.phase,
            "set": timeline.events[-1].as_dict()["set"] | {"skipped": len(best.skipped)},
            "matchness": best.rate,
            "first_guess_acceptance": first_tokens.value if first_tokens.trials else None,
            "threshold": self._pacing.threshold,
            "passes": self._num_passes,
            "alternatives": self._pacing.num_alternatives,
            "search": self.optimiser.report(),
            "timeline": [event.as_dict() for event in timeline.events],
        }
        return {self.name: report}


__all__ = ["Skip"]
