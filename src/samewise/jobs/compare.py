"""Compare a replay with its receipt, token by token and bit by bit. Host only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from samewise.outputs import Chunk
from samewise.receipts import Receipt, logprob_check, logprob_digest

CONTEXT_TOKENS = 12
"""Tokens before a difference that its description quotes. Set by hand: about a line of text."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a replay and its receipt; no position if the tokens' checks are equal."""

    position: int | None
    description: str


@dataclass(slots=True)
class Comparison:
    """One replay and its receipt. `show` turns token ids into quoted text."""

    receipt: Receipt
    show: Callable[[Sequence[int]], str]
    logprobs: list[float] = field(default_factory=list)

    def add(self, chunk: Chunk) -> Difference | None:
        """Compare the next tokens of the replay; returns the first difference, or None."""
        num_recorded = len(self.receipt.token_ids)
        for token, logprob in zip(chunk.token_ids, chunk.token_logprobs, strict=True):
            at = len(self.logprobs)
            if at == num_recorded:
                return self._replay_is_longer(at)
            if description := self._compare_token(at, token, logprob):
                return Difference(at, description)
            self.logprobs.append(logprob)
        at = len(self.logprobs)
        if chunk.finish_reason is not None:
            return self._compare_end(at, chunk.finish_reason, chunk.stop_reason)
        return self._replay_is_longer(at) if at == num_recorded else None

    def _replay_is_longer(self, at: int) -> Difference:
        return Difference(at, f"the receipt ends here ({self._recorded_end}), the replay goes on")

    def _compare_token(self, at: int, token: int, logprob: float) -> str | None:
        receipt = self.receipt
        if token != receipt.token_ids[at]:
            return (
                f"the receipt says {self._token(receipt.token_ids[at])}, "
                f"the replay {self._token(token)}{self._context(at)}"
            )
        if logprob_check(logprob) != receipt.logprob_checks[at]:
            return (
                f"both say {self._token(token)}, but the bits of its log-probability differ: "
                f"the receipt has the checksum {receipt.logprob_checks[at]}, "
                f"the replay {logprob_check(logprob)} ({logprob!r}){self._context(at)}"
            )
        return None

    def _compare_end(self, at: int, finish: str, stop: int | str | None) -> Difference | None:
        receipt = self.receipt
        if at < len(receipt.token_ids):
            following = self._token(receipt.token_ids[at])
            return Difference(
                at, f"the replay ends here ({_end(finish, stop)}), the receipt goes on with {following}"
            )
        if (finish, stop) != (receipt.finish_reason, receipt.stop_reason):
            return Difference(
                at, f"the receipt ends by {self._recorded_end}, the replay by {_end(finish, stop)}"
            )
        digest = logprob_digest(self.logprobs)
        if digest != receipt.logprob_digest:
            return Difference(
                None,
                f"every position's checksum agrees, but the digest of the log-probability bits is {digest} "
                f"and not {receipt.logprob_digest}",
            )
        return None

    @property
    def _recorded_end(self) -> str:
        return _end(self.receipt.finish_reason, self.receipt.stop_reason)

    def _token(self, token: int) -> str:
        return f"token {token} {self.show([token])}".rstrip()

    def _context(self, at: int) -> str:
        text = self.show(self.receipt.token_ids[max(0, at - CONTEXT_TOKENS) : at])
        return f", after {text}" if text else ""


def _end(finish: str, stop: int | str | None) -> str:
    return finish if stop is None else f"{finish} {stop!r}"


__all__ = ["CONTEXT_TOKENS", "Comparison", "Difference"]
