"""Request bodies → prompts and SamplingParams.

A body that cannot be served raises ApiError, and nothing else. The server and the batch command share these
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from samewise.config import PROPOSERS
from samewise.errors import CallerError
from samewise.openai.bodies import (
    CHAT,
    COMPLETIONS,
    Body,
    ChatBody,
    CompletionBody,
    TokenizeBody,
    as_integer,
)
from samewise.openai.errors import ApiError, invalid, unsupported
from samewise.openai.formats import grammar_of, grammar_of_outputs
from samewise.openai.json_body import quote, validate
from samewise.openai.messages import conversation, predicted_text, template_kwargs
from samewise.openai.reasoning import (
    TAIL_TOKENS,
    AnswerParser,
    DecodeTokens,
    ReasoningFormat,
    reasoning_format_of,
    thinking_kwargs,
)
from samewise.openai.request import DeltaParser, ParsedRequest, ParseOptions, Prompt
from samewise.openai.tool_calls import ToolCallParser, call_ids, tool_format_of
from samewise.openai.tools import RequestTools, checked_tools, request_tools
from samewise.openai.unsupported import refuse_unsupported
from samewise.outputs import RequestOutput
from samewise.params import SamplingParams
from samewise.types import Grammar

C = TypeVar("C")

SAMPLING_FIELDS = tuple(
    entry.name
    for entry in fields(SamplingParams)
    if entry.name in Body.model_fields and entry.name not in ("max_tokens", "prompt_logprobs", "prediction")
)
"""Fields of a body that are SamplingParams' own. Those left out have another form in a body, or mean
something else at each endpoint."""


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
        "continuous_usage": bool(
            stream_options
            and stream_options.continuous_usage_stats
            and stream_options.include_usage is not False
        ),
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
        f"prompt={quote(prompt)}: give text, a list of texts, token ids, or a list of lists of token ids",
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
            f"stop={quote(stops)}: give text or a list of texts", param="stop", code="invalid_type"
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


__all__ = [
    "SAMPLING_FIELDS",
    "parse",
    "served_name",
    "takes_tools",
    "template_tools",
    "thinking_fields",
]
