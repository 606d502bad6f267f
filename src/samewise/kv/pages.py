"""KV pages as numbers: which are free, and how many sequences hold each.

Page 0 is the trash page: padding rows write there, no row reads it, and it is never allocated.
Host only: the tensors behind the numbers are in `store`.
"""

from __future__ import annotations

from samewise.errors import InvariantBroken

TRASH = 0


class PagePool:
    """A free list and reference counts. Every page but the trash page is free, held or evictable.

    An evictable page is held by no sequence but is not free: its content is in the prefix index, which
    frees it when it evicts it.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise InvariantBroken(f"a pool of {num_pages} pages has none to allocate")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, TRASH, -1))
        self._refs = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    def refs(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._refs[page]

    def take(self) -> int | None:
        """Allocate a free page with one holder; None when there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a holder to a page that is held or evictable."""
        self._refs[page] += 1

    def release(self, page: int) -> int:
        """Remove a holder. Returns how many are left; at 0 the page is evictable until it is freed."""
        left = self._refs[page] - 1
        if left < 0:
            raise InvariantBroken(f"page {page} released more often than held")
        self._refs[page] = left
        return left

    def free(self, page: int) -> None:
        """Put an evictable page back on the free list."""
        if self._refs[page] or page == TRASH:
            raise InvariantBroken(f"page {page} freed while held {self._refs[page]} times")
        self._free.append(page)

    def check(self, held: dict[int, int], evictable: set[int]) -> None:
        """Raise unless every page is exactly one of trash, free, held (page -> holders) or evictable."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantBroken("a page is on the free list twice")
        for page in range(self.num_pages):
            states = [page == TRASH, page in free, held.get(page, 0) > 0, page in evictable]
            if sum(states) != 1 or self._refs[page] != held.get(page, 0):
                raise InvariantBroken(
                    f"page {page}: trash, free, held, evictable = {states}; "
                    f"{self._refs[page]} references for {held.get(page, 0)} holders"
                )


__all__ = ["TRASH", "PagePool"]
