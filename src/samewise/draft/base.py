"""What a proposer is: two verbs and a farewell. Nothing it says is ever emitted.

Host only.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from samewise.types import Ask, Proposal, Verdict


class Proposer(Protocol):
    """Guesses tokens. May be wrong, slow, random or broken: the output cannot change."""

    @property
    def name(self) -> str:
        """As in `LLM(proposer=name)`."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether it means to guess nothing for now, so that nobody need ask."""
        ...

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """Guesses for any of the asks, at most `ask.room` each."""
        ...

    def observe(self, verdicts: list[Verdict]) -> None:
        """Learn how earlier guesses fared."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence is gone."""
        ...


@runtime_checkable
class Reader(Protocol):
    """A proposer that reads prompts, and would rather do so while the device reads them too."""

    def meet(self, asks: list[Ask]) -> None:
        """Sequences that are new. Nothing is asked yet."""
        ...


class Drafter(Proposer, Protocol):
    """A proposer that runs a model, and may need time for itself."""

    @property
    def ready(self) -> bool:
        """Whether it could guess at all."""
        ...

    @property
    def changes(self) -> int:
        """How often it has changed its ways: what was known of it before holds no longer."""
        ...

    def think(self, asks: list[Ask]) -> None:
        """Time for itself, at every step, whether or not it is asked for guesses."""
        ...


class Nothing:
    """Guesses nothing: one row per sequence and frame. The reference for every law."""

    name = "none"
    quiet = True

    def propose(self, asks: list[Ask]) -> list[Proposal]:  # noqa: ARG002 - part of the protocol
        """No guesses."""
        return []

    def observe(self, verdicts: list[Verdict]) -> None:
        """Nothing to learn."""

    def forget(self, seq_id: int) -> None:
        """Nothing to forget."""


class First:
    """Several proposers in turn: whoever has a guess first drafts, and goes on with what it began."""

    quiet = False

    def __init__(self, members: list[Proposer]) -> None:
        self._members = members
        self.name = "+".join(member.name for member in members)
        self._drafter: dict[int, str] = {}

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """For each ask the first member's guesses, if it has any."""
        proposals: list[Proposal] = []
        left = asks
        for member in self._members:
            mine = [a for a in left if not a.draft or self._drafter.get(a.seq_id) == member.name]
            found = [p for p in member.propose(mine) if p.tokens] if mine else []
            proposals += found
            served = {p.seq_id for p in found}
            for seq_id in served:
                self._drafter[seq_id] = member.name
            left = [ask for ask in left if ask.seq_id not in served]
        return proposals

    def meet(self, asks: list[Ask]) -> None:
        """Whoever reads, reads."""
        for member in self._members:
            if isinstance(member, Reader):
                member.meet(asks)

    def observe(self, verdicts: list[Verdict]) -> None:
        """Everybody learns."""
        for member in self._members:
            member.observe(verdicts)

    def forget(self, seq_id: int) -> None:
        """Everybody forgets."""
        self._drafter.pop(seq_id, None)
        for member in self._members:
            member.forget(seq_id)


__all__ = ["Drafter", "First", "Nothing", "Proposer", "Reader"]
