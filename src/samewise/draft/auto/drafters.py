"""What is measured of each drafter, and which drafter drafts for a sequence, and how far.

Host only; the clock is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from samewise.draft.auto.explain import DecisionLog
from samewise.draft.base import Drafter
from samewise.draft.cost_model import AcceptanceRate, CostCurve, FrameCosts, expected_tokens
from samewise.draft.tuning import DEFAULTS, Tuning
from samewise.types import Ask, Proposal, Verdict


class MeasuredDrafter:
    """A drafter, the seconds of its passes by number of sequences, and the acceptance of its drafts."""

    def __init__(self, drafter: Drafter, tuning: Tuning = DEFAULTS) -> None:
        self.drafter, self._tuning = drafter, tuning
        self._revision = 0
        self._reset()

    def _reset(self) -> None:
        auto, costs = self._tuning.auto, self._tuning.cost_model
        hits = auto.drafter_prior * auto.drafter_prior_trials
        self.cost = CostCurve(costs)
        self.rate = AcceptanceRate(hits, auto.drafter_prior_trials, costs.rate_memory)
        self.last_trial = -math.inf  # step
        self._sizes: set[int] = set()  # numbers of sequences it has drafted for

    def refresh(self) -> None:
        """Drop the measurements if it drafts with something else now."""
        if self.drafter.revision != self._revision:
            self._revision = self.drafter.revision
            self._reset()

    def observe_pass(self, live: int, seconds: float) -> None:
        """Add one pass. The first of a size may have compiled or captured something and is not counted."""
        if live in self._sizes:
            self.cost.observe(live, seconds)
        self._sizes.add(live)


class DrafterChoice(NamedTuple):
    """A drafter for the next drafts, how far they go, and the tokens that each is expected to commit."""

    measured: MeasuredDrafter
    num_tokens: int
    gain: float  # tokens per second over what is had without; 0.0: a trial
    expected: float


class DrafterSelector:
    """Assigns drafters to sequences where they are measured to pay, runs them and measures them."""

    def __init__(
        self,
        drafters: list[Drafter],
        frames: FrameCosts,
        clock: Callable[[], float],
        max_tokens: int,
        log: DecisionLog,
        tuning: Tuning = DEFAULTS,
    ) -> None:
        self._frames, self._clock, self._max_tokens, self._log = frames, clock, max_tokens, log
        self._tuning = tuning
        self._drafters = {drafter.name: MeasuredDrafter(drafter, tuning) for drafter in drafters}
        self._own_rates: dict[int, dict[str, AcceptanceRate]] = {}  # of each sequence, by drafter
        self._targets: dict[int, tuple[str, int]] = {}  # a sequence's drafter and its draft's full length

    @property
    def any_ready(self) -> bool:
        """Whether any drafter could draft."""
        return any(measured.drafter.ready for measured in self._drafters.values())

    @property
    def busy(self) -> bool:
        """Whether any drafter has work of its own to do, or drafts for a sequence."""
        return bool(self._targets) or any(measured.drafter.busy for measured in self._drafters.values())

    def has_target(self, asks: list[Ask]) -> bool:
        """Whether a drafter is assigned to any of these."""
        return any(ask.seq_id in self._targets for ask in asks)

    # ---- each step

    def on_step(self, asks: list[Ask]) -> None:
        """Let every drafter do its own work."""
        for measured in self._drafters.values():
            measured.drafter.on_step(asks)
            measured.refresh()

    def assign(self, choice: DrafterChoice, asks: list[Ask], live: int) -> None:
        """Let the chosen drafter make the next drafts of these sequences, which have none.

        A trial is of few, those with the shortest texts: a draft model reads a text before it drafts.
        """
        if not choice.gain:
            asks = sorted(asks, key=lambda ask: len(ask.tokens))[: self._tuning.auto.trial_sequences]
        measured = choice.measured
        measured.last_trial = self._log.step
        name, lengths = measured.drafter.name, dict[float, int]()
        for ask in asks:
            num_tokens = choice.num_tokens
            if choice.gain:
                rate = round(self._rate_of(ask.seq_id, measured), 2)
                if rate not in lengths:
                    lengths[rate] = self._best_length(measured, live, rate)[0]
                num_tokens = lengths[rate]
            self._targets[ask.seq_id] = (name, min(num_tokens, ask.room))
        self._log.counts[name] += len(asks)

    def draft(self, asks: list[Ask]) -> list[Proposal]:
        """One call of every drafter that has sequences to draft for."""
        proposals: list[Proposal] = []
        for name, measured in self._drafters.items():
            assigned = []
            for ask in asks:
                drafter, num_tokens = self._targets.get(ask.seq_id, ("", 0))
                if drafter == name and len(ask.draft) < num_tokens:
                    assigned.append(ask._replace(room=min(ask.room, num_tokens - len(ask.draft))))
            if not assigned:
                continue
            began = self._clock()
            drafted = measured.drafter.propose(assigned)
            if num_passes := measured.drafter.passes_of(drafted):
                measured.observe_pass(len(assigned), (self._clock() - began) / num_passes)
            room = {ask.seq_id: ask.room for ask in assigned}
            proposals += [p._replace(more=p.more and len(p.tokens) < room[p.seq_id]) for p in drafted]
        return proposals

    # ---- the choice

    def choose(self, live: int, plain: float) -> DrafterChoice | None:
        """The drafter that brings most tokens per second, or one that is due for a trial.

        None where `plain`, what is had without a drafter, is as much.
        """
        tuning = self._tuning.auto
        best: DrafterChoice | None = None
        if not self._frames.known:
            return None
        for measured in self._drafters.values():
            if not measured.drafter.ready:
                continue
            if self._due_for_trial(measured, live, plain):
                num_sequences = min(live, tuning.trial_sequences)
                self._log.explain("%s is tried for %d sequences", measured.drafter.name, num_sequences)
                num_tokens = min(tuning.trial_tokens, self._max_tokens)
                return DrafterChoice(measured, num_tokens, 0.0, num_tokens)
            if not measured.cost.known:
                continue
            num_tokens, throughput = self._best_length(measured, live, measured.rate.value)
            gain = throughput - plain
            if throughput > plain * tuning.min_speedup and (best is None or gain > best.gain):
                expected = expected_tokens(measured.rate.value, num_tokens)
                best = DrafterChoice(measured, num_tokens, gain, expected)
        if self._drafters:
            name, num_tokens, gain = ("no drafter", 0, 0.0)
            if best is not None:
                name, num_tokens, gain = best.measured.drafter.name, best.num_tokens, best.gain
            self._log.explain(
                "%s drafts %d for %d sequences; %.1f tokens/s without, %.1f more with",
                name, num_tokens, live, plain, gain,
            )  # fmt: skip
        return best

    def _best_length(self, measured: MeasuredDrafter, live: int, rate: float) -> tuple[int, float]:
        """The draft length with most tokens per second at this acceptance, and that throughput."""
        a_pass = measured.cost.at(live)
        throughputs = [
            (live * expected_tokens(rate, k) / (k * a_pass + self._frames.cost(live * (k + 1))), k)
            for k in range(1, self._max_tokens + 1)
        ]
        throughput, k = max(throughputs, key=lambda pair: pair[0])
        return k, throughput

    def _due_for_trial(self, measured: MeasuredDrafter, live: int, plain: float) -> bool:
        """Whether its last trial is long ago, and it would pay if all its tokens were accepted."""
        tuning, timed = self._tuning.auto, measured.cost.known
        interval = tuning.retry_steps if timed else tuning.retry_steps_untimed
        if self._log.step - measured.last_trial < interval:
            return False
        return not timed or self._best_length(measured, live, 1.0)[1] > plain * tuning.min_speedup

    def _rate_of(self, seq_id: int, measured: MeasuredDrafter) -> float:
        """A drafter's acceptance in this sequence, mixed with that in all by the number of trials."""
        overall, own = measured.rate.value, self._own_rates.get(seq_id, {}).get(measured.drafter.name)
        if own is None or not own.trials:
            return overall
        weight = own.trials / (own.trials + self._tuning.auto.own_rate_trials)
        return weight * own.value + (1 - weight) * overall

    # ---- learning

    def observe(self, verdicts: list[Verdict]) -> None:
        """Learn from verdicts on drafts; a sequence whose draft was verified is assigned anew."""
        for verdict in verdicts:
            if not verdict.guessed:
                continue
            _, num_tokens = self._targets.pop(verdict.seq_id, ("", verdict.guessed))
            measured = self._drafters.get(verdict.drafter)
            if measured is not None:
                drafted = min(verdict.guessed, num_tokens)  # leaves beside the chain are no further levels
                measured.rate.observe(drafted, verdict.accepted)
                memory = self._tuning.cost_model.sequence_rate_memory
                own = self._own_rates.setdefault(verdict.seq_id, {})
                rate = own.setdefault(verdict.drafter, AcceptanceRate(0.0, 0.0, memory))
                rate.observe(drafted, verdict.accepted)
        for measured in self._drafters.values():
            measured.drafter.observe(verdicts)

    def forget(self, seq_id: int) -> None:
        """Drop a sequence."""
        self._own_rates.pop(seq_id, None)
        self._targets.pop(seq_id, None)
        for measured in self._drafters.values():
            measured.drafter.forget(seq_id)

    def recover(self) -> None:
        """Drop all sequences."""
        self._own_rates, self._targets = {}, {}
        for measured in self._drafters.values():
            measured.drafter.recover()

    def renew(self, contract_id: str) -> None:
        """Pass on to every drafter."""
        for measured in self._drafters.values():
            measured.drafter.renew(contract_id)

    def warm(self, max_num_seqs: int) -> None:
        """Pass on to every drafter."""
        for measured in self._drafters.values():
            measured.drafter.warm(max_num_seqs)

    def report(self) -> dict[str, Any]:
        """Seconds of a pass by number of sequences, and acceptance, of every drafter."""
        return {
            name: {"seconds": measured.cost.table(), "acceptance": measured.rate.value}
            for name, measured in self._drafters.items()
        }

    def stats(self) -> dict[str, dict[str, Any]]:
        """The drafters' own reports."""
        drafters = [measured.drafter for measured in self._drafters.values()]
        return {name: report for drafter in drafters for name, report in drafter.stats().items()}


__all__ = ["DrafterChoice", "DrafterSelector", "MeasuredDrafter"]
