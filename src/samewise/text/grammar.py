"""Grammars over tokens: a bit mask of the tokens that may come next. Host only; llguidance computes it.

A mask is a function of the grammar and the tokens before a position: committed ones, then drafted ones. It
does not depend on the proposer, on other sequences or on preemption. A `GrammarGuide` stands after the
committed tokens of one sequence. To answer about drafted tokens it advances and rolls back within the call;
it moves for good only when a token is committed.

A grammar may be written by a stranger, so one that is not plain is first compiled by a child process under
limits (`compile_queue`), and only then here. Compiled grammars are kept here, beside the tokenizer.
`types.Sampling` holds only the grammar's text, so that it stays comparable and a request can be written to a
file.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Any

from samewise.errors import BadParameter, QueueFull
from samewise.shares import within_share
from samewise.text.compile_process import Trial
from samewise.text.compile_queue import CompileLimits, CompileQueue
from samewise.text.grammar_source import (
    LEXER_FUEL,
    MAX_LEXER_STATES,
    MAX_TEXT,
    PARSER_ITEMS,
    WHITESPACE,
    GrammarRefused,
    bits,
    compile_matcher,
    is_plain,
    lexer_cost,
)
from samewise.types import Finish, Grammar

log = logging.getLogger("samewise")

KEPT_BYTES = 256 << 20
"""Bytes of compiled grammars kept for later requests; the one used longest ago is dropped first. Set by hand:
about 128 ordinary grammars."""

HEAVY_BYTES = 512 << 20
"""Bytes of heavy grammars in memory, at most, those of requests under way included. Set by hand."""

LIGHT = Trial(seconds=0.1, num_bytes=8 << 20)
"""A grammar that takes more of either is heavy. Ordinary ones take 2 to 20 ms and 1 to 3 MB."""

PLAIN = Trial(seconds=0.03, num_bytes=2 << 20)
"""What is counted for a plain grammar, which is compiled without a trial, and at least for any other: the
first mask and small allocations that a trial does not show. Measured, rounded up."""

GROWTH_BYTES = 20 << 10
"""Bytes that are counted for every token of an answer: what the shared lexer grows by. Ordinary grammars grow
by 0 to 16 kB a token at first and stop growing; the worst one found grows by 110 kB."""

MAX_GROWTH = 5000 * MAX_LEXER_STATES
"""Bytes that a lexer grows by, at most: 5 kB a state, as measured for the worst grammar found."""

SHARED_FUEL = LEXER_FUEL // 2
"""What a lexer may cost while sequences share it. Half of what one alone may: a lexer that others used finds
some things in another order, which changes what they cost by a little."""

BLOCK = 64
"""Tokens for which a sequence keeps a lexer of its own: a new one costs the engine up to LIGHT's seconds."""

RECENT_SHARE = 0.25
"""Of the latest token in the pace of a sequence; the tokens before it have the rest. Set by hand."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Processor time that the grammar of one sequence may take, beyond which the sequence ends. Set by hand.

    Where a text can be read in many ways, each token takes longer than the one before: with the worst grammar
    found 0.3 s after some hundred tokens, in the thread that serves all sequences. Ordinary grammars take
    0.0002 s a token, those that exhaust lexers again and again 0.003 s.
    """

    first: float = 0.5  # seconds, however short the text is
    per_token: float = 0.005  # seconds more for every token

    def seconds(self, num_tokens: int) -> float:
        """What a text of so many tokens may have taken."""
        return self.first + self.per_token * num_tokens


_MISSING = "grammars need llguidance; pip install 'samewise[grammar]'"


def version() -> str:
    """The library that computes masks, and where it gives up: a fact of the contract."""
    try:
        library = f"llguidance {installed('llguidance')}"
    except PackageNotFoundError:
        return "none"
    return f"{library}, fuel {LEXER_FUEL}, states {MAX_LEXER_STATES}, items {PARSER_ITEMS}"


class CompiledGrammar:
    """A grammar compiled for one tokenizer. Requests hold on to it from their check to their end.

    Its lexer is shared by all sequences that follow the grammar, until it has cost SHARED_FUEL or has failed.
    """

    def __init__(
        self,
        grammar: Grammar,
        trie: Any,
        trial: Trial,
        pace: Pace | None = None,
        owner: bytes | None = None,
    ) -> None:
        self.grammar, self.pace, self.owner = grammar, pace, owner
        self.is_heavy = trial.seconds > LIGHT.seconds or trial.num_bytes > LIGHT.num_bytes
        self.is_spent = False  # new requests get a new lexer, and those that share this one take their own
        self.is_read = True  # whether the lexer was not used since its cost was read
        self.num_tokens = 0  # committed by all sequences; counted by the engine's thread
        self.matcher: Any = None  # at the start of a text; copied for every sequence
        self.first_cost = 0  # of a new lexer
        self._trie = trie
        self._compiled_bytes = max(trial.num_bytes, PLAIN.num_bytes) + len(grammar.text)

    def compile(self) -> Any:
        """A matcher with a lexer of its own."""
        return compile_matcher(self._trie, self.grammar)

    @property
    def num_bytes(self) -> int:
        """An estimate of its memory."""
        return self._compiled_bytes + min(self.num_tokens * GROWTH_BYTES, MAX_GROWTH)

    def guide(self, stop_ids: frozenset[int]) -> GrammarGuide:
        """A guide at the start of a text that `stop_ids` may end."""
        return GrammarGuide(self.matcher.deep_copy(), self._trie, stop_ids, origin=self)

    def read(self, matcher: Any) -> None:
        """Find out whether the shared lexer has cost too much, if it was used since the last time."""
        if not self.is_read and not self.is_heavy:
            self.is_spent = self.is_spent or self.cost(matcher) > SHARED_FUEL
        self.is_read = True

    def cost(self, matcher: Any) -> int:
        """What a matcher's lexer has cost since it was new."""
        return lexer_cost(matcher) - self.first_cost


_Key = tuple[bytes | None, Grammar]
"""Whose requests had a grammar compiled, and the grammar."""


class Grammars:
    """The grammars of one tokenizer, compiled on first use. Safe to call from any thread.

    What one owner's requests had compiled is found by its own alone: others cannot tell from the time it
    takes what was compiled before, and no owner uses up the lexer of another one's answers. Heavy grammars
    share their memory by owner.

    `close` it to end its child processes at once; they also end with this object and with the process. `pace`
    is that of the sequences of grammars compiled from then on; None: they may take any time.
    """

    pace: Pace | None = None

    def __init__(
        self, tokenizer: Any, vocab: int, eos_ids: Iterable[int], *, limits: CompileLimits | None = None
    ) -> None:
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab, sorted(eos_ids)
        self._limits = limits
        self._lock = threading.Lock()
        self._trie_lock = threading.Lock()
        self._trie: Any = None  # llguidance's form of the tokenizer; takes about a second to build
        self._queue: CompileQueue[CompiledGrammar] | None = None
        self._kept: OrderedDict[_Key, CompiledGrammar] = OrderedDict()  # the latest used last
        # In memory: kept here, or held by a request.
        self._live: weakref.WeakValueDictionary[_Key, CompiledGrammar] = weakref.WeakValueDictionary()
        self._heavy: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
        self._compiling: dict[_Key, Future[CompiledGrammar]] = {}
        self._closed = False

    def check(self, grammar: Grammar) -> None:
        """Raise BadParameter unless the grammar can be followed with this tokenizer."""
        self.compile(grammar)

    def guide(self, grammar: Grammar, stop_ids: frozenset[int]) -> GrammarGuide:
        """A guide at the start of a text that `stop_ids` may end."""
        return self.compile(grammar).guide(stop_ids)

    def compile(self, grammar: Grammar, *, owner: bytes | None = None) -> CompiledGrammar:
        """The compiled grammar; waits for it. Raises as `start` and its future do."""
        return self.start(grammar, owner=owner).result()

    def start(self, grammar: Grammar, *, owner: bytes | None = None) -> Future[CompiledGrammar]:
        """A future of the compiled grammar, done already if it was compiled before or is plain.

        Raises, or the future fails with, BadParameter for a grammar that cannot be followed or needs too
        much, and QueueFull where too many wait, or heavy ones fill the memory (those of one `owner`, or all).
        """
        found = self.find(grammar, owner=owner)
        if found is not None:
            return found
        _refuse_long(grammar)
        self._make_trie()
        if is_plain(grammar) or not hasattr(os, "fork"):  # Windows has neither forks nor limits for them
            return _done(self._make(grammar, PLAIN, owner))
        return self._submit(grammar, owner)

    def find(self, grammar: Grammar, *, owner: bytes | None = None) -> Future[CompiledGrammar] | None:
        """The same where it was compiled before, or is being compiled. Takes no time; None: it was not."""
        with self._lock:
            compiled = self._find((owner, grammar))
            return self._compiling.get((owner, grammar)) if compiled is None else _done(compiled)

    def prepare(self) -> None:
        """Convert the tokenizer now, which stops other threads for about a second. Raises BadParameter."""
        self._make_trie()
        with self._lock:
            self._get_queue()

    def close(self) -> None:
        """End the children. What is being compiled fails, and so does what would need a child later."""
        with self._lock:
            self._closed, queue = True, self._queue
        if queue is not None:
            queue.close()

    def _find(self, key: _Key) -> CompiledGrammar | None:
        compiled = self._live.get(key)
        if compiled is None or compiled.is_spent:
            self._kept.pop(key, None)
            return None
        self._keep(compiled)
        return compiled

    def _submit(self, grammar: Grammar, owner: bytes | None) -> Future[CompiledGrammar]:
        key = owner, grammar
        with self._lock:
            if key in self._compiling:
                return self._compiling[key]
            result = self._get_queue().submit(grammar, partial(self._make, owner=owner), owner=owner)
            self._compiling[key] = result
        result.add_done_callback(lambda _: self._compiling.pop(key, None))
        return result

    def _make(self, grammar: Grammar, trial: Trial, owner: bytes | None = None) -> CompiledGrammar:
        """Compile in this process what is known to be cheap enough."""
        compiled = CompiledGrammar(grammar, self._trie, trial, self.pace, owner)
        if compiled.is_heavy:
            with self._lock:
                self._make_room(compiled)
        compiled.matcher = compiled.compile()
        compiled.first_cost = lexer_cost(compiled.matcher)
        with self._lock:
            self._live[owner, grammar] = compiled
            self._keep(compiled)
        return compiled

    def _make_room(self, compiled: CompiledGrammar) -> None:
        """Count a heavy grammar; drop others that no request holds, its owner's first. Raises QueueFull."""
        heavy = [key for key, kept in self._kept.items() if kept.is_heavy]
        for key in sorted(heavy, key=lambda key: key[0] != compiled.owner):
            if self._has_room(compiled):
                break
            del self._kept[key]
        if not self._has_room(compiled):
            raise QueueFull(
                f"grammar={compiled.grammar.kind}: requests under way hold {HEAVY_BYTES >> 20} MB of large "
                "grammars, or yours their share of it; try again later, or make it smaller",
                param="grammar",
            )
        self._heavy.add(compiled)

    def _has_room(self, compiled: CompiledGrammar) -> bool:
        """Whether the heavy grammars of its owner, and all, leave room for one more."""
        used = sum(one.num_bytes for one in self._heavy)
        own = sum(one.num_bytes for one in self._heavy if one.owner == compiled.owner)
        own = 0 if compiled.owner is None else own
        return within_share(own, used, HEAVY_BYTES, compiled.num_bytes)

    def _keep(self, compiled: CompiledGrammar) -> None:
        """Keep a grammar as the latest used, and drop those used longest ago beyond KEPT_BYTES."""
        key = compiled.owner, compiled.grammar
        self._kept[key] = compiled
        self._kept.move_to_end(key)
        total = sum(kept.num_bytes for kept in self._kept.values())
        while total > KEPT_BYTES and len(self._kept) > 1:
            total -= self._kept.popitem(last=False)[1].num_bytes

    def _get_queue(self) -> CompileQueue[CompiledGrammar]:
        if self._queue is None:
            self._queue = CompileQueue(self._describe_tokenizer(), self._limits)
            weakref.finalize(self, self._queue.close)
            if self._closed:
                self._queue.close()
        return self._queue

    def _make_trie(self) -> Any:
        with self._trie_lock:
            if self._trie is None:
                self._trie = self._convert_tokenizer()
            return self._trie

    def _convert_tokenizer(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise BadParameter(_MISSING, param="grammar") from error
        try:
            return LLTokenizer(**self._describe_tokenizer())
        except ValueError as error:
            raise BadParameter(
                f"this model's tokenizer does not work with grammars: {error}", param="grammar"
            ) from error

    def _describe_tokenizer(self) -> dict[str, Any]:
        """The keywords of llguidance's LLTokenizer, as plain data that a child can be sent."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise BadParameter("grammar needs a tokenizer, and this model has none", param="grammar")
        if not getattr(tokenizer, "is_fast", False):
            raise BadParameter(
                "this model's tokenizer does not work with grammars: it is not a fast one", param="grammar"
            )
        inner = copy.copy(tokenizer.backend_tokenizer)
        inner.no_padding()
        inner.no_truncation()
        # A model may have more ids than its tokenizer has tokens; masks never allow those.
        num_ids = max(self._vocab, len(tokenizer))
        eos_ids = self._eos_ids or tokenizer.eos_token_id
        return {"tokenizer": inner.to_str(), "n_vocab": num_ids, "eos_token": eos_ids}


class GrammarGuide:
    """A `types.Guide`: the state of one sequence in its grammar.

    llguidance gives up where a lexer costs too much or has too many states. What a position costs depends on
    what the lexer was used for before, so it must not end a sequence while others share the lexer, or while
    guesses are asked about. The rule: a sequence ends at the first position where a lexer of its own fails or
    has cost more than LEXER_FUEL; one that was new at the last multiple of BLOCK tokens, and made the masks
    of the committed tokens since then. A shared lexer that has cost less has made all of those masks and
    others too, so the rule holds without asking. Else a sequence takes a lexer of its own, and its guesses
    are not followed any more. Sequences of a heavy grammar cannot: where the shared lexer fails they end with
    an error, which is no answer. So does one that takes more time than its grammar's pace; beyond half of
    that time its guesses are not followed.
    """

    def __init__(
        self, start: Any, trie: Any, stop_ids: frozenset[int], *, origin: CompiledGrammar | None = None
    ) -> None:
        self._start, self._matcher, self._trie, self._origin = start, start.deep_copy(), trie, origin
        eos_ids = frozenset(trie.eos_tokens)
        extra = frozenset(token for token in stop_ids - eos_ids if trie.is_special_token(token))
        self._end_ids = (
            eos_ids | extra
        )  # a special token among the stop ids ends the text as end-of-text does
        self._before_end = ~bits(self._end_ids)  # where the text may not end yet, no end token is allowed
        self._at_end = ~bits(eos_ids - stop_ids)  # an end-of-text token that does not stop is never allowed
        self._extra_ends = bits(extra)
        self._committed: list[int] = []
        self._masks: dict[tuple[int, ...], bytes | None] = {}  # by drafted tokens after the committed ones
        self._failed = False  # llguidance cannot follow the committed tokens
        self._owns_lexer = False
        self._seconds = 0.0  # of processor time, taken before the call under way
        self._began = 0.0  # the thread's processor time when that call began
        self._taken_at = 0.0  # `_seconds` at the latest committed token
        self.pace = 0.0

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
        """Commit a token. STOP: the text ends with it; ABORT: the grammar refuses it or fails.

        ERROR: the lexer of a heavy grammar has failed, or the grammar takes too much time.
        """
        with self._timed():
            finish = self._take(token)
        self.pace += RECENT_SHARE * (self._seconds - self._taken_at - self.pace)
        self._taken_at = self._seconds
        return Finish.ERROR if finish is None and self._is_overdue() else finish

    def _take(self, token: int) -> Finish | None:
        self._check_cost()
        self._masks.clear()
        if self._failed:
            return self._refusal()
        if token in self._end_ids:
            return Finish.STOP if self._accepts() else self._refusal()
        if not self._commit(token) and not (self._take_lexer() and self._commit(token)):
            return self._refusal()
        self._committed.append(token)
        if self._origin is not None:
            self._origin.num_tokens += 1
        if self._owns_lexer and len(self._committed) % BLOCK == 0:
            self._renew_lexer()
        return Finish.STOP if self._matcher.is_stopped() else None

    def restore(self, tokens: tuple[int, ...]) -> None:
        """Return to the state after these committed tokens."""
        self._committed, self._masks = list(tokens), {}
        with self._timed():
            self._return_to_committed()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the processor time of this thread."""
        self._began = time.thread_time()
        try:
            yield
        finally:
            self._seconds += time.thread_time() - self._began

    @property
    def _allowed(self) -> Pace | None:
        return None if self._origin is None else self._origin.pace

    def _is_overdue(self) -> bool:
        """Whether the grammar's pace was exceeded; says so in the log."""
        pace, num_tokens = self._allowed, len(self._committed)
        if pace is None or self._seconds <= pace.seconds(num_tokens):
            return False
        log.warning(
            "a request is ended: its grammar took %.1f s of processor time for %d tokens",
            self._seconds, num_tokens,
        )  # fmt: skip
        return True

    def _follows_guesses(self) -> bool:
        """Whether masks after guesses are computed: they only save time. Asked in a call that is timed."""
        if self._owns_lexer:
            return False
        pace = self._allowed
        taken = self._seconds + time.thread_time() - self._began
        return pace is None or taken <= pace.seconds(len(self._committed)) / 2

    def _refusal(self) -> Finish:
        """How a sequence ends that cannot go on: other sequences may be to blame only for an error."""
        origin = self._origin
        return Finish.ERROR if origin and origin.is_heavy and self._matcher.is_error() else Finish.ABORT

    def _accepts(self) -> bool:
        """Whether the text may end after the committed tokens."""
        if self._matcher.is_accepting():
            return True
        self._matcher.compute_bitmask()  # llguidance notices here that a lexer failed
        return self._take_lexer() and bool(self._matcher.is_accepting())

    def _commit(self, token: int) -> bool:
        return self._advance((token,)) == 1 and not self._matcher.is_error()

    def _compute_masks(self, path: tuple[int, ...]) -> int:
        """Cache the masks along a path as far as it is allowed; returns how many of its tokens are."""
        with self._timed():
            if self._is_spent:
                self._take_lexer()
            num = self._walk(path)
            if self._matcher.is_error():
                num = self._walk_again(path, num)
        return num

    def _walk(self, path: tuple[int, ...]) -> int:
        """Cache masks and return; where llguidance fails the matcher stays in its error state."""
        masks, num_advanced = self._masks, 0
        for num in range(len(path) + 1):
            prefix = path[:num]
            if prefix not in masks:
                if num and not self._follows_guesses():
                    self._matcher.rollback(num_advanced)
                    return num - 1
                num_advanced += self._advance(path[num_advanced:num])
                mask = self._current_mask() if num_advanced == num else None
                if self._matcher.is_error():
                    return num
                masks[prefix] = mask
            if num == len(path) or not _allows(masks[prefix], path[num]):
                break
        self._matcher.rollback(num_advanced)
        return num

    def _walk_again(self, path: tuple[int, ...], failed_at: int) -> int:
        """After a failure of llguidance: go on with a lexer of its own, and without the guess that failed."""
        if failed_at:
            self._masks[path[:failed_at]] = None
        if not self._take_lexer():
            if failed_at:
                self._return_to_committed()
                return failed_at - 1
            self._failed, self._masks[()] = True, None
            return 0
        return min(self._walk(path), max(0, failed_at - 1))

    def _return_to_committed(self) -> None:
        """A matcher after the committed tokens. A new lexer if it has its own, or the shared one failed."""
        if self._owns_lexer:
            self._renew_lexer()
            return
        self._matcher = self._start.deep_copy()
        followed = not self._committed or bool(self._matcher.consume_tokens(self._committed))
        self._failed = not followed or self._matcher.is_error()
        if self._matcher.is_error():
            self._take_lexer()

    # ---- the lexer

    @property
    def _is_spent(self) -> bool:
        """Whether the lexer is shared and must not be used any more."""
        origin = self._origin
        return origin is not None and origin.is_spent and not self._owns_lexer and not origin.is_heavy

    def _check_cost(self) -> None:
        """Before a token is committed: fail if a lexer of its own could not make the mask before it."""
        if self._origin is None:
            return
        if not self._owns_lexer:
            self._origin.read(self._matcher)
            if not self._is_spent:
                return
            self._take_lexer()
        if not self._failed and () not in self._masks:
            self._masks[()] = self._current_mask()
        self._failed = self._failed or self._matcher.is_error()
        self._failed = self._failed or self._origin.cost(self._matcher) > LEXER_FUEL

    def _take_lexer(self) -> bool:
        """Take a lexer of its own in place of a shared one; returns whether it could, and can go on."""
        origin = self._origin
        if origin is None or self._owns_lexer:
            return False
        origin.is_spent = True
        if origin.is_heavy:
            return False
        self._owns_lexer = True
        self._renew_lexer()
        return not self._failed

    def _renew_lexer(self) -> None:
        """A new lexer, used as if it had been taken at the last multiple of BLOCK tokens."""
        assert self._origin is not None
        self._matcher = self._origin.compile()
        first = len(self._committed) // BLOCK * BLOCK
        self._failed = bool(first and not self._matcher.consume_tokens(self._committed[:first]))
        for token in self._committed[first:]:
            self._failed = self._failed or self._current_mask() is None or not self._commit(token)
        if not self._failed:
            self._current_mask()
        self._failed = self._failed or self._matcher.is_error()

    def _advance(self, path: tuple[int, ...]) -> int:
        """Move along a path as far as the grammar allows, but not over an end token; returns how far."""
        for num, token in enumerate(path):
            if token in self._end_ids:
                return num
            if not self._matcher.try_consume_tokens([token]):
                self._matcher.compute_bitmask()  # tells a lexer that failed from a token that is not allowed
                return num
        return len(path)

    def _current_mask(self) -> bytes | None:
        """The mask at the matcher's position; None where no token is allowed."""
        matcher = self._matcher
        if matcher.is_stopped():  # the text is complete, or cannot be followed further
            return None
        mask: bytes = matcher.compute_bitmask()
        if self._origin is not None and not self._owns_lexer:
            self._origin.is_read = False
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
        return bits(valid).to_bytes(len(mask), "little")


def _allows(mask: bytes | None, token: int) -> bool:
    return mask is not None and 0 <= token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _done(compiled: CompiledGrammar) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    future.set_result(compiled)
    return future


def _refuse_long(grammar: Grammar) -> None:
    if len(grammar.text) > MAX_TEXT:
        raise GrammarRefused(grammar.kind, f"it has {len(grammar.text)} characters; give at most {MAX_TEXT}")


__all__ = [
    "BLOCK",
    "GROWTH_BYTES",
    "HEAVY_BYTES",
    "KEPT_BYTES",
    "LIGHT",
    "MAX_GROWTH",
    "PLAIN",
    "SHARED_FUEL",
    "WHITESPACE",
    "CompiledGrammar",
    "Grammar",
    "GrammarGuide",
    "Grammars",
    "Pace",
    "version",
]
