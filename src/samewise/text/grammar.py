"""Grammars over tokens: a bit mask of the tokens that may come next. Host only; llguidance computes it.

A mask is a function of the grammar and the tokens before a position: committed ones, then drafted ones. It
does not depend on the proposer, on other sequences or on preemption. A `GrammarGuide` stands after the
committed tokens of one sequence. To answer about drafted tokens it advances and rolls back within the call;
it moves for good only when a token is committed.

Compiled grammars are cached here, beside the tokenizer. `types.Sampling` holds only the grammar's text, so
that it stays comparable and a request can be written to a file.
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

MAX_COMPILED = 128
"""Compiled grammars kept in memory; the one used longest ago is dropped first. Set by hand."""

WHITESPACE = r"( |\n {0,16})?"
"""White space between the parts of JSON: none, a space, or a new line and its indent. Without a limit a model
can generate white space for ever."""

_MISSING = "grammars need llguidance; pip install 'samewise[grammar]'"


def version() -> str:
    """The library that computes masks: a fact of the contract."""
    try:
        return f"llguidance {installed('llguidance')}"
    except PackageNotFoundError:
        return "none"


class Grammars:
    """The grammars of one tokenizer, compiled on first use. Safe to call from any thread."""

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab, sorted(eos_ids)
        self._lock = threading.Lock()
        self._compile_lock = threading.Lock()  # separate: a compiled grammar never waits for a compilation
        self._trie: Any = None  # llguidance's form of the tokenizer; takes about a second to build
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()  # the latest used last

    def check(self, grammar: Grammar) -> None:
        """Raise BadParameter unless the grammar can be followed with this tokenizer."""
        self._new_matcher(grammar)

    def guide(self, grammar: Grammar, stop_ids: frozenset[int]) -> GrammarGuide:
        """A guide at the start of a text that `stop_ids` may end."""
        return GrammarGuide(self._new_matcher(grammar), self._trie, stop_ids)

    def _new_matcher(self, grammar: Grammar) -> Any:
        """A private copy of the grammar's matcher, at the start."""
        matcher = self._copy_compiled(grammar)
        if matcher is None:
            with self._compile_lock:
                compiled = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = compiled
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
                matcher = compiled.deep_copy()
        return matcher

    def _copy_compiled(self, grammar: Grammar) -> Any:
        with self._lock:
            if grammar not in self._compiled:
                return None
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar].deep_copy()

    def _compile(self, grammar: Grammar) -> Any:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise BadParameter(_MISSING, param="grammar") from error

        if self._trie is None:
            self._trie = self._convert_tokenizer()
        matcher = LLMatcher(self._trie, _source(grammar), log_level=0)
        if not matcher.is_error():
            mask = matcher.compute_bitmask()  # the first mask is the slowest: computed once, before copies
        if matcher.is_error():
            raise BadParameter(
                f"grammar={grammar.kind}: {_first_lines(matcher.get_error())}", param="grammar"
            )
        if not int.from_bytes(mask, "little") & ~_bits(self._trie.eos_tokens):
            raise BadParameter(
                f"grammar={grammar.kind}: it admits only the empty text, or nothing this model can spell",
                param="grammar",
            )
        return matcher

    def _convert_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise BadParameter("grammar needs a tokenizer, and this model has none", param="grammar")
        from llguidance.hf import from_tokenizer

        # A model may have more ids than its tokenizer has tokens; masks never allow those.
        num_ids = max(self._vocab, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=num_ids, eos_token=self._eos_ids or None)
        except ValueError as error:
            raise BadParameter(
                f"this model's tokenizer does not work with grammars: {error}", param="grammar"
            ) from error


class GrammarGuide:
    """A `types.Guide`: the state of one sequence in its grammar."""

    def __init__(self, start: Any, trie: Any, stop_ids: frozenset[int]) -> None:
        self._start, self._matcher, self._trie = start, start.deep_copy(), trie
        eos_ids = frozenset(trie.eos_tokens)
        extra = frozenset(token for token in stop_ids - eos_ids if trie.is_special_token(token))
        self._end_ids = (
            eos_ids | extra
        )  # a special token among the stop ids ends the text as end-of-text does
        self._before_end = ~_bits(self._end_ids)  # where the text may not end yet, no end token is allowed
        self._at_end = ~_bits(eos_ids - stop_ids)  # an end-of-text token that does not stop is never allowed
        self._extra_ends = _bits(extra)
        self._committed: list[int] = []
        self._masks: dict[tuple[int, ...], bytes | None] = {}  # by drafted tokens after the committed ones
        self._failed = False  # llguidance cannot follow the committed tokens

    def fits(self, draft: list[int], guesses: tuple[int, ...]) -> int:
        """How many of `guesses` the grammar allows after the committed and drafted tokens."""
        return max(0, self._compute_masks((*draft, *guesses)) - len(draft))

    def masks(self, guesses: tuple[int, ...]) -> list[bytes | None]:
        """The allowed next tokens: before the first guess, and after each."""
        self._compute_masks(guesses)
        return [self._masks.get(guesses[:num]) for num in range(len(guesses) + 1)]

    def mask(self, guesses: tuple[int, ...]) -> bytes | None:
        """The last of `masks`."""
        self._compute_masks(guesses)
        return self._masks.get(guesses)

    def take(self, token: int) -> Finish | None:
        """Commit a token. STOP: the text ends with it; ABORT: the grammar refuses it or fails."""
        self._masks.clear()
        if token in self._end_ids and not self._failed:
            return Finish.STOP if self._matcher.is_accepting() else Finish.ABORT
        if self._failed or self._advance((token,)) == 0 or self._matcher.is_error():
            return Finish.ABORT
        self._committed.append(token)
        return Finish.STOP if self._matcher.is_stopped() else None

    def restore(self, tokens: tuple[int, ...]) -> None:
        """Return to the state after these committed tokens."""
        matcher = self._start.deep_copy()
        followed = not tokens or bool(matcher.consume_tokens(list(tokens)))
        self._matcher, self._committed, self._masks = matcher, list(tokens), {}
        self._failed = not followed or matcher.is_error()

    def _compute_masks(self, path: tuple[int, ...]) -> int:
        """Cache the masks along a path as far as it is allowed; returns how many of its tokens are."""
        masks, num_advanced = self._masks, 0
        for num in range(len(path) + 1):
            prefix = path[:num]
            if prefix not in masks:
                num_advanced += self._advance(path[num_advanced:num])
                masks[prefix] = self._current_mask() if num_advanced == num else None
            if num == len(path) or not _allows(masks[prefix], path[num]):
                break
        self._roll_back(num_advanced)
        return num

    def _advance(self, path: tuple[int, ...]) -> int:
        """Move along a path as far as the grammar allows, but not over an end token; returns how far."""
        for num, token in enumerate(path):
            if token in self._end_ids or not self._matcher.try_consume_tokens([token]):
                return num
        return len(path)

    def _roll_back(self, num: int) -> None:
        """Return to the position after the committed tokens, even if llguidance failed on a drafted one."""
        if not self._matcher.is_error():
            self._matcher.rollback(num)
            return
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._committed)
        self._failed = self._matcher.is_error() or num == 0

    def _current_mask(self) -> bytes | None:
        """The mask at the matcher's position; None where no token is allowed."""
        matcher = self._matcher
        if matcher.is_stopped():  # the text is complete, or cannot be followed further
            return None
        mask: bytes = matcher.compute_bitmask()
        if matcher.is_error():
            return None
        if mask.count(0) == len(mask) - 1:
            mask = self._without_special_token(mask)
        keep, extra = (self._at_end, self._extra_ends) if matcher.is_accepting() else (self._before_end, 0)
        if keep != -1 or extra:
            mask = (int.from_bytes(mask, "little") & keep | extra).to_bytes(len(mask), "little")
        return mask if any(mask) else None

    def _without_special_token(self, mask: bytes) -> bytes:
        """Replace a mask of one special token by one of ordinary tokens with the same text.

        llguidance forces fixed text as the tokenizer would encode it. Where that text reads like a special
        token, the mask allows only that token, which stands for no text and which the matcher then refuses.
        """
        last = len(mask.rstrip(b"\0")) - 1
        token = 8 * last + mask[last].bit_length() - 1
        if mask[last].bit_count() > 1 or self._matcher.validate_tokens([token]):
            return mask
        forced: bytes = self._matcher.compute_ff_bytes()
        words = [self._trie.greedy_tokenize(forced[:size].decode("utf-8", "ignore")) for size in range(1, 17)]
        valid = {word[0] for word in words if len(word) == 1 and self._matcher.validate_tokens(word)}
        return _bits(valid).to_bytes(len(mask), "little")


def _allows(mask: bytes | None, token: int) -> bool:
    return mask is not None and 0 <= token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _bits(ids: Iterable[int]) -> int:
    return sum(1 << token for token in ids)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    schema = json.loads(grammar.text) if grammar.text else {"type": "object"}
    if schema.pop("x-guidance", None) is not None:
        raise BadParameter(
            "grammar=json_schema: 'x-guidance' is not part of JSON Schema; leave it out", param="grammar"
        )
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _first_lines(message: str) -> str:
    """An llguidance error without its dump of the parser's state."""
    return message.split("\n<state>", maxsplit=1)[0].strip()[:400]


__all__ = ["MAX_COMPILED", "WHITESPACE", "Grammar", "GrammarGuide", "Grammars", "version"]
