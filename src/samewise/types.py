"""The nouns. Everything that crosses a module is one of these, and frozen unless it says otherwise.

Small records that are made once per sequence and step are named tuples: as frozen as a frozen
dataclass and several times cheaper to make. Positions are absolute, intervals half-open.

Host only: this module has never heard of a tensor.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from samewise.errors import BadParameter, InvariantBroken

TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, log-probability), by falling value, equal values by rising id."""


class Finish(StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "lark")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like: a kind and its text. Knows no tokens; `grammar.py` compiles it."""

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise BadParameter(f"grammar kind {self.kind!r}: known are {', '.join(GRAMMAR_KINDS)}")
        if not isinstance(self.text, str):
            raise BadParameter(f"a {self.kind} grammar is text, not {type(self.text).__name__}")
        if (self.kind == "json_object") != (self.text == ""):
            need = "takes no text" if self.text else "needs a text"
            raise BadParameter(f"a {self.kind} grammar {need}")
        if self.kind == "json_schema":
            _check_schema(self.text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str) -> Grammar:
        """JSON that fits a schema. Properties come in the order the schema names them."""
        return cls("json_schema", schema if isinstance(schema, str) else _dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression from its first character to its last."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, rules: str) -> Grammar:
        """Text of a context-free grammar, in llguidance's variant of Lark."""
        return cls("lark", rules)


def _dumps(schema: object) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadParameter(f"the JSON schema is not JSON: {error}") from error


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadParameter(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise BadParameter(f"a JSON schema is an object, not {text[:40]!r}")


class Guide(Protocol):
    """Where a sequence stands in its grammar: after its committed tokens, never after a guess.

    Owned by a Sequence; lent with an Ask or a Span. What it says is a function of the grammar and the tokens
    before a position, so guesses may be asked about in any order and leave nothing behind.
    """

    def fits(self, draft: list[int], guesses: tuple[int, ...]) -> int:
        """How many of `guesses` the grammar lets follow what was committed and drafted."""
        ...

    def masks(self, guesses: tuple[int, ...]) -> list[bytes | None]:
        """What may come next: before the first guess, and after each. A bit per token id, lowest first.

        None where nothing is to be said: behind the end of the text, or where no token fits.
        """
        ...

    def mask(self, guesses: tuple[int, ...]) -> bytes | None:
        """The last of `masks`."""
        ...

    def take(self, token: int) -> Finish | None:
        """Commit a token. STOP: the text ends with it; ABORT: the grammar cannot take it, or be followed."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen, once everything about the request is known.

    Token ids only: stop strings, texts and defaults were resolved before. `index` is the place among
    the request's n choices. The choice at a position is a function of this, the row's logits and the
    tokens before it.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()  # end-of-text and the caller's own; barred before min_tokens
    top_logprobs: int | None = None  # None: none asked for; -1: the whole vocabulary
    seed: int = 0
    index: int = 0
    edited: bool = field(init=False)  # logits are changed in a way that depends on the tokens before
    plain: bool = field(init=False)  # the model's own argmax, nothing added and nothing barred

    def __post_init__(self) -> None:
        object.__setattr__(self, "edited", self._edited())
        object.__setattr__(self, "plain", self.temperature == 0.0 and not self.edited)

    def _edited(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or bool(self.bad_words)
            or self.min_tokens > 0
            or self.grammar is not None
        )

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p can bar a token (greedy choice never needs them)."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Sublayers that a pass leaves out, by the number of their layer. An argument, not a mode."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def __str__(self) -> str:
        told = [
            f"{name} {_runs(part)}"
            for name, part in (("attention", self.attention), ("mlp", self.mlp))
            if part
        ]
        return "; ".join(told) or "nothing"


def _runs(numbers: frozenset[int]) -> str:
    """1-4, 7, 9-10."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class Branch(NamedTuple):
    """Another way a draft may go on: its first `at` guesses, then these tokens."""

    at: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be continued. `arrival` orders requests; ids are never reused."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    verify: bool = True
    prompt_logprobs: int | None = None  # None: none; else how many alternatives, beside the token itself
    score_from: int | None = None  # only log-probabilities of prompt tokens from here on are wanted
    salt: bytes = b""  # prefixes are shared only between equal salts
    leader: int | None = None  # a request with the same prompt whose pages are worth waiting for
    share: bool = True  # whether guesses for others may be taken from its text
    speculate: bool = True  # whether anybody guesses for it; without, one token a frame

    @property
    def scores_from(self) -> int | None:
        """First prompt position whose own log-probability is wanted, if any."""
        return self.score_from if self.score_from is not None else None if self.prompt_logprobs is None else 1


@dataclass(slots=True)
class Sequence:
    """A request on its way. The one mutable noun; the Scheduler owns it, nobody else writes to it.

    `tokens` are the prompt and what was committed. `kv_len` is how far canonical KV reaches: positions
    below it are never written again. Above it lies scratch. `draft` holds guesses not yet replayed; while it
    is `open` its drafter means to add to it. `branches` are alternatives to it, each replayed as one more
    span in pages that are only lent to it until the frame has spoken.
    """

    request: Request
    tokens: list[int]
    most: int = 0  # it ends when it has this many tokens, if nothing ends it sooner
    draft: list[int] = field(default_factory=list)
    drafter: str = ""
    branches: tuple[Branch, ...] = ()
    lent: list[array[int]] = field(default_factory=list)  # private pages of the branches in the frame
    open: bool = False
    ready_since: int | None = None  # the step from which on it waits for a frame
    kv_len: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    digests: list[bytes] = field(default_factory=list)  # of full pages of known tokens, in order
    num_indexed: int = 0  # how many of those digests have been offered to the prefix index
    num_cached: int | None = None  # prompt tokens found in the prefix cache when first admitted
    score_next: int | None = None  # the next prompt position whose log-probability is owed
    last_served: int = -1
    finish: Finish | None = None
    stop_id: int | None = None
    trusted: bool = False  # its KV above the prompt came from the fast path
    guide: Guide | None = None  # of a sequence with a grammar
    prompt_len: int = field(init=False)  # fixed here: preemption does not turn output into prompt

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt)

    @property
    def given(self) -> int:
        """Known tokens whose KV is not there yet. At least one while the sequence lives."""
        return len(self.tokens) - self.kv_len

    @property
    def reading(self) -> bool:
        """Whether more than the last known token still has to be read."""
        return len(self.tokens) - self.kv_len > 1

    def check(self) -> None:
        """Raise InvariantBroken unless the lengths fit together."""
        if not 0 <= self.kv_len < len(self.tokens):
            raise InvariantBroken(
                f"request {self.request.id}: kv_len {self.kv_len} of {len(self.tokens)} tokens"
            )
        if self.draft and self.reading:
            raise InvariantBroken(f"request {self.request.id}: drafts while its prompt is still being read")


class Ask(NamedTuple):
    """What a proposer may know of a sequence that could use guesses.

    `tokens` is the sequence's own list (prompt, then output), lent for reading during one call;
    `draft` what has been guessed so far. At most `room` further guesses are of use.
    """

    seq_id: int
    tokens: list[int]
    prompt_len: int
    draft: list[int]
    kv_len: int
    pages: array[int]
    sampling: Sampling
    room: int
    pool: bytes | None = b""  # with whom it shares text; None: with nobody
    guide: Guide | None = None  # lent, like the tokens: what its grammar lets come next


class Proposal(NamedTuple):
    """Guesses to be appended to a sequence's draft, and log-probabilities where the proposer has them.

    `more`: the drafter would go on at the next step; until it has, the draft is not replayed. `branches` are
    alternatives to the whole draft, counted from its start.
    """

    seq_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    tops: tuple[TopLogprobs, ...] = ()
    drafter: str = ""
    more: bool = False
    branches: tuple[Branch, ...] = ()


class Span(NamedTuple):
    """A run of consecutive positions of one sequence: `inputs` stand at start, start + 1, …

    The first `given` inputs are known tokens, the rest guesses. `given` may exceed `len(inputs)`
    while a prompt is being read. `tokens` is the sequence's own list, lent for reading until the
    replay returns. `targets` are known tokens whose log-probability is wanted, the first of them
    predicted by row `target_row`. With a `source` the one input is not known here yet: it is what that
    row of the frame before answers, and the device puts it in. A `branch` above 0 is one of several spans of
    its sequence; before the frame, the page `copy[0]` is copied to `copy[1]`.
    """

    seq_id: int
    start: int
    inputs: tuple[int, ...]
    given: int
    pages: array[int]
    sampling: Sampling
    tokens: list[int]
    prompt_len: int
    targets: tuple[int, ...] = ()
    target_row: int = 0
    target_tops: int = 0
    source: int | None = None
    drafter: str = ""
    guide: Guide | None = None  # lent, like the tokens
    branch: int = 0
    copy: tuple[int, int] | None = None


class Truth(NamedTuple):
    """What the replay says of a span: one entry per row, from row `first` on.

    Rows before `first` predict tokens that are known already. `scores` answer the span's targets.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[TopLogprobs, ...] = ()
    scores: tuple[float, ...] = ()
    score_tops: tuple[TopLogprobs, ...] = ()


class Verdict(NamedTuple):
    """Tokens that may become public, and how far canonical KV then reaches."""

    seq_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[TopLogprobs, ...]
    kv_len: int
    guessed: int
    accepted: int
    verified: bool = True
    scores: tuple[float, ...] = ()
    score_tops: tuple[TopLogprobs, ...] = ()
    drafter: str = ""
    branch: int = 0  # whose span it was: 0 is the draft itself
    spent: int = 0  # guesses of branches that lost


class Delta(NamedTuple):
    """What became public in one step for one request."""

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[TopLogprobs, ...]
    finish: Finish | None
    stop_id: int | None = None
    scores: tuple[float, ...] = ()
    score_tops: tuple[TopLogprobs, ...] = ()
    num_cached: int = 0
    accepted: int = 0
    guessed: int = 0
    drafter: str = ""
    frames: int = 0  # that these tokens came from: one; none of a request that opted out


__all__ = [
    "GRAMMAR_KINDS",
    "Ask",
    "Branch",
    "Delta",
    "Finish",
    "Grammar",
    "Guide",
    "LayerSet",
    "Proposal",
    "Request",
    "Sampling",
    "Sequence",
    "Span",
    "TopLogprobs",
    "Truth",
    "Verdict",
]
