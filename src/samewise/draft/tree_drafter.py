"""Draft trees from suffix counts, recycled candidates, runners-up and predictions, for many sequences.

Four things speak for a token: it followed the same context before, in the own text or in an earlier one; it
was in the top 8 of the row that last followed the same token; it was a runner-up of one of the last two
committed rows, which often comes a position later; or the caller predicted it. `Estimates` makes one
probability of them.

This is the reference: native/ does the same in C++, tree for tree, and is used where a compiler is
installed. No clock, no torch. Host only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from itertools import takewhile
from typing import NamedTuple, Protocol

from samewise.draft.estimates import (
    MAX_DISTANCE,
    OWN,
    PREDICTED,
    RECYCLED,
    RUNNERS_UP,
    STORED,
    Estimates,
    context_class,
)
from samewise.draft.recycle import WIDTH, Ids, RecycleTables, max_tables
from samewise.draft.suffix_counts import MAX_LENGTH, SEPARATOR, Match, Named, SuffixTrie, TextStore
from samewise.draft.tree import DraftTree, GrownTree, Limit, Root, RowPrices, Siblings, cut, grow
from samewise.draft.tuning import DEFAULTS, TreeTuning
from samewise.follow_up import FollowUpPlan, FrameToFollow
from samewise.types import ROOT


class Sources(IntFlag):
    """What a drafter takes candidates from."""

    SUFFIXES = 1  # the own text, earlier texts, and the caller's prediction
    ROWS = 2  # recycled candidates and runners-up
    ALL = 3


class Committed(NamedTuple):
    """Tokens that a frame committed for a sequence, and the candidates of the sequence's rows.

    `rows[i]`: the row that chose `tokens[i]`. `inputs` and `ids` are those of all rows, rejected ones too;
    without candidates all three are empty.
    """

    seq_id: int
    tokens: tuple[int, ...]
    rows: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    ids: Ids | None = None


class Memory(NamedTuple):
    """Bytes that a drafter takes: tables of recycled candidates, stored texts, and texts of sequences."""

    tables: int
    store: int
    sequences: int


class Follows(FollowUpPlan, Protocol):
    """A plan of a tree drafter."""

    def trees(self) -> tuple[list[DraftTree], float]:
        """The trees of the next frame, and the accepted nodes to expect of them."""
        ...


class GrowsTrees(Protocol):
    """What `TreeDrafter` and its C++ twin do. One owner, one thread."""

    def begin(
        self, seq_id: int, tokens: list[int], salt: bytes | None, prediction: Sequence[int] = ()
    ) -> None:
        """Take a text. Without a salt nothing of it is shared, and no other text serves it.

        The prediction is cut at the first token that is not of the vocabulary: no tree may have it.
        """
        ...

    def index(self, seq_id: int, max_tokens: int) -> int:
        """Index so many tokens of a text that was begun; returns how many are left.

        `commit` and `grow` index what is left of a sequence's text first.
        """
        ...

    def commit(self, frame: list[Committed]) -> None:
        """Learn from the last trees, keep the rows' candidates, and append the tokens."""
        ...

    def grow(
        self, limits: list[Limit], prices: RowPrices, min_prob: float = 0.0
    ) -> tuple[list[DraftTree], float]:
        """A tree for each limit, of the nodes that bring most tokens per second, and what they bring."""
        ...

    def follower(
        self, frame: FrameToFollow, prices: RowPrices, max_nodes: int, min_prob: float = 0.0
    ) -> Follows | None:
        """For a frame in flight: verdicts, new tokens and the next trees in one call; None: it cannot."""
        ...

    def forget(self, seq_id: int, *, store: bool = True) -> None:
        """Drop a sequence; its text goes to the store, if it shares and `store`."""
        ...

    def recover(self) -> None:
        """Drop all sequences."""
        ...

    def clear(self) -> None:
        """Drop tables, stored texts and rows: the weights were replaced. Texts and estimates stay."""
        ...

    def memory(self) -> Memory:
        """Bytes taken now."""
        ...


class _End:
    """The end of a path through a tree: its matches, its depth, and what the sources name after it."""

    __slots__ = ("agreed", "context", "cursor", "depth", "named", "own", "stored")

    def __init__(self, own: Match, stored: list[Match], depth: int, cursor: int, agreed: int) -> None:
        self.own, self.stored, self.depth = own, stored, depth
        self.cursor, self.agreed = cursor, agreed
        self.context = 0
        self.named: list[Named] = []


Ranked = tuple[list[int], list[int]]
"""Candidates of a row and the rank of each."""


@dataclass(slots=True)
class _Sequence:
    """What is known of one sequence.

    `start`: where its tokens begin in the trie, behind the prediction. `cursor`: the place in the prediction
    that comes next, -1: unknown; `agreed`: tokens before it that agreed. `beaten`: of its last committed
    rows, the latest first, the candidates that were not chosen. `recycled`: its own rows by token, where it
    does not share.
    """

    text: SuffixTrie
    salt: bytes | None
    prediction: list[int]
    unread: list[int]  # of the prediction, SEPARATOR and the text: what is indexed by and by, the last first
    start: int = 0
    cursor: int = -1
    agreed: int = 0
    lost_at: int = 0
    beaten: list[Ranked] = field(default_factory=list)
    recycled: dict[int, list[int]] = field(default_factory=dict)
    rows_kept: int = 0  # by the tables' count: when it last had a table, or rows for one
    tree: GrownTree[_End] | None = None  # the last one, as it grew


class TreeDrafter:
    """Grows trees and learns from what was verified. Owns the tables, the store and the estimates."""

    def __init__(
        self, vocab: int, sources: Sources = Sources.ALL, tuning: TreeTuning = DEFAULTS.trees
    ) -> None:
        self._vocab, self._tuning, self._sources = vocab, tuning, sources
        self.tables = RecycleTables(vocab, max_tables(vocab, tuning.table_bytes))
        self.store = TextStore(tuning.suffixes)
        self.estimates = Estimates(tuning.estimates)
        self._sequences: dict[int, _Sequence] = {}

    def begin(
        self, seq_id: int, tokens: list[int], salt: bytes | None, prediction: Sequence[int] = ()
    ) -> None:
        """Take a text. Without a salt nothing of it is shared, and no other text serves it."""
        prediction = list(takewhile(lambda token: 0 <= token < self._vocab, prediction))
        before = [*prediction, SEPARATOR] if prediction else []
        sequence = _Sequence(
            SuffixTrie(self._tuning.suffixes), salt, prediction, [*before, *tokens][::-1], len(before),
            0 if prediction else -1,
        )  # fmt: skip
        if salt is not None and Sources.ROWS in self._sources:
            sequence.rows_kept = self.tables.open(salt)
        self._sequences[seq_id] = sequence

    def index(self, seq_id: int, max_tokens: int) -> int:
        """Index so many tokens of a text that was begun; returns how many are left."""
        sequence = self._sequences.get(seq_id)
        return 0 if sequence is None else _read(sequence, max_tokens)

    def commit(self, frame: list[Committed]) -> None:
        """Learn from the last trees, keep the rows' candidates, and append the tokens."""
        for committed in frame:
            sequence, tokens = self._sequences[committed.seq_id], list(committed.tokens)
            _read(sequence, len(sequence.unread))
            self._learn(sequence, tokens)
            if Sources.ROWS in self._sources:
                self._keep_rows(sequence, committed)
            sequence.text.extend(tokens)
            self._follow_prediction(sequence, tokens)

    def follower(
        self,
        frame: FrameToFollow,  # noqa: ARG002 - the C++ twin's
        prices: RowPrices,  # noqa: ARG002
        max_nodes: int,  # noqa: ARG002
        min_prob: float = 0.0,  # noqa: ARG002
    ) -> Follows | None:
        """None: Python would not be faster than the engine's own loop."""
        return None

    def forget(self, seq_id: int, *, store: bool = True) -> None:
        """Drop a sequence; its text goes to the store, if it shares and `store`."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None and store and not sequence.unread and Sources.SUFFIXES in self._sources:
            self.store.add(sequence.salt, sequence.text.tokens[sequence.start :])

    def recover(self) -> None:
        """Drop all sequences."""
        self._sequences = {}

    def clear(self) -> None:
        """Drop tables, stored texts and rows: the weights were replaced. Texts and estimates stay.

        A table is made again with its first row.
        """
        self.tables.clear()
        self.store.clear()
        for sequence in self._sequences.values():
            sequence.beaten, sequence.recycled, sequence.tree = [], {}, None

    def memory(self) -> Memory:
        """Bytes taken now; those of texts are estimated."""
        sequences = self._sequences.values()
        own = sum(s.text.nbytes + 4 * WIDTH * len(s.recycled) for s in sequences)
        return Memory(self.tables.nbytes, self.store.nbytes, own)

    def grow(
        self, limits: list[Limit], prices: RowPrices, min_prob: float = 0.0
    ) -> tuple[list[DraftTree], float]:
        """A tree for each limit, of the nodes that bring most tokens per second, and what they bring."""
        sequences = [self._sequences[limit.seq_id] for limit in limits]
        for sequence in sequences:
            _read(sequence, len(sequence.unread))
        tries = [self._tries(sequence) for sequence in sequences]

        def expand(i: int, before: _End, token: int) -> tuple[_End, Siblings]:
            end = _follow(sequences[i], tries[i], before, token)
            return end, self._siblings(sequences[i], tries[i], token, end)

        roots = []
        for limit, sequence, stored in zip(limits, sequences, tries, strict=True):
            root = self._root(sequence, stored)
            siblings = self._siblings(sequence, stored, sequence.text.tokens[-1], root)
            roots.append(Root(limit, root, siblings))
        trees = grow(roots, expand, prices, min_prob, self._tuning.patience, self._tuning.check_nodes)
        for sequence, tree in zip(sequences, trees, strict=True):
            sequence.tree = tree
        return cut(trees, prices)

    # ---- what is named after a path

    def _tries(self, sequence: _Sequence) -> list[SuffixTrie]:
        return self.store.tries(sequence.salt) if Sources.SUFFIXES in self._sources else []

    def _root(self, sequence: _Sequence, tries: list[SuffixTrie]) -> _End:
        text, num = sequence.text, self._tuning.suffixes.max_context
        last = text.tokens[max(sequence.start, len(text.tokens) - num) :]
        matches = [trie.find(last) for trie in tries]
        return _End(text.match(), matches, 0, sequence.cursor, sequence.agreed)

    def _siblings(self, sequence: _Sequence, tries: list[SuffixTrie], token: int, end: _End) -> Siblings:
        """Set what the sources name after a path that ends with `token`, and rank it."""
        own_length = stored_length = 0
        recycled: list[int] = []
        if Sources.SUFFIXES in self._sources:
            own_length = end.own[2]
            stored_length = self._name_texts(sequence, tries, end)
        if Sources.ROWS in self._sources:
            recycled = self._name_rows(sequence, token, end)
        end.context = context_class(own_length, stored_length, recycled=bool(recycled))
        return self.estimates.rank(end.context, end.named, sequence.text.seen)

    def _name_texts(self, sequence: _Sequence, tries: list[SuffixTrie], end: _End) -> int:
        """The prediction, the own text and stored ones; the length of the longest match in the latter."""
        named, cursor = end.named, end.cursor
        if 0 <= cursor < len(sequence.prediction):
            named.append((PREDICTED, (sequence.prediction[cursor],), (min(end.agreed, MAX_LENGTH),)))
        sequence.text.name(end.own, OWN, named)
        stored_length = 0
        for trie, match in zip(tries, end.stored, strict=True):
            if match[2] > stored_length:  # of two tries with matches of one length the newer
                stored_length = match[2]
                trie.name(match, STORED, named)
        return stored_length

    def _name_rows(self, sequence: _Sequence, token: int, end: _End) -> list[int]:
        """The candidates of the row that last followed the token, which are returned, and runners-up."""
        depth, named = end.depth, end.named
        most = self._tuning.deep_ranks if depth else WIDTH
        table = self.tables.get(sequence.salt)
        recycled = sequence.recycled.get(token, []) if table is None else table.candidates(token)
        if recycled:
            named.append((RECYCLED, recycled[:most], range(WIDTH)))
        for lag, (ids, ranks) in enumerate(sequence.beaten):
            if lag + depth < MAX_DISTANCE:
                named.append((RUNNERS_UP[lag + depth], ids[:most], ranks))
        return recycled

    # ---- what a frame tells

    def _learn(self, sequence: _Sequence, truth: list[int]) -> None:
        """The root and each right node tell which of their candidates came."""
        tree, sequence.tree = sequence.tree, None
        if tree is None:
            return
        node, grown = ROOT, DraftTree(tuple(tree.tokens), tuple(tree.parents))
        for node, token in zip([ROOT, *grown.path(truth)], truth, strict=False):
            end = tree.states.get(node)
            if end is not None:
                self.estimates.learn(end.context, end.named, sequence.text.seen, token)

    def _keep_rows(self, sequence: _Sequence, committed: Committed) -> None:
        """Recycle all rows, those of committed tokens last; of the latest, keep what was not chosen."""
        _, tokens, rows, inputs, ids = committed
        if ids is None:
            sequence.beaten = []
            return
        kept = set(rows)
        order = [row for row in range(len(inputs)) if row not in kept] + list(rows)
        if sequence.salt is None:
            for row in order:
                sequence.recycled[inputs[row]] = ids[row].tolist() if ids[row, 0] >= 0 else []
        else:
            sequence.rows_kept = self.tables.use(sequence.salt, sequence.rows_kept)
            table = self.tables.get(sequence.salt)
            if table is not None:
                table.remember([inputs[row] for row in order], ids[order])
        num = self._tuning.num_rows
        beaten = [
            _without(ids[row].tolist(), token) for row, token in zip(rows[-num:], tokens[-num:], strict=True)
        ]
        sequence.beaten = [*reversed(beaten), *sequence.beaten][:num]

    def _follow_prediction(self, sequence: _Sequence, tokens: list[int]) -> None:
        """Move the place in the prediction; where the text left it, look for the text's last tokens in it."""
        predicted = sequence.prediction
        if not predicted:
            return
        for token in tokens:
            cursor = sequence.cursor
            if 0 <= cursor < len(predicted) and predicted[cursor] == token:
                sequence.cursor, sequence.agreed = cursor + 1, sequence.agreed + 1
                sequence.lost_at = cursor + 1
            else:
                sequence.cursor, sequence.agreed = -1, 0
        if sequence.cursor < 0:
            text = sequence.text.tokens
            last = text[max(sequence.start, len(text) - MAX_LENGTH) :]
            least = self._tuning.suffixes.min_resync
            sequence.cursor, sequence.agreed = _resync(predicted, last, sequence.lost_at, least)


def _read(sequence: _Sequence, max_tokens: int) -> int:
    """Index so many tokens of what is left of its text; returns how many are left then."""
    text, unread = sequence.text, sequence.unread
    for _ in range(min(max_tokens, len(unread))):
        token = unread.pop()
        if token == SEPARATOR:
            text.separate()
        else:
            text.append(token)
    return len(unread)


def _follow(sequence: _Sequence, tries: list[SuffixTrie], before: _End, token: int) -> _End:
    """The end of a path that is one token longer."""
    own = sequence.text.follow(before.own, token)
    stored = [trie.follow(match, token) for trie, match in zip(tries, before.stored, strict=True)]
    cursor, agreed, predicted = before.cursor, before.agreed, sequence.prediction
    if 0 <= cursor < len(predicted) and predicted[cursor] == token:
        cursor, agreed = cursor + 1, agreed + 1
    else:
        cursor, agreed = -1, 0
    return _End(own, stored, before.depth + 1, cursor, agreed)


def _resync(predicted: list[int], last: list[int], lost_at: int, least: int) -> tuple[int, int]:
    """Where the prediction goes on after the `last` tokens of the text, and how many tokens agree there.

    The most agreeing tokens win, at least `least`; of equals the first place after `lost_at`, then the first
    before it. (-1, 0): nowhere.
    """
    best = (0, 0, 0)  # agreeing tokens, whether after `lost_at`, minus the place
    for end in range(1, len(predicted)):
        if predicted[end - 1] != last[-1]:
            continue
        num, most = 1, min(end, len(last))
        while num < most and predicted[end - 1 - num] == last[-1 - num]:
            num += 1
        best = max(best, (num, int(end > lost_at), -end))
    return (-best[2], best[0]) if best[0] >= least else (-1, 0)


def _without(ids: list[int], token: int) -> Ranked:
    """The candidates but for one, which need not be among them, and the rank of each."""
    ranks = [rank for rank, candidate in enumerate(ids) if candidate != token]
    return [ids[rank] for rank in ranks], ranks


__all__ = ["Committed", "Follows", "GrowsTrees", "Memory", "Sources", "TreeDrafter"]
