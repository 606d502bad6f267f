"""The types that cross modules. All are immutable except Sequence.

Records made once per sequence and step are named tuples: immutable like a frozen dataclass and several times
cheaper to make. Positions are absolute, intervals half-open. Host only: no tensors.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from samewise.errors import BadParameter, CallerError, InvariantBroken

if TYPE_CHECKING:
    import numpy as np

TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, log-probability) pairs by falling value; equal values by rising id."""


class Finish(StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # it failed inside the engine, and others go on


GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "lark")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output: its kind and source text. `text/grammar.py` compiles it."""

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise _bad(f"grammar kind {self.kind!r}: known are {', '.join(GRAMMAR_KINDS)}")
        if not isinstance(self.text, str):
            raise _bad(f"a {self.kind} grammar is text, not {type(self.text).__name__}")
        if (self.kind == "json_object") != (self.text == ""):
            need = "takes no text" if self.text else "needs a text"
            raise _bad(f"a {self.kind} grammar {need}")
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


def _bad(message: str) -> BadParameter:
    return BadParameter(message, param="grammar")


def _dumps(schema: object) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(f"the JSON schema is not JSON: {error}") from error


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _bad(f"a JSON schema is an object, not {text[:40]!r}")


class Guide(Protocol):
    """A sequence's state in its grammar, after its committed tokens.

    Owned by a Sequence; an Ask or a Span holds a reference. Every answer is a function of the grammar and the
    tokens before a position, so asking about guesses leaves no state behind.
    """

    @property
    def pace(self) -> float:
        """Processor time of its latest tokens, in seconds each. Plans may depend on it, masks may not."""
        ...

    def fits(self, draft: list[int], guesses: tuple[int, ...]) -> int:
        """How many of `guesses` the grammar allows after the committed tokens and `draft`."""
        ...

    def masks(self, guesses: tuple[int, ...]) -> list[bytes | None]:
        """The allowed next tokens before the first guess and after each: a bit per token id, lowest first.

        None where there is no constraint to apply: after the end of the text, or where no token fits.
        """
        ...

    def mask(self, guesses: tuple[int, ...]) -> bytes | None:
        """The last of `masks`."""
        ...

    def take(self, token: int) -> Finish | None:
        """Commit a token. STOP: the text ends with it; ABORT: the grammar refuses it; ERROR: it failed."""
        ...

    def restore(self, tokens: tuple[int, ...]) -> None:
        """Return to the state after these committed tokens, whatever an unfinished call left behind."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen: SamplingParams with every default, text and stop string resolved to token ids.

    The token at a position is a function of this, the row's logits and the tokens before it.
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
    stop_ids: frozenset[int] = frozenset()  # end-of-text and stop_token_ids; masked before min_tokens
    top_logprobs: int | None = None  # None: not wanted; -1: the whole vocabulary
    logprob_token_ids: tuple[int, ...] = ()  # shown in place of the most probable tokens
    seed: int = 0
    index: int = 0  # which of the request's n choices
    processed: bool = False  # whether log-probabilities are those of the distribution tokens are drawn from
    edited: bool = field(init=False)  # whether logits are changed (penalties, bias, grammar, …)
    plain: bool = field(init=False)  # whether the token is the argmax of the model's own logits

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
    def divisor(self) -> float:
        """What logits are divided by before log-probabilities are taken; 1: they are taken of the logits."""
        return self.temperature if self.processed and self.temperature > 0.0 else 1.0

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p can exclude a token; greedy choice never needs them."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class LayerSet:
    """The sublayers a pass skips, by layer number. An argument of a pass, not a mode."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def __str__(self) -> str:
        parts = (("attention", self.attention), ("mlp", self.mlp))
        return "; ".join(f"{name} {_ranges(layers)}" for name, layers in parts if layers) or "nothing"


def _ranges(numbers: frozenset[int]) -> str:
    """As text: 1-4, 7, 9-10."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


ROOT = -1
"""The parent of a draft's first tokens: the last committed token."""

MAX_TREE_NODES = 64
"""Guesses of a draft tree, at most. On recorded text 64 nodes bring 6 % more tokens than 32."""

MAX_TREE_DEPTH = 32
"""Levels of a draft tree, at most. Bounds the lists of slots that a pass carries."""

RESYNC_TOKENS = 2
"""Last tokens of an answer that must occur in the caller's prediction for it to be followed again from there.
Usage counts by it, so it is part of the interface; drafts begin with it (`draft.tuning`)."""

NUM_CANDIDATES = 8
"""Most probable tokens of a verified row that proposers may ask for."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue. Ids order requests by arrival and are never reused."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    verify: bool = True
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: no prompt log-probabilities
    score_from: int | None = None  # first prompt position to score; None: no scoring
    salt: bytes = b""  # prefix pages are shared only between requests with equal salts
    leader: int | None = None  # a request with the same prompt whose prefix pages it waits for
    priority: int = 0  # lower is served earlier among the requests of its owner; no bit depends on it
    share: bool = True  # whether drafts for other requests may use its text
    speculate: bool = True  # whether it gets drafts; without, one token per frame
    prediction: tuple[int, ...] = ()  # what the caller expects the output to be; drafts are taken from it
    owner: bytes = b""  # sequences of one owner do not delay the first token of another's
    # Of an answer that another engine began under the same contract: output tokens, and the number of the
    # prompt's log-probabilities, that its caller has. It goes on after them, to the same bits.
    output: tuple[int, ...] = ()
    num_scores: int = 0

    @property
    def first_scored(self) -> int | None:
        """First prompt position whose log-probability is wanted; None: none is."""
        if self.score_from is not None:
            return self.score_from
        return None if self.prompt_logprobs is None else 1


class Received(NamedTuple):
    """How much of a request its caller has: output tokens, and log-probabilities of prompt tokens."""

    tokens: int = 0
    scores: int = 0

    def after(self, delta: Delta) -> Received:
        """How much it is with a delta that follows."""
        return Received(self.tokens + len(delta.tokens), self.scores + len(delta.scores))


@dataclass(slots=True)
class Sequence:
    """The state of a request. The only mutable type here; only the Scheduler writes to it.

    `kv_len` is how far canonical KV reaches: positions below it are never written again, positions at and
    above it are scratch. `draft` holds guesses that were not verified yet: a tree, whose node i is `draft[i]`
    after the node `parents[i]`. A parent stands before its children.
    """

    request: Request
    tokens: list[int]  # the prompt, then what was committed
    max_len: int = 0  # tokens at which it ends with finish reason "length"
    draft: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # one per token of the draft; ROOT: the last token
    drafter: str = ""  # the proposer that made the draft
    drafting: bool = False  # whether its proposer will extend the draft at the next step
    ready_since: int | None = None  # the step since which it waits for a frame
    kv_len: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    digests: list[bytes] = field(default_factory=list)  # of full pages of known tokens, in order
    num_indexed: int = 0  # pages offered to the prefix index so far
    num_cached: int | None = None  # prompt tokens found in the prefix cache when first admitted
    score_next: int | None = None  # the next prompt position whose log-probability is still wanted
    last_served: int = -1  # the last step in which it had rows
    finish: Finish | None = None
    stop_id: int | None = None
    unverified_kv: bool = False  # whether KV above the prompt came from the fast path
    guide: Guide | None = None  # for a request with a grammar
    guide_moved: bool = False  # whether the guide may stand after tokens that were dropped
    num_failures: int = 0  # failed steps it was part of since it last made progress
    failed_at: Received | None = None  # what its caller had at the last of them
    prompt_len: int = field(init=False)  # fixed here: preemption does not turn output into prompt
    place: int = field(init=False)  # in the order of admission; by arrival, and then by priority

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt)
        self.place = self.request.id

    @property
    def committed(self) -> Received:
        """Output tokens and scores so far."""
        if self.score_next is None:
            return Received(len(self.tokens) - self.prompt_len)
        first = self.request.first_scored
        scores = 0 if first is None else self.score_next - first
        return Received(len(self.tokens) - self.prompt_len, scores)

    @property
    def given(self) -> int:
        """Known tokens without canonical KV. At least one while the sequence runs."""
        return len(self.tokens) - self.kv_len

    @property
    def prefilling(self) -> bool:
        """Whether known tokens before the last one lack KV: a prompt, or tokens after a preemption."""
        return len(self.tokens) - self.kv_len > 1

    def check(self) -> None:
        """Raise InvariantBroken unless the lengths are consistent."""
        if not 0 <= self.kv_len < len(self.tokens):
            raise InvariantBroken(
                f"request {self.request.id}: kv_len {self.kv_len} of {len(self.tokens)} tokens"
            )
        if self.draft and self.prefilling:
            raise InvariantBroken(f"request {self.request.id}: has a draft while its prompt is being read")


class Ask(NamedTuple):
    """What a proposer is told about a sequence that could use guesses.

    `tokens` and `draft` are the sequence's own lists, valid during one call. A draft can be at most `room`
    tokens deeper and have `max_nodes` more tokens in all.
    """

    seq_id: int
    tokens: list[int]  # the prompt, then what was committed
    prompt_len: int
    draft: list[int]  # the guesses so far
    kv_len: int
    pages: array[int]
    sampling: Sampling
    room: int
    share_salt: bytes | None = b""  # requests with equal salts may draft from each other's text; None: none
    guide: Guide | None = None
    max_nodes: int = 0
    prediction: tuple[int, ...] = ()  # what the caller expects the output to be, or to contain


class Proposal(NamedTuple):
    """Guesses to append to a sequence's draft.

    `parents`: for each token the index of the token before it in the whole draft, or ROOT; a parent stands
    before its children. Empty: each token follows the one before, the first the draft's last one.
    `more`: the proposer will extend the draft at the next step, and it is not verified before that.
    """

    seq_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # where the proposer computed them
    tops: tuple[TopLogprobs, ...] = ()
    drafter: str = ""
    more: bool = False
    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()  # as in Delta


class Span(NamedTuple):
    """A run of consecutive positions of one sequence in a frame: `inputs` at start, start + 1, …

    The first `given` inputs are known tokens, the rest guesses; `given` exceeds `len(inputs)` while a prompt
    is read in pieces. With `parents` the guesses are a tree: guess i follows guess `parents[i]`, or the last
    given input (ROOT), and its position is one more than that of its parent. Without, they are a chain.
    `tokens` is the sequence's own list, valid until the frame has landed.
    """

    seq_id: int
    start: int
    inputs: tuple[int, ...]
    given: int
    pages: array[int]
    sampling: Sampling
    tokens: list[int]
    prompt_len: int
    targets: tuple[int, ...] = ()  # known tokens whose log-probability is wanted
    target_row: int = 0  # the span's row that predicts the first of them
    target_tops: int | None = None  # alternatives wanted for each, with its rank; None: neither is
    source: int | None = None  # the row of the frame in flight whose token is the input, still on the device
    drafter: str = ""
    guide: Guide | None = None
    parents: tuple[int, ...] = ()


class Candidates(NamedTuple):
    """The most probable next tokens of verified rows, most probable first; for drafts only."""

    inputs: tuple[int, ...]  # the row's input token: the last given one, then the guesses
    ids: np.ndarray[Any, np.dtype[np.int32]]  # [rows, NUM_CANDIDATES]; a view, valid until the next frame


class Truth(NamedTuple):
    """What verification computed for a span: one entry per row, from the last given row on.

    Earlier rows predict tokens that are known. `scores` are the log-probabilities of the span's targets.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[TopLogprobs, ...] = ()
    scores: tuple[float, ...] = ()
    score_tops: tuple[TopLogprobs, ...] = ()
    candidates: Candidates | None = None
    ranks: tuple[int, ...] = ()
    score_ranks: tuple[int, ...] = ()


class Verdict(NamedTuple):
    """Tokens that may be committed, and how far canonical KV reaches with them.

    `path` holds the accepted guesses of a tree, by index; the KV of guess `path[i]` belongs at position
    `kv_len - len(path) + i`. Empty for a chain, whose guesses stand where they belong.
    """

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
    path: tuple[int, ...] = ()
    candidates: Candidates | None = None  # of the span's rows, where the proposer asked for them
    ranks: tuple[int, ...] = ()
    score_ranks: tuple[int, ...] = ()


class Delta(NamedTuple):
    """What was committed for one request in one step.

    A token's rank is its place in its row by falling log-probability, then by rising id, counted from 1.
    There is one for each token where log-probabilities are shown (`Sampling.top_logprobs`), and one for each
    score where those of the prompt are (`Request.prompt_logprobs`).

    `error`: the caller's mistake that ended the request, where it was found after the request was queued.
    """

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
    frames: int = 0  # 1 if the tokens came from a frame; 0 for an unverified request
    ranks: tuple[int, ...] = ()
    score_ranks: tuple[int, ...] = ()
    error: CallerError | None = None


__all__ = [
    "GRAMMAR_KINDS",
    "MAX_TREE_DEPTH",
    "MAX_TREE_NODES",
    "NUM_CANDIDATES",
    "RESYNC_TOKENS",
    "ROOT",
    "Ask",
    "Candidates",
    "Delta",
    "Finish",
    "Grammar",
    "Guide",
    "LayerSet",
    "Proposal",
    "Received",
    "Request",
    "Sampling",
    "Sequence",
    "Span",
    "TopLogprobs",
    "Truth",
    "Verdict",
]
