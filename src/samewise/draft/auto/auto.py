"""The proposer `auto`: suffix matches, a drafter, or nothing, whichever commits most tokens per second.

Every decision comes from measurements: seconds of a frame by its rows, seconds of a drafter's pass, and the
acceptance of earlier drafts. A drafted token is verified where the tokens it is expected to bring are worth
more than its row's time; padding rows are free. Host only; the clock is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from samewise.draft.auto.drafters import DrafterSelector
from samewise.draft.auto.explain import DecisionLog
from samewise.draft.auto.idle_policy import IdlePolicy
from samewise.draft.auto.matches import MatchEstimates, num_worth_verifying
from samewise.draft.base import Drafter, Proposer
from samewise.draft.cost_model import FrameCosts
from samewise.draft.ngram import Ngram
from samewise.draft.tuning import DEFAULTS, Tuning
from samewise.types import Ask, Proposal, Verdict


class Auto(Proposer):
    """Picks proposer and draft length per sequence and step.

    `ahead`: frames are launched ahead where no drafts are made, so asking has a price and may pause.
    """

    name = "auto"

    def __init__(
        self,
        ngram: Ngram,
        drafters: list[Drafter],
        frames: FrameCosts,
        clock: Callable[[], float],
        *,
        max_tokens: int = 16,
        ahead: bool = False,
        explain: bool = False,
        tuning: Tuning = DEFAULTS,
    ) -> None:
        self._ngram, self._frames, self._clock, self._max_tokens = ngram, frames, clock, max_tokens
        self._tuning = tuning.auto
        self._log = DecisionLog(explain=explain)
        self._drafters = DrafterSelector(drafters, frames, clock, max_tokens, self._log, tuning)
        self._matches = MatchEstimates(tuning)
        self._idle = IdlePolicy(clock, tuning) if ahead else None
        self._match_lengths: dict[int, int] = {}  # of the match that a sequence's draft came from
        self._waited_steps = 0  # steps in a row in which an assigned drafter drafted nothing
        self._live: set[int] = set()  # sequences of the last frame
        self._unverified: set[int] = set()  # sequences with drafts whose verdict is not in

    @property
    def quiet(self) -> bool:
        """True during a pause, once all drafts are verified."""
        return self._idle is not None and self._idle.pausing and not self._unverified

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """Suffix matches first, then drafters for the other sequences, as far as they pay."""
        self._log.step += 1
        began = self._clock()
        self._drafters.on_step(asks)
        if self._idle is not None:
            self._idle.exclude(self._clock() - began)
        fresh = [ask for ask in asks if not ask.draft]
        proposals = self._propose_matches(fresh, len(asks))
        matched = {proposal.seq_id for proposal in proposals}
        self._drafters.assign([ask for ask in fresh if ask.seq_id not in matched], len(asks))
        proposals += self._drafters.draft([ask for ask in asks if ask.seq_id not in matched])
        self._unverified.update(proposal.seq_id for proposal in proposals)
        if self._idle is not None and asks:
            self._pause_if_idle(self._idle, asks, proposals)
        return proposals

    def _propose_matches(self, asks: list[Ask], live: int) -> list[Proposal]:
        """Drafts from suffix matches: the likeliest tokens of all sequences, as many as pay for rows."""
        matches = [(ask, match) for ask in asks if (match := self._ngram.find(ask)) is not None]
        if not matches:
            if asks:
                self._log.explain("no suffix match in %d sequences", len(asks))
            return []
        candidates: list[tuple[float, int, int]] = []  # chance, -index in its draft, sequence
        for ask, match in matches:
            num = min(len(match.tokens), ask.room, self._max_tokens)
            for i, chance in enumerate(self._matches.token_chances(ask.seq_id, match.length, num)):
                candidates.append((chance, -i, ask.seq_id))
        candidates.sort(reverse=True)
        chances = [chance for chance, _, _ in candidates]
        min_gain = 0.0 if self._idle is None else self._idle.price(live)
        num = num_worth_verifying(chances, live, self._frames, self._tuning.price_factor, min_gain)
        draft_lens = Counter(seq_id for _, _, seq_id in candidates[:num])
        proposals = []
        for ask, match in matches:
            if draft_lens[ask.seq_id]:
                self._match_lengths[ask.seq_id] = match.length
                tokens = match.tokens[: draft_lens[ask.seq_id]]
                proposals.append(Proposal(ask.seq_id, tokens, drafter=self._ngram.name))
        self._log.counts[self._ngram.name] += len(proposals)
        self._log.explain(
            "%d of %d sequences match; %d tokens drafted beside a frame of %.2f ms",
            len(matches), live, num, self._frames.cost(live) * 1e3,
        )  # fmt: skip
        return proposals

    def meet(self, asks: list[Ask]) -> None:
        """Index the prompts; a drafter that is ready may draft for them, so a pause ends."""
        self._ngram.meet(asks)
        if self._idle is not None and self._drafters.any_ready:
            self._idle.wake()

    def observe(self, verdicts: list[Verdict]) -> None:
        """Learn acceptance and costs; during a pause, match the committed text."""
        self._unverified.difference_update(verdict.seq_id for verdict in verdicts)
        for verdict in verdicts:
            if verdict.guessed and verdict.drafter == self._ngram.name:
                length = self._match_lengths.get(verdict.seq_id, 0)
                self._matches.observe_draft(verdict.seq_id, length, verdict.guessed, verdict.accepted)
        self._drafters.observe(verdicts)
        if self._idle is not None:
            prefill = not all(verdict.tokens for verdict in verdicts)
            self._idle.landed(len(verdicts), prefill=prefill)
            self._live = {verdict.seq_id for verdict in verdicts}
            if self._idle.pausing:
                self._log.step += 1
                self._wake_for_matches(self._idle, verdicts)

    def forget(self, seq_id: int) -> None:
        """Drop a sequence."""
        self._matches.forget(seq_id)
        self._match_lengths.pop(seq_id, None)
        self._unverified.discard(seq_id)
        self._ngram.forget(seq_id)
        self._live.discard(seq_id)
        if self._idle is not None and not self._live:
            self._idle.interrupted()
        self._drafters.forget(seq_id)

    def recover(self) -> None:
        """Drop all sequences, and end a pause."""
        self._matches.recover()
        self._ngram.recover()
        self._match_lengths, self._live, self._unverified = {}, set(), set()
        self._waited_steps = 0
        if self._idle is not None:
            self._idle.wake()
            self._idle.interrupted()
        self._drafters.recover()

    def renew(self, contract_id: str) -> None:
        """Pass on to every drafter."""
        self._drafters.renew(contract_id)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Decisions and measurements so far, and the reports of the drafters."""
        idle = self._idle
        report = {
            "decisions": dict(self._log.counts),
            "frame_seconds": self._frames.curve.table(),
            "drafters": self._drafters.report(),
            "match_acceptance": self._matches.table(),
            "rest": None if idle is None else idle.stats(max(1, len(self._live))),
        }
        return {self.name: report} | self._drafters.stats()

    # ---- pauses, where frames are launched ahead

    def _pause_if_idle(self, idle: IdlePolicy, asks: list[Ask], proposals: list[Proposal]) -> None:
        assigned = self._drafters.has_target(asks)
        self._waited_steps = 0 if proposals else self._waited_steps + assigned
        waiting = assigned and self._waited_steps <= self._tuning.max_wait_steps
        idle.asked(drafted=bool(proposals) or any(ask.draft for ask in asks) or waiting)
        if idle.pausing:
            self._log.explain("nothing to propose; pausing")

    def _wake_for_matches(self, idle: IdlePolicy, verdicts: list[Verdict]) -> None:
        """Match what was committed: learn from it, and ask again where a match is worth it."""
        expected = 0.0
        for verdict in verdicts:
            if not verdict.tokens:
                continue
            match = self._ngram.track(verdict.seq_id, verdict.tokens, verdict.kv_len + 1)
            if match.previous is not None:
                length, right = match.previous
                self._matches.observe(verdict.seq_id, length, right=right)
            if match.length:
                num = self._max_tokens
                expected += self._matches.expected_after_next(verdict.seq_id, match.length, num)
        idle.wake_if_worth(len(verdicts), expected)
        if not idle.pausing:
            self._log.explain(
                "asking again; %.2f accepted tokens expected, asking adds %.2f ms to a frame",
                expected, idle.price(len(verdicts)) * 1e3,
            )  # fmt: skip


__all__ = ["Auto"]
