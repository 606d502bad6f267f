"""Suffix matching: find the longest suffix of a sequence that occurred before, and propose what followed it.

Searched are the request's own prompt and output, and a bounded store of answers to earlier requests. An index
over pairs of tokens gives the few places to compare; no text is ever scanned. Host only.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import NamedTuple

from samewise.draft.base import Proposer
from samewise.draft.tuning import DEFAULTS, NgramTuning
from samewise.types import Ask, Proposal

SEPARATOR = -1
"""Between two texts of a store; never a token id."""


class Match(NamedTuple):
    """What followed the earlier occurrence, and how many tokens before it agree."""

    tokens: tuple[int, ...]
    length: int
    shared: bool  # found in an answer to another request


class TrackedMatch(NamedTuple):
    """The match at a tracked sequence's end, and whether the match before it predicted the next token."""

    length: int  # 0: none long enough
    previous: tuple[int, bool] | None  # its length, and whether the token it predicted came


class TextIndex:
    """A growing text, and where each pair of tokens ended in it lately."""

    def __init__(self, tuning: NgramTuning = DEFAULTS.ngram) -> None:
        self._tuning = tuning
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, int], list[int]] = {}

    def extend(self, tokens: list[int]) -> None:
        """Append tokens."""
        text, ends, max_places = self.tokens, self._ends, self._tuning.max_places
        start = max(1, len(text))
        text += tokens
        for end, pair in enumerate(pairwise(text[start - 1 :]), start + 1):
            places = ends.get(pair)
            if places is None:
                ends[pair] = [end]
                continue
            places.append(end)
            if len(places) > 2 * max_places:
                del places[:max_places]

    def find(self, suffix: list[int], *, own: bool) -> tuple[int, int]:
        """(end, length) of the longest earlier match of `suffix`'s end, the latest of equals; (0, 0): none.

        `own`: the suffix is the end of this text, which is not its own match.
        """
        if len(suffix) < 2:
            return 0, 0
        text, best_length, best_end, max_match = self.tokens, 0, 0, self._tuning.max_match
        places = self._ends.get((suffix[-2], suffix[-1]), ())
        for end in reversed(places[-self._tuning.max_places - own :]):
            if end >= len(text):  # nothing follows
                continue
            length, max_length = 2, min(max_match, end, len(suffix))
            while length < max_length and text[end - 1 - length] == suffix[-1 - length]:
                length += 1
            if length > best_length:
                best_length, best_end = length, end
        return best_end, best_length

    def follow(self, end: int, num: int) -> tuple[int, ...]:
        """Up to `num` tokens from `end` on; past the end of the text, its last period repeats."""
        text = self.tokens
        tokens = text[end : end + num]
        period = len(text) - end
        while period > 0 and len(tokens) < num and SEPARATOR not in tokens:
            tokens = tokens + tokens[-period:]
        if SEPARATOR in tokens:
            tokens = tokens[: tokens.index(SEPARATOR)]
        return tuple(tokens[:num])


class _Pool:
    """Answers of earlier requests that may share: two halves, the older dropped when the newer is full."""

    def __init__(self, tuning: NgramTuning) -> None:
        self._tuning, self._half = tuning, tuning.store_tokens // 2
        self.halves = [TextIndex(tuning), TextIndex(tuning)]

    def add(self, tokens: list[int]) -> None:
        if len(self.halves[0].tokens) + len(tokens) > self._half:
            self.halves = [TextIndex(self._tuning), self.halves[0]]
        self.halves[0].extend([*tokens[-self._half :], SEPARATOR])


class Ngram(Proposer):
    """Proposes by suffix matching: microseconds of host time per token, no model pass."""

    name = "ngram"

    def __init__(self, tuning: NgramTuning = DEFAULTS.ngram) -> None:
        self._tuning = tuning
        self._texts: dict[int, TextIndex] = {}
        self._requests: dict[int, tuple[int, bytes | None]] = {}  # prompt length and pool of each sequence
        self._predicted: dict[int, tuple[int, int]] = {}  # of a tracked match: its length and its next token
        self._pools: OrderedDict[bytes, _Pool] = OrderedDict()

    def meet(self, asks: list[Ask]) -> None:
        """Index the prompts."""
        for ask in asks:
            self._text(ask)

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """What followed the match, further the longer it is. A draft under way is not extended."""
        proposals = []
        for ask in asks:
            if not ask.draft and (match := self.find(ask)) is not None:
                tokens = match.tokens[: self._tuning.draft_per_match * match.length]
                proposals.append(Proposal(ask.seq_id, tokens, drafter=self.name))
        return proposals

    def find(self, ask: Ask) -> Match | None:
        """The longest match for a sequence, its own text before stored answers; None if too short."""
        tuning = self._tuning
        self._predicted.pop(ask.seq_id, None)
        text = self._text(ask)
        end, length = text.find(ask.tokens, own=True)
        own = None
        if length >= tuning.min_own_match and (tokens := text.follow(end, ask.room)):
            own = Match(tokens, length, shared=False)
            if length >= tuning.max_match:
                return own
        stored = self._find_stored(ask)
        return stored if stored is not None and (own is None or stored.length > own.length) else own

    def track(self, seq_id: int, tokens: tuple[int, ...], length: int) -> TrackedMatch:
        """Extend a sequence by committed tokens, to `length` in all, and match its end without proposing.

        Gives no match for a sequence whose prompt was not indexed, or of which tokens were missed.
        """
        tuning, text = self._tuning, self._texts.get(seq_id)
        predicted = self._predicted.pop(seq_id, None)
        if text is None or len(text.tokens) + len(tokens) != length:
            return TrackedMatch(0, None)
        text.extend(list(tokens))
        best_length, next_token = 0, SEPARATOR
        end, match_length = text.find(text.tokens, own=True)
        if match_length >= tuning.min_own_match:
            best_length, next_token = match_length, text.tokens[end]
        pool_name = self._requests[seq_id][1]
        pool = None if pool_name is None else self._pools.get(pool_name)
        for half in () if pool is None else pool.halves:
            end, match_length = half.find(text.tokens, own=False)
            longer = match_length > best_length and match_length >= tuning.min_shared_match
            if longer and half.tokens[end] != SEPARATOR:
                best_length, next_token = match_length, half.tokens[end]
        if best_length:
            self._predicted[seq_id] = (best_length, next_token)
        previous = None if predicted is None else (predicted[0], predicted[1] == tokens[0])
        return TrackedMatch(best_length, previous)

    def forget(self, seq_id: int) -> None:
        """Drop the sequence; its answer goes to its pool, if it has one."""
        text = self._texts.pop(seq_id, None)
        self._predicted.pop(seq_id, None)
        prompt_len, pool_name = self._requests.pop(seq_id, (0, None))
        if text is None or pool_name is None or len(text.tokens) - prompt_len < 2:
            return
        pool = self._pools.setdefault(pool_name, _Pool(self._tuning))
        self._pools.move_to_end(pool_name)
        pool.add(text.tokens[prompt_len:])
        while len(self._pools) > self._tuning.max_pools or (
            len(self._pools) > 1 and self._num_stored() > self._tuning.store_tokens
        ):
            self._pools.popitem(last=False)

    def recover(self) -> None:
        """Drop all sequences. Stored answers stay: an index without some pairs finds fewer matches."""
        self._texts, self._requests, self._predicted = {}, {}, {}

    def _num_stored(self) -> int:
        return sum(len(half.tokens) for pool in self._pools.values() for half in pool.halves)

    def _text(self, ask: Ask) -> TextIndex:
        """The sequence's index, extended to its tokens; built anew if it does not end as they do."""
        text = self._texts.get(ask.seq_id)
        if text is None:
            text = self._texts[ask.seq_id] = TextIndex(self._tuning)
            self._requests[ask.seq_id] = (ask.prompt_len, ask.share_salt)
        num_indexed, num_compared = len(text.tokens), self._tuning.compared_tokens
        if text.tokens[-num_compared:] != ask.tokens[max(0, num_indexed - num_compared) : num_indexed]:
            text, num_indexed = TextIndex(self._tuning), 0
            self._texts[ask.seq_id] = text
        if num_indexed < len(ask.tokens):
            text.extend(ask.tokens[num_indexed:])
        return text

    def _find_stored(self, ask: Ask) -> Match | None:
        pool = self._pools.get(ask.share_salt) if ask.share_salt is not None else None
        if pool is None:
            return None
        best = None
        for half in pool.halves:
            end, length = half.find(ask.tokens, own=False)
            if length >= self._tuning.min_shared_match and (best is None or length > best.length):
                tokens = half.follow(end, ask.room)
                best = Match(tokens, length, shared=True) if tokens else best
        return best


__all__ = ["Match", "Ngram", "TextIndex", "TrackedMatch"]
