"""SWIFT's phase 1, context-based layer-set optimisation, driven while requests are answered.

*Accumulate*: nothing is skipped until there is text to score on. *Optimise*: every few committed tokens,
within a bounded share of the time, the search suggests candidates, and candidates and incumbent are scored on
the same text. When the search ends, phase 2 (*accelerate*) goes on alone. The search opens again when first
tokens are accepted clearly less often than before, or, where it had found nothing, after ever longer pauses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from samewise.counters import Counters
from samewise.draft.cost_model import FrameCosts
from samewise.draft.skip.active_set import ActiveSet
from samewise.draft.skip.budget import SearchBudget
from samewise.draft.skip.layer_set_store import LayerSetStore
from samewise.draft.skip.pricing import PassPricing
from samewise.draft.skip.recent_text import TextPiece
from samewise.draft.skip.score_layer_set import LayerSetScorer
from samewise.draft.skip.search import Search
from samewise.draft.skip.timeline import ACCELERATE, ACCUMULATE, OPTIMISE, Event, Timeline
from samewise.draft.tuning import DEFAULTS, Tuning
from samewise.types import Ask, LayerSet

log = logging.getLogger("samewise.skip")


class LayerSetOptimiser:
    """Runs the search, puts its incumbent to use, and notices when the set no longer fits the text.

    `frame_is_full_pass`: a frame has no more rows than are used, so its seconds are those of a full pass.
    `in_advance`: a short first round need not wait until its share of the time was saved.
    """

    def __init__(
        self,
        search: Search,
        scorer: LayerSetScorer,
        active: ActiveSet,
        pricing: PassPricing,
        store: LayerSetStore,
        frames: FrameCosts,
        counters: Counters,
        clock: Callable[[], float],
        *,
        frame_is_full_pass: bool,
        in_advance: bool = True,
        tuning: Tuning = DEFAULTS,
    ) -> None:
        self.search, self.scorer, self.store = search, scorer, store
        self._active, self._pricing = active, pricing
        self._frames, self._counters, self._clock = frames, counters, clock
        self._frame_is_full_pass, self._in_advance, self._tuning = frame_is_full_pass, in_advance, tuning
        self.budget = SearchBudget(tuning.search)
        self.timeline = Timeline(tuning.skip.max_events)
        self._texts: dict[int, tuple[list[int], int]] = {}  # tokens and prompt length of live sequences
        self._scored_at = 0  # committed tokens at the last score
        self._num_sets = 0  # candidates scored by all searches
        self._lacks_text = False  # there was too little to score on, at the last step
        self._informed = self._loaded = False  # hidden states were looked at; the store was read
        self._num_broken = 0  # sets dropped since one held
        self._retry_tokens = tuning.search.retry_tokens  # pause after a search that found nothing
        self._retry_at: float = math.inf  # committed tokens
        self._record(ACCUMULATE)

    @property
    def due(self) -> bool:
        """Whether a scoring step is due and affordable; with the search closed, whether to open it again."""
        num_tokens = self._counters.output_tokens
        if not self.search.open:
            return num_tokens >= self._retry_at
        return num_tokens - self._scored_at >= self._tuning.search.every and self._affordable

    @property
    def _step_seconds(self) -> float:
        """Expected seconds of a scoring step."""
        first = self._tuning.search.first_step_factor * self._frames.cost(self.scorer.num_rows)
        return self.budget.step_seconds or first

    @property
    def _affordable(self) -> bool:
        """Whether the time of a step was saved, or a first round takes so little that it need not be."""
        tuning, step = self._tuning.search, self._step_seconds
        round_seconds = tuning.min_rounds / self.scorer.batch * step
        in_first_round = self.search.round < tuning.min_rounds
        in_advance = self._in_advance and in_first_round and round_seconds <= tuning.max_first_round
        return self.budget.saved >= step or in_advance

    def tick(self) -> None:
        """Let the budget grow with time."""
        self.budget.tick(self._clock(), searching=self.search.open)

    def on_step(self, asks: list[Ask]) -> None:
        """One step of the search, if it is due."""
        self.tick()
        for ask in asks:
            if ask.share_salt is not None:  # a request that shares no text leaves none behind
                self._texts[ask.seq_id] = (ask.tokens, ask.prompt_len)
        if self.due and not self.search.open:
            self._reopen()
            self._record(OPTIMISE)
        if asks and self.due and self._frames.known:
            pieces = self.scorer.text.gather(asks)
            self._scored_at, self._lacks_text = self._counters.output_tokens, not pieces
            if pieces:
                self._prepare(pieces)
                self._score_candidates(asks, pieces)
            self.budget.charge(self._clock(), scored=bool(pieces))

    def forget(self, seq_id: int) -> None:
        """The sequence has ended: its text may be scored on later."""
        text = self._texts.pop(seq_id, None)
        if text is not None:
            self.scorer.text.add_answer(*text)

    def recover(self) -> None:
        """Drop all sequences, and draft with the search's incumbent, of which nothing is measured yet."""
        self._texts = {}
        self.scorer.recover()
        self._use()

    # ---- a round of the search

    def _prepare(self, pieces: list[TextPiece]) -> None:
        """Before the first step: capture the pass (not counted as searching), and look at hidden states."""
        if not self._informed:
            self.warm()
            self._inform(pieces)
            self.budget.charge(self._clock(), scored=False)

    def warm(self) -> None:
        """Prepare the scoring passes."""
        self.scorer.warm()
        self.budget.exclude(self._clock())

    def _score_candidates(self, asks: list[Ask], pieces: list[TextPiece]) -> None:
        search, live = self.search, len(asks)
        self._pricing.set_context(sum(len(ask.tokens) for ask in asks))
        if self._frame_is_full_pass:
            self._pricing.observe_full_pass(live, self._frames.cost(live))
        elif not self._pricing.known:
            self._pricing.observe_full_pass(live, self.scorer.time_full_pass(asks, self._clock))
        prices, incumbent = self._pricing.prices(live), search.best.skipped
        candidates = search.suggest_several(prices, self.scorer.num_candidates(pieces, incumbent))
        *scores, own_score = self.scorer.score(pieces, [*candidates, incumbent])
        rates = [(candidate, score.rate) for candidate, score in zip(candidates, scores, strict=True)]
        won = search.score_several(rates, own_score.rate, own_score.num_targets, prices)
        self._num_sets += len(candidates)
        if incumbent and not won and self._active.is_broken(own_score.rate, own_score.num_targets):
            self._drop()
            return
        if search.best.skipped != incumbent:
            log.info("layer set: skip %s (%.0f%% right)", search.best.skipped, 100 * search.best.rate)
            self._use()
            self._save()
        best_score = scores[candidates.index(search.best.skipped)] if won else own_score
        for confidence, right in best_score.confidences:
            self._active.greedy.observe(confidence, right=right)
        self._record(OPTIMISE)
        if not search.open:
            self._active.restart()
            self._active.promised = search.best.rate
            self._record(ACCELERATE)
            self._save()
            self._plan_retry()

    def _inform(self, pieces: list[TextPiece]) -> None:
        """Look at the hidden states once, and take the set that an earlier process found as incumbent."""
        self._informed = True
        self.search.inform(self.scorer.residual_shares(pieces[:1]))  # for a hint one piece is enough
        if self._loaded or self._active.ready:
            return
        self._loaded, stored = True, self.store.load()
        if stored is None:
            return
        if self.search.start_from(*stored):
            self._use()
        else:
            log.warning("ignoring a layer set of another model in the cache: %s", stored[0])

    def _use(self) -> None:
        """Draft with the search's incumbent from now on."""
        skipped = self.search.best.skipped
        self._active.use(self.scorer.path(skipped) if skipped else None)

    def _save(self) -> None:
        if self._active.ready:
            self.store.save(self.search.best.skipped, self.search.best.rate)

    # ---- when the set no longer fits

    def check_acceptance(self) -> None:
        """After verdicts: drop a set that breaks its promise; search again where acceptance has fallen."""
        active, tuning = self._active, self._tuning.skip
        if not active.ready or not active.measured:
            return
        rate, trials = active.first_tokens.value, active.first_tokens.trials
        if active.is_broken(rate, trials):
            self._drop()
        elif active.has_fallen():
            self.scorer.text.forget_answers()  # they were about another topic
            self._reopen()
            active.promised = rate
            self._record(OPTIMISE)
        else:
            if active.usual_rate is None and not self.search.open:
                active.usual_rate = rate
            if trials >= tuning.num_holding_tokens:
                self._num_broken = 0

    def _drop(self) -> None:
        """Skip nothing and search again; after several sets in a row that did not hold, only later."""
        self.scorer.text.forget_answers()
        self._reopen()
        self.search.drop()
        self._use()
        self._num_broken += 1
        if self._num_broken < self._tuning.skip.max_broken_sets:
            self._record(OPTIMISE)
            return
        self._num_broken = 0
        self.search.close(f"{self._tuning.skip.max_broken_sets} sets in a row did not hold")
        self._record(ACCELERATE)
        self._plan_retry()

    def _reopen(self) -> None:
        if not self.search.open:
            self.budget.saved = min(self.budget.saved, 0.0)
        self.search.reopen()
        self._informed, self._retry_at = False, math.inf
        self._active.restart()

    def _plan_retry(self) -> None:
        """Where nothing was found, another text or fewer sequences may have something to gain."""
        tuning = self._tuning.search
        if self._active.ready:
            self._retry_tokens = tuning.retry_tokens
        else:
            self._retry_at = self._counters.output_tokens + self._retry_tokens
            self._retry_tokens = min(2 * self._retry_tokens, tuning.max_retry_tokens)

    # ---- from outside

    def fix(self, skipped: LayerSet, rate: float) -> None:
        """Draft with this set without a search; search only if its acceptance falls."""
        self.search.fix(skipped, rate)
        self._use()
        self._active.usual_rate = rate
        self._record(ACCELERATE)

    def renew(self, contract_id: str) -> None:
        """After replaced weights everything found before must be scored again."""
        first, self.store.contract_id = self.store.contract_id is None, contract_id
        if first:
            return
        self._informed = self._loaded = False
        self._retry_tokens, self._retry_at = self._tuning.search.retry_tokens, math.inf
        self._active.restart()
        if self.timeline.phase != ACCUMULATE:
            self.search.reopen()
            self.scorer.text.forget_answers()
            self._record(ACCUMULATE)

    def report(self) -> dict[str, Any]:
        """For stats()["skip"]["search"]."""
        budget, num_tokens = self.budget, self._counters.output_tokens
        return {
            "rounds": self.search.round,  # sets scored since it was opened
            "open": self.search.open,
            "ended": self.search.ended or None,
            "sets": self._num_sets,  # scored in all
            "tokens": num_tokens,
            "sets_per_1000_tokens": 1000 * self._num_sets / num_tokens if num_tokens else 0.0,
            "sets_per_step": self.scorer.batch,
            "step_seconds": budget.step_seconds,
            "waits_for": self._waits_for,
            "seconds": budget.spent,
            "share": budget.spent / budget.active if budget.active else 0.0,
        }

    @property
    def _waits_for(self) -> str | None:
        """What the next step waits for, in words; None: for nothing, or the search has ended for good."""
        tuning, num_tokens = self._tuning.search, self._counters.output_tokens
        if not self.search.open:
            pause = self._retry_at - num_tokens
            return f"{pause} more tokens: nothing that pays was found" if math.isfinite(pause) else None
        if not self._frames.known:
            return "a first frame: its time is not known"
        if not self._affordable:
            saved, step = 1e3 * self.budget.saved, 1e3 * self._step_seconds
            return f"time: {saved:.1f} ms saved of {step:.1f} for a step, at {tuning.share:.0%} of the time"
        if self._lacks_text:
            return f"text: fewer than {tuning.min_targets} tokens committed lately can be scored on"
        left = tuning.every - (num_tokens - self._scored_at)
        return f"{left} more tokens" if left > 0 else None

    def _record(self, phase: str) -> None:
        best = self.search.best
        num_tokens = self._counters.output_tokens
        self.timeline.add(Event(phase, num_tokens, best.throughput, best.rate, best.skipped))


__all__ = ["LayerSetOptimiser"]
