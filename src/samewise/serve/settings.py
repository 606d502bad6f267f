"""What an operator decides about the server: read once, checked once, frozen. Host only.

Keys are kept as digests from the start: nothing here can print one.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from samewise.errors import BadParameter
from samewise.receipts.signing import SigningKey

KEY_VARIABLE = "SAMEWISE_API_KEY"
MAX_QUEUED = 1024  # requests that may wait, where nobody says otherwise
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that open the server. None at all: it is open to everybody, who are then one customer."""

    digests: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        """From the keys themselves, which are not kept."""
        found = list(dict.fromkeys(keys))
        for key in found:
            if not key or not key.isascii() or any(c.isspace() or not c.isprintable() for c in key):
                raise BadParameter("an API key is one word of printable ASCII; one of those given is not")
        return cls(tuple(_digest(key) for key in found))

    def customer(self, given: str) -> bytes | None:
        """Who holds this key: a name to keep customers apart by. None: nobody does.

        All keys are compared, and in constant time, so that time tells nothing about them.
        """
        digest, found = _digest(given), None
        for known in self.digests:
            if hmac.compare_digest(known, digest):
                found = known
        return found

    def __bool__(self) -> bool:
        return bool(self.digests)


def gather_keys(given: Iterable[str] = (), file: Path | None = None) -> Keys:
    """Keys from the command line, the environment (comma-separated) and a file (one a line, # comments)."""
    keys = [*given, *(key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",") if key.strip())]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadParameter(f"api_key_file={str(file)!r} cannot be read: {error}") from error
        listed = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not listed:
            raise BadParameter(f"api_key_file={str(file)!r} holds no key; write one a line")
        keys += listed
    return Keys.of(keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """How the server behaves. Limits of single bodies are in protocol.Terms."""

    model_names: tuple[str, ...] = ()  # what it is called; the first is what answers say
    keys: Keys = field(default_factory=Keys)
    allowed_origins: tuple[str, ...] = ()
    max_body: int = 8 * 2**20  # bytes
    shutdown_timeout: float = 30.0  # seconds that requests may take to end after SIGTERM
    receipts: Path | None = None  # where a receipt of every answer goes
    hide_prompts: bool = False  # receipts keep only a digest of the prompt
    signer: SigningKey | None = field(default=None, repr=False)  # signs receipts

    def __post_init__(self) -> None:
        if self.max_body < 1024:
            raise BadParameter(f"max_body={self.max_body}: give at least 1024 bytes")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise BadParameter(f"shutdown_timeout={self.shutdown_timeout}: give seconds, 0 or more")
        if any(not name for name in self.model_names):
            raise BadParameter("served_model_name is empty; leave it out or give a name")


def _digest(key: str) -> bytes:
    return sha256(b"samewise api key\0" + key.encode("utf-8", "surrogatepass")).digest()


__all__ = ["KEY_VARIABLE", "LOG_LEVELS", "MAX_QUEUED", "Keys", "ServeSettings", "gather_keys"]
