"""What followed a context, and how often: a trie of the last tokens with counts, over one text or several.

A context is the last 1 to `max_context` tokens. A context that occurred once is no node of its own but a
position of the text, so most tokens add one entry. Host only; no text is ever scanned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from samewise.draft.tuning import DEFAULTS, SuffixTuning

SEPARATOR = -1
"""Between two texts of one trie; never a token id."""


# The classes of matches. They say where weights of `estimates` lie, so they are no tuning: with others,
# `estimates.first_weights` must be learned anew. Set by hand.
MAX_LENGTH = 6
"""Tokens: longer matches are one class."""
NUM_SHARES = 5
"""Classes of a next token's share of its context's occurrences: below 20 %, below 40 %, ..."""
MAX_TOTAL = 4
"""Occurrences of a context: more are one class."""
NUM_MATCH_CLASSES = MAX_LENGTH * NUM_SHARES * MAX_TOTAL

ENTRY_BYTES = 82
"""Bytes of host memory that an entry of a trie takes on average, as found on recorded text."""

Named = tuple[int, Sequence[int], Sequence[int]]
"""(source, tokens, classes): tokens that a source names as next, and the class of each."""


def match_class(length: int, count: int, total: int) -> int:
    """The class of a token that followed a context of `length` tokens `count` times out of `total`."""
    share = min(NUM_SHARES * count // total, NUM_SHARES - 1)
    return ((min(length, MAX_LENGTH) - 1) * NUM_SHARES + share) * MAX_TOTAL + min(total, MAX_TOTAL) - 1


class _Node:
    """A context that occurred more than once.

    `children` by next token: a node; or, at 0 and above, the position after the only occurrence; or, below 0,
    minus the number of occurrences where contexts are no longer extended.
    """

    __slots__ = ("children", "classes", "count", "frequent", "total")

    def __init__(self, count: int) -> None:
        self.count = count  # occurrences
        self.total = 0  # of them, with a next token
        self.children: dict[int, _Node | int] = {}
        self.frequent: list[int] = []  # next tokens, most frequent first, the latest of equals first
        self.classes: list[int] | None = None  # of `frequent`; None: not computed since the last change


Match = tuple[list[_Node], int, int]
"""Where the end of some text occurred in a trie: nodes, longest context first and the empty one last; the
position that continues the longest match where it occurred once (-1: none); the match's length in tokens."""


def _occurrences(child: _Node | int) -> int:
    if isinstance(child, _Node):
        return child.count
    return 1 if child >= 0 else -child


_ONCE = [[match_class(max(length, 1), 1, 1)] for length in range(MAX_LENGTH + 1)]


class SuffixTrie:
    """Counts of what followed each context of a growing text. One owner."""

    def __init__(self, tuning: SuffixTuning = DEFAULTS.trees.suffixes) -> None:
        self._tuning = tuning
        self._root = _Node(0)
        # Contexts that end the text, longest first: the next token is counted there.
        self._open = [self._root]
        self.tokens: list[int] = []
        self._num_children = 0

    @property
    def num_entries(self) -> int:
        """Tokens, separators and children of contexts, which is what takes memory."""
        return len(self.tokens) + self._num_children

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, estimated."""
        return ENTRY_BYTES * self.num_entries

    @property
    def seen(self) -> dict[int, object]:
        """Its keys are the tokens that occurred. To be read only."""
        return cast("dict[int, object]", self._root.children)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token, counting it after each context that ends the text."""
        position = len(self.tokens) + 1
        self.tokens.append(token)
        depth, matched = len(self._open), []
        for node in self._open:
            depth -= 1
            child = node.children.get(token)
            if child is None:
                node.children[token] = position
                self._num_children += 1
            elif isinstance(child, _Node):
                child.count += 1
                matched.append(child)
            elif depth >= self._tuning.max_context:
                node.children[token] = -2 if child >= 0 else child - 1
            else:
                node.children[token] = opened = self._open_context(child)
                matched.append(opened)
            node.total += 1
            node.classes = None
            self._rank(node, token)
        matched.append(self._root)
        self._open = matched

    def separate(self) -> None:
        """End a text: no context reaches from the next one into it."""
        self.tokens.append(SEPARATOR)
        self._open = [self._root]

    def match(self) -> Match:
        """The earlier occurrences of the text's own end."""
        return self._open, -1, len(self._open) - 1

    def find(self, suffix: list[int]) -> Match:
        """The occurrences of the end of another text, at most `max_context` tokens of it."""
        match: Match = [self._root], -1, 0
        for token in suffix[-self._tuning.max_context :]:
            match = self.follow(match, token)
        return match

    def follow(self, match: Match, token: int) -> Match:
        """The match after one more token. Costs one look-up for each context."""
        nodes, position, length = match
        followed = -1
        if position >= 0:
            tokens = self.tokens
            if position < len(tokens) and tokens[position] == token:
                followed = position + 1
        found: list[_Node] = []
        depth = len(nodes)
        longest = length + 1 if followed >= 0 else 0
        for node in nodes:
            child = node.children.get(token)
            if child is None:
                pass
            elif isinstance(child, _Node):
                found.append(child)
                longest = longest or depth
            elif child >= 0 and followed < 0:
                followed, longest = child, depth
            depth -= 1
        found.append(self._root)
        return found, followed, longest

    def name(self, match: Match, source: int, named: list[Named]) -> None:
        """Append the tokens that followed the match, under a source: those of longer contexts first.

        A token may follow a shorter context too. Shorter ones are left out once enough tokens are named.
        """
        nodes, position, length = match
        num, most = 0, self._tuning.max_successors
        if 0 <= position < len(self.tokens):
            named.append((source, [self.tokens[position]], _ONCE[min(length, MAX_LENGTH)]))
            num = 1
        depth = len(nodes) - 1
        for node in nodes:
            if not depth or num >= most:
                break
            classes = node.classes or self._classify(node, depth)
            named.append((source, tuple(node.frequent), classes))
            num += len(node.frequent)
            depth -= 1

    def _classify(self, node: _Node, length: int) -> list[int]:
        children, total = node.children, node.total
        node.classes = [match_class(length, _occurrences(children[token]), total) for token in node.frequent]
        return node.classes

    def _open_context(self, position: int) -> _Node:
        """A node for a context whose first occurrence ended before `position` and which occurred again."""
        node = _Node(2)
        self._num_children += 1
        token = self.tokens[position] if position < len(self.tokens) else SEPARATOR
        if token != SEPARATOR:
            node.children[token] = position + 1
            node.frequent.append(token)
            node.total = 1
            self._num_children += 1
        return node

    def _rank(self, node: _Node, token: int) -> None:
        """Move a next token that was just counted to its place among the frequent ones."""
        frequent, children = node.frequent, node.children
        if frequent and frequent[0] == token:
            return
        count = _occurrences(children[token])
        if token in frequent:
            i = frequent.index(token)
        elif len(frequent) < self._tuning.max_successors:
            i = len(frequent)
            frequent.append(token)
        elif _occurrences(children[frequent[-1]]) <= count:
            i = len(frequent) - 1
        else:
            return
        while i and _occurrences(children[frequent[i - 1]]) <= count:
            frequent[i] = frequent[i - 1]
            i -= 1
        frequent[i] = token


class _Pool:
    """Texts of earlier requests that may share: two tries, the older dropped when the newer is full."""

    def __init__(self, tuning: SuffixTuning) -> None:
        self._tuning = tuning
        self.tries = [SuffixTrie(tuning)]

    @property
    def num_entries(self) -> int:
        return sum(trie.num_entries for trie in self.tries)

    def add(self, tokens: list[int]) -> None:
        half = self._tuning.store_entries // 2
        per_token = 2 * (self._tuning.max_context + 1) + 1  # at most: two children of each context, itself
        tokens = tokens[-min(self._tuning.stored_tokens, max(1, (half - 1) // per_token)) :]
        if self.tries[0].tokens and self.tries[0].num_entries + len(tokens) * per_token + 1 > half:
            self.tries = [SuffixTrie(self._tuning), self.tries[0]]
        self.tries[0].extend(tokens)
        self.tries[0].separate()


class TextStore:
    """A bounded store of earlier texts, by salt. One owner."""

    def __init__(self, tuning: SuffixTuning = DEFAULTS.trees.suffixes) -> None:
        self._tuning = tuning
        self._pools: OrderedDict[bytes, _Pool] = OrderedDict()

    @property
    def num_entries(self) -> int:
        """Entries of all tries, at most `SuffixTuning.store_entries`."""
        return sum(pool.num_entries for pool in self._pools.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, estimated."""
        return ENTRY_BYTES * self.num_entries

    def tries(self, salt: bytes | None) -> list[SuffixTrie]:
        """Tries over the texts that a request with this salt may draft from, the newer first; None: none."""
        pool = None if salt is None else self._pools.get(salt)
        return [] if pool is None else pool.tries

    def add(self, salt: bytes | None, tokens: list[int]) -> None:
        """Store a text for later requests of the same salt; without a salt it is not stored."""
        if salt is None or len(tokens) < 2:
            return
        pool = self._pools.setdefault(salt, _Pool(self._tuning))
        self._pools.move_to_end(salt)
        pool.add(tokens)
        while len(self._pools) > self._tuning.max_pools or (
            len(self._pools) > 1 and self.num_entries > self._tuning.store_entries
        ):
            self._pools.popitem(last=False)

    def clear(self) -> None:
        """Forget all texts."""
        self._pools.clear()


__all__ = [
    "ENTRY_BYTES",
    "MAX_LENGTH",
    "MAX_TOTAL",
    "NUM_MATCH_CLASSES",
    "NUM_SHARES",
    "SEPARATOR",
    "Match",
    "Named",
    "SuffixTrie",
    "TextStore",
    "match_class",
]
