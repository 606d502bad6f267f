"""The result of an audit: a status and its details, per receipt. Host only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from samewise.receipts import Receipt


class Status(StrEnum):
    """The possible results of an audit."""

    SAME = "same"
    DIFFERENT = "different"
    ALTERED = "altered"
    OTHER_CONTRACT = "other contract"
    NO_PROMISE = "no promise"
    NOT_SIGNED = "not signed"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one receipt. `position` counts the answer's tokens from 0."""

    where: str
    status: Status
    details: tuple[str, ...] = ()
    position: int | None = None
    num_tokens: int = 0
    contract: str | None = None

    @property
    def is_same(self) -> bool:
        """Whether the replay gave the receipt's tokens and log-probabilities, bit for bit."""
        return self.status is Status.SAME

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "receipt": self.where, "status": self.status.value, "position": self.position,
            "details": list(self.details), "num_tokens": self.num_tokens, "contract": self.contract,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A receipt to audit, and the place it was read from."""

    where: str
    receipt: Receipt

    def finding(self, status: Status, *details: str, position: int | None = None) -> Finding:
        """A finding about this receipt. A receipt that was changed is ALTERED, whatever else was found."""
        receipt, changes = self.receipt, _changes(self.receipt)
        return Finding(
            self.where,
            Status.ALTERED if changes else status,
            (*changes, *details),
            position,
            len(receipt.token_ids),
            receipt.contract.id,
        )

    def check_unreplayed(self, signed_by: str | None) -> Finding | None:
        """A finding that needs no replay: a wrong signer, or a request that was not verified."""
        signature = self.receipt.signature
        if signed_by is not None and (signature is None or signature.key != signed_by):
            signer = "no key" if signature is None else signature.key
            return self.finding(Status.NOT_SIGNED, f"signed by {signer}, not by {signed_by}")
        if not self.receipt.verified:
            return self.finding(
                Status.NO_PROMISE, "the request was not verified, so its bits depended on the load"
            )
        return None


def _changes(receipt: Receipt) -> tuple[str, ...]:
    """Signs that a receipt was changed after it was made."""
    changes = []
    if not receipt.intact:
        changes.append("it was changed after it was made: its digest does not fit what it says")
    if receipt.signature is not None and not receipt.signature_valid:
        changes.append("its signature is not good")
    return tuple(changes)


__all__ = ["Case", "Finding", "Status"]
