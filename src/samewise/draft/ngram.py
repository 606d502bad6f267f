"""Guess that text repeats itself: find the longest suffix that was seen before, and say what followed it.

Looks in the request's own prompt and output, and in a bounded store of what earlier requests were answered.
A hash index over pairs of tokens leads to the few places worth comparing; nothing is ever scanned.

Host only.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import NamedTuple

from samewise.draft.base import Proposer
from samewise.types import Ask, Proposal

PLACES = 8  # most recent occurrences of a pair that are looked at
LONGEST = 24  # a match is not followed back further
OWN_LEAST, SHARED_LEAST = 2, 3  # shortest matches believed
STORE_TOKENS = 200_000  # kept of earlier answers in all; each pool in two halves, the older dropped first
POOLS = 64  # kept at once; the one unused the longest goes first
BREAK = -1  # between texts; never a token


class Match(NamedTuple):
    """What may come next, and how many tokens before it agree with what was seen."""

    tokens: tuple[int, ...]
    length: int
    shared: bool


class Heard(NamedTuple):
    """How many of a sequence's last tokens were seen before, 0 for too few; and how the match before fared:
    its length, and whether what had followed it came again."""

    length: int
    fared: tuple[int, bool] | None


class TextIndex:
    """A text that grows, and where each pair of tokens in it ended lately."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, int], list[int]] = {}

    def extend(self, tokens: list[int]) -> None:
        """Append."""
        text, ends = self.tokens, self._ends
        start = max(1, len(text))
        text += tokens
        for end, pair in enumerate(pairwise(text[start - 1 :]), start + 1):
            places = ends.get(pair)
            if places is None:
                ends[pair] = [end]
                continue
            places.append(end)
            if len(places) > 2 * PLACES:
                del places[:PLACES]

    def find(self, suffix: list[int], most: int, *, own: bool) -> tuple[int, int]:
        """(end, length) of the longest earlier match of `suffix`'s end, the latest of equals; (0, 0): none.

        `own`: the suffix is this very text's end, which does not count as its own match.
        """
        if len(suffix) < 2:
            return 0, 0
        text, best, where = self.tokens, 0, 0
        for end in reversed(self._ends.get((suffix[-2], suffix[-1]), ())[-PLACES - own :]):
            if end >= len(text):  # nothing follows
                continue
            length, most_here = 2, min(most, end, len(suffix))
            while length < most_here and text[end - 1 - length] == suffix[-1 - length]:
                length += 1
            if length > best:
                best, where = length, end
        return where, best

    def follow(self, end: int, num: int) -> tuple[int, ...]:
        """Up to `num` tokens from `end` on; a text that runs out goes on repeating what led up to it."""
        text = self.tokens
        found = text[end : end + num]
        period = len(text) - end
        while period > 0 and len(found) < num and BREAK not in found:
            found = found + found[-period:]
        if BREAK in found:
            found = found[: found.index(BREAK)]
        return tuple(found[:num])


class _Pool:
    """Answers of earlier requests: two halves, the older of which is dropped when the newer is full."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self.halves = [TextIndex(), TextIndex()]

    def add(self, tokens: list[int]) -> None:
        if len(self.halves[0].tokens) + len(tokens) > self._half:
            self.halves = [TextIndex(), self.halves[0]]
        self.halves[0].extend([*tokens[-self._half :], BREAK])


class Ngram(Proposer):
    """Suffix matching. Costs microseconds per token, and no pass of any model."""

    name = "ngram"

    def __init__(self, store_tokens: int = STORE_TOKENS) -> None:
        self._limit = store_tokens
        self._texts: dict[int, TextIndex] = {}
        self._asked: dict[int, tuple[int, bytes | None]] = {}  # prompt length and pool of each sequence
        self._foretold: dict[int, tuple[int, int]] = {}  # length of a match that was heard, and what followed
        self._pools: OrderedDict[bytes, _Pool] = OrderedDict()

    def meet(self, asks: list[Ask]) -> None:
        """Read."""
        for ask in asks:
            self._text(ask)

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """What followed the last time, twice as far as the match reaches back."""
        proposals = []
        for ask in asks:
            if not ask.draft and (match := self.find(ask)) is not None:
                tokens = match.tokens[: 2 * match.length]
                proposals.append(Proposal(ask.seq_id, tokens, drafter=self.name))
        return proposals

    def find(self, ask: Ask) -> Match | None:
        """The best match for a sequence, its own text first; None where nothing fits."""
        self._foretold.pop(ask.seq_id, None)
        text = self._text(ask)
        end, length = text.find(ask.tokens, LONGEST, own=True)
        if length >= OWN_LEAST and (tokens := text.follow(end, ask.room)):
            own = Match(tokens, length, shared=False)
            if length >= LONGEST:
                return own
        else:
            own = None
        other = self._in_store(ask)
        return other if other is not None and (own is None or other.length > own.length) else own

    def listen(self, seq_id: int, tokens: tuple[int, ...], length: int) -> Heard:
        """A sequence has gone on by these tokens to that length, and nobody asks.

        Of one that was never met, or of which something was missed, nothing is heard.
        """
        text, before = self._texts.get(seq_id), self._foretold.pop(seq_id, None)
        if text is None or len(text.tokens) + len(tokens) != length:
            return Heard(0, None)
        text.extend(list(tokens))
        best, follows = 0, BREAK
        end, num = text.find(text.tokens, LONGEST, own=True)
        if num >= OWN_LEAST:
            best, follows = num, text.tokens[end]
        name = self._asked[seq_id][1]
        pool = None if name is None else self._pools.get(name)
        for half in () if pool is None else pool.halves:
            end, num = half.find(text.tokens, LONGEST, own=False)
            if num > best and num >= SHARED_LEAST and half.tokens[end] != BREAK:
                best, follows = num, half.tokens[end]
        if best:
            self._foretold[seq_id] = (best, follows)
        return Heard(best, None if before is None else (before[0], before[1] == tokens[0]))

    def forget(self, seq_id: int) -> None:
        """The sequence is gone; what it was answered may help others, if it may be shared."""
        text = self._texts.pop(seq_id, None)
        self._foretold.pop(seq_id, None)
        prompt_len, pool = self._asked.pop(seq_id, (0, None))
        if text is None or pool is None or len(text.tokens) - prompt_len < 2:
            return
        store = self._pools.setdefault(pool, _Pool(self._limit))
        self._pools.move_to_end(pool)
        store.add(text.tokens[prompt_len:])
        while len(self._pools) > POOLS or (len(self._pools) > 1 and self._stored() > self._limit):
            self._pools.popitem(last=False)

    def _stored(self) -> int:
        return sum(len(half.tokens) for pool in self._pools.values() for half in pool.halves)

    def _text(self, ask: Ask) -> TextIndex:
        text = self._texts.get(ask.seq_id)
        if text is None:
            text = self._texts[ask.seq_id] = TextIndex()
            self._asked[ask.seq_id] = (ask.prompt_len, ask.pool)
        known = len(text.tokens)
        if text.tokens[-8:] != ask.tokens[max(0, known - 8) : known]:
            text, known = TextIndex(), 0  # what was heard is not what was said
            self._texts[ask.seq_id] = text
        if known < len(ask.tokens):
            text.extend(ask.tokens[known:])
        return text

    def _in_store(self, ask: Ask) -> Match | None:
        pool = self._pools.get(ask.pool) if ask.pool is not None else None
        if pool is None:
            return None
        best = None
        for half in pool.halves:
            end, length = half.find(ask.tokens, LONGEST, own=False)
            if length >= SHARED_LEAST and (best is None or length > best.length):
                tokens = half.follow(end, ask.room)
                best = Match(tokens, length, shared=True) if tokens else best
        return best


__all__ = ["Heard", "Match", "Ngram", "TextIndex"]
