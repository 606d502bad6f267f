"""Request bodies → prompts and SamplingParams.

A body that cannot be served raises ApiError, and nothing else. The server and the batch command share these
functions.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from samewise.config import PROPOSERS
from samewise.errors import CallerError, PromptTooLong
from samewise.openai.bodies import (
    CHAT,
    CHAT_ONLY,
    COMPLETIONS,
    COMPLETIONS_ONLY,
    MAX_LOGPROBS,
    MAX_N,
    UNSUPPORTED,
    Body,
    ChatBody,
    CompletionBody,
    TokenizeBody,
    as_integer,
)
from samewise.openai.errors import ApiError, invalid, unsupported
from samewise.openai.formats import grammar_of, grammar_of_outputs
from samewise.openai.messages import conversation, predicted_text, template_kwargs
from samewise.openai.nesting import MAX_NESTING, nests_deeper
from samewise.openai.reasoning import (
    TAIL_TOKENS,
    AnswerParser,
    DecodeTokens,
    ReasoningFormat,
    reasoning_format_of,
    thinking_kwargs,
)
from samewise.openai.tool_calls import ToolCallParser, call_ids, tool_format_of
from samewise.openai.tools import RequestTools, checked_tools, request_tools, special_names, special_tokens
from samewise.outputs import RequestOutput
from samewise.params import GREEDY_BELOW, SamplingParams
from samewise.types import Grammar

B = TypeVar("B", bound=BaseModel)
C = TypeVar("C")
Checked_co = TypeVar("Checked_co", covariant=True)
Prompt = str | Sequence[int]

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions. Chats have none: they go on to the end of the context."""

SAMPLING_FIELDS = tuple(
    entry.name
    for entry in fields(SamplingParams)
    if entry.name in Body.model_fields and entry.name not in ("max_tokens", "prompt_logprobs", "prediction")
)
"""Fields of a body that are SamplingParams' own. Those left out have another form in a body, or mean
something else at each endpoint."""

MAX_DIGITS = 64
"""Digits of an integer in a body. Set by hand: schemas bound integers of 128 bits, which have 39."""

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


def read_json(raw: bytes) -> Any:
    """A body as JSON. Raises ApiError."""
    try:
        return load_json(raw, parse_int=_short_int)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None


def load_json(text: str | bytes, parse_int: Callable[[str], int] | None = None) -> Any:
    """JSON that can be written again: without NaN, Infinity and numbers beyond floats, which Python reads.

    Raises ValueError or RecursionError.
    """
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=parse_int)


def _short_int(text: str) -> int:
    """An integer. Reading one of 4,300 digits takes 60 µs, of which a body could have thousands."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits, more than {MAX_DIGITS}")
    return int(text)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def validate(kind: type[B], body: object) -> B:
    """A body of this type; its first mistake as an ApiError."""
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON object, not {_quote(body)}", code="invalid_body")
    for name, value in body.items():
        if nests_deeper(value, MAX_NESTING - 1):
            raise invalid(name, f"nests more than {MAX_NESTING} levels deep; make it flatter")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ApiError(f"{where} is missing", param=param, code="missing_required_parameter") from None
        message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise ApiError(
            f"{where}={_quote(first['input'])}: {message}", param=param, code="invalid_type"
        ) from None


def parse(endpoint: str, body: object, options: ParseOptions | None = None) -> ParsedRequest:
    """A body of `/v1/completions` or `/v1/chat/completions`; raises ApiError."""
    options = options or ParseOptions()
    if endpoint == COMPLETIONS:
        return _completion(validate(CompletionBody, body), options)
    if endpoint == CHAT:
        return _chat(validate(ChatBody, body), options)
    raise ApiError(f"{endpoint!r} is not served; there are {COMPLETIONS} and {CHAT}", param="url")


def served_name(requested: str | None, names: Sequence[str], *, remedy: str = "") -> str:
    """The model's name in the answer. Raises 404 for a name that is not among `names`."""
    if requested is None or requested in names:
        return requested or names[0]
    raise ApiError(
        f"the model {requested[:200]!r} is not served here; there is {', '.join(map(repr, names))}{remedy}",
        status=404, param="model", code="model_not_found",
    )  # fmt: skip


def refuse_unsupported(body: BaseModel, **neutral: object) -> None:
    """Refuse fields that would change the output and cannot be honoured.

    `neutral` are further values, by field, that change nothing.
    """
    elsewhere = CHAT_ONLY if isinstance(body, CompletionBody) else COMPLETIONS_ONLY
    for name, value in (body.model_extra or {}).items():
        if value is None or (name in neutral and value == neutral[name]):
            continue
        for table in (UNSUPPORTED, elsewhere):
            if name in table and value not in table[name][0]:
                raise unsupported(name, table[name][1])


# ---- the two endpoints


def _completion(body: CompletionBody, options: ParseOptions) -> ParsedRequest:
    prompts = _prompts(body.prompt)
    refuse_unsupported(body, best_of=1 if body.n is None else body.n, add_special_tokens=True)
    _limit("logprobs", body.logprobs, options.max_logprobs)
    echoed = body.logprobs if body.echo else None
    prompt_logprobs = [num for num in (echoed, body.prompt_logprobs) if num is not None]
    params = _params(
        body,
        options,
        max_tokens=options.completion_tokens if body.max_tokens is None else body.max_tokens,
        logprobs=_num_logprobs(body, body.logprobs),
        prompt_logprobs=max(prompt_logprobs, default=None),
        grammar=_checked(lambda: _response_grammar(body)),
    )
    if len(prompts) * params.n > options.max_choices:
        raise invalid(
            "prompt", f"{len(prompts)} prompts × n={params.n} are more than {options.max_choices}; send fewer"
        )
    return ParsedRequest(
        endpoint=COMPLETIONS, params=params, prompts=prompts, echo=bool(body.echo), **_common(body, options)
    )


def _chat(body: ChatBody, options: ParseOptions) -> ParsedRequest:
    refuse_unsupported(body, add_special_tokens=False)
    _limit("top_logprobs", body.top_logprobs, options.max_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    tools = _checked(lambda: _tools(body, options))
    if tools.tool_format is not None and body.skip_special_tokens:
        raise invalid("skip_special_tokens", "calls of tools are read from special tokens; leave it out")
    template = template_kwargs(body, special=options.special_tokens_in_content) | thinking_fields(
        body, _template_text(body.tools, options.template)
    )
    reasoning = _reasoning(body, tools, options)
    marked = tools.tool_format is not None or (reasoning is not None and reasoning.marks.special)
    params = _params(
        body,
        options,
        max_tokens=_chat_max_tokens(body),
        logprobs=_num_logprobs(body, (body.top_logprobs or 0) if body.logprobs else None),
        prompt_logprobs=body.prompt_logprobs,
        grammar=tools.grammar,
        **({"skip_special_tokens": False} if marked else {}),
    )
    if params.n > options.max_choices:
        raise invalid("n", f"{params.n} is more than {options.max_choices}; ask for fewer")
    if len(body.messages) > options.max_messages:
        raise invalid("messages", f"{len(body.messages)} are more than {options.max_messages}; send fewer")
    return ParsedRequest(
        endpoint=CHAT,
        params=params,
        messages=conversation(body.messages),
        template=template | ({"tools": list(tools.tools)} if tools.tools else {}),
        make_parser=_make_parser(replace(tools, tools=()), options.contract_id, reasoning),
        count_reasoning=None if reasoning is None else reasoning.count,
        **_common(body, options),
    )


def thinking_fields(body: ChatBody | TokenizeBody, template: str | None) -> dict[str, Any]:
    """A body's fields about reasoning, as variables for the chat template that knows them."""
    return thinking_kwargs(
        template,
        enable_thinking=body.enable_thinking,
        reasoning_effort=body.reasoning_effort,
        verbosity=body.verbosity,
        given=body.chat_template_kwargs,
    )


def _chat_max_tokens(body: ChatBody) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise invalid("max_tokens", f"{old} contradicts max_completion_tokens={new}; give one of them")
    return old if new is None else new


def _tools(body: ChatBody, options: ParseOptions) -> RequestTools:
    response = _response_grammar(body)
    if not body.tools and not body.tool_choice:
        return RequestTools(grammar=response)
    return request_tools(
        body.tools,
        body.tool_choice,
        parallel=body.parallel_tool_calls,
        template=_template_text(body.tools, options.template),
        special=options.special_tokens,
        response=response,
    )


def _response_grammar(body: Body) -> Grammar | None:
    response = None if body.response_format is None else grammar_of(body.response_format)
    if body.structured_outputs is None:
        return response
    if response is not None:
        raise invalid("structured_outputs", "is given beside response_format; give one of them")
    return grammar_of_outputs(body.structured_outputs)


def template_tools(tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The keyword for the chat template of a conversation with these tools, checked; empty without any."""
    checked = _checked(lambda: checked_tools(tools))
    return {"tools": list(checked)} if checked else {}


def takes_tools(template: Callable[[Any], str]) -> bool:
    """Whether requests with tools are taken: the chat template writes calls in a way that can be read."""
    text = _template_text([{}], template)
    return text is not None and tool_format_of(text) is not None


def _template_text(tools: Any, template: Callable[[Any], str] | None) -> str | None:
    """The chat template's text for these tools; None where there is none."""
    try:
        return template(tools) if template is not None else None
    except (TypeError, ValueError, AttributeError):  # what transformers raises for a model without a template
        return None


@dataclass(frozen=True, slots=True)
class _Reasoning:
    """The reasoning of one request's answers."""

    marks: ReasoningFormat
    decode: DecodeTokens
    show: bool
    held: bool  # a grammar holds the answer from its start, whatever the prompt has opened
    continued: str | None  # the message that the answer continues

    def before(self, output: RequestOutput) -> str:
        """The text in which the prompt may have opened the marks."""
        if self.held:
            return ""
        if self.continued is None:
            return self.decode(output.prompt_token_ids[-TAIL_TOKENS:])
        opening, closing = self.marks.opening, self.marks.closing
        opened = self.continued.rfind(opening) > self.continued.rfind(closing)
        return opening if opened and not self.marks.channels else ""

    def count(self, output: RequestOutput, token_ids: Sequence[int]) -> int:
        """How many of an answer's tokens are reasoning."""
        return self.marks.num_tokens(self.before(output), token_ids, self.decode)


def _reasoning(body: ChatBody, tools: RequestTools, options: ParseOptions) -> _Reasoning | None:
    """None where the model's answers have no reasoning."""
    if options.decode is None:
        return None
    marks = reasoning_format_of(
        _template_text(body.tools, options.template), options.special_tokens, options.special_names
    )
    if marks is None or (marks.special and body.skip_special_tokens):
        return None
    last = body.messages[-1] if body.continue_final_message and body.messages else None
    continued = None if last is None else str(last.get("content") or "")
    held = tools.grammar is not None and not tools.free
    return _Reasoning(marks, options.decode, body.include_reasoning is not False, held, continued)


def _make_parser(
    tools: RequestTools, contract_id: str, reasoning: _Reasoning | None
) -> Callable[[RequestOutput, int], DeltaParser] | None:
    tool_format = tools.tool_format

    def calls(output: RequestOutput, index: int) -> ToolCallParser:
        assert tool_format is not None
        return tools.parser(call_ids(tool_format, contract_id, output.prompt_token_ids, index))

    if reasoning is None:
        return None if tool_format is None else calls
    return lambda output, index: AnswerParser(
        reasoning.marks.splitter(reasoning.before(output)),
        None if tool_format is None else calls(output, index),
        show=reasoning.show,
    )


# ---- both endpoints


def _params(body: Body, options: ParseOptions, **endpoint: Any) -> SamplingParams:
    """Sampling parameters: the defaults, then the body's own fields, then those the endpoint decides."""
    _limit("n", body.n, options.max_n, minimum=1)
    _limit("prompt_logprobs", endpoint["prompt_logprobs"], options.max_logprobs)
    _check_lists(body, options)
    given = {name: getattr(body, name) for name in SAMPLING_FIELDS if getattr(body, name) is not None}
    given["prediction"] = predicted_text(body.prediction)
    speculate = _speculate(body.proposer, options)
    return _checked(lambda: replace(options.defaults, speculate=speculate, **(given | endpoint)))


def _num_logprobs(body: Body, num: int | None) -> int | None:
    """Alternatives per token. Tokens that the body names stand in place of the most probable."""
    if body.logprob_token_ids is None:
        return num
    if num is None:
        raise invalid("logprob_token_ids", "needs logprobs")
    return len(body.logprob_token_ids)


def _common(body: Body, options: ParseOptions) -> dict[str, Any]:
    stream_options = body.stream_options
    if stream_options is not None and not body.stream:
        raise invalid("stream_options", "is for streams; set stream: true")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "is not streamed; set stream: false")
    if body.receipt and not options.receipts:
        raise unsupported("receipt", "is not supported here")
    return {
        "model": body.model,
        "stream": bool(body.stream),
        "include_usage": bool(stream_options and stream_options.include_usage),
        "continuous_usage": bool(stream_options and stream_options.continuous_usage_stats),
        "prompt_logprobs": body.prompt_logprobs,
        "return_token_ids": bool(body.return_token_ids),
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
        "cache_salt": body.cache_salt,
        "receipt": bool(body.receipt),
        "explain": bool(body.explain),
        "fresh_seeds": options.fresh_seeds,
    }


def _speculate(proposer: str | None, options: ParseOptions) -> bool:
    """Whether to draft. A request can ask for `none` or for the engine's own proposer, and for no other."""
    if proposer is None or proposer == options.proposer:
        return True
    if proposer == "none":
        return False
    if options.proposer is None and proposer in PROPOSERS:
        return True
    own = (
        f"this server's is {options.proposer!r}" if options.proposer else f"known are {', '.join(PROPOSERS)}"
    )
    raise unsupported("proposer", f"{proposer[:64]!r} is not available; {own}, or use 'none'")


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    """A text, texts, token ids, or lists of token ids, as one or more prompts."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return tuple(prompt)
        lists = prompt if isinstance(prompt[0], list) else [prompt]
        ids = [_token_ids(item) for item in lists]
        if None not in ids:
            return tuple(one for one in ids if one is not None)
    raise ApiError(
        f"prompt={_quote(prompt)}: give text, a list of texts, token ids, or a list of lists of token ids",
        param="prompt", code="invalid_type",
    )  # fmt: skip


def _token_ids(value: Any) -> list[int] | None:
    """A list of integers, or None for any other value."""
    if not isinstance(value, list):
        return None
    ids = [as_integer(item) for item in value]
    return ids if all(type(item) is int for item in ids) else None


def _check_lists(body: Body, options: ParseOptions) -> None:
    stops = [body.stop] if isinstance(body.stop, str) else [] if body.stop is None else body.stop
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ApiError(
            f"stop={_quote(stops)}: give text or a list of texts", param="stop", code="invalid_type"
        )
    if len(stops) > options.max_stops:
        raise invalid("stop", f"{len(stops)} are more than {options.max_stops}; give fewer")
    for name, texts in (("stop", stops), ("bad_words", body.bad_words or ())):
        if any(len(text) > options.max_stop_len for text in texts):
            raise invalid(name, f"a text is longer than {options.max_stop_len} characters; shorten it")
    for name in ("logit_bias", "bad_words", "stop_token_ids", "allowed_token_ids"):
        entries = getattr(body, name) or ()
        limit = options.max_allowed if name == "allowed_token_ids" else options.max_listed
        if len(entries) > limit:
            raise invalid(name, f"{len(entries)} entries are more than {limit}; give fewer")
    if len(body.logprob_token_ids or ()) > options.max_named:
        num = len(body.logprob_token_ids or ())
        raise invalid("logprob_token_ids", f"{num} entries are more than {options.max_named}; give fewer")
    if (size := sum(map(len, body.bad_words or ()))) > options.max_words_len:
        raise invalid("bad_words", f"{size} characters are more than {options.max_words_len}; give fewer")
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= 1024:
        raise invalid("cache_salt", "give 1 to 1024 characters")


def _limit(name: str, value: int | None, maximum: int, *, minimum: int = 0) -> None:
    if value is not None and not minimum <= value <= maximum:
        raise ApiError(f"{name}={value}: give {minimum} to {maximum}", param=name, code="invalid_value")


def _checked(make: Callable[[], C]) -> C:
    """The result of `make`, with a caller's mistake as an ApiError."""
    try:
        return make()
    except CallerError as error:
        raise ApiError.of(error) from error


def _quote(value: object) -> str:
    """A value for a message: JSON, at most 80 characters. No more of it is written than is shown."""
    text = ""
    try:
        for piece in json.JSONEncoder().iterencode(value):
            text += piece
            if len(text) > 80:
                return text[:80] + "…"
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
    return text


__all__ = [
    "MAX_NESTING",
    "SAMPLING_FIELDS",
    "DeltaParser",
    "ParseOptions",
    "ParsedRequest",
    "Prompt",
    "RequestChecker",
    "load_json",
    "nests_deeper",
    "parse",
    "read_json",
    "refuse_unsupported",
    "served_name",
    "takes_tools",
    "template_tools",
    "thinking_fields",
    "validate",
]
