"""The server's settings: read once, checked once, frozen. Keys are stored as digests only."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from samewise.errors import BadParameter
from samewise.params import LOGPROBS_MODES
from samewise.receipts.signing import SigningKey
from samewise.serve.limits import ServeLimits

KEY_VARIABLE = "SAMEWISE_API_KEY"
UNSEEDED = ("fresh", "prompt")
"""Where the seed of a sampled request that gives none comes from: it is drawn, or derived from the prompt."""
MAX_QUEUED = 1024
"""Choices that may wait where `max_queued` is not set. Set by hand: minutes of work for a small machine."""
KEEP_ALIVE = 10.0
"""Seconds without a byte after which a stream says that it lives: a long prompt, a full queue and held-back
text are silent. Set by hand: many proxies close a silent connection after 30 to 60 s, Codex and Claude Code
after 300 s."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine in a Host header. A page of another site that has its name lead here (DNS rebinding)
sends that name."""
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)
"""An Origin header as browsers write it: no path and no slash at the end."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that give access to the server, as digests. With no key the server is open."""

    digests: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        """From the keys in plain text, which are not stored."""
        unique = list(dict.fromkeys(keys))
        for key in unique:
            if not key or not key.isascii() or any(c.isspace() or not c.isprintable() for c in key):
                raise BadParameter(
                    "an API key is one word of printable ASCII; one of those given is not", param="api_key"
                )
        return cls(tuple(_digest(key) for key in unique))

    def match(self, key: str) -> bytes | None:
        """The digest of a valid key; None for any other.

        All digests are compared, each in constant time, so that timing reveals nothing about them.
        """
        digest, matched = _digest(key), None
        for known in self.digests:
            if hmac.compare_digest(known, digest):
                matched = known
        return matched

    def __bool__(self) -> bool:
        return bool(self.digests)


def gather_keys(given: Iterable[str] = (), file: Path | None = None) -> Keys:
    """Keys from the command line, the environment (comma-separated) and a file (one a line, # comments)."""
    keys = [*given, *(key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",") if key.strip())]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadParameter(
                f"api_key_file={str(file)!r} cannot be read: {error}", param="api_key_file"
            ) from error
        listed = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not listed:
            raise BadParameter(
                f"api_key_file={str(file)!r} holds no key; write one a line", param="api_key_file"
            )
        keys += listed
    return Keys.of(keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """The server's settings. Limits of single bodies are in openai.request.ParseOptions.

    Without a key, web pages of other origins than `allowed_origins` are refused: a browser would let any page
    that its user visits send requests to this server.
    """

    model_names: tuple[str, ...] = ()  # accepted names; answers carry the first
    keys: Keys = field(default_factory=Keys)
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call the server; "*": of all
    allowed_hosts: tuple[str, ...] | None = None  # names in the Host header; None: any
    limits: ServeLimits = field(default_factory=ServeLimits)
    max_body: int = 8 * 2**20  # bytes; set by hand: a million tokens of text
    shutdown_timeout: float = 30.0  # seconds for active requests to end after SIGTERM
    keep_alive: float = KEEP_ALIVE  # seconds of silence in a stream
    receipts: Path | None = None  # folder for a receipt of every answer
    hide_prompts: bool = False  # receipts hold only a digest of the prompt
    special_tokens_in_content: bool = True  # False: control tokens in messages are read as text
    signer: SigningKey | None = field(default=None, repr=False)  # signs receipts
    training: bool = False  # whether trainers may pause it and replace its weights; only with a key
    logprobs_mode: str = "raw_logprobs"  # of requests that do not say
    unseeded: str | None = None  # see UNSEEDED; None: fresh for trainers, else prompt

    def __post_init__(self) -> None:
        if self.max_body < 1024:
            raise BadParameter(f"max_body={self.max_body}: give at least 1024 bytes", param="max_body")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise BadParameter(
                f"shutdown_timeout={self.shutdown_timeout}: give seconds, 0 or more", param="shutdown_timeout"
            )
        if not 0 < self.keep_alive < float("inf"):
            raise BadParameter(f"keep_alive={self.keep_alive}: give seconds above 0", param="keep_alive")
        if 4 * self.max_body > 3 * self.limits.max_bodies:  # the share of a single body
            raise BadParameter(
                f"max_body={self.max_body} is more than 3/4 of max_bodies={self.limits.max_bodies}, the "
                "bytes of all bodies together; raise that too",
                param="max_bodies",
            )
        if self.training and not self.keys:
            raise BadParameter(
                "enable_training: whoever reaches this server could replace its weights; give it a key "
                f"(--api-key-file, {KEY_VARIABLE})",
                param="enable_training",
            )
        _check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        _check_choice("unseeded", self.unseeded, (None, *UNSEEDED))
        for origin in self.allowed_origins:
            if not ORIGIN.fullmatch(origin):
                raise BadParameter(
                    f"allowed_origins={origin!r}: give scheme://host or scheme://host:port, with no slash at "
                    "the end, or *",
                    param="allowed_origins",
                )
        if any(not name for name in self.model_names):
            raise BadParameter(
                "served_model_name is empty; leave it out or give a name", param="served_model_name"
            )

    @property
    def fresh_seeds(self) -> bool:
        """Whether sampled requests without a seed draw one.

        A trainer samples a prompt many times, in requests that are all alike, and needs different answers.
        """
        return self.unseeded == "fresh" or (self.unseeded is None and self.training)

    @property
    def several_owners(self) -> bool:
        """Whether requests come from owners that share the server: there are several keys."""
        return len(self.keys.digests) > 1


def _check_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        named = ", ".join(choice for choice in choices if choice is not None)
        raise BadParameter(f"{name}={value!r}: choose one of {named}", param=name)


def _digest(key: str) -> bytes:
    return sha256(b"samewise api key\0" + key.encode("utf-8", "surrogatepass")).digest()


__all__ = [
    "KEEP_ALIVE",
    "KEY_VARIABLE",
    "LOCAL_HOSTS",
    "LOG_LEVELS",
    "MAX_QUEUED",
    "UNSEEDED",
    "Keys",
    "ServeSettings",
    "gather_keys",
]
