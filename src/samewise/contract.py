"""The contract: the facts that an engine's bits depend on, and one id for them. Host only.

Two engines with equal contracts have given the same bits for the probe's text, and give the same bits for the
same request. The id is printed at start and returned with every answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256

ENGINE_VERSION = "4"
"""Raised where this package's own arithmetic changes (noise, sampling rule, frames, sums) and no other fact
tells."""

ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Contract:
    """Facts, sorted by name."""

    facts: tuple[tuple[str, str], ...]
    id: str = field(init=False, compare=False)
    """A short digest: equal if and only if all facts are equal."""

    def __post_init__(self) -> None:
        text = json.dumps(self.facts, ensure_ascii=True, separators=(",", ":"))
        object.__setattr__(self, "id", "sw-" + sha256(text.encode()).hexdigest()[:20])

    @classmethod
    def of(cls, facts: dict[str, str]) -> Contract:
        """The contract of these facts and this engine's version."""
        return cls(tuple(sorted((facts | {"engine": ENGINE_VERSION}).items())))

    def differences(self, other: Contract) -> list[tuple[str, str, str]]:
        """(fact, here, there) for every fact that differs; "(absent)" where one side lacks it."""
        here, there = dict(self.facts), dict(other.facts)
        names = sorted(here.keys() | there.keys())
        differing = [name for name in names if here.get(name) != there.get(name)]
        return [(name, here.get(name, ABSENT), there.get(name, ABSENT)) for name in differing]

    def __str__(self) -> str:
        return self.id


__all__ = ["ABSENT", "ENGINE_VERSION", "Contract"]
