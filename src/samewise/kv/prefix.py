"""Prefix cache: the digest of a token prefix -> the page that holds its last tokens.

Canonical KV is unique for a token prefix, so sequences with the same tokens so far share pages, of prompts
and answers alike. Digests form a SHA-256 chain over full pages, rooted in a salt: equal digests mean equal
prefixes. Indexed pages that no sequence holds are evicted least recently used first.

Host only: tokens and page numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from samewise.kv.pages import PagePool


def extend_digests(
    digests: list[bytes], tokens: Sequence[int], salt: bytes, page_size: int, num_pages: int
) -> None:
    """Extend `digests`, those of the first full pages of `tokens`, to `num_pages` pages, in place."""
    for i in range(len(digests), num_pages):
        parent = digests[-1] if digests else sha256(b"samewise prefix" + salt).digest()
        page_tokens = array("q", tokens[i * page_size : (i + 1) * page_size])
        digests.append(sha256(parent + page_tokens.tobytes()).digest())


class PrefixIndex:
    """Allocates pages and indexes full ones by the prefix they hold. Owns the pool.

    With `enabled` off no page is indexed, and it is a plain page allocator.
    """

    def __init__(self, pool: PagePool, *, enabled: bool) -> None:
        self.pool = pool
        self.enabled = enabled
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._evictable: dict[int, None] = {}  # least recently used first, by insertion order

    @property
    def num_available(self) -> int:
        """Pages that `take` can allocate: free ones, and evictable ones."""
        return self.pool.num_free + len(self._evictable)

    @property
    def num_indexed(self) -> int:
        """Pages that `match` can find."""
        return len(self._page_of)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest indexed prefix. Not yet held: `hold` them before the next `take`."""
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, page: int) -> None:
        """Add a holder to a matched page."""
        self._evictable.pop(page, None)
        self.pool.hold(page)

    def take(self) -> int | None:
        """Allocate a page with undefined content, evicting the least recently used one if none is free."""
        if not self.pool.num_free and self._evictable:
            self._evict(next(iter(self._evictable)))
        return self.pool.take()

    def release(self, pages: Sequence[int]) -> None:
        """Release a sequence's pages. The tail of a prefix is evicted before its head."""
        for page in reversed(pages):
            if self.pool.release(page) == 0:
                if page in self._digest_of:
                    self._evictable[page] = None
                else:
                    self.pool.free(page)

    def add(self, digest: bytes, page: int) -> None:
        """Index a full canonical page by its prefix; no effect if the prefix already has a page."""
        if self.enabled and digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def clear(self) -> None:
        """Empty the index: after a change of weights no page is canonical any more."""
        for page in list(self._evictable):
            self._evict(page)
        self._page_of.clear()
        self._digest_of.clear()

    def check(self, held: dict[int, int]) -> None:
        """Raise InvariantBroken unless every page is accounted for; `held` is page -> holders."""
        self.pool.check(held, set(self._evictable))

    def _evict(self, page: int) -> None:
        del self._evictable[page]
        del self._page_of[self._digest_of.pop(page)]
        self.pool.free(page)


__all__ = ["PrefixIndex", "extend_digests"]
