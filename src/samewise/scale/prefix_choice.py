"""Which replica a request goes to: the one that has most of its prompt's pages, unless it is much busier.

Pages are addressed by the SHA-256 chain of the prefix cache (`kv/prefix`), so equal digests mean equal
prefixes, of prompts and answers alike. A chooser remembers which digests it has sent where. It does not know
what a replica has evicted, or was sent by another router: a wrong guess costs a prefill, never a bit.

Host only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChoiceLimits:
    """Set by hand."""

    slack: int = 4
    """Requests by which the preferred replica may be busier than the least busy one, beside `share`."""
    share: float = 0.5
    """The same as a share of the least busy one's requests: queues of 40 and 60 are about as long."""
    pages: int = 1 << 16
    """Digests remembered for each replica: with pages of 16 tokens a million tokens, in 8 MB."""


LIMITS = ChoiceLimits()


class PrefixChoice:
    """What was sent where. Owned by one router."""

    def __init__(self, limits: ChoiceLimits = LIMITS) -> None:
        self._limits = limits
        self._pages: dict[str, OrderedDict[bytes, None]] = {}  # by replica, least recently sent first

    def rank(
        self,
        pages: Sequence[bytes],
        reported: Mapping[str, int | None],
        avoid: Collection[str] = (),
        own: Mapping[str, int] | None = None,
    ) -> list[str]:
        """The replicas, the one to try first in front.

        `reported`: requests under way, by replica; None: it has not said so for a while. `own`: how many of
        this router it has at least. Those to `avoid` come last, however little they have to do.
        """
        own = own or {}
        loads = {name: max(load or 0, own.get(name, 0)) for name, load in reported.items()}
        least = min((load for name, load in loads.items() if name not in avoid), default=0)
        most = least + self._limits.slack + self._limits.share * least

        def badness(name: str) -> tuple[bool, bool, int, int, str]:
            return name in avoid, loads[name] > most, -self.num_known(name, pages), loads[name], name

        return sorted(loads, key=badness)

    def num_known(self, replica: str, pages: Sequence[bytes]) -> int:
        """How many of the first pages the replica was sent before."""
        known = self._pages.get(replica, ())
        for number, page in enumerate(pages):
            if page not in known:
                return number
        return len(pages)

    def sent(self, replica: str, pages: Sequence[bytes]) -> None:
        """A request with these pages went to a replica."""
        known = self._pages.setdefault(replica, OrderedDict())
        for page in reversed(pages):  # the tail of a prefix is forgotten before its head
            known[page] = None
            known.move_to_end(page)
        while len(known) > self._limits.pages:
            known.popitem(last=False)

    def keep(self, replicas: Sequence[str]) -> None:
        """Forget all replicas but these."""
        self._pages = {name: known for name, known in self._pages.items() if name in replicas}


__all__ = ["LIMITS", "ChoiceLimits", "PrefixChoice"]
