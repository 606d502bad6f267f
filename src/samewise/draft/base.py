"""The proposer interface: one base class whose methods do nothing unless a proposer overrides them.

A proposer only decides how many tokens a verification pass can commit at once; no token it proposes is ever
emitted unverified. Host only.
"""

from __future__ import annotations

from typing import Any

from samewise.follow_up import FollowUpPlan, FrameToFollow
from samewise.types import Ask, Proposal, Verdict


class Proposer:
    """Proposes draft tokens. Drafts may be wrong, late or missing: the output cannot depend on them.

    The engine calls these methods and no others, all from one thread.
    """

    name: str
    """As in `LLM(proposer=name)`; also the `drafter` of this proposer's proposals."""

    wants_candidates: bool = False
    """Whether verdicts should carry the most probable next tokens of their rows (`Verdict.candidates`)."""

    @property
    def quiet(self) -> bool:
        """True while `propose` would return nothing: the engine may skip the call and launch ahead."""
        return False

    def propose(self, asks: list[Ask]) -> list[Proposal]:  # noqa: ARG002 - the default ignores it
        """Draft tokens for any of the asks, at most `ask.room` each."""
        return []

    def plan_follow_up(self, frame: FrameToFollow) -> FollowUpPlan | None:  # noqa: ARG002 - as above
        """While a frame runs: how to draft in one call when it lands; None: `propose` will be called."""
        return None

    def take_follow_up(self) -> list[Proposal]:
        """What the plan drafted when it was run: called instead of `propose`."""
        return []

    def observe(self, verdicts: list[Verdict]) -> None:
        """Learn from the verdicts of one frame, in the frame's order."""

    def forget(self, seq_id: int) -> None:
        """Drop the state of a sequence that has finished or was aborted."""

    def recover(self) -> None:
        """Drop the state of all sequences, and of a call that an exception cut short anywhere.

        May be cut short itself; it is then called again. All sequences that go on are met anew.
        """

    def meet(self, asks: list[Ask]) -> None:
        """Index the prompts of new sequences while the device works. No draft is wanted yet."""

    def index_texts(self) -> None:
        """Do a bounded part of what `meet` left undone. Called in every step, while the device works."""

    def warm(self, max_num_seqs: int) -> None:
        """Prepare the passes of up to so many sequences before the first request arrives."""

    def renew(self, contract_id: str) -> None:
        """Follow the certified weights: called once when the engine was built, and after each replacement."""

    def stats(self) -> dict[str, dict[str, Any]]:
        """Reports for `Engine.stats()`, by proposer name."""
        return {}


class Drafter(Proposer):
    """A proposer that runs model passes. `auto` measures its passes and decides when to use it."""

    @property
    def ready(self) -> bool:
        """Whether it can draft at all now."""
        return True

    @property
    def revision(self) -> int:
        """Rises whenever it starts to draft with something else: earlier measurements then no longer hold."""
        return 0

    @property
    def busy(self) -> bool:
        """Whether `on_step` has work to do now."""
        return False

    def passes_of(self, proposals: list[Proposal]) -> int:
        """Passes that the last call of `propose`, which returned these, took; 0: its time says nothing."""
        return max((len(proposal.tokens) for proposal in proposals), default=0)

    def on_step(self, asks: list[Ask]) -> None:
        """Do work of its own, at every step in which `auto` is asked, whether or not drafts are wanted."""


class NoDrafts(Proposer):
    """Never drafts: one row per sequence and frame. The reference that other proposers are compared with."""

    name = "none"
    quiet = True


class Fallback(Proposer):
    """Several proposers in order: the first with a draft for a sequence drafts until it is verified."""

    def __init__(self, members: list[Proposer]) -> None:
        self._members = members
        self.name = "+".join(member.name for member in members)
        self.wants_candidates = any(member.wants_candidates for member in members)
        self._drafter: dict[int, str] = {}  # which member drafts for a sequence

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """The first non-empty proposal for each ask; a draft stays with the member that began it."""
        proposals: list[Proposal] = []
        left = asks
        for member in self._members:
            eligible = [a for a in left if not a.draft or self._drafter.get(a.seq_id) == member.name]
            drafted = [p for p in member.propose(eligible) if p.tokens] if eligible else []
            proposals += drafted
            served = {p.seq_id for p in drafted}
            for seq_id in served:
                self._drafter[seq_id] = member.name
            left = [ask for ask in left if ask.seq_id not in served]
        return proposals

    def observe(self, verdicts: list[Verdict]) -> None:
        """Pass on to every member."""
        for member in self._members:
            member.observe(verdicts)

    def forget(self, seq_id: int) -> None:
        """Pass on to every member."""
        self._drafter.pop(seq_id, None)
        for member in self._members:
            member.forget(seq_id)

    def recover(self) -> None:
        """Pass on to every member."""
        self._drafter = {}
        for member in self._members:
            member.recover()

    def meet(self, asks: list[Ask]) -> None:
        """Pass on to every member."""
        for member in self._members:
            member.meet(asks)

    def index_texts(self) -> None:
        """Pass on to every member."""
        for member in self._members:
            member.index_texts()

    def warm(self, max_num_seqs: int) -> None:
        """Pass on to every member."""
        for member in self._members:
            member.warm(max_num_seqs)

    def renew(self, contract_id: str) -> None:
        """Pass on to every member."""
        for member in self._members:
            member.renew(contract_id)

    def stats(self) -> dict[str, dict[str, Any]]:
        """The reports of every member."""
        return {name: report for member in self._members for name, report in member.stats().items()}


__all__ = ["Drafter", "Fallback", "NoDrafts", "Proposer"]
