"""How far a draft model drafts, which of its tokens are verified, and when drafting pauses.

Everything follows from measurements: seconds of a pass and of the rest of a step, and how often tokens of a
given confidence, and alternatives of a given rank, were accepted. Host only; the clock is an argument.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from samewise.draft.cost_model import AcceptanceRate, Calibration, CostCurve, FrameCosts
from samewise.draft.tuning import DEFAULTS, Tuning
from samewise.types import ROOT, Ask, Proposal, Verdict


class Choice(NamedTuple):
    """A drafted token, its confidence, and the likeliest other tokens, best first.

    Confidence is the probability of a greedy token; of a sampled one, its share among logits plus noise.
    """

    token: int
    confidence: float
    others: tuple[int, ...] = ()


@dataclass(slots=True)
class Draft:
    """A draft under way: a chain of choices, one per pass."""

    ask: Ask
    pages: array[int]  # the draft model's
    max_tokens: int
    choices: list[Choice] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # of each token, that it and all before are accepted
    ended: bool = False  # whether its last token ends the text

    @property
    def reach(self) -> float:
        """The chance that all its tokens are accepted."""
        return self.chances[-1] if self.chances else 1.0

    @property
    def sampled(self) -> bool:
        """Whether its tokens are sampled, not greedy."""
        return self.ask.sampling.temperature > 0.0


class _Node(NamedTuple):
    """A token that may be verified."""

    chance: float  # that it is reached and right
    depth: int  # tokens of the chain before it
    rank: int  # 0: of the chain; else the number of the alternative
    draft: int  # index of its draft

    @property
    def order(self) -> tuple[float, int, int, int]:
        """The likeliest first, a parent before its children."""
        return -self.chance, self.depth, self.rank, self.draft


class _Proposed(NamedTuple):
    """What is known of a draft until its verdict."""

    start: int  # tokens before the draft
    sampled: bool
    choices: list[Choice]


class ModelPacing:
    """Owns what was measured of a draft model's passes, and its drafts until they are verified."""

    def __init__(self, frames: FrameCosts, clock: Callable[[], float], tuning: Tuning = DEFAULTS) -> None:
        self._frames, self._clock, self._tuning, self._costs = frames, clock, tuning.model, tuning.cost_model
        self._num_passes = 0
        self._num_leaves = 0
        self._lengths: Counter[int] = Counter()  # passes of a chain → how often
        self.reset()
        self.recover()

    def reset(self) -> None:
        """Drop what was measured: the model that is drafted for has changed."""
        tuning, costs = self._tuning, self._costs
        hits = tuning.prior_chance * tuning.prior_trials
        self._pass_seconds = CostCurve(costs)  # by number of sequences
        self._between = CostCurve(costs)  # seconds of a step outside of drafting, by number of sequences
        self._rate = AcceptanceRate(hits, tuning.prior_trials, costs.rate_memory)
        self._greedy, self._sampled = (Calibration(tuning.prior_chance, costs) for _ in range(2))
        trials = tuning.alternative_prior_trials
        self._by_rank = [
            AcceptanceRate(tuning.alternative_prior * trials / (i + 1), trials, costs.rate_memory)
            for i in range(tuning.num_alternatives)
        ]
        self._by_position: dict[int, AcceptanceRate] = {}

    def recover(self) -> None:
        """Drop all drafts and measurements under way."""
        self._proposed: dict[int, _Proposed] = {}
        self._began = self._last = 0.0
        self._ended: tuple[float, int] | None = None  # when the last drafts were made, and for how many

    def forget(self, seq_id: int) -> None:
        """Drop a sequence. The time between steps is not measured where one ends."""
        self._proposed.pop(seq_id, None)
        self._ended = None

    @property
    def has_drafts(self) -> bool:
        """Whether any draft awaits its verdict."""
        return bool(self._proposed)

    # ---- a chain of passes

    def begin(self, live: int) -> None:
        """A step in which so many sequences may be drafted for."""
        self._began = self._last = self._clock()
        if self._ended is not None and self._ended[1] == live:
            self._between.observe(live, self._began - self._ended[0])
        self._ended = None

    def add(self, drafts: list[Draft], choices: list[Choice]) -> None:
        """The choices of a pass for these drafts."""
        now = self._clock()
        if drafts[0].choices:  # the first pass of a chain also reads what was committed: not timed
            self._pass_seconds.observe(len(drafts), now - self._last)
        self._last = now
        self._num_passes += 1
        for draft, choice in zip(drafts, choices, strict=True):
            calibration = self._sampled if draft.sampled else self._greedy
            draft.chances.append(draft.reach * calibration.chance(choice.confidence))
            draft.choices.append(choice)
            draft.ended = draft.ended or choice.token in draft.ask.sampling.stop_ids

    def worth_another(self, drafts: list[Draft], live: list[Draft], under_way: int) -> bool:
        """Whether one more pass for the `live` drafts brings more tokens per second than stopping now.

        `under_way`: passes whose choices are not known yet.
        """
        if not self._pass_seconds.known:
            return len(live[0].choices) + under_way < self._tuning.untimed_passes
        chance, rows = self._rate.value, sum(len(draft.choices) + 1 for draft in drafts)
        expected = _expected(drafts)
        reach = sum(draft.reach for draft in live)
        for _ in range(under_way):
            reach *= chance
            expected += reach
            rows += len(live)
        a_pass, frames = self._pass_seconds.at(len(live)), self._frames
        seconds = self._clock() - self._began + under_way * a_pass + self._rest(len(drafts), rows)
        price = a_pass + frames.cost(rows + len(live)) - frames.cost(rows)
        return reach * chance * seconds >= expected * price

    def _rest(self, live: int, rows: int) -> float:
        """Seconds of a step outside of drafting."""
        return self._between.at(live) if self._between.known else self._frames.cost(rows)

    # ---- proposals

    def proposals(self, drafts: list[Draft], drafter: str) -> list[Proposal]:
        """Of each draft the tokens worth a row in the frame, with alternatives to unsure ones as leaves."""
        rows = sum(len(draft.choices) + 1 for draft in drafts)
        seconds = self._clock() - self._began + self._rest(len(drafts), rows)
        picked = self._pick(drafts, _expected(drafts) / max(seconds, 1e-9))
        self._lengths[max(len(draft.choices) for draft in drafts)] += 1
        for draft in drafts:
            ask = draft.ask
            proposed = _Proposed(len(ask.tokens) + len(ask.draft), draft.sampled, draft.choices)
            self._proposed[ask.seq_id] = proposed
        result = [_proposal(draft, nodes, drafter) for draft, nodes in zip(drafts, picked, strict=True)]
        self._ended = (self._clock(), len(drafts))
        return result

    def _pick(self, drafts: list[Draft], throughput: float) -> list[list[_Node]]:
        """The nodes to verify, by draft: the likeliest of all, as many as bring the most over their price.

        The first token of every draft is among them: its pass is paid, and it shows how good drafts are.
        """
        picked = [[_Node(draft.chances[0], 0, 0, i)] for i, draft in enumerate(drafts)]
        nodes = _limited([node for i, draft in enumerate(drafts) for node in self._nodes(i, draft)], drafts)
        num, frames, rows = 0, self._frames, 2 * len(drafts)
        gain = best = 0.0
        for i, node in enumerate(nodes, start=1):
            gain += node.chance
            profit = gain - throughput * (frames.cost(rows + i) - frames.cost(rows))
            if profit > best:
                num, best = i, profit
        for node in nodes[:num]:
            picked[node.draft].append(node)
        self._num_leaves += sum(node.rank > 0 for node in nodes[:num])
        return picked

    def _nodes(self, index: int, draft: Draft) -> list[_Node]:
        """Every token of a draft's chain after the first, and the alternatives to each; no unlikely ones."""
        nodes: list[_Node] = []
        before = 1.0
        for depth, (choice, chance) in enumerate(zip(draft.choices, draft.chances, strict=True)):
            if depth:
                nodes.append(_Node(chance, depth, 0, index))
            for rank, (_, rate) in enumerate(zip(choice.others, self._by_rank, strict=False), start=1):
                nodes.append(_Node((before - chance) * rate.value, depth, rank, index))
            before = chance
        return [node for node in nodes if node.chance >= self._tuning.min_chance]

    # ---- learning

    def observe(self, verdict: Verdict) -> None:
        """Compare a sequence's draft with what was committed, whether or not all of it was verified."""
        proposed = self._proposed.get(verdict.seq_id)
        if proposed is None or not verdict.tokens:
            return
        del self._proposed[verdict.seq_id]
        if verdict.kv_len + 1 - len(verdict.tokens) != proposed.start:
            return
        calibration = self._sampled if proposed.sampled else self._greedy
        for place, (choice, token) in enumerate(zip(proposed.choices, verdict.tokens, strict=False)):
            right = choice.token == token
            calibration.observe(choice.confidence, right=right)
            self._rate.observe(1, int(right))
            rate = self._by_position.setdefault(place, AcceptanceRate(0.0, 0.0, self._costs.rate_memory))
            rate.observe(1, int(right))
            if not right:
                for rate, other in zip(self._by_rank, choice.others, strict=False):
                    rate.observe(1, int(other == token))
                return

    def report(self) -> dict[str, Any]:
        """Passes and their seconds, chain lengths, acceptance by position and of alternatives by rank."""
        num_chains = self._lengths.total()
        return {
            "passes": self._num_passes,
            "pass_seconds": self._pass_seconds.table(),
            "rest_seconds": self._between.table(),
            "mean_length": self._num_passes / num_chains if num_chains else None,
            "lengths": dict(sorted(self._lengths.items())),
            "acceptance": self._rate.value,
            "acceptance_by_position": [rate.value for _, rate in sorted(self._by_position.items())],
            "alternative_acceptance": [rate.value for rate in self._by_rank],
            "leaves": self._num_leaves,
        }


class Pauses:
    """Without `auto`: whether drafts pay, and for how long none are made where they do not."""

    def __init__(self, frames: FrameCosts, clock: Callable[[], float], tuning: Tuning = DEFAULTS) -> None:
        self._frames, self._clock, self._tuning = frames, clock, tuning.model
        self._num_in_row = 0
        self.total = 0
        self.recover()

    def recover(self) -> None:
        """End a pause and measure anew."""
        self._left = 0  # frames of the pause
        self._live = 0  # sequences when it began
        self._restart()

    def _restart(self) -> None:
        self._num_steps = 0
        self._seconds = self._plain = 0.0  # of steps with drafts; for the same tokens without drafts
        self.interrupt()

    def interrupt(self) -> None:
        """The step under way is not measured: sequences came or went."""
        self._began: float | None = None
        self._tokens = dict[int, int]()  # committed in the step, by sequence that is drafted for

    @property
    def pausing(self) -> bool:
        """Whether no drafts should be made now."""
        return self._left > 0

    @property
    def speedup(self) -> float | None:
        """Throughput of the latest steps with drafts as a multiple of that without; None: not measured."""
        return self._plain / self._seconds if self._seconds > 0.0 else None

    def begin(self, seq_ids: list[int]) -> None:
        """A step with drafts for these sequences begins, and the one before ends."""
        if self._left:
            return
        now, tuning = self._clock(), self._tuning
        num_tokens = sum(self._tokens.values())
        if self._began is not None and num_tokens and self._frames.known:
            keep, live = 1.0 - 1.0 / tuning.throughput_steps, len(self._tokens)
            self._num_steps += 1
            self._seconds = keep * self._seconds + now - self._began
            self._plain = keep * self._plain + self._frames.cost(live) * num_tokens / live
        self._began, self._tokens = now, dict.fromkeys(seq_ids, 0)
        if self._num_steps < tuning.min_steps:
            return
        if (self.speedup or 0.0) >= tuning.min_speedup:
            self._num_in_row = 0
            return
        self._left = min(tuning.pause_frames << self._num_in_row, tuning.max_pause_frames)
        self._live = len(seq_ids)
        self._num_in_row = min(self._num_in_row + 1, 16)
        self.total += 1
        self._restart()

    def observe(self, verdicts: list[Verdict]) -> None:
        """Count what was committed, or a frame of the pause."""
        for verdict in verdicts:
            if verdict.seq_id in self._tokens:
                self._tokens[verdict.seq_id] += len(verdict.tokens)
        live, factor = sum(bool(verdict.tokens) for verdict in verdicts), self._tuning.live_factor
        if self._left and live:
            self._left -= 1
            if not self._live / factor < live < self._live * factor:
                self._left = 0


def _expected(drafts: list[Draft]) -> float:
    """Tokens to expect of a frame over these drafts: one each, and those accepted."""
    return len(drafts) + sum(sum(draft.chances) for draft in drafts)


def _limited(nodes: list[_Node], drafts: list[Draft]) -> list[_Node]:
    """The nodes in order, of each draft as many as its ask allows beside the first; by default no leaves."""
    num_picked = [1] * len(drafts)
    picked: list[_Node] = []
    for node in sorted(nodes, key=lambda node: node.order):
        limit = drafts[node.draft].ask.max_nodes
        if num_picked[node.draft] < limit or (limit == 0 and not node.rank):
            num_picked[node.draft] += 1
            picked.append(node)
    return picked


def _proposal(draft: Draft, nodes: list[_Node], drafter: str) -> Proposal:
    """A chain, then its leaves, the deepest first: as a walk down the likeliest child meets them."""
    base = len(draft.ask.draft)
    num_chain = sum(node.rank == 0 for node in nodes)
    leaves = sorted((node for node in nodes if node.rank), key=lambda node: (-node.depth, node.rank))
    chain = [choice.token for choice in draft.choices[:num_chain]]
    if not leaves:
        return Proposal(draft.ask.seq_id, tuple(chain), drafter=drafter)
    tokens = (*chain, *(draft.choices[leaf.depth].others[leaf.rank - 1] for leaf in leaves))
    depths = (*range(num_chain), *(leaf.depth for leaf in leaves))
    parents = tuple(base + depth - 1 if base + depth else ROOT for depth in depths)
    return Proposal(draft.ask.seq_id, tokens, drafter=drafter, parents=parents)


__all__ = ["Choice", "Draft", "ModelPacing", "Pauses"]
