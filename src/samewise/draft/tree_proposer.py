"""Proposers of draft trees, which run no model: `ngram`, `recycle`, and the merged trees that `auto` uses.

A `TreeProposer` follows the text of every sequence and passes on what frames tell to a tree drafter. Host
only.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from samewise.draft.base import Proposer
from samewise.draft.cost_model import FrameCosts
from samewise.draft.tree import DraftTree, Limit, RowPrices
from samewise.draft.tree_drafter import Committed, Follows, GrowsTrees, Sources
from samewise.draft.tuning import DEFAULTS, TreeTuning
from samewise.errors import InvariantBroken
from samewise.follow_up import FollowUp, FrameOutputs, FrameToFollow
from samewise.types import MAX_TREE_DEPTH, MAX_TREE_NODES, Ask, Proposal, Verdict

NAMES = {Sources.SUFFIXES: "ngram", Sources.ROWS: "recycle", Sources.ALL: "tree"}


class RowPricing:
    """What nodes cost, by measured frames. `factor`: times the price of its row that a node must be worth."""

    def __init__(self, frames: FrameCosts, factor: float = 1.0) -> None:
        self._frames, self._factor = frames, factor
        self._key: tuple[int, int, int, int] | None = None  # of the seconds below
        self._seconds = array("d")

    def prices(
        self, live: int, max_nodes: int, brought: float = 1.0, known: int = 0, gap: float = 0.0
    ) -> RowPrices:
        """Of up to `max_nodes` nodes, or some more, beside `live` sequences.

        `brought`: accepted nodes per expected one. `known`: rows of the frame that read prompts. `gap`:
        seconds between frames, where drafts are asked for.
        """
        # Rounded up, so that a few nodes more or less do not have the prices computed again.
        max_nodes = -(-max_nodes // MAX_TREE_NODES) * MAX_TREE_NODES
        key = (self._frames.version, live, max_nodes, known)
        if key != self._key:
            self._seconds, self._key = self._compute(live + known, max_nodes), key
        return RowPrices(live, self._seconds, 1.0 / brought, gap)

    def _compute(self, rows: int, max_nodes: int) -> array[float]:
        """Of a frame that has so many rows without any node."""
        frames, factor, seconds = self._frames, self._factor, array("d")
        plain = frames.cost(rows)
        for cost, num in frames.steps(rows, max(rows, min(rows + max_nodes, frames.sizes[-1]))):
            seconds.extend([plain + factor * (cost - plain)] * num)
        return seconds


class _Known(NamedTuple):
    """How much of a sequence the drafter knows: its length in tokens, and the last one."""

    length: int
    last: int


class _Begun(NamedTuple):
    """A text that is being indexed: what will be known then, and how many tokens are left, at most."""

    known: _Known
    left: int


class TreeFollowUp:
    """A plan to draft trees as soon as a frame lands."""

    def __init__(self, proposer: TreeProposer, follower: Follows) -> None:
        self.frame, self._proposer, self._follower = follower.frame, proposer, follower

    def run(self, outputs: FrameOutputs) -> FollowUp | None:
        """See FollowUpPlan."""
        follow_up = self._follower.run(outputs)
        if follow_up is not None:
            self._proposer.followed = self._follower
        return follow_up


class GrownTrees(NamedTuple):
    """Trees of a frame's sequences, empty ones too, and the accepted nodes to expect of all of them."""

    frame: FrameToFollow
    trees: list[DraftTree]
    expected: float


class TreeProposer(Proposer):
    """Proposes trees of candidates from texts (`ngram`), from rows (`recycle`), or from both (`tree`).

    With `frames`, nodes that do not pay for their rows are left out.
    """

    def __init__(
        self,
        drafter: GrowsTrees,
        sources: Sources = Sources.ALL,
        tuning: TreeTuning = DEFAULTS.trees,
        frames: FrameCosts | None = None,
    ) -> None:
        self._drafter, self._tuning, self._frames = drafter, tuning, frames
        self._pricing = None if frames is None else RowPricing(frames)
        self.name = NAMES[sources]
        self.wants_candidates = Sources.ROWS in sources
        self._known: dict[int, _Known] = {}
        self._begun: dict[int, _Begun] = {}
        self.followed: Follows | None = None
        """What drafted from the frame that landed; its tokens are known to the drafter already."""
        self._num_trees = self._num_nodes = self._num_accepted = 0

    # ---- the proposer interface

    def meet(self, asks: list[Ask]) -> None:
        """Index the prompts; of long ones the beginning, `index_texts` does the rest."""
        for ask in asks:
            self._follow(ask)

    def index_texts(self) -> None:
        """Go on indexing, in the order in which texts were met."""
        left = self._tuning.suffixes.tokens_per_step
        for seq_id in list(self._begun):
            if left <= 0:
                break
            left -= self._index(seq_id, left)

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """A tree of the likeliest nodes for each sequence; a draft under way is not extended."""
        fresh = [ask for ask in asks if not ask.draft]
        if not fresh:
            return []
        tuning = self._tuning
        prices = self._prices(len(fresh), len(asks))
        trees, _ = self.grow(fresh, prices, tuning.max_nodes, tuning.min_prob)
        return self.proposals([ask.seq_id for ask in fresh], trees)

    def _prices(self, num: int, live: int, known: int = 0) -> RowPrices:
        max_nodes = self._tuning.max_nodes * num
        if self._pricing is not None and self._frames is not None and self._frames.known:
            return self._pricing.prices(live, max_nodes, known=known)
        return RowPrices.free(num, max_nodes)

    def plan_follow_up(self, frame: FrameToFollow) -> TreeFollowUp | None:
        """Trees as `propose` would grow them; None where their price is not known."""
        if self._frames is None or not self._frames.known:
            return None
        num, tuning = frame.num_judged, self._tuning
        prices = self._prices(num, num, len(frame.next_inputs))
        return self.follow(frame, prices, tuning.max_nodes, tuning.min_prob)

    def take_follow_up(self) -> list[Proposal]:
        """The trees as proposals."""
        grown = self.take_trees()
        return self.proposals(grown.frame.seq_ids, grown.trees)

    def observe(self, verdicts: list[Verdict]) -> None:
        """Append the committed tokens to the texts, keep their rows' candidates, and learn."""
        frame = []
        all_known, followed, name = self._known, self.followed is not None, self.name
        for verdict in verdicts:
            seq_id, tokens = verdict.seq_id, verdict.tokens
            known = all_known.get(seq_id) if tokens else None
            if known is None:
                continue
            length = known.length + len(tokens)
            if length != verdict.kv_len + 1:
                continue  # some tokens were missed; the next ask has them
            if not followed:
                frame.append(_committed(verdict, known.last))
            all_known[seq_id] = _Known(length, tokens[-1])
            if verdict.guessed and verdict.drafter == name:
                self._num_accepted += verdict.accepted
        if frame:
            self._drafter.commit(frame)

    def forget(self, seq_id: int) -> None:
        """Drop a sequence; its text goes to the store, if it shares."""
        known, begun = self._known.pop(seq_id, None), self._begun.pop(seq_id, None)
        if known is not None or begun is not None:
            self._drafter.forget(seq_id)

    def recover(self) -> None:
        """Drop all sequences."""
        self._known, self._begun, self.followed = {}, {}, None
        self._drafter.recover()

    def renew(self, contract_id: str) -> None:  # noqa: ARG002 - weights were replaced, whichever they are
        """Drop rows and stored texts: the model that made them is gone."""
        self._drafter.clear()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Trees, nodes and accepted nodes so far, and the memory of tables, store and sequences in bytes."""
        memory = self._drafter.memory()
        report = {
            "trees": self._num_trees,
            "nodes": self._num_nodes,
            "accepted": self._num_accepted,
            "table_bytes": memory.tables,
            "store_bytes": memory.store,
            "sequence_bytes": memory.sequences,
        }
        return {self.name: report}

    # ---- for `auto`

    def grow(
        self, asks: list[Ask], prices: RowPrices, max_nodes: int, min_prob: float = 0.0
    ) -> tuple[list[DraftTree], float]:
        """Trees for sequences without a draft, and the accepted tokens to expect from all of them."""
        limits = [
            Limit(ask.seq_id, min(max_nodes, ask.max_nodes), min(ask.room, MAX_TREE_DEPTH))
            for ask in asks
            if self._follow(ask)
        ]
        grown, expected = self._drafter.grow(limits, prices, min_prob)
        if len(grown) == len(asks):
            return grown, expected
        trees = dict(zip([limit.seq_id for limit in limits], grown, strict=True))
        return [trees.get(ask.seq_id, DraftTree()) for ask in asks], expected

    def expect(self, seq_ids: list[int], prices: RowPrices, max_nodes: int) -> tuple[list[DraftTree], float]:
        """Trees for those of the sequences that are known, and the accepted nodes to expect of all."""
        limits = [Limit(seq_id, max_nodes, max_nodes) for seq_id in seq_ids if seq_id in self._known]
        return self._drafter.grow(limits, prices)

    def follow(
        self, frame: FrameToFollow, prices: RowPrices, max_nodes: int, min_prob: float = 0.0
    ) -> TreeFollowUp | None:
        """A plan to grow trees when a frame lands; None where a sequence's text is not known to its end."""
        first, known = 0, self._known
        columns = (frame.column(name) for name in ("num_rows", "given", "start", "next_given"))
        for seq_id, num_rows, given, start, next_given in zip(frame.seq_ids, *columns, strict=True):
            if not next_given and known.get(seq_id) != (start + given, frame.inputs[first + given - 1]):
                return None
            first += num_rows
        follower = self._drafter.follower(frame, prices, max_nodes, min_prob)
        return None if follower is None else TreeFollowUp(self, follower)

    def take_trees(self) -> GrownTrees:
        """What the plan grew from the frame that landed."""
        follower, self.followed = self.followed, None
        if follower is None:
            raise InvariantBroken("no trees were grown from the frame that landed")
        return GrownTrees(follower.frame, *follower.trees())

    def proposals(self, seq_ids: list[int], trees: list[DraftTree]) -> list[Proposal]:
        """The trees that are not empty, as proposals."""
        drafted = [
            Proposal(seq_id, tree.tokens, drafter=self.name, parents=tree.parents)
            for seq_id, tree in zip(seq_ids, trees, strict=True)
            if tree.tokens
        ]
        self._num_trees += len(drafted)
        self._num_nodes += sum(len(proposal.tokens) for proposal in drafted)
        return drafted

    # ---- texts

    def _follow(self, ask: Ask) -> bool:
        """Bring the drafter to the end of the ask's tokens; index them anew where it knows others.

        False: of a long text a part is not indexed yet, and no tree can be grown.
        """
        tokens, known = ask.tokens, self._known.get(ask.seq_id)
        if known is not None and known.length == len(tokens) and known.last == tokens[-1]:
            return True
        if ask.seq_id in self._begun:
            return False
        if known is not None and (known.length > len(tokens) or tokens[known.length - 1] != known.last):
            self._drop(ask.seq_id)
            known = None
        if known is None:
            start = max(0, ask.prompt_len - self._tuning.suffixes.indexed_tokens)
            prediction = ask.prediction[: self._tuning.suffixes.indexed_tokens]
            self._drafter.begin(ask.seq_id, tokens[start : ask.prompt_len], ask.share_salt, prediction)
            known = _Known(ask.prompt_len, tokens[ask.prompt_len - 1])
            self._begun[ask.seq_id] = _Begun(known, ask.prompt_len - start + len(prediction) + 1)
            self._index(ask.seq_id, self._tuning.suffixes.tokens_per_step)
            if ask.seq_id in self._begun:
                return False
        if known.length < len(tokens):
            self._drafter.commit([Committed(ask.seq_id, tuple(tokens[known.length :]))])
        self._known[ask.seq_id] = _Known(len(tokens), tokens[-1])
        return True

    def _index(self, seq_id: int, max_tokens: int) -> int:
        """Index so many tokens of a text, and return how many there were, at most."""
        begun, left = self._begun[seq_id], self._drafter.index(seq_id, max_tokens)
        if left:
            self._begun[seq_id] = begun._replace(left=left)
        else:
            self._known[seq_id] = self._begun.pop(seq_id).known
        return begun.left - left

    def _drop(self, seq_id: int) -> None:
        """Forget a sequence whose text is not the one that is known, without storing it."""
        self._known.pop(seq_id, None)
        self._drafter.forget(seq_id, store=False)


def _committed(verdict: Verdict, last: int) -> Committed:
    """What a verdict tells. `last`: the token before its tokens, which the first row's input may not name."""
    tokens, candidates = verdict.tokens, verdict.candidates
    if candidates is None:
        return Committed(verdict.seq_id, tokens)
    rows = (0, *[node + 1 for node in verdict.path]) if verdict.path else tuple(range(len(tokens)))
    return Committed(verdict.seq_id, tokens, rows, (last, *candidates.inputs[1:]), candidates.ids)


__all__ = ["NAMES", "GrownTrees", "RowPricing", "TreeFollowUp", "TreeProposer"]
