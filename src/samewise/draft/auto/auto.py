"""The proposer `auto`: draft trees, a drafter, or nothing, whichever commits most tokens per second.

Every decision comes from measurements: seconds of a frame by its rows, seconds of a drafter's pass, and the
acceptance of earlier drafts. A node is verified where the tokens it is expected to bring are worth more than
its row's time; padding rows are free. Host only; the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log1p
from typing import Any, NamedTuple

from samewise.draft.auto.drafters import DrafterSelector
from samewise.draft.auto.explain import DecisionLog
from samewise.draft.auto.idle_policy import IdlePolicy
from samewise.draft.base import Drafter, Proposer
from samewise.draft.cost_model import BroughtRatio, FrameCosts
from samewise.draft.tree import DraftTree, RowPrices
from samewise.draft.tree_proposer import RowPricing, TreeFollowUp, TreeProposer
from samewise.draft.tuning import DEFAULTS, Tuning
from samewise.follow_up import FrameToFollow
from samewise.types import Ask, Proposal, Verdict


class Brought(NamedTuple):
    """Tokens and seconds of a frame with drafts, in those of a frame without.

    `fair`: tokens as the geometric mean over sequences, which tells whether asking pays, as it tells for a
    node: what one sequence loses in pace counts as much as what another one gains.
    """

    tokens: float
    seconds: float
    fair: float


NOTHING = Brought(1.0, 1.0, 1.0)


class Auto(Proposer):
    """Picks proposer and draft size per sequence and step.

    `ahead`: frames are launched ahead where no drafts are made, so asking has a price and may pause.
    """

    name = "auto"

    def __init__(
        self,
        trees: TreeProposer,
        drafters: list[Drafter],
        frames: FrameCosts,
        clock: Callable[[], float],
        *,
        max_tokens: int = 16,
        ahead: bool = False,
        explain: bool = False,
        tuning: Tuning = DEFAULTS,
    ) -> None:
        self._trees, self._frames, self._clock = trees, frames, clock
        self._tuning = tuning.auto
        self._pricing = RowPricing(frames, self._tuning.price_factor)
        self.wants_candidates = trees.wants_candidates
        self._log = DecisionLog(explain=explain)
        self._drafters = DrafterSelector(drafters, frames, clock, max_tokens, self._log, tuning)
        prior = self._tuning.brought_prior
        self._ratio = BroughtRatio(prior, prior, self._tuning.brought_memory, self._tuning.max_brought)
        self._expected: dict[int, float] = {}  # accepted nodes expected of a sequence's tree in flight
        self._idle = IdlePolicy(clock, tuning) if ahead else None
        self._advantage = 1.0  # moving average: tokens per second with trees over those without
        self._unassigned_until = 0  # step up to which a drafter that would pay is taken to get no sequence
        self._waited_steps = 0  # steps in a row in which an assigned drafter drafted nothing
        self._live: set[int] = set()  # sequences of the last frame
        self._unverified: set[int] = set()  # sequences with drafts whose verdict is not in

    @property
    def quiet(self) -> bool:
        """True during a pause, once all drafts are verified."""
        return self._idle is not None and self._idle.pausing and not self._unverified

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """Trees for all sequences without a draft, or a drafter where that brings more."""
        self._log.step += 1
        began = self._clock()
        self._drafters.on_step(asks)
        self._exclude(began)
        fresh, live = [ask for ask in asks if not ask.draft], len(asks)
        trees, brought = self._grow(fresh, live)
        by_drafter = self._assign(fresh, trees, live, brought)
        began = self._clock()
        proposals = self._drafters.draft(asks)
        if proposals:
            self._exclude(began)
        if self._idle is not None and fresh:
            weighed = by_drafter if proposals else brought
            self._idle.weigh(weighed.fair, weighed.seconds)
        drafted = {proposal.seq_id for proposal in proposals}
        left = [
            (ask.seq_id, tree) for ask, tree in zip(fresh, trees, strict=True) if ask.seq_id not in drafted
        ]
        proposals += self._propose_trees([seq_id for seq_id, _ in left], [tree for _, tree in left])
        self._unverified.update([proposal.seq_id for proposal in proposals])
        if self._idle is not None and asks:
            self._pause_if_idle(self._idle, busy=self._is_drafting(asks, proposals))
        return proposals

    def plan_follow_up(self, frame: FrameToFollow) -> TreeFollowUp | None:
        """Trees; None in a pause, where costs are not known, and where a drafter works or may get a sequence.

        A drafter that pays on average may get none: the loop is slower, so that is asked again only at times.
        """
        live, frames = frame.num_judged, self._frames
        if self._idle is None or self._idle.pausing or not frames.known or self._drafters.busy:
            return None
        with_trees = live / frames.cost(live) * max(1.0, self._advantage)
        due = self._log.step >= self._unassigned_until
        if due and self._drafters.choose(live, with_trees) is not None:
            return None
        prices = self._prices(live, live * frame.max_nodes, len(frame.next_inputs))
        return self._trees.follow(frame, prices, frame.max_nodes)

    def take_follow_up(self) -> list[Proposal]:
        """The trees as proposals, and what they are expected to bring taken down."""
        self._log.step += 1
        frame, trees, expected = self._trees.take_trees()
        live = frame.num_judged
        brought = self._brought_by(live, trees, expected, len(frame.next_inputs))
        self._explain(live, trees, expected, brought)
        self._advantage += self._tuning.trees_weight * (brought.tokens / brought.seconds - self._advantage)
        proposals = self._propose_trees(frame.seq_ids, trees)
        self._unverified.update([proposal.seq_id for proposal in proposals])
        if self._idle is not None:
            self._idle.weigh(brought.fair, brought.seconds)
            self._pause_if_idle(self._idle, busy=False)
        return proposals

    def _exclude(self, began: float) -> None:
        if self._idle is not None:
            self._idle.exclude(self._clock() - began)

    # ---- trees

    def _grow(self, asks: list[Ask], live: int) -> tuple[list[DraftTree], Brought]:
        """Trees of the nodes that pay for their rows, and what they bring."""
        if not asks:
            return [], NOTHING
        budget = sum([ask.max_nodes for ask in asks])
        trees, expected = self._trees.grow(asks, self._prices(live, budget), budget)
        brought = self._brought_by(live, trees, expected)
        self._explain(live, trees, expected, brought)
        return trees, brought

    def _explain(self, live: int, trees: list[DraftTree], expected: float, brought: Brought) -> None:
        self._log.explain(
            "%d nodes for %d sequences, %.2f accepted expected; %.2f times the tokens in %.2f times the time",
            sum([len(tree.tokens) for tree in trees]), live, expected, brought.tokens, brought.seconds,
        )  # fmt: skip

    def _prices(self, live: int, max_nodes: int, known: int = 0) -> RowPrices:
        """What nodes cost, beside `known` rows that read prompts.

        The price of asking is paid with nodes or without: it makes a longer frame weigh less.
        """
        frames, tuning, ratio = self._frames, self._tuning, self._ratio.value
        if not frames.known:
            return RowPrices.free(live, min(max_nodes, tuning.untimed_nodes * live), 1.0 / ratio)
        gap = 0.0 if self._idle is None else self._idle.price(live)
        return self._pricing.prices(live, max_nodes, ratio, known, gap)

    def _brought_by(self, live: int, trees: list[DraftTree], expected: float, known: int = 0) -> Brought:
        """Tokens and seconds of a frame with these trees, the price of asking among them.

        `known`: rows of the frame that read prompts, with nodes or without.
        """
        if not self._frames.known:
            return NOTHING
        plain = self._frames.cost(live + known)
        price = 0.0 if self._idle is None else self._idle.price(live)
        num_nodes, ratio = sum([len(tree.tokens) for tree in trees]), self._ratio.value
        seconds = (self._frames.cost(live + known + num_nodes) + price) / plain
        logs = sum([log1p(ratio * sum(tree.probs)) for tree in trees if tree.probs])
        return Brought(1.0 + expected * ratio / live, seconds, exp(logs / live))

    def _propose_trees(self, seq_ids: list[int], trees: list[DraftTree]) -> list[Proposal]:
        for seq_id, tree in zip(seq_ids, trees, strict=True):
            self._expected[seq_id] = sum(tree.probs)
        proposals = self._trees.proposals(seq_ids, trees)
        self._log.counts[self._trees.name] += len(proposals)
        self._log.counts["none"] += len(seq_ids) - len(proposals)
        return proposals

    # ---- drafters

    def _assign(self, asks: list[Ask], trees: list[DraftTree], live: int, brought: Brought) -> Brought:
        """Give sequences to a drafter, where it brings more tokens per second than trees do.

        Returns what is brought then; the same where no drafter is chosen.
        """
        plain = live / self._frames.cost(live) if asks and self._frames.known else 0.0
        advantage = brought.tokens / brought.seconds
        if asks:
            self._advantage += self._tuning.trees_weight * (advantage - self._advantage)
        # A drafter must beat what trees bring on average too: of single positions only the poor ones are
        # seen, and a draft model has to read the whole text before it can draft at one of them.
        with_trees = plain * max(1.0, advantage, self._advantage)
        choice = self._drafters.choose(live, with_trees) if plain else None
        ratio, assigned = self._ratio.value, list[Ask]()
        if choice is not None:
            assigned = [
                ask
                for ask, tree in zip(asks, trees, strict=True)
                if 1.0 + ratio * sum(tree.probs) < choice.expected
            ]
            self._drafters.assign(choice, assigned, live)
        if choice is None or not assigned:
            self._unassigned_until = self._log.step + self._tuning.retry_assign_steps
            return brought
        self._unassigned_until = 0
        tokens = (with_trees + choice.gain) / plain
        return Brought(tokens, 1.0, tokens)

    def meet(self, asks: list[Ask]) -> None:
        """Index the prompts; a drafter that is ready may draft for them, so a pause ends."""
        self._trees.meet(asks)
        if self._idle is not None and (self._drafters.any_ready or any(ask.prediction for ask in asks)):
            self._idle.wake()

    def index_texts(self) -> None:
        """Pass on to the trees: drafters read texts in passes of their own."""
        self._trees.index_texts()

    # ---- learning

    def observe(self, verdicts: list[Verdict]) -> None:
        """Learn acceptance and costs, and follow the text; in a pause, see whether trees would pay."""
        self._unverified.difference_update([verdict.seq_id for verdict in verdicts])
        name, ratio, expected = self._trees.name, self._ratio, self._expected
        for verdict in verdicts:
            if verdict.guessed and verdict.drafter == name:
                ratio.observe(expected.pop(verdict.seq_id, 0.0), verdict.accepted)
        self._drafters.observe(verdicts)
        idle = self._idle
        if idle is None or not idle.pausing or len(verdicts) <= self._tuning.max_followed:
            self._trees.observe(verdicts)
        if idle is None:
            return
        prefill = not all(verdict.tokens for verdict in verdicts)
        idle.landed(len(verdicts), self._frames.last_seconds, prefill=prefill)
        self._live = {verdict.seq_id for verdict in verdicts}
        if idle.pausing:
            self._log.step += 1
            if idle.due and 0 < len(verdicts) <= self._tuning.max_followed and self._frames.known:
                self._wake_if_worth(idle, verdicts)

    def _wake_if_worth(self, idle: IdlePolicy, verdicts: list[Verdict]) -> None:
        """Grow trees while the device computes; ask again where they would pay."""
        live, max_nodes = len(verdicts), self._tuning.probe_nodes
        prices = self._prices(live, max_nodes * live)
        trees, expected = self._trees.expect([v.seq_id for v in verdicts], prices, max_nodes)
        brought = self._brought_by(live, trees, expected)
        idle.weigh(brought.fair, brought.seconds)
        if not idle.pausing:
            self._log.explain(
                "asking again; %.2f accepted tokens expected, asking adds %.2f ms to a frame",
                expected, idle.price(live) * 1e3,
            )  # fmt: skip

    def forget(self, seq_id: int) -> None:
        """Drop a sequence."""
        self._trees.forget(seq_id)
        self._expected.pop(seq_id, None)
        self._unverified.discard(seq_id)
        self._live.discard(seq_id)
        if self._idle is not None and not self._live:
            self._idle.interrupted()
        self._drafters.forget(seq_id)

    def recover(self) -> None:
        """Drop all sequences, and end a pause."""
        self._trees.recover()
        self._expected, self._live, self._unverified = {}, set(), set()
        self._waited_steps = 0
        if self._idle is not None:
            self._idle.wake()
            self._idle.interrupted()
        self._drafters.recover()

    def warm(self, max_num_seqs: int) -> None:
        """Pass on to every drafter."""
        self._drafters.warm(max_num_seqs)

    def renew(self, contract_id: str) -> None:
        """Pass on to every member."""
        self._trees.renew(contract_id)
        self._drafters.renew(contract_id)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Decisions and measurements so far, and the reports of trees and drafters."""
        idle = self._idle
        report = {
            "decisions": dict(self._log.counts),
            "frame_seconds": self._frames.curve.table(),
            "drafters": self._drafters.report(),
            "brought": self._ratio.value,
            "pauses": None if idle is None else idle.stats(max(1, len(self._live))),
        }
        return {self.name: report} | self._trees.stats() | self._drafters.stats()

    # ---- pauses, where frames are launched ahead

    def _is_drafting(self, asks: list[Ask], proposals: list[Proposal]) -> bool:
        """Whether a drafter is about to draft, or a draft is under way."""
        assigned = self._drafters.has_target(asks)
        self._waited_steps = 0 if proposals else self._waited_steps + assigned
        waiting = assigned and self._waited_steps <= self._tuning.max_wait_steps
        return waiting or any(ask.draft for ask in asks) or any(p.more for p in proposals)

    def _pause_if_idle(self, idle: IdlePolicy, *, busy: bool) -> None:
        idle.asked(busy=busy)
        if idle.pausing:
            self._log.explain("asking brings %.2f times the tokens per second; pausing", idle.advantage)


__all__ = ["NOTHING", "Auto", "Brought"]
