"""Check a prompt and its sampling parameters once, and turn them into engine requests.

Everything that can be wrong with a request is found here, before anything is queued; `Engine.add` takes the
result without checking it again. The methods only read, so any thread may call them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, cast

from samewise.errors import BadParameter, BadPrompt, PromptTooLong
from samewise.execute.load import Loaded
from samewise.llm.prediction import NO_PREDICTION, Prediction
from samewise.params import SamplingParams, derive_seed
from samewise.schedule.limits import Limits
from samewise.text.byte_tokens import TokenBytes
from samewise.text.chat_template import Messages, render_chat, template_of
from samewise.text.control_tokens import MARK, ControlTokens
from samewise.text.detokenize import TextStream
from samewise.text.grammar import CompiledGrammar, Grammars, Pace
from samewise.types import Grammar, Guide, Request, Sampling

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`, as vLLM takes them."""

PROMPT_KEYS = ("prompt", "prompt_token_ids")
"""Keys of a prompt that is a mapping. Others, such as vLLM's `multi_modal_data`, would change the output."""

GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that a checkpoint's generation_config.json may set."""

CHARACTERS_PER_TOKEN = 32
"""Characters of a prompt or prediction read per token of the context, at most: bounds the work for a huge
text. Tokens of plain text have 3 to 5 characters, of indented code up to 20."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A prompt and its parameters, checked against the model. Submitting it can only fail on a full queue."""

    text: str | None  # the prompt as text, where it was given so
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    sampling: Sampling  # of the first choice
    # Of the output; at most as long as the context.
    prediction: Prediction = field(default=NO_PREDICTION, compare=False)
    grammar: CompiledGrammar | None = field(default=None, compare=False)  # kept in memory by the request
    # The same ids for the engine: one tuple for all choices, which may be hundreds of a long prompt.
    _prompt: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_prompt", tuple(self.token_ids))

    @property
    def seed(self) -> int:
        """The request's seed: given, or derived from the prompt."""
        return self.sampling.seed

    @property
    def num_held(self) -> int:
        """Tokens that lie in memory until the answer ends: of the prompt, and of the prediction."""
        return len(self.token_ids) + len(self.prediction)

    def request(
        self, request_id: int, index: int, *, salt: bytes, leader: int | None, owner: bytes = b""
    ) -> Request:
        """The engine's request for choice `index` of n. `leader`: the first choice's request id."""
        params = self.params
        return Request(
            request_id,
            self._prompt,
            self.sampling if index == 0 else replace(self.sampling, index=index),
            self.max_tokens,
            verify=params.verify,
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            salt=salt,
            leader=leader,
            priority=params.priority,
            share=params.share,
            speculate=params.speculate,
            prediction=self.prediction.tokens,
            owner=owner,
        )


class CheckedScore(NamedTuple):
    """A prompt and the completion whose log-probabilities are wanted."""

    prompt: list[int]
    completion: list[int]
    temperature: float = 1.0  # by which logits are divided

    def request(self, request_id: int) -> Request:
        """The engine's request: read everything, generate nothing, score the completion."""
        tokens = (*self.prompt, *self.completion)
        sampling = Sampling(temperature=self.temperature, processed=True)
        return Request(request_id, tokens, sampling, max_tokens=0, score_from=len(self.prompt))


class Intake:
    """Tokenises and checks requests for one loaded model."""

    def __init__(self, loaded: Loaded, limits: Limits, *, seed: int, date: str | None) -> None:
        self.tokenizer = loaded.tokenizer
        self._eos_ids, self._vocab = loaded.eos_ids, loaded.arch.vocab
        self._generation = loaded.generation
        self._limits, self._seed, self._date = limits, seed, date
        self._grammars = Grammars(loaded.tokenizer, loaded.arch.vocab, loaded.eos_ids)
        self._token_bytes = TokenBytes.of(loaded.tokenizer)
        self._token_texts: dict[int, str] = {}  # a cache of `decode_token`

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    # ---- requests

    def check(self, prompt: Prompt, params: SamplingParams, *, owner: bytes | None = None) -> CheckedRequest:
        """A request that can be submitted, or the error that says what is wrong with it.

        `owner` is that which its grammar was compiled for.
        """
        params = copy(params)  # the caller may assign to its own while this request runs
        keep = params.truncate_prompt_tokens
        text, ids = self._token_ids(prompt, kept_side=None if keep is None else params.truncation_side)
        if keep is not None:
            ids = ids[-keep:] if params.truncation_side == "left" else ids[:keep]
        self.refuse_unknown_tokens(ids)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self._limits.longest - len(ids))
        self._limits.refuse_misfit(len(ids), max_tokens)
        if params.stops and self.tokenizer is None:
            raise BadParameter(
                f"stop={params.stop!r}: this model has no tokenizer; use stop_token_ids", param="stop"
            )
        grammar = None if params.grammar is None else self._grammars.compile(params.grammar, owner=owner)
        sampling = params.resolve(
            vocab=self._vocab,
            eos_ids=self._eos_ids,
            encode=self._encode_word if self.tokenizer is not None else None,
            seed=derive_seed(self._seed, ids) if params.seed is None else params.seed,
            index=0,
        )
        prediction = self._prediction(params.prediction)
        return CheckedRequest(text, ids, params, max_tokens, sampling, prediction, grammar)

    def check_score(
        self, prompt: Prompt, completion: str | Sequence[int], temperature: float = 1.0
    ) -> CheckedScore:
        """A completion that can be scored after its prompt, at a temperature (0: as 1)."""
        temperature = SamplingParams(temperature=temperature).temperature or 1.0
        before = self._token_ids(prompt)[1]
        self.refuse_unknown_tokens(before)
        self._limits.refuse_misfit(len(before), 0)
        if isinstance(completion, str):
            if self.tokenizer is None:
                raise BadPrompt(
                    "this model has no tokenizer; give the completion as token ids", param="completions"
                )
            self.refuse_endless(completion)
            after = self.encode(completion, add_special_tokens=False)
        else:
            after = _as_ids(completion, param="completions")
        if not after:
            raise BadPrompt("the completion is empty; there is nothing to score", param="completions")
        self.refuse_unknown_tokens(after)
        self._limits.refuse_misfit(len(before) + len(after), 0)
        return CheckedScore(before, after, temperature)

    def start_compiling(self, grammar: Grammar, *, owner: bytes | None = None) -> Future[CompiledGrammar]:
        """A future of a compiled grammar, for a caller that must not block in `check`.

        Raises, and fails, as `check` does. `check` finds the grammar as long as the result is held, for the
        same `owner`. Grammars of one owner take no more than a share of the queue and of memory.
        """
        return self._grammars.start(grammar, owner=owner)

    def find_compiled(
        self, grammar: Grammar, *, owner: bytes | None = None
    ) -> Future[CompiledGrammar] | None:
        """What `start_compiling` returns, for a grammar that needs no work. Else None, at once."""
        return self._grammars.find(grammar, owner=owner)

    def prepare_grammars(self) -> None:
        """Do now what the first grammar would wait for, if this model can follow grammars at all."""
        with suppress(BadParameter):  # no tokenizer, or llguidance is not installed: requests are told
            self._grammars.prepare()

    def bound_grammars(self, pace: Pace | None) -> None:
        """End sequences whose grammars take more processor time than this, with an error. None: none.

        For servers: a grammar may be a stranger's, and the engine's thread follows it for every sequence.
        """
        self._grammars.pace = pace

    def stop_compiling(self) -> None:
        """End the processes that compile grammars; requests that wait for one fail. Compiled ones go on."""
        self._grammars.close()

    def guide(self, checked: CheckedRequest) -> Guide | None:
        """A new grammar guide for one sequence; None for a request without a grammar."""
        return None if checked.grammar is None else checked.grammar.guide(checked.sampling.stop_ids)

    def default_params(self) -> SamplingParams:
        """The checkpoint's own generation defaults."""
        generation = self._generation
        values = {name: generation[name] for name in GENERATION_DEFAULTS if generation.get(name) is not None}
        if generation.get("do_sample") is False:
            values["temperature"] = 0.0
        if generation.get("max_new_tokens"):
            values["max_tokens"] = generation["max_new_tokens"]
        return SamplingParams(**values)

    def refuse_unknown_tokens(self, tokens: Iterable[int]) -> None:
        """Raise BadPrompt unless every token id is in the model's vocabulary."""
        for token in tokens:
            if type(token) is not int or not 0 <= token < self._vocab:
                raise BadPrompt(
                    f"the prompt holds {token!r}; token ids of this model are 0 to {self._vocab - 1}",
                    param="prompt",
                )

    # ---- text and tokens

    def chat_prompt(
        self, messages: Messages, /, *, special_tokens_in_content: bool = True, **template: Any
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template; see `render_chat`.

        `special_tokens_in_content=False`: control tokens in messages, tools and other values are encoded as
        text; only the template's own take effect.
        """
        marks = not special_tokens_in_content and self.tokenizer is not None
        if marks:
            messages = [self._control_tokens.mark(message) for message in messages]
            template = self._control_tokens.mark(template)
        text = render_chat(self.tokenizer, messages, date=self._date, **template)
        self.refuse_endless(text)
        if marks and MARK in text:
            return _encode(lambda: self._control_tokens.encode(text))
        return self.encode(text, add_special_tokens=False)

    def template(self, tools: Any = None) -> str:
        """The model's chat template."""
        return template_of(self.tokenizer, tools)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's token ids."""
        self._refuse_without_tokenizer()
        return _encode(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        self._refuse_without_tokenizer()
        self.refuse_unknown_tokens(token_ids)
        return str(self.tokenizer.decode(token_ids))

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Tokens as the vocabulary spells them. Unlike their texts, no two are alike."""
        self._refuse_without_tokenizer()
        return [str(name) for name in self.tokenizer.convert_ids_to_tokens(token_ids)]

    def decode_token(self, token: int) -> str | None:
        """A single token's text, as log-probabilities show it; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = str(self.tokenizer.decode([token]))
        return text

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes a token stands for; None where they are not known without its neighbours."""
        return None if self._token_bytes is None else self._token_bytes.bytes_of(token)

    def text_stream(self, checked: CheckedRequest) -> TextStream | None:
        """A detokeniser for one choice; None where text is not wanted or there is no tokenizer."""
        params = checked.params
        if self.tokenizer is None or not params.detokenize:
            return None
        return TextStream(
            self.tokenizer,
            checked.token_ids,
            stops=params.stops,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            token_bytes=self._token_bytes,
        )

    def _token_ids(self, prompt: Prompt, *, kept_side: str | None = None) -> tuple[str | None, list[int]]:
        """(the prompt as text, or None; its token ids). `kept_side`: the prompt will be truncated."""
        if isinstance(prompt, Mapping):
            _refuse_unknown_keys(prompt)
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _as_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise BadPrompt(
                    f"a prompt mapping needs 'prompt' or 'prompt_token_ids', not {sorted(prompt)}",
                    param="prompt",
                )
            prompt = cast("str", prompt["prompt"])
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise BadPrompt("this model has no tokenizer; give token ids instead of text", param="prompt")
            if not prompt:
                raise BadPrompt("the prompt is empty; give some text or token ids", param="prompt")
            if kept_side is not None:
                return prompt, self.encode(self._cut(prompt, kept_side))
            self.refuse_endless(prompt)
            return prompt, self.encode(prompt)
        return None, _as_ids(prompt)

    def _prediction(self, prediction: str | Sequence[int] | None) -> Prediction:
        """The tokens of a prediction, cut to the length of the longest context.

        A text is also cut at the first token that the model does not have.
        """
        if not prediction:
            return NO_PREDICTION
        longest = self._limits.longest
        if isinstance(prediction, str):
            text = prediction[: longest * CHARACTERS_PER_TOKEN]
            try:
                ids = self.encode(text, add_special_tokens=False)[:longest]
            except BadPrompt as error:
                raise BadParameter(f"prediction: {error}", param="prediction") from error
            # A tokenizer may have tokens that the model does not have, such as an added padding token.
            return Prediction(list(takewhile(lambda token: token < self._vocab, ids)))
        outside = [token for token in prediction if token >= self._vocab]
        if outside:
            raise BadParameter(
                f"prediction holds {outside[0]}; token ids of this model are 0 to {self._vocab - 1}",
                param="prediction",
            )
        return Prediction(prediction[:longest])

    def _encode_word(self, text: str) -> list[int]:
        try:
            return self.encode(text, add_special_tokens=False)
        except BadPrompt as error:
            raise BadParameter(f"bad_words: {error}", param="bad_words") from error

    def _cut(self, text: str, kept_side: str) -> str:
        """The end of a text that is kept, as many characters as the tokens of the context may have.

        A function of the text and of `context`, a fact of the contract; not of the KV cache.
        """
        most = self._limits.max_model_len * CHARACTERS_PER_TOKEN
        return text[-most:] if kept_side == "left" else text[:most]

    def refuse_endless(self, text: str) -> None:
        """Refuse a text that cannot fit by its characters alone: tokenising megabytes takes seconds."""
        longest = self._limits.longest
        if len(text) > longest * CHARACTERS_PER_TOKEN:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, more than {CHARACTERS_PER_TOKEN} for each of the "
                f"{longest} tokens of the longest context; shorten it",
                param="prompt",
            )

    def _refuse_without_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise BadPrompt("this model has no tokenizer; it reads and writes token ids", param="prompt")


def _refuse_unknown_keys(prompt: Mapping[str, Any]) -> None:
    for name, value in prompt.items():
        if name not in PROMPT_KEYS:
            raise BadPrompt(
                f"the prompt holds {name!r}: {str(value)[:40]!r}, which is not supported; "
                f"known are {', '.join(map(repr, PROMPT_KEYS))}",
                param="prompt",
            )


def _encode(encode: Callable[[], Iterable[int]]) -> list[int]:
    """Token ids, with the errors of a tokenizer as BadPrompt."""
    try:
        return list(encode())
    except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate cannot be encoded
        raise BadPrompt(
            f"the text cannot be tokenised: {error}; is it valid Unicode?", param="prompt"
        ) from error


def _as_ids(prompt: Any, *, param: str = "prompt") -> list[int]:
    """A list of ints from any iterable of integer-like values (numpy's too; a bool is left to be refused)."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Iterable):
        raise BadPrompt(f"a prompt is text or a list of token ids, not {type(prompt).__name__}", param=param)
    try:
        return [token if isinstance(token, bool) else operator.index(token) for token in prompt]
    except TypeError:
        odd = next(token for token in prompt if not hasattr(token, "__index__"))
        raise BadPrompt(
            f"the prompt holds {odd!r}; a prompt is text or a list of token ids", param=param
        ) from None


__all__ = ["CheckedRequest", "CheckedScore", "Intake", "Prompt"]
