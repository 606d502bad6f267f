"""Draft trees from suffix counts, recycled candidates and runners-up, for many sequences.

Three things speak for a token: it followed the same context before, in the own text or in an earlier one; it
was in the top 8 of the row that last followed the same token; or it was a runner-up of one of the last two
committed rows, which often comes a position later. `Estimates` makes one probability of them. No clock, no
torch. Host only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from samewise.draft.estimates import (
    MAX_DISTANCE,
    OWN,
    RECYCLED,
    RUNNERS_UP,
    STORED,
    Estimates,
    EstimateTuning,
    context_class,
)
from samewise.draft.recycle import Candidates, RecycleTable, row_classes
from samewise.draft.suffix_counts import Match, Named, SuffixTrie, SuffixTuning, TextStore
from samewise.draft.tree import DraftTree, Siblings, grow

Rows = Sequence[Sequence[int]]
Probs = Sequence[Sequence[float]] | None


@dataclass(frozen=True, slots=True)
class TreeTuning:
    """Constants of growing. Values were compared with bench/drafts.py."""

    # Candidates of a row used below the root; all 8 bring no more.
    deep_ranks: int = 3
    # Committed rows whose runners-up are candidates. One row brings 1 % less, three bring no more.
    num_rows: int = 2
    suffixes: SuffixTuning = field(default_factory=SuffixTuning)
    estimates: EstimateTuning = field(default_factory=EstimateTuning)


DEFAULTS = TreeTuning()


class _End:
    """The end of a path through a tree: its matches, its depth, and what the sources name after it."""

    __slots__ = ("context", "depth", "named", "own", "stored")

    def __init__(self, own: Match, stored: list[Match], depth: int) -> None:
        self.own, self.stored, self.depth = own, stored, depth
        self.context = 0
        self.named: list[Named] = []


@dataclass(slots=True)
class _Sequence:
    """What is known of one sequence.

    `beaten`: of its last committed rows, the latest first, the candidates that were not chosen. `recycled`:
    its own rows by token, where they may not enter the shared table.
    """

    text: SuffixTrie
    salt: bytes | None
    beaten: list[Candidates] = field(default_factory=list)
    recycled: dict[int, Candidates] = field(default_factory=dict)
    runners_up: list[list[Named]] = field(default_factory=list)  # by depth below the sequence's end
    tree: DraftTree = field(default_factory=DraftTree)  # the last one
    ends: dict[int, _End] = field(default_factory=dict)  # by node of the tree, where it was expanded


class TreeDrafter:
    """Grows trees and learns from what was verified. Owns the table, the store and the estimates."""

    def __init__(self, vocab: int, tuning: TreeTuning = DEFAULTS) -> None:
        self._tuning = tuning
        self.table = RecycleTable(vocab)
        self.store = TextStore(tuning.suffixes)
        self.estimates = Estimates(tuning.estimates)
        self._sequences: dict[int, _Sequence] = {}

    def begin(self, seq_id: int, prompt: list[int], salt: bytes | None = b"") -> None:
        """Index a prompt. Without a salt nothing of the sequence is shared, and no stored text serves it."""
        text = SuffixTrie(self._tuning.suffixes)
        text.extend(prompt)
        self._sequences[seq_id] = _Sequence(text, salt)

    def remember(self, seq_id: int, tokens: list[int], top_ids: Rows, top_probs: Probs = None) -> None:
        """Keep the top 8 of rows replayed after `tokens`: of a prompt, or of rejected nodes."""
        sequence = self._sequences[seq_id]
        if sequence.salt is not None:
            self.table.remember(tokens, top_ids, top_probs)
            return
        for token, row in zip(tokens, _candidates(top_ids, top_probs), strict=True):
            sequence.recycled[token] = row

    def commit(self, seq_id: int, tokens: list[int], top_ids: Rows, top_probs: Probs = None) -> None:
        """Append committed tokens, each with the top 8 of the row that chose it; learn from the last tree."""
        sequence, num_rows = self._sequences[seq_id], self._tuning.num_rows
        self._learn(sequence, tokens)
        text = sequence.text
        inputs = [*text.tokens[-1:], *tokens[:-1]]
        self.remember(seq_id, inputs, top_ids[-len(inputs) :], top_probs and top_probs[-len(inputs) :])
        text.extend(tokens)
        latest = _candidates(top_ids[-num_rows:], top_probs and top_probs[-num_rows:])
        beaten = [_without(row, token) for row, token in zip(latest, tokens[-num_rows:], strict=True)]
        sequence.beaten = [*reversed(beaten), *sequence.beaten][:num_rows]
        sequence.runners_up = self._runners_up(sequence.beaten)

    def forget(self, seq_id: int) -> None:
        """Drop a sequence; its text goes to the store, if it shares."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self.store.add(sequence.salt, sequence.text.tokens)

    def clear(self) -> None:
        """Forget rows and stored texts: the weights were replaced. Sequences and estimates stay."""
        self.table.clear()
        self.store.clear()
        for sequence in self._sequences.values():
            sequence.beaten, sequence.recycled, sequence.runners_up = [], {}, []
            sequence.tree, sequence.ends = DraftTree(), {}

    def grow(self, seq_id: int, max_nodes: int, min_prob: float = 0.0) -> DraftTree:
        """A tree of up to `max_nodes` nodes after the sequence's end, each of at least `min_prob`."""
        sequence = self._sequences[seq_id]
        text, tries = sequence.text, self.store.tries(sequence.salt)
        last = text.tokens[-self._tuning.suffixes.max_context :]

        def siblings(end: _End, token: int) -> Siblings:
            self._name(sequence, tries, token, end)
            return self.estimates.rank(end.context, end.named, text.seen)

        def expand(before: _End, token: int) -> tuple[_End, Siblings]:
            own = text.follow(before.own, token)
            stored = [trie.follow(match, token) for trie, match in zip(tries, before.stored, strict=True)]
            end = _End(own, stored, before.depth + 1)
            return end, siblings(end, token)

        root = _End(text.match(), [trie.find(last) for trie in tries], 0)
        sequence.tree, sequence.ends = grow(root, siblings(root, last[-1]), expand, max_nodes, min_prob)
        return sequence.tree

    def _name(self, sequence: _Sequence, tries: list[SuffixTrie], token: int, end: _End) -> None:
        """Set what the sources name after a path that ends with `token`."""
        depth, named = end.depth, end.named
        sequence.text.name(end.own, OWN, named)
        stored_length = 0
        for trie, match in zip(tries, end.stored, strict=True):
            if match[2] > stored_length:  # of two tries with matches of one length the newer
                stored_length = match[2]
                trie.name(match, STORED, named)
        ids, classes = sequence.recycled.get(token) or self.table.candidates(token)
        recycled = ids[0] >= 0
        if recycled:
            named.append((RECYCLED, ids[: self._tuning.deep_ranks] if depth else ids, classes))
        if depth < len(sequence.runners_up):
            named += sequence.runners_up[depth]
        end.context = context_class(end.own[2], stored_length, recycled=recycled)

    def _runners_up(self, beaten: list[Candidates]) -> list[list[Named]]:
        """By depth below the sequence's end: the candidates of the last rows that were not chosen."""
        most = self._tuning.deep_ranks
        return [
            [
                (RUNNERS_UP[lag + depth], ids[:most] if depth else ids, classes)
                for lag, (ids, classes) in enumerate(beaten)
                if lag + depth < MAX_DISTANCE
            ]
            for depth in range(MAX_DISTANCE)
        ]

    def _learn(self, sequence: _Sequence, truth: list[int]) -> None:
        """The root and each right node tell which of their candidates came."""
        nodes = [-1, *sequence.tree.path(truth)]
        for node, token in zip(nodes, truth, strict=False):
            end = sequence.ends.get(node)
            if end is not None:
                self.estimates.learn(end.context, end.named, sequence.text.seen, token)
        sequence.tree, sequence.ends = DraftTree(), {}


def _candidates(top_ids: Rows, top_probs: Probs) -> list[Candidates]:
    """(ids, classes) of each row."""
    classes = row_classes(top_probs, len(top_ids)).tolist()
    return [(list(ids), of_row) for ids, of_row in zip(top_ids, classes, strict=True)]


def _without(row: Candidates, token: int) -> Candidates:
    """The row but for one candidate, which it need not have."""
    ids, classes = row
    if token not in ids:
        return row
    place = ids.index(token)
    return ids[:place] + ids[place + 1 :], classes[:place] + classes[place + 1 :]


__all__ = ["TreeDrafter", "TreeTuning"]
