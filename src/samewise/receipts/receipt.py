"""The receipt of one answer: request, output, contract, digest and optional signature. Host only.

A receipt is a function of the request and its answer. It holds no time and no request id, so the same request
gives the same receipt, byte for byte. Its digest shows that it was changed; a signature names the key that
signed it; a replay (`samewise.jobs.audit`) shows whether it is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from samewise.contract import Contract
from samewise.params import SamplingParams
from samewise.receipts.digests import canonical_json, content_digest
from samewise.receipts.signing import ALGORITHM, Signature, SigningKey

KIND = "samewise_receipt"
VERSION = 1
PROMISE = "the same bits under this contract"
NO_PROMISE = "none: the request was not verified"

COMPLETE = ("stop", "length")
"""Finish reasons of a complete choice; only such a choice has a receipt."""

UNRECORDED = ("prediction", "priority")
"""Parameters that receipts do not hold."""

Json = dict[str, Any]
Settings = Mapping[str, str | int | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One answer to one request. The fields after `signature` are parsed from `body`."""

    body: Json = field(repr=False)
    stored_digest: str  # as written in the receipt; `digest` is computed from `body`
    signature: Signature | None = None
    contract: Contract
    model: str
    settings: Settings  # engine settings that give this contract
    prompt_digest: str
    prompt_len: int
    prompt_token_ids: tuple[int, ...] | None  # None: the receipt holds only the digest
    params: SamplingParams  # with the seed that was used
    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    logprob_digest: str
    logprob_checks: tuple[str, ...]
    weights_version: int = 0  # how often the process had replaced its weights; the contract names them

    @property
    def verified(self) -> bool:
        """Whether the request was verified, so that its bits are promised."""
        return self.params.verify

    @property
    def digest(self) -> str:
        """The digest of the body; it does not depend on the layout of the JSON."""
        return content_digest(canonical_json(self.body))

    @property
    def intact(self) -> bool:
        """Whether the body is unchanged since the receipt was made."""
        return self.stored_digest == self.digest

    def signed(self, key: SigningKey) -> Receipt:
        """A copy of this receipt, signed."""
        return replace(self, signature=key.sign(self._signed_bytes()))

    @property
    def signature_valid(self) -> bool:
        """Whether the receipt has a signature that is valid for its present body."""
        return self.signature is not None and self.signature.verifies(self._signed_bytes())

    def as_json(self) -> Json:
        """The receipt as it is written to a file."""
        document = self.body | {"digest": self.stored_digest}
        if self.signature is not None:
            document["signature"] = {"algorithm": ALGORITHM, **asdict(self.signature)}
        return document

    def dumps(self) -> str:
        """One line of canonical JSON."""
        return canonical_json(self.as_json()).decode()

    def _signed_bytes(self) -> bytes:
        return KIND.encode() + b"\n" + canonical_json(self.body)


__all__ = [
    "COMPLETE",
    "KIND",
    "NO_PROMISE",
    "PROMISE",
    "UNRECORDED",
    "VERSION",
    "Json",
    "Receipt",
    "Settings",
]
