"""OpenAI's request bodies → prompts and SamplingParams. With `replies`, all that is to be known of the wire.

`parse` raises ApiError, and nothing else, for whatever a client may have sent. Host only: no web server in
here, so that a batch of requests from a file is read by the same rules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from samewise.config import PROPOSERS
from samewise.errors import CallerError
from samewise.openai.bodies import REFUSED, Body, ChatBody, CompletionBody, TokenizeBody, whole
from samewise.openai.errors import ApiError, invalid, refused
from samewise.openai.formats import grammar_of
from samewise.openai.messages import conversation
from samewise.openai.parsed import CHAT, COMPLETIONS, Dialect, MakeReader, Parsed, Prompt, Terms, TextReader
from samewise.openai.replies import respond
from samewise.openai.toolbox import toolbox_of
from samewise.openai.tools import call_ids
from samewise.outputs import RequestOutput
from samewise.params import SamplingParams

B = TypeVar("B", bound=BaseModel)

DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that a checkpoint may have an opinion on."""

SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "verify",
    "share",
)
"""Fields that are SamplingParams' own, under the same name."""

TEMPLATE_OWN = ("add_generation_prompt", "continue_final_message", "messages", "tools")
"""What chat_template_kwargs may not say, because there is a field for it."""

CHAT_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    # name: (values that change nothing, what to do instead)
    "max_completion_tokens": ((), "is for conversations; use max_tokens"),
    "tool_choice": (("none", "auto"), f"is for conversations; use {CHAT}"),
    "tools": (([],), f"is for conversations; use {CHAT}"),
    "top_logprobs": ((0,), "is for conversations; use logprobs"),
}
COMPLETIONS_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "echo": ((False,), f"is for completions; use {COMPLETIONS}, or continue_final_message"),
    "tools": (([],), f"is not known here; the usage of {CHAT} with max_tokens 0 counts them"),  # /tokenize
}
"""Fields that mean something at another endpoint only."""

NOT_TEMPLATE = (
    "chat_template",
    "conversation",
    "documents",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
"""Keywords of transformers that are not the template's."""


def parse(endpoint: str, body: object, terms: Terms | None = None) -> Parsed:
    """A body of `/v1/completions` or `/v1/chat/completions`, understood; or ApiError."""
    terms = terms or Terms()
    if endpoint == COMPLETIONS:
        return _completion(read(CompletionBody, body), terms)
    if endpoint == CHAT:
        return _chat(read(ChatBody, body), terms)
    raise ApiError(f"{endpoint!r} is not served; there are {COMPLETIONS} and {CHAT}", param="url")


def read(kind: type[B], body: object) -> B:
    """A body of some kind; the first mistake as an ApiError."""
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON object, not {_brief(body)}", code="invalid_body")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ApiError(f"{where} is missing", param=param, code="missing_required_parameter") from None
        said = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise ApiError(
            f"{where}={_brief(first['input'])}: {said}", param=param, code="invalid_type"
        ) from None


def refuse_unsupported(body: BaseModel, **neutral: object) -> None:
    """Whatever would change the output and cannot be honoured is refused by its name.

    `neutral` are values that change nothing here, by the name of their field.
    """
    elsewhere = CHAT_ONLY if isinstance(body, CompletionBody) else COMPLETIONS_ONLY
    for name, value in (body.model_extra or {}).items():
        if value is None or (name in neutral and value == neutral[name]):
            continue
        if name in REFUSED and value not in REFUSED[name][0]:
            raise refused(name, REFUSED[name][1])
        if name in elsewhere and value not in elsewhere[name][0]:
            raise refused(name, elsewhere[name][1])


# ---- the two endpoints


def _completion(body: CompletionBody, terms: Terms) -> Parsed:
    prompts = _prompts(body.prompt)
    n = 1 if body.n is None else body.n
    refuse_unsupported(body, best_of=n, add_special_tokens=True)
    _limit("logprobs", body.logprobs, terms.max_logprobs)
    if body.echo and body.logprobs is not None and body.prompt_logprobs not in (None, body.logprobs):
        raise invalid("prompt_logprobs", "with echo and logprobs, leave it out or give the same number")
    prompt_logprobs = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    params = _params(
        body,
        terms,
        _form(body, terms),
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompts=prompt_logprobs,
    )
    if len(prompts) * params.n > terms.max_choices:
        raise invalid(
            "prompt", f"{len(prompts)} prompts × n={params.n} are more than {terms.max_choices}; send fewer"
        )
    return Parsed(
        endpoint=COMPLETIONS, params=params, prompts=prompts, echo=bool(body.echo), **_common(body, terms)
    )


def _chat(body: ChatBody, terms: Terms) -> Parsed:
    refuse_unsupported(body, add_special_tokens=False)
    logprobs, form = _chat_logprobs(body, terms), _form(body, terms)
    params = _params(
        body, terms, form, max_tokens=_chat_limit(body), logprobs=logprobs, prompts=body.prompt_logprobs
    )
    if params.n > terms.max_choices:
        raise invalid("n", f"{params.n} is more than {terms.max_choices}; ask for fewer")
    if len(body.messages) > terms.max_messages:
        raise invalid("messages", f"{len(body.messages)} are more than {terms.max_messages}; send fewer")
    return Parsed(
        endpoint=CHAT,
        params=params,
        messages=conversation(body.messages),
        template=chat_template(body) | form.template,
        reader=form.reader,
        **_common(body, terms),
    )


def chat_template(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Keywords for the chat template, from the fields that are about nothing else."""
    going_on = bool(body.continue_final_message)
    if going_on and body.add_generation_prompt:
        raise invalid("continue_final_message", "excludes add_generation_prompt; give one of them")
    own = dict(body.chat_template_kwargs or {})
    for name in own:
        if name in TEMPLATE_OWN:
            raise invalid("chat_template_kwargs", f"{name} has a field of its own; set it there")
        if name in NOT_TEMPLATE or not name.isidentifier():
            raise invalid("chat_template_kwargs", f"{name!r} is not for a template")
    begin = not going_on if body.add_generation_prompt is None else body.add_generation_prompt
    return own | {"add_generation_prompt": begin} | ({"continue_final_message": True} if going_on else {})


def _chat_logprobs(body: ChatBody, terms: Terms) -> int | None:
    _limit("top_logprobs", body.top_logprobs, terms.max_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _chat_limit(body: ChatBody) -> int | None:
    both = (body.max_completion_tokens, body.max_tokens)
    if None not in both and both[0] != both[1]:
        raise invalid(
            "max_tokens", f"{both[1]} contradicts max_completion_tokens={both[0]}; give one of them"
        )
    return both[1] if both[0] is None else both[0]


# ---- what they share


def _params(
    body: Body,
    terms: Terms,
    form: _Form,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompts: int | None,
) -> SamplingParams:
    _limit("n", body.n, terms.max_n, least=1)
    _limit("prompt_logprobs", prompts, terms.max_logprobs)
    _check_lists(body, terms)
    given: dict[str, Any] = {name: getattr(terms.defaults, name) for name in DEFAULTED}
    for name in SAME_NAME:
        if getattr(body, name) is not None:
            given[name] = getattr(body, name)
    given["speculate"] = _speculate(body.proposer, terms)
    try:
        return SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompts, **(given | form.params)
        )
    except CallerError as error:
        raise ApiError.of(error) from error


def _common(body: Body, terms: Terms) -> dict[str, Any]:
    options = body.stream_options
    if options is not None and not body.stream:
        raise invalid("stream_options", "is for streams; set stream: true")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "is not streamed; set stream: false")
    if body.receipt and not terms.receipts:
        raise refused("receipt", "is not supported here")
    return {
        "model": body.model,
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.continuous_usage_stats),
        "return_token_ids": bool(body.return_token_ids),
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
        "cache_salt": body.cache_salt,
        "receipt": bool(body.receipt),
        "explain": bool(body.explain),
    }


def _speculate(proposer: str | None, terms: Terms) -> bool:
    """`none` can be had by one request; otherwise there is the engine's own proposer, and no other."""
    if proposer is None or proposer == terms.proposer:
        return True
    if proposer == "none":
        return False
    if terms.proposer is not None or proposer not in PROPOSERS:
        own = (
            f"this server's is {terms.proposer!r}" if terms.proposer else f"known are {', '.join(PROPOSERS)}"
        )
        raise refused("proposer", f"{proposer[:64]!r} cannot be had; {own}, and 'none' can be")
    return True


@dataclass(frozen=True, slots=True)
class _Form:
    """What `response_format`, `tools` and `tool_choice` come to."""

    params: dict[str, Any] = field(default_factory=dict)  # keywords of SamplingParams
    template: dict[str, Any] = field(default_factory=dict)  # keywords of the chat template
    reader: MakeReader | None = None  # how to read the answer's text


def _form(body: Body, terms: Terms) -> _Form:
    """What shape the answer must have, and how calls are read out of it."""
    chat = body if isinstance(body, ChatBody) else None
    dialect = terms.dialect
    try:
        response = grammar_of(body.response_format)
        if chat is None or not (chat.tools or chat.tool_choice):
            return _Form({"grammar": response} if response else {})
        template = _template(dialect, chat.tools)
        special = dialect.special if dialect is not None else {}
        box = toolbox_of(
            chat.tools, chat.tool_choice, parallel=chat.parallel_tool_calls, template=template,
            special=special, response=response,
        )  # fmt: skip
    except CallerError as error:
        raise ApiError.of(error) from error
    params: dict[str, Any] = {"grammar": box.grammar} if box.grammar else {}
    if box.family is None:
        return _Form(params)
    if body.skip_special_tokens:
        raise invalid("skip_special_tokens", "calls of tools are read from special tokens; leave it out")
    family, contract = box.family, dialect.contract if dialect is not None else ""

    def reader(output: RequestOutput, index: int) -> TextReader:
        return box.stream(call_ids(family, contract, output.prompt_token_ids, index))

    tools = {"tools": list(box.tools)} if box.tools else {}
    return _Form(params | {"skip_special_tokens": False}, tools, reader)


def _template(dialect: Dialect | None, tools: Any) -> str | None:
    """The chat template's text for these tools; None where there is none."""
    try:
        return dialect.template(tools) if dialect is not None else None
    except (TypeError, ValueError, AttributeError):  # transformers' ways of saying that there is none
        return None


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    """A string, strings, token ids, or lists of them → one or more prompts."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return tuple(prompt)
        several = isinstance(prompt[0], list)
        found = [_token_ids(item) for item in (prompt if several else [prompt])]
        if None not in found:
            return tuple(ids for ids in found if ids is not None)
    raise ApiError(
        f"prompt={_brief(prompt)}: give text, a list of texts, token ids, or a list of lists of token ids",
        param="prompt", code="invalid_type",
    )  # fmt: skip


def _token_ids(listed: Any) -> list[int] | None:
    """Token ids, if that is what they are."""
    found: list[Any] = [whole(token) for token in listed] if isinstance(listed, list) else [None]
    return found if all(type(token) is int for token in found) else None


def _check_lists(body: Body, terms: Terms) -> None:
    stops = [body.stop] if isinstance(body.stop, str) else [] if body.stop is None else body.stop
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ApiError(
            f"stop={_brief(stops)}: give text or a list of texts", param="stop", code="invalid_type"
        )
    if len(stops) > terms.max_stops:
        raise invalid("stop", f"{len(stops)} are more than {terms.max_stops}; give fewer")
    if any(len(stop) > terms.max_stop_len for stop in stops):
        raise invalid("stop", f"a text is longer than {terms.max_stop_len} characters; shorten it")
    for name in ("logit_bias", "bad_words", "stop_token_ids"):
        found = getattr(body, name) or ()
        if len(found) > terms.max_listed:
            raise invalid(name, f"{len(found)} entries are more than {terms.max_listed}; give fewer")
    if any(len(word) > terms.max_stop_len for word in body.bad_words or ()):
        raise invalid("bad_words", f"a text is longer than {terms.max_stop_len} characters; shorten it")
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= 1024:
        raise invalid("cache_salt", "give 1 to 1024 characters")


def _limit(name: str, value: int | None, most: int, *, least: int = 0) -> None:
    if value is not None and not least <= value <= most:
        raise ApiError(f"{name}={value}: give {least} to {most}", param=name, code="invalid_value")


def _brief(value: object) -> str:
    """A value as a message may quote it."""
    try:
        said = json.dumps(value)
    except (TypeError, ValueError):
        said = type(value).__name__
    return said if len(said) <= 80 else said[:80] + "…"


__all__ = [
    "CHAT",
    "COMPLETIONS",
    "Parsed",
    "Prompt",
    "Terms",
    "chat_template",
    "parse",
    "read",
    "refuse_unsupported",
    "respond",
]
