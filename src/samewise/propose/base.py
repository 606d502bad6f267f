"""What a proposer is: two verbs and a farewell. Nothing it says is ever emitted.

Host only.
"""

from __future__ import annotations

from typing import Protocol

from samewise.types import Ask, Proposal, Verdict


class Proposer(Protocol):
    """Guesses tokens. May be wrong, slow, random or broken: the output cannot change."""

    @property
    def name(self) -> str:
        """As in `LLM(proposer=name)`."""
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


class Nothing:
    """Guesses nothing: one row per sequence and frame. The reference for every law."""

    name = "none"

    def propose(self, asks: list[Ask]) -> list[Proposal]:  # noqa: ARG002 - part of the protocol
        """No guesses."""
        return []

    def observe(self, verdicts: list[Verdict]) -> None:
        """Nothing to learn."""

    def forget(self, seq_id: int) -> None:
        """Nothing to forget."""


__all__ = ["Nothing", "Proposer"]
