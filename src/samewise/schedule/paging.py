"""Which KV pages a sequence has: matched in the prefix index, taken, released. Host only.

Does not decide which sequences run: preempting a sequence to free its pages is the Scheduler's decision.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from samewise.errors import InvariantBroken
from samewise.kv.pages import PagePool
from samewise.kv.prefix import PrefixIndex, extend_digests
from samewise.schedule.limits import Limits
from samewise.types import MAX_TREE_NODES, Sequence


class Paging:
    """Owns the page pool and the prefix index. Owned by the Scheduler."""

    def __init__(self, limits: Limits) -> None:
        self._page = limits.page
        self.index = PrefixIndex(PagePool(limits.num_pages), enabled=limits.prefix_caching)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self._page)

    def start(self, seq: Sequence, *, force: bool) -> bool:
        """Give a sequence its prefix's cached pages. False, and nothing taken, if the rest would not fit.

        With `force` it starts in any case: nothing else runs whose pages it could wait for.
        """
        matched = self._match(seq)
        for number in matched:
            self.index.hold(number)
        needed = len(seq.tokens) // self._page + 1 - len(matched)
        if not force and needed > self.index.num_available:
            self.index.release(matched)
            return False
        seq.pages = array("i", matched)
        seq.kv_len = len(matched) * self._page
        seq.num_indexed = len(matched)
        return True

    def _match(self, seq: Sequence) -> list[int]:
        """Cached pages of the sequence's prefix.

        The last known token is always computed again, because its logits give the next token. So are the rows
        whose logits score a prompt token.
        """
        if not self.index.enabled:
            return []
        end = len(seq.tokens)
        if seq.score_next is not None and seq.score_next < seq.prompt_len:
            end = seq.score_next
        num = (end - 1) // self._page
        extend_digests(seq.digests, seq.tokens, seq.request.salt, self._page, num)
        return self.index.match(seq.digests[:num])

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Add free pages until the sequence can hold this many tokens; False if there are too few.

        Pages added before the shortage stay with the sequence.
        """
        while len(seq.pages) * self._page < num_tokens:
            page = self.index.take()
            if page is None:
                return False
            seq.pages.append(page)
        return True

    def draft_room(self, seq: Sequence, at_least: int) -> int:
        """Guesses of a tree that its pages can hold, and the free pages of which it may take a few."""
        spare = min(self.index.num_available // 4, MAX_TREE_NODES // self._page + 1)
        fits = (len(seq.pages) + spare) * self._page - len(seq.tokens) - len(seq.draft)
        return max(fits, at_least)

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Add pages for this many tokens, as far as a draft may take free ones."""
        if len(seq.pages) * self._page >= num_tokens:
            return
        self.grow(seq, min(num_tokens, len(seq.tokens) + len(seq.draft) + self.draft_room(seq, 0)))

    def room(self, seq: Sequence) -> int:
        """Tokens that fit into the sequence's pages above its canonical KV."""
        return len(seq.pages) * self._page - seq.kv_len

    def moves(self, seq: Sequence, first: int, path: tuple[int, ...]) -> list[tuple[int, int]]:
        """(from, to): slots whose KV has to be moved so that the accepted guesses stand at their positions.

        Guess i of a tree lies in the slot of position `first` + i; guess `path[j]` belongs at `first` + j,
        which is never higher. By rising target, so that moving them one after the other is safe.
        """
        return [
            (self._slot(seq, first + node), self._slot(seq, first + level))
            for level, node in enumerate(path)
            if node != level
        ]

    def _slot(self, seq: Sequence, position: int) -> int:
        return seq.pages[position // self._page] * self._page + position % self._page

    def release(self, seq: Sequence) -> None:
        """Free all pages of a sequence."""
        self.index.release(seq.pages)
        seq.pages = array("i")

    def share(self, seq: Sequence) -> None:
        """Offer the sequence's full canonical pages to the prefix index."""
        full = seq.kv_len // self._page
        if full <= seq.num_indexed:
            return
        if self.index.enabled:
            extend_digests(seq.digests, seq.tokens, seq.request.salt, self._page, full)
            for i in range(seq.num_indexed, full):
                self.index.add(seq.digests[i], seq.pages[i])
        seq.num_indexed = full

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raise InvariantBroken unless every page is accounted for."""
        held: Counter[int] = Counter()
        for seq in running:
            seq.check()
            held.update(seq.pages)
            if self.room(seq) < 0:
                raise InvariantBroken(f"request {seq.request.id} has too few pages for its KV")
        for seq in waiting:
            if seq.pages:
                raise InvariantBroken(f"request {seq.request.id} waits but holds pages")
        self.index.check(dict(held))


__all__ = ["Paging"]
