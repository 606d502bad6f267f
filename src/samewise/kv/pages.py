"""Pages as numbers: which are free, and how many sequences hold each.

Page 0 is the trash page: padding rows write there and nobody reads it, so it is never handed out.
Host only: the tensors behind the numbers live elsewhere.
"""

from __future__ import annotations

from samewise.errors import InvariantBroken

TRASH = 0


class PagePool:
    """A free list and reference counts. Every page but the trash is free, held or resting.

    Resting pages are held by nobody but are not free either: the prefix index keeps their content
    and says when one may be freed.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise InvariantBroken(f"a pool of {num_pages} pages has none to hand out")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, TRASH, -1))
        self._refs = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be taken at once."""
        return len(self._free)

    def refs(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._refs[page]

    def take(self) -> int | None:
        """A free page, held once; None when there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more sequence holds a page that is held or resting."""
        self._refs[page] += 1

    def release(self, page: int) -> int:
        """One sequence fewer holds the page. Returns how many still do; at 0 it rests until freed."""
        left = self._refs[page] - 1
        if left < 0:
            raise InvariantBroken(f"page {page} released more often than held")
        self._refs[page] = left
        return left

    def free(self, page: int) -> None:
        """Give a resting page back to the free list."""
        if self._refs[page] or page == TRASH:
            raise InvariantBroken(f"page {page} freed while held {self._refs[page]} times")
        self._free.append(page)

    def check(self, held: dict[int, int], resting: set[int]) -> None:
        """Raise unless every page is exactly one of trash, free, held (as often as told) or resting."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantBroken("a page is on the free list twice")
        for page in range(self.num_pages):
            homes = [page == TRASH, page in free, held.get(page, 0) > 0, page in resting]
            if sum(homes) != 1 or self._refs[page] != held.get(page, 0):
                raise InvariantBroken(
                    f"page {page}: trash, free, held, resting = {homes}; "
                    f"{self._refs[page]} references for {held.get(page, 0)} holders"
                )


__all__ = ["TRASH", "PagePool"]
