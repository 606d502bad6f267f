"""A request as it is parsed: its prompts or messages, its parameters, and the form of its answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from samewise.errors import CallerError, PromptTooLong
from samewise.openai.bodies import CHAT, MAX_LOGPROBS, MAX_N
from samewise.openai.errors import ApiError, invalid
from samewise.openai.reasoning import DecodeTokens
from samewise.openai.tools import special_names, special_tokens
from samewise.outputs import RequestOutput
from samewise.params import GREEDY_BELOW, SamplingParams

C = TypeVar("C")
Checked_co = TypeVar("Checked_co", covariant=True)
Prompt = str | Sequence[int]

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions. Chats have none: they go on to the end of the context."""

SEED_BITS = 53
"""Of a seed that is drawn: every JSON reader keeps it exactly."""

MAX_REPEATS = 1 << 20
"""Tokens and log-probabilities of prompts in an answer's choices after the first, at most. Set by hand: they
take 100 to 200 bytes of memory each, which nothing else counts."""


class DeltaParser(Protocol):
    """Turns a choice's text into OpenAI's deltas: reasoning, content or tool calls."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """Add text; returns the deltas that it completes."""
        ...

    def flush(self) -> list[dict[str, Any]]:
        """The text has ended: returns what was held back."""
        ...


class RequestChecker(Protocol[Checked_co]):
    """The part of `llm.intake.Intake` that is used here. (That module imports torch, this one must not.)"""

    tokenizer: Any

    def default_params(self) -> SamplingParams:
        """The checkpoint's own defaults."""
        ...

    def template(self, tools: Any = None) -> str:
        """The chat template's text."""
        ...

    def chat_prompt(self, messages: Any, /, **template: Any) -> list[int]:
        """Token ids of a conversation."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        ...

    def check(self, prompt: Prompt, params: SamplingParams, *, owner: bytes | None = None) -> Checked_co:
        """A checked request; its grammar was compiled for this owner."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ParseOptions:
    """Defaults and limits for bodies, and what is known of the model they are for."""

    defaults: SamplingParams = field(default_factory=SamplingParams)  # for fields that a body leaves out
    proposer: str | None = None  # the engine's own; None: any known name is accepted
    receipts: bool = False  # whether receipts can be returned
    template: Callable[[Any], str] | None = None  # the chat template's text, given the tools
    special_tokens: Mapping[str, int] = field(default_factory=dict)  # for grammars over tool calls
    special_names: frozenset[str] = frozenset()  # of the tokens that are left out of an answer's text
    decode: DecodeTokens | None = None  # token ids to text; without it answers are not split into reasoning
    contract_id: str = ""  # ids of tool calls are derived from it
    special_tokens_in_content: bool = True  # False: control tokens in messages are text, whatever a body says
    completion_tokens: int | None = COMPLETION_MAX_TOKENS  # where a completion has no max_tokens
    fresh_seeds: bool = False  # whether a sampled request without a seed draws one; else the prompt gives it
    # Limits of one body: far above what clients send, and low enough to bound the work for one request.
    max_choices: int = 1024  # prompts × n
    max_n: int = MAX_N
    max_logprobs: int = MAX_LOGPROBS
    max_stops: int = 64
    max_stop_len: int = 1024  # characters
    max_named: int = 128  # entries of logprob_token_ids; vLLM's limit
    max_listed: int = 1024  # entries of logit_bias, bad_words, stop_token_ids
    max_allowed: int = 1 << 18  # entries of allowed_token_ids: the largest vocabularies have about as many
    max_words_len: int = 1 << 15  # characters of all bad_words; each is tokenised twice, at 1 µs a character
    max_messages: int = 4096

    @classmethod
    def of(
        cls,
        intake: RequestChecker[Any],
        *,
        proposer: str,
        contract_id: str,
        special_tokens_in_content: bool = True,
    ) -> ParseOptions:
        """The options for a model."""
        return cls(
            defaults=intake.default_params(),
            proposer=proposer,
            receipts=True,
            template=intake.template,
            special_tokens=special_tokens(intake.tokenizer),
            special_names=special_names(intake.tokenizer),
            decode=intake.decode,
            contract_id=contract_id,
            special_tokens_in_content=special_tokens_in_content,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRequest:
    """A request: prompts (completions) or messages (chat), parameters, and the form of the answer."""

    endpoint: str  # COMPLETIONS or CHAT
    model: str | None
    params: SamplingParams
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)  # keywords of the chat template
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None  # shown beside the answer, apart from those of an echo
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    cache_salt: str | None = None
    receipt: bool = False
    explain: bool = False
    # A parser for a choice, given the prompt's output and the choice's index. None: the text is the content.
    make_parser: Callable[[RequestOutput, int], DeltaParser] | None = field(default=None, compare=False)
    # How many of an answer's tokens are reasoning, given the prompt's output. None: there is no reasoning.
    count_reasoning: Callable[[RequestOutput, Sequence[int]], int] | None = field(default=None, compare=False)
    # Where the prompt and max_tokens exceed the context, the context ends the answer.
    fit_max_tokens: bool = False
    fresh_seeds: bool = False  # whether each prompt of a sampled request without a seed draws one
    # What the request's own format calls the fields of a chat, where it is translated from another.
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return self.endpoint == CHAT

    @property
    def num_choices(self) -> int:
        """Number of answers asked for, over all prompts."""
        return self.params.n * (1 if self.chat else len(self.prompts))

    def refuse_repeats(self, num_prompt_tokens: int) -> None:
        """Refuse n answers that would each show the log-probabilities of long prompts. Raises ApiError."""
        if self.chat or self.params.prompt_logprobs is None:  # a chat shows them once
            return
        values = num_prompt_tokens * (1 + self.params.prompt_logprobs)
        if (self.params.n - 1) * values > MAX_REPEATS:
            raise invalid(
                "n",
                f"the prompt's {values} tokens and log-probabilities would be in {self.params.n} choices; "
                f"together they may have {MAX_REPEATS} more than one has, so ask for fewer",
            )

    def without_conversation(self) -> ParsedRequest:
        """The request once it was checked: from then on only the tokens of its prompts matter."""
        return replace(self, messages=(), template={}, prompts=("",) * len(self.prompts))

    def check(self, intake: RequestChecker[C], *, owner: bytes | None = None) -> list[C]:
        """Render the chat template, tokenise and check; one result per prompt. Raises ApiError.

        `owner` is that which the grammar was compiled for.
        """
        try:
            prompts: Sequence[Prompt] = self.prompts
            if self.chat:
                prompts = [intake.chat_prompt(self.messages, **self.template)]
            return [self._check(intake, prompt, owner) for prompt in prompts]
        except CallerError as error:
            field_name = "messages" if self.chat else "prompt"
            raise self.named(ApiError.of(error, prompt_field=field_name)) from error

    def named(self, error: ApiError) -> ApiError:
        """The error, with its field as the request's own format calls it."""
        error.param = self.names.get(error.param or "", error.param)
        return error

    def _check(self, intake: RequestChecker[C], prompt: Prompt, owner: bytes | None) -> C:
        params = self.params
        if self.fresh_seeds and params.seed is None and params.temperature >= GREEDY_BELOW:
            params = replace(params, seed=secrets.randbits(SEED_BITS))
        try:
            return intake.check(prompt, params, owner=owner)
        except PromptTooLong:
            if not self.fit_max_tokens:
                raise
            return intake.check(prompt, replace(params, max_tokens=None), owner=owner)


__all__ = [
    "DeltaParser",
    "ParseOptions",
    "ParsedRequest",
    "Prompt",
    "RequestChecker",
]
