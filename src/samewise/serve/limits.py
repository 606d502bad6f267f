"""How much of the machine clients may hold: connections, seconds, bytes. Set once, frozen.

Every limit protects clients from each other: what one of them holds without using it is taken back.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields

from samewise.errors import BadParameter

FILES_KEPT = 192
"""File descriptors that connections leave free: the model's files, receipts, the log, pipes, a burst of
accepted sockets. Set by hand."""

MOST_CONNECTIONS = 4096
"""Connections where the file limit allows more. Set by hand: each costs memory."""


KEPT_SHARE = 8
"""One connection of so many is never taken by requests that wait for answers. Set by hand: a hundred where
files are limited to 1024, for `/health` and the other public paths, and for the next request to arrive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeLimits:
    """What clients may hold. Seconds and bytes were set by hand, for clients on slow links."""

    max_connections: int | None = None  # None: FILES_KEPT below the limit on open files
    head_timeout: float = 10.0  # for TLS and a request's head, and for what an idle connection sends
    body_timeout: float = 60.0  # for a request's body
    write_timeout: float = 30.0  # without progress in sending an answer
    idle_timeout: int = 5  # between two requests of a connection
    max_head: int = 64 * 2**10  # bytes of a request's head
    max_bodies: int = 64 * 2**20  # bytes of all bodies that are being received or read
    max_unread: int = 256 * 2**20  # bytes of memory of answers that their clients do not read
    max_stored: int = 64 * 2**20  # bytes of memory of stored responses
    max_prompts: int = 2**24  # tokens of all prompts and predictions; 44 to 60 bytes each, 8 more a choice
    max_values: int = 2**20  # of a body, see is_crowded: reading more JSON delays other clients
    max_listeners: int = 64  # of the live feed, which does not end by itself

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not 0 < value < float("inf"):
                raise BadParameter(f"{one.name}={value}: give a number above 0", param=one.name)

    def connections(self) -> int:
        """The most connections, whatever was asked for: the file limit cannot be exceeded."""
        allowed = max(8, _file_limit() - FILES_KEPT)
        return min(allowed, self.max_connections or MOST_CONNECTIONS)

    def answered_connections(self) -> int:
        """The most connections whose requests are being answered, but for those of public paths."""
        most = self.connections()
        return max(1, most - max(1, most // KEPT_SHARE))

    def public_requests(self) -> int:
        """The most requests for public paths that are being answered, `/health` and its like apart."""
        return max(1, self.connections() // (2 * KEPT_SHARE))


def _file_limit() -> int:
    """File descriptors that this process may have open."""
    if sys.platform == "win32":
        return 2**20
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


__all__ = ["ServeLimits"]
