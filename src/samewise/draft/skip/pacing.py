"""SWIFT's phase 2, confidence-aware acceleration: how far drafts go, and where they have alternatives.

The confidence of a drafted token is translated into a chance of acceptance by how often tokens of such
confidence were accepted. A draft keeps its tokens while they are worth a row in the frame; drafts get another
pass together, the likeliest first, as many as pay for it. A draft is a chain while it grows. When it is
complete, alternatives to its unsure tokens are added as leaves of a tree, if a row costs less than the token
that it may bring. No fixed threshold: it follows acceptance, costs and load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from samewise.draft.cost_model import AcceptanceRate, Calibration
from samewise.draft.skip.active_set import ActiveSet
from samewise.draft.skip.confidence import TokenChoices
from samewise.draft.skip.pricing import PassPricing
from samewise.draft.tuning import DEFAULTS, Tuning
from samewise.types import Ask, Proposal, Verdict


class _Alternative(NamedTuple):
    """Another token that may follow the first `place` tokens of a draft."""

    gain: float  # the chance that these hold and this one follows
    place: int
    token: int
    rank: int  # among the alternatives at that place


@dataclass(slots=True)
class _Draft:
    """What is known of a sequence's draft until its verdict."""

    revision: int  # of the set it is made with
    sampled: bool
    tokens: list[int] = field(default_factory=list)  # the chain, without alternatives
    confidences: list[float] = field(default_factory=list)
    reach: float = 1.0  # the chance that all its tokens are accepted
    alternatives: list[_Alternative] = field(default_factory=list)
    num_offered: int = 0  # of the alternatives


class ConfidencePacing:
    """Owns the outstanding drafts of `skip`; cuts and extends them, and adds alternatives."""

    def __init__(
        self, active: ActiveSet, pricing: PassPricing, chain: int, tuning: Tuning = DEFAULTS
    ) -> None:
        self._active, self._pricing, self._chain, self._tuning = active, pricing, chain, tuning.skip
        self._drafts: dict[int, _Draft] = {}
        trials, memory = self._tuning.alternative_prior_trials, tuning.cost_model.rate_memory
        hits = self._tuning.alternative_prior * trials
        self._by_rank = [
            AcceptanceRate(hits / (i + 1), trials, memory) for i in range(self._tuning.num_alternatives)
        ]
        self.num_alternatives = 0  # that were verified
        self._min_gain = 0.0  # tokens that one more drafted token must bring, where all drafts are alike

    @property
    def has_drafts(self) -> bool:
        """Whether any draft awaits its verdict."""
        return bool(self._drafts)

    @property
    def threshold(self) -> float:
        """The confidence from which on a greedy token is worth drafting now."""
        chance = self._min_gain / max(self._active.typical_chance, 1e-9)
        return self._active.greedy.min_confidence(chance)

    def admit(self, asks: list[Ask]) -> list[Ask]:
        """The asks that may be drafted for: new drafts, and those that the set in use began.

        Another set left other KV behind, so its drafts end where they are.
        """
        revision, drafts = self._active.revision, self._drafts
        for ask in asks:
            if not ask.draft:
                drafts[ask.seq_id] = _Draft(revision, ask.sampling.temperature > 0)
        return [a for a in asks if (d := drafts.get(a.seq_id)) is not None and d.revision == revision]

    def pace(
        self, asks: list[Ask], proposals: list[Proposal], choices: dict[int, list[TokenChoices]]
    ) -> list[Proposal]:
        """Cut each proposal to the tokens worth a row, decide which drafts go on, complete the others."""
        active, pricing = self._active, self._pricing
        rows = sum(len(draft.confidences) + 1 for draft in self._drafts.values())
        throughput = pricing.throughput(active.skipped, len(self._drafts), active.typical_chance)
        num_new = sum(len(proposal.tokens) for proposal in proposals)
        min_chance = throughput * pricing.row_seconds(rows, num_new)
        paced: list[Proposal] = []
        for ask, proposal in zip(asks, proposals, strict=True):
            num = self._extend(self._drafts[ask.seq_id], proposal.tokens, choices[ask.seq_id], min_chance)
            rows += num
            open_end = proposal.tokens[-1] not in ask.sampling.stop_ids
            more = num == len(proposal.tokens) < ask.room and open_end
            paced.append(proposal._replace(tokens=proposal.tokens[:num], more=more))
        going_on = self._going_on([proposal.seq_id for proposal in paced if proposal.more], rows, throughput)
        for i, (ask, proposal) in enumerate(zip(asks, paced, strict=True)):
            if proposal.seq_id in going_on:
                continue
            draft = self._drafts[proposal.seq_id]
            picked = self._pick(draft, ask.max_nodes - len(proposal.tokens), rows, throughput)
            draft.num_offered = len(picked)
            rows += len(picked)
            paced[i] = _with_alternatives(proposal, len(ask.draft), picked)
        return paced

    def _extend(
        self, draft: _Draft, tokens: tuple[int, ...], choices: list[TokenChoices], min_chance: float
    ) -> int:
        """Add tokens to a draft while it is likely enough to hold; how many were added.

        The first token of a draft is always kept: its acceptance shows how good the set is.
        """
        calibration = self._calibration(draft)
        for num, (token, (ids, confidences)) in enumerate(zip(tokens, choices, strict=True)):
            confidence = dict(zip(ids, confidences, strict=True)).get(token, 0.0)
            chance, reach, place = calibration.chance(confidence), draft.reach, len(draft.confidences)
            if chance < self._tuning.sure_chance:
                others = [other for other in ids if other != token][: self._tuning.num_alternatives]
                for rank, (other, rate) in enumerate(zip(others, self._by_rank, strict=False)):
                    gain = reach * (1.0 - chance) * rate.value
                    draft.alternatives.append(_Alternative(gain, place, other, rank))
            if place and reach * chance < min_chance:
                return num
            draft.tokens.append(token)
            draft.confidences.append(confidence)
            draft.reach *= chance
        return len(tokens)

    def _going_on(self, seq_ids: list[int], rows: int, throughput: float) -> set[int]:
        """The sequences whose drafts get another pass: the likeliest, as many as pay for it together."""
        active, pricing, drafts = self._active, self._pricing, self._drafts
        order = sorted(seq_ids, key=lambda seq_id: -drafts[seq_id].reach)
        reaches = [drafts[seq_id].reach for seq_id in order]
        chance = active.typical_chance
        num = pricing.num_worth_another_pass(active.skipped, reaches, chance, rows, throughput, self._chain)
        if order:
            a_pass = pricing.pass_seconds(active.skipped, len(order)) / len(order)
            self._min_gain = throughput * (a_pass + pricing.row_seconds(rows, len(order)))
        return set(order[:num])

    def _pick(self, draft: _Draft, max_nodes: int, rows: int, throughput: float) -> list[_Alternative]:
        """Alternatives whose row costs less than the token they may bring is worth, in depth-first order."""
        ranked = sorted(draft.alternatives, key=lambda a: (-a.gain, a.place, a.token))
        picked: list[_Alternative] = []
        for alternative in ranked[: max(0, min(max_nodes, self._tuning.max_leaves))]:
            price = self._pricing.row_seconds(rows + len(picked), 1) * throughput
            if alternative.gain < max(self._tuning.min_leaf_chance, price):
                break
            picked.append(alternative)
        return sorted(picked, key=lambda a: (-a.place, a.rank))

    # ---- learning

    def observe(self, verdict: Verdict, *, own: bool) -> None:
        """Close the sequence's draft; if `own`, the verdict is about it: learn from it."""
        draft = self._drafts.pop(verdict.seq_id, None)
        if draft is None or not own:
            return
        self.num_alternatives += draft.num_offered
        if draft.revision != self._active.revision:
            return
        accepted = zip(draft.tokens, verdict.tokens[: verdict.accepted], strict=False)
        num_held = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], accepted))
        calibration = self._calibration(draft)
        for i, confidence in enumerate(draft.confidences[: min(num_held + 1, verdict.guessed)]):
            calibration.observe(confidence, right=i < num_held)
        for alternative in draft.alternatives:  # offered or not
            if alternative.place == num_held < min(len(verdict.tokens), len(draft.confidences)):
                right = alternative.token == verdict.tokens[num_held]
                self._by_rank[alternative.rank].observe(1, int(right))
        self._active.first_tokens.observe(1, int(num_held > 0))

    def forget(self, seq_id: int) -> None:
        """Drop a sequence's draft."""
        self._drafts.pop(seq_id, None)

    def recover(self) -> None:
        """Drop all drafts."""
        self._drafts = {}

    def _calibration(self, draft: _Draft) -> Calibration:
        return self._active.sampled if draft.sampled else self._active.greedy


def _with_alternatives(proposal: Proposal, num_drafted: int, picked: list[_Alternative]) -> Proposal:
    """A complete draft of `num_drafted` tokens and this proposal's, with leaves beside its tokens."""
    if not picked:
        return proposal._replace(more=False)
    chain = range(num_drafted, num_drafted + len(proposal.tokens))
    return proposal._replace(
        tokens=(*proposal.tokens, *(leaf.token for leaf in picked)),
        parents=(*(node - 1 for node in chain), *(leaf.place - 1 for leaf in picked)),  # ROOT is -1
        more=False,
    )


__all__ = ["ConfidencePacing"]
