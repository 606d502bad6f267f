"""Grammars over tokens: which may come next, given the tokens before. Host only; llguidance does the work.

A mask is a function of the grammar and the tokens before a position: committed ones, then guesses. So it is
the same whoever guessed, whatever else runs, and however often the sequence was preempted. A `Walk` stands
behind the committed tokens of one sequence. To answer about guesses it goes ahead and comes back within the
call; it moves for good only when a token is committed.

Compiled grammars are kept here, beside the engine that has the tokenizer: `types.Sampling` holds the text
alone, so it stays comparable, and a request can be written down. Requests without a grammar never come here.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Any

from samewise.errors import BadParameter
from samewise.types import Finish, Grammar

KEPT = 128  # compiled grammars

WHITESPACE = r"( |\n {0,16})?"
"""Between the parts of JSON: nothing, a space, or a new line and its indent. A model cannot idle there."""

_MISSING = "grammars need llguidance; pip install 'samewise[grammar]'"


def version() -> str:
    """What masks come from: part of the contract."""
    try:
        return f"llguidance {installed('llguidance')}"
    except PackageNotFoundError:
        return "none"


class Grammars:
    """The grammars of one tokenizer, compiled when first asked for. Any thread may ask."""

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab, sorted(eos_ids)
        self._lock = threading.Lock()
        self._compiling = threading.Lock()  # its own: a grammar that is known waits for no other
        self._trie: Any = None  # the tokenizer as llguidance has it; takes a second to make
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()  # the latest used last

    def check(self, grammar: Grammar) -> None:
        """Raise BadParameter unless the grammar can be followed with this tokenizer."""
        self._start(grammar)

    def guide(self, grammar: Grammar, stop_ids: frozenset[int]) -> Walk:
        """A walk from the beginning of a text that `stop_ids` may end."""
        return Walk(self._start(grammar), self._trie, stop_ids)

    def _start(self, grammar: Grammar) -> Any:
        """A matcher at the beginning, which nobody else has."""
        found = self._find(grammar)
        if found is None:
            with self._compiling:
                made = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = made
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
                found = made.deep_copy()
        return found

    def _find(self, grammar: Grammar) -> Any:
        with self._lock:
            if grammar not in self._compiled:
                return None
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar].deep_copy()

    def _compile(self, grammar: Grammar) -> Any:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise BadParameter(_MISSING) from error

        if self._trie is None:
            self._trie = self._read_tokenizer()
        made = LLMatcher(self._trie, _source(grammar), log_level=0)
        if not made.is_error():
            mask = made.compute_bitmask()  # the first one takes the longest: not while others wait
        if made.is_error():
            raise BadParameter(f"grammar={grammar.kind}: {_first_lines(made.get_error())}")
        if not int.from_bytes(mask, "little") & ~_bits(self._trie.eos_tokens):
            raise BadParameter(
                f"grammar={grammar.kind}: it admits only the empty text, or nothing this model can spell"
            )
        return made

    def _read_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise BadParameter("grammar needs a tokenizer, and this model has none")
        from llguidance.hf import from_tokenizer

        # A model may have more ids than its tokenizer has tokens; those are never let through.
        most = max(self._vocab, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=most, eos_token=self._eos_ids or None)
        except ValueError as error:
            raise BadParameter(f"this model's tokenizer does not work with grammars: {error}") from error


class Walk:
    """A `types.Guide`: one sequence's way through its grammar."""

    def __init__(self, start: Any, trie: Any, stop_ids: frozenset[int]) -> None:
        self._start, self._matcher, self._trie = start, start.deep_copy(), trie
        own = frozenset(trie.eos_tokens)
        more = frozenset(token for token in stop_ids - own if trie.is_special_token(token))
        self._ends = own | more  # a special token that was told to end the text is an end of text too
        self._early = ~_bits(self._ends)  # where the text may not end yet, no end is let through
        self._never = ~_bits(own - stop_ids)  # and those that were told to end nothing never are
        self._more = _bits(more)
        self._taken: list[int] = []
        self._known: dict[tuple[int, ...], bytes | None] = {}  # masks behind what is committed, by guesses
        self._lost = False  # llguidance gave up on this text

    def fits(self, draft: list[int], guesses: tuple[int, ...]) -> int:
        """How many of `guesses` the grammar lets follow what was committed and drafted."""
        return max(0, self._look((*draft, *guesses)) - len(draft))

    def masks(self, guesses: tuple[int, ...]) -> list[bytes | None]:
        """What may come next: before the first guess, and after each."""
        self._look(guesses)
        return [self._known.get(guesses[:num]) for num in range(len(guesses) + 1)]

    def mask(self, guesses: tuple[int, ...]) -> bytes | None:
        """The last of `masks`."""
        self._look(guesses)
        return self._known.get(guesses)

    def take(self, token: int) -> Finish | None:
        """Commit a token. STOP: the text ends with it; ABORT: the grammar cannot take it, or be followed."""
        self._known.clear()
        if token in self._ends and not self._lost:
            return Finish.STOP if self._matcher.is_accepting() else Finish.ABORT
        if self._lost or self._go((token,)) == 0 or self._matcher.is_error():
            return Finish.ABORT
        self._taken.append(token)
        return Finish.STOP if self._matcher.is_stopped() else None

    def _look(self, path: tuple[int, ...]) -> int:
        """Learn the masks along a path, as far as they let it through; returns how far that is."""
        known, gone = self._known, 0
        for num in range(len(path) + 1):
            here = path[:num]
            if here not in known:
                gone += self._go(path[gone:num])
                known[here] = self._here() if gone == num else None
            if num == len(path) or not _lets(known[here], path[num]):
                break
        self._come_back(gone)
        return num

    def _go(self, path: tuple[int, ...]) -> int:
        """Go ahead as far as the grammar goes, and not beyond the end; returns how far that was."""
        for num, token in enumerate(path):
            if token in self._ends or not self._matcher.try_consume_tokens([token]):
                return num
        return len(path)

    def _come_back(self, gone: int) -> None:
        """Stand behind the committed tokens again. A guess too much for llguidance leaves no trace either."""
        if not self._matcher.is_error():
            self._matcher.rollback(gone)
            return
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._taken)
        self._lost = self._matcher.is_error() or gone == 0

    def _here(self) -> bytes | None:
        """The mask where the matcher stands now."""
        matcher = self._matcher
        if matcher.is_stopped():  # the text is complete, or can be followed no further
            return None
        mask: bytes = matcher.compute_bitmask()
        if matcher.is_error():
            return None
        if mask.count(0) == len(mask) - 1:
            mask = self._spelt(mask)
        keep, more = (self._never, self._more) if matcher.is_accepting() else (self._early, 0)
        if keep != -1 or more:
            mask = (int.from_bytes(mask, "little") & keep | more).to_bytes(len(mask), "little")
        return mask if any(mask) else None

    def _spelt(self, mask: bytes) -> bytes:
        """Text that must come next is asked for in the tokenizer's own words, one at a time. Where it reads
        like a special token it would be asked for as that token, which stands for no text: spell it instead.
        """
        last = len(mask.rstrip(b"\0")) - 1
        token = 8 * last + mask[last].bit_length() - 1
        if mask[last].bit_count() > 1 or self._matcher.validate_tokens([token]):
            return mask
        forced: bytes = self._matcher.compute_ff_bytes()
        words = [self._trie.greedy_tokenize(forced[:size].decode("utf-8", "ignore")) for size in range(1, 17)]
        found = {word[0] for word in words if len(word) == 1 and self._matcher.validate_tokens(word)}
        return _bits(found).to_bytes(len(mask), "little")


def _lets(mask: bytes | None, token: int) -> bool:
    return mask is not None and 0 <= token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _bits(ids: Iterable[int]) -> int:
    return sum(1 << token for token in ids)


def _source(grammar: Grammar) -> str:
    """As llguidance wants it."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    schema = json.loads(grammar.text) if grammar.text else {"type": "object"}
    own = schema.pop("x-guidance", None)
    if own is not None:
        raise BadParameter("grammar=json_schema: 'x-guidance' is not part of JSON Schema; leave it out")
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _first_lines(message: str) -> str:
    """The part of an error that was written for people."""
    return message.split("\n<state>", maxsplit=1)[0].strip()[:400]


__all__ = ["KEPT", "WHITESPACE", "Grammar", "Grammars", "Walk", "version"]
