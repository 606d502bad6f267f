"""Content-addressed prefixes: the digest of a token prefix → the page that holds its last tokens.

Canonical KV is unique for a token prefix, so a page may be shared by anybody whose tokens so far are
the same, prompt and answer alike. Digests form a SHA-256 chain over full pages, rooted in a salt:
equal digests mean equal prefixes. Pages held by nobody rest here, least recently used first out.

Host only: tokens and numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from samewise.kv.pages import PagePool


def chain(known: list[bytes], tokens: Sequence[int], salt: bytes, page: int, upto: int) -> None:
    """Extend `known`, the digests of the first full pages of `tokens`, to `upto` pages."""
    for i in range(len(known), upto):
        parent = known[-1] if known else sha256(b"samewise prefix" + salt).digest()
        known.append(sha256(parent + array("q", tokens[i * page : (i + 1) * page]).tobytes()).digest())


class PrefixIndex:
    """Hands out pages and remembers what full pages hold. Owns the pool.

    With `enabled` off nothing is remembered, and it is a plain page allocator.
    """

    def __init__(self, pool: PagePool, *, enabled: bool) -> None:
        self.pool = pool
        self.enabled = enabled
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._resting: dict[int, None] = {}  # insertion order is least recently used first

    @property
    def num_available(self) -> int:
        """Pages that `take` can give: free ones, and resting ones whose content would be forgotten."""
        return self.pool.num_free + len(self._resting)

    @property
    def num_indexed(self) -> int:
        """Pages whose content can be found."""
        return len(self._page_of)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest known prefix. Not yet held: hold them before anything else is taken."""
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, page: int) -> None:
        """Share a matched page."""
        self._resting.pop(page, None)
        self.pool.hold(page)

    def take(self) -> int | None:
        """A page of one's own with unknown content, forgetting the least recently used if need be."""
        if not self.pool.num_free and self._resting:
            self._forget(next(iter(self._resting)))
        return self.pool.take()

    def release(self, pages: Sequence[int]) -> None:
        """Give up a sequence's pages. The tail of a prefix is forgotten before its head."""
        for page in reversed(pages):
            if self.pool.release(page) == 0:
                if page in self._digest_of:
                    self._resting[page] = None
                else:
                    self.pool.free(page)

    def offer(self, digest: bytes, page: int) -> None:
        """Remember that a full canonical page holds this prefix. The first page to say so keeps it."""
        if self.enabled and digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def clear(self) -> None:
        """Forget everything: the weights changed, so no page is canonical any more."""
        for page in list(self._resting):
            self._forget(page)
        self._page_of.clear()
        self._digest_of.clear()

    def check(self, held: dict[int, int]) -> None:
        """Raise InvariantBroken unless no page is lost, shared unawares or known under two names."""
        self.pool.check(held, set(self._resting))

    def _forget(self, page: int) -> None:
        del self._resting[page]
        del self._page_of[self._digest_of.pop(page)]
        self.pool.free(page)


__all__ = ["PrefixIndex", "chain"]
