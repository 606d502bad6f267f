"""Canonical JSON and the SHA-256 digests that receipts carry. Host only."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from samewise.types import Grammar

CHECK_DIGITS = 4
"""Hexadecimal digits of one token's checksum: 16 bits locate a difference, the full digest shows equality."""


def canonical_json(value: dict[str, Any]) -> bytes:
    """A JSON object in its one canonical form: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def as_json(value: Any) -> Any:
    """A sampling parameter's value as receipts write it: JSON's objects, lists, texts and numbers."""
    if isinstance(value, Mapping):
        return {str(name): as_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    return asdict(value) if isinstance(value, Grammar) else value


def content_digest(content: bytes) -> str:
    """The SHA-256 of bytes as receipts write it."""
    return "sha256:" + sha256(content).hexdigest()


def prompt_digest(token_ids: Sequence[int]) -> str:
    """The digest of a prompt: its token ids as little-endian uint32."""
    return content_digest(struct.pack(f"<{len(token_ids)}I", *token_ids))


def logprob_digest(logprobs: Sequence[float]) -> str:
    """The digest of log-probability bits: little-endian float32, in order."""
    return content_digest(struct.pack(f"<{len(logprobs)}f", *logprobs))


def logprob_check(logprob: float) -> str:
    """A short checksum of one log-probability's bits, so that an audit can name the position that differs."""
    return sha256(struct.pack("<f", logprob)).hexdigest()[:CHECK_DIGITS]


__all__ = [
    "CHECK_DIGITS",
    "as_json",
    "canonical_json",
    "content_digest",
    "logprob_check",
    "logprob_digest",
    "prompt_digest",
]
