"""SamplingParams: what a request asks of the sampler, in vLLM's words. Each parameter is declared once.

`resolve` turns them into `types.Sampling`: token ids and numbers, with nothing left to look up.

Host only: imports no torch.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from samewise.errors import BadParameter
from samewise.types import Grammar, Sampling
from samewise.values import FLAG, Values, integer, is_integer, is_number, number, one_of

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0: always the most likely token. vLLM's limit."""


LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
"""vLLM's modes. Raw: of the model's own logits. Processed: of the distribution that tokens are drawn from,
after penalties, bias, masks and temperature, with tokens at -inf that top-k, top-p or min-p exclude. At
temperature 0 nothing is divided or excluded. Those of the prompt then have the temperature alone."""


def param(default: Any, values: Values, **options: Any) -> Any:
    """A field of SamplingParams. None is a value where it is the default or `optional`."""
    optional = default is None or options.pop("optional", False)
    return field(default=default, metadata={"declared": (values, optional)}, **options)


def _is_token(value: Any) -> bool:
    return is_integer(value) and value >= 0


def _read_bias(value: Mapping[object, object]) -> dict[int, float]:
    return {_bias_token(token): _bias_amount(token, amount) for token, amount in value.items()}


def _bias_token(token: object) -> int:
    """JSON has no integer keys, so decimal digits are accepted; at most 20 of them, because int() is slow."""
    if isinstance(token, str) and token.isdecimal() and len(token) <= 20:
        return int(token)
    if not _is_token(token):
        raise _refused("logit_bias", token, "keys are token ids")
    assert isinstance(token, int)
    return token


def _bias_amount(token: object, amount: Any) -> float:
    if not (is_number(amount) and -100 <= amount <= 100):
        raise _refused("logit_bias", {token: amount}, "values are numbers from -100 to 100")
    return float(amount)


def _refused(name: str, value: object, remedy: str) -> BadParameter:
    return BadParameter(f"{name}={value!r}: {remedy}", param=name)


STRINGS = Values(
    "non-empty strings",
    lambda texts: all(isinstance(text, str) and text for text in texts),
    within=Values(
        "a string or a list of strings",
        lambda value: isinstance(value, Iterable) and not isinstance(value, bytes),
        convert=lambda value: (value,) if isinstance(value, str) else tuple(value),
    ),
)
WORDS = Values("no word of spaces alone", lambda words: all(word.strip() for word in words), within=STRINGS)
TOKENS = Values(
    "a list of token ids",
    lambda tokens: all(map(_is_token, tokens)),
    within=Values(
        "a list of token ids",
        lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes),
        convert=tuple,
    ),
    json_schema={"items": {"minimum": 0}},
)
SOME_TOKENS = Values(
    "at least one token id", bool, within=TOKENS, json_schema={**TOKENS.json_schema, "minItems": 1}
)
BIAS = Values(
    "a mapping of token ids to -100 … 100", lambda value: isinstance(value, Mapping), convert=_read_bias
)
GRAMMAR = Values("a Grammar, such as Grammar.json_object()", lambda value: isinstance(value, Grammar))
PREDICTION = Values(
    "text or token ids",
    lambda value: isinstance(value, str) or all(map(_is_token, value)),
    within=Values(
        "text or a list of token ids",
        lambda value: isinstance(value, Iterable) and not isinstance(value, bytes | Mapping),
        convert=lambda value: value if isinstance(value, str) else tuple(value),
    ),
)
SEED = replace(integer(-(2**63), 2**64 - 1), text="a whole number of at most 64 bits")
PRIORITY = replace(integer(-(2**63), 2**63 - 1), text="a whole number of 64 bits")
PENALTY = number("-2 to 2 (0: off)", minimum=-2, maximum=2)


@dataclass(kw_only=True, unsafe_hash=True)
class SamplingParams:
    """How to continue a prompt. Names and defaults are vLLM's; every value is checked when it is made.

    A parameter can be assigned; a value that the constructor would refuse is refused, and changes nothing.
    Requests under way keep the values they were made with. Lists are stored as tuples. Where no seed is
    given, one is derived from the prompt (`derive_seed`), so the same request gives the same text again.
    """

    n: int = param(1, integer(1))
    temperature: float = param(1.0, number("0 (greedy) or more", minimum=0))
    top_p: float = param(1.0, number("more than 0 and at most 1 (1: off)", above=0, maximum=1))
    top_k: int = param(0, replace(integer(-1), convert=lambda value: max(value, 0)))  # 0 or -1: off
    min_p: float = param(0.0, number("0 (off) to 1", minimum=0, maximum=1))
    presence_penalty: float = param(0.0, PENALTY)
    frequency_penalty: float = param(0.0, PENALTY)
    repetition_penalty: float = param(1.0, number("0.01 to 100 (1: off)", minimum=0.01, maximum=100))
    seed: int | None = param(None, SEED)
    stop: str | Sequence[str] | None = param(None, STRINGS)
    stop_token_ids: Sequence[int] | None = param(None, TOKENS)
    bad_words: Sequence[str] | None = param(None, WORDS)
    include_stop_str_in_output: bool = param(False, FLAG)
    ignore_eos: bool = param(False, FLAG)
    max_tokens: int | None = param(16, integer(0), optional=True)  # None: up to the context; 0: prefill only
    min_tokens: int = param(0, integer(0))
    logprobs: int | None = param(None, integer(-1))  # alternatives per token; -1: the whole vocabulary
    prompt_logprobs: int | None = param(None, integer(-1))  # the same for the prompt's tokens
    # The tokens whose log-probabilities are shown beside each chosen one, in place of the most probable.
    logprob_token_ids: Sequence[int] | None = param(None, SOME_TOKENS)
    # Log-probabilities of the model's own logits, or of what tokens are drawn from (see LOGPROBS_MODES).
    logprobs_mode: str = param("raw_logprobs", one_of(*LOGPROBS_MODES))
    detokenize: bool = param(True, FLAG)
    skip_special_tokens: bool = param(True, FLAG)
    spaces_between_special_tokens: bool = param(True, FLAG)
    logit_bias: Mapping[int, float] | None = param(None, BIAS, hash=False)
    allowed_token_ids: Sequence[int] | None = param(None, SOME_TOKENS)
    # The form of the answer; needs samewise[grammar].
    grammar: Grammar | None = param(None, GRAMMAR)  # noqa: RUF009 - param() is a dataclass field
    truncate_prompt_tokens: int | None = param(None, integer(1))  # keep this many of the prompt's tokens ...
    truncation_side: str = param(
        "left", one_of("left", "right")
    )  # ... cutting on this side; left: keep the last
    priority: int = param(0, PRIORITY)  # lower runs earlier, among equals the one that came first
    verify: bool = param(True, FLAG)  # False: faster, but the bits may depend on the load
    share: bool = param(True, FLAG)  # False: drafts for other requests are not taken from this one's tokens
    speculate: bool = param(True, FLAG)  # False: no drafts are made for it; the output is the same
    # What the output is expected to be, or to contain: a draft of it. The output is the same with any.
    prediction: str | Sequence[int] | None = param(None, PREDICTION)

    def __new__(cls, *_: object, **given: object) -> Self:
        """Refuse unknown names with a suggestion, which the dataclass's own TypeError would not give."""
        for name, value in given.items():
            if name not in _PARAMS:
                close = difflib.get_close_matches(name, _PARAMS, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_PARAMS)}"
                raise BadParameter(f"{name}={value!r} is not a sampling parameter; {hint}", param=name)
        return super().__new__(cls)

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Like the constructor, with None meaning the default, except for `max_tokens` (no limit)."""
        return cls(**{k: v for k, v in given.items() if v is not None or k == "max_tokens"})

    def clone(self, **changes: Any) -> Self:
        """A copy, with some values changed."""
        return replace(self, **changes)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(self.stop) if self.stop is not None else ()

    @property
    def shows_logprobs(self) -> bool:
        """Whether log-probabilities of the output are shown."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a parameter that the constructor would take with all others as they are."""
        if len(vars(self)) == len(_PARAMS):  # else it is being made, and is checked as a whole
            value = getattr(replace(self, **{name: value}), name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a parameter cannot be deleted; assign its default to {name}")

    def __post_init__(self) -> None:
        for name, (values, optional) in _PARAMS.items():
            object.__setattr__(self, name, values.read(name, getattr(self, name), optional=optional))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.stop and not self.detokenize:
            raise _refused("stop", self.stop, "stop strings need detokenize=True")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            remedy = f"give at most max_tokens={self.max_tokens}, or raise that"
            raise _refused("min_tokens", self.min_tokens, remedy)
        if self.allowed_token_ids is not None and self.grammar is not None:
            remedy = "cannot be combined with a grammar: both may leave no token. Put it in the grammar"
            raise _refused("allowed_token_ids", self.allowed_token_ids, remedy)
        named = self.logprob_token_ids
        if named is not None and self.logprobs not in (None, len(named)):
            remedy = f"with {len(named)} logprob_token_ids, leave it out or give {len(named)}"
            raise _refused("logprobs", self.logprobs, remedy)
        if self.prediction is not None and self.n > 1:
            raise _refused("n", self.n, "a prediction is for one answer; ask for n=1, or leave it out")

    def resolve(
        self,
        *,
        vocab: int,
        eos_ids: Collection[int],
        encode: Callable[[str], list[int]] | None,
        seed: int,
        index: int,
    ) -> Sampling:
        """The sampler's parameters for choice `index` of n. `seed` is used where the request gives none.

        `encode` returns a text's token ids without special tokens; bad words need it.
        """
        self._check_vocabulary(vocab)
        stops, named = frozenset(self.stop_token_ids or ()), self.logprob_token_ids
        return Sampling(
            temperature=0.0 if self.temperature < GREEDY_BELOW else self.temperature,
            top_k=self.top_k if self.top_k < vocab else 0,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=self._bad_word_ids(encode),
            grammar=self.grammar,
            min_tokens=self.min_tokens,
            stop_ids=stops if self.ignore_eos else stops | frozenset(eos_ids),
            top_logprobs=self.logprobs if named is None else len(named),
            logprob_token_ids=() if named is None else tuple(dict.fromkeys(named)),
            seed=seed if self.seed is None else self.seed,
            index=index,
            processed=self.logprobs_mode == "processed_logprobs",
        )

    def _check_vocabulary(self, vocab: int) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            outside = [token for token in getattr(self, name) or () if token >= vocab]
            if outside:
                raise _refused(name, outside, f"this model's token ids are 0 to {vocab - 1}")

    def _bad_word_ids(self, encode: Callable[[str], list[int]] | None) -> tuple[tuple[int, ...], ...]:
        """Token ids of every bad word, at the start of a text and after a space; without duplicates."""
        if not self.bad_words:
            return ()
        if encode is None:
            raise _refused("bad_words", self.bad_words, "this model has no tokenizer; use logit_bias")
        encodings = [tuple(encode(gap + word.lstrip())) for word in self.bad_words for gap in ("", " ")]
        return tuple(ids for ids in dict.fromkeys(encodings) if ids)


_PARAMS: dict[str, tuple[Values, bool]] = {f.name: f.metadata["declared"] for f in fields(SamplingParams)}


def json_schema_of(name: str) -> dict[str, Any]:
    """The range of a sampling parameter, in JSON Schema's words; empty where it has none."""
    values, _ = _PARAMS[name]
    return dict(values.json_schema)


def derive_seed(engine_seed: int, prompt: Sequence[int]) -> int:
    """The seed of a request that gives none: a hash of the engine's seed and the prompt's token ids.

    Load, arrival and history are not part of it, so the same request gives the same bits again. It is below
    2**53, the largest integer that every JSON reader keeps exactly.
    """
    text = f"{engine_seed} 0 {','.join(map(str, prompt))}"  # the 0 is part of seeds already published
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 11


__all__ = ["GREEDY_BELOW", "LOGPROBS_MODES", "SamplingParams", "derive_seed", "json_schema_of", "param"]
