"""SamplingParams: how a caller says what is wanted, in vLLM's words; checked when made.

`resolve` turns them into `types.Sampling`: token ids and numbers, with nothing left to look up.

Host only: this module has never heard of a tensor.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from samewise.errors import BadParameter
from samewise.types import Grammar, Sampling

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: the most likely token, always."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names and defaults are vLLM's; every value is checked when made.

    Lists may be given where tuples are kept. With no seed, one is derived from the prompt (see
    `derive_seed`), so the same request still gives the same text. `verify=False` gives up the promise of
    equal bits for this request.
    """

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as far as the context reaches; 0: only read the prompt
    min_tokens: int = 0
    logprobs: int | None = None  # -1: the whole vocabulary
    prompt_logprobs: int | None = None  # -1: the whole vocabulary
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    grammar: Grammar | None = None  # what the answer must look like; needs samewise[grammar]
    truncate_prompt_tokens: int | None = None  # keep this many of its last tokens
    verify: bool = True
    share: bool = True  # guesses for others may be taken from this answer; False: kept to itself
    speculate: bool = True  # False: nobody guesses for it; the output is the same

    def __new__(cls, *_: object, **given: object) -> Self:
        """Refuse names that do not exist, before the dataclass would with less to say."""
        known = [entry.name for entry in fields(cls)]
        for name, value in given.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
                raise BadParameter(f"{name}={value!r} is not a sampling parameter; {hint}")
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
        """Stop strings, as many as were given."""
        return tuple(self.stop) if self.stop is not None else ()

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_counts()
        for name in _FLAGS:
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "give True or False")
        self._keep("stop", _texts("stop", self.stop))
        self._keep("bad_words", _texts("bad_words", self.bad_words))
        blank = [word for word in self.bad_words or () if not word.strip()]
        _check("bad_words", blank, not blank, "a word of spaces alone would bar any text")
        self._keep("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._keep("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        self._keep("logit_bias", _bias(self.logit_bias))
        _check("stop", self.stop, not self.stop or self.detokenize, "stop strings need detokenize=True")
        allowed = self.allowed_token_ids
        _check("allowed_token_ids", allowed, allowed is None or bool(allowed), "allow at least one, or None")
        grammar = self.grammar
        known = grammar is None or isinstance(grammar, Grammar)
        _check("grammar", grammar, known, "give a Grammar, such as Grammar.json_object(), or None")
        apart = "cannot stand beside a grammar: the two may leave nothing to say. Put it in the grammar"
        _check("allowed_token_ids", allowed, allowed is None or grammar is None, apart)

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            _check(name, value, _is_number(value) and math.isfinite(value), "give a finite number")
            self._keep(name, float(value))
        _check("temperature", self.temperature, self.temperature >= 0, "give 0 (greedy) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "give more than 0 and at most 1 (1: off)")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "give 0 (off) to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "give -2 to 2 (0: off)")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 0.01 <= penalty <= 100, "give 0.01 to 100 (1: off)")

    def _check_counts(self) -> None:
        for name, (least, optional) in _COUNTS.items():
            value = getattr(self, name)
            remedy = f"give a whole number, {least} or more" + (", or None" if optional else "")
            good = optional if value is None else _is_whole(value) and value >= least
            _check(name, value, good, remedy)
        self._keep("top_k", max(self.top_k, 0))
        _check(
            "seed",
            self.seed,
            self.seed is None or (_is_whole(self.seed) and -(2**63) <= self.seed < 2**64),
            "give a whole number of at most 64 bits, or None",
        )
        if self.max_tokens is not None:
            most = f"give at most max_tokens={self.max_tokens}, or raise that"
            _check("min_tokens", self.min_tokens, self.min_tokens <= self.max_tokens, most)

    def resolve(
        self,
        *,
        vocab: int,
        eos_ids: Collection[int],
        encode: Callable[[str], list[int]] | None,
        seed: int,
        index: int,
    ) -> Sampling:
        """The same for one of the n choices, as the sampler wants it. `seed` serves where none was given.

        `encode` gives a text's token ids without special tokens; bad words need it.
        """
        self._check_vocabulary(vocab)
        stops = frozenset(self.stop_token_ids or ())
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
            top_logprobs=self.logprobs,
            seed=seed if self.seed is None else self.seed,
            index=index,
        )

    def _check_vocabulary(self, vocab: int) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            outside = [token for token in getattr(self, name) or () if token >= vocab]
            remedy = f"this model's token ids are 0 to {vocab - 1}"
            _check(name, outside, not outside, remedy)

    def _bad_word_ids(self, encode: Callable[[str], list[int]] | None) -> tuple[tuple[int, ...], ...]:
        """Every bad word as it is written at the start of a text and after a space; each spelling once."""
        if not self.bad_words:
            return ()
        if encode is None:
            raise BadParameter(f"bad_words={self.bad_words!r}: this model has no tokenizer; use logit_bias")
        spellings = [tuple(encode(gap + word.lstrip())) for word in self.bad_words for gap in ("", " ")]
        return tuple(ids for ids in dict.fromkeys(spellings) if ids)


def derive_seed(engine_seed: int, prompt: Sequence[int], ordinal: int = 0) -> int:
    """The seed of a request that gave none: a hash of the engine's seed, the prompt's tokens and `ordinal`.

    Nothing of load, arrival or history goes in, so the same request gives the same bits again. `ordinal`
    tells apart equal prompts that are meant to differ; leave it at 0 where they are not. The result stays
    below 2**53, so that JSON carries it everywhere.
    """
    text = f"{engine_seed} {ordinal} {','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 11


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "verify",
    "share",
    "speculate",
)
_COUNTS = {  # name: (least, whether None will do)
    "n": (1, False),
    "top_k": (-1, False),
    "max_tokens": (0, True),
    "min_tokens": (0, False),
    "logprobs": (-1, True),
    "prompt_logprobs": (-1, True),
    "truncate_prompt_tokens": (1, True),
}


def _check(name: str, value: object, good: bool, remedy: str) -> None:
    if not good:
        raise BadParameter(f"{name}={value!r}: {remedy}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(name: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    listed = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    _check(name, value, all(isinstance(text, str) and text for text in listed), "give non-empty strings")
    return listed


def _ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    listed = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (None,)
    _check(name, value, all(_is_whole(token) and token >= 0 for token in listed), "give a list of token ids")
    return listed


def _bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    _check("logit_bias", value, isinstance(value, Mapping), "give a mapping of token ids to -100 … 100")
    assert isinstance(value, Mapping)
    return {_bias_id(token): _bias_amount(token, amount) for token, amount in value.items()}


def _bias_id(token: object) -> int:
    """JSON knows no integer keys, so digits will do."""
    if isinstance(token, str) and token.isdecimal() and len(token) <= 20:  # Python reads no endless numbers
        return int(token)
    _check("logit_bias", token, _is_whole(token) and token >= 0, "keys are token ids")  # type: ignore[operator]
    assert isinstance(token, int)
    return token


def _bias_amount(token: object, amount: object) -> float:
    good = _is_number(amount) and -100 <= amount <= 100  # type: ignore[operator]
    _check("logit_bias", {token: amount}, good, "values are numbers from -100 to 100")
    return float(amount)  # type: ignore[arg-type]


__all__ = ["GREEDY_BELOW", "SamplingParams", "derive_seed"]
