"""Bodies of `/v1/responses` → the parsed request of a chat.

Fields that the translation does not name go to the chat as they are: those a chat knows work, those it
refuses are refused, and others pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samewise.openai.bodies import CHAT, MAX_LOGPROBS
from samewise.openai.errors import ApiError, invalid, unsupported
from samewise.openai.exchange import parse_as_chat
from samewise.openai.json_body import validate
from samewise.openai.nesting import is_longer
from samewise.openai.request import ParsedRequest, ParseOptions
from samewise.openai.responses.bodies import (
    MAX_METADATA,
    MAX_METADATA_NAME,
    MAX_METADATA_VALUE,
    ResponsesBody,
)
from samewise.openai.responses.items import FindItem, Item, input_items, messages_of

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

MAX_REPEATED = 1 << 20
"""Characters of JSON of tools, of the choice between them, and of the answer's form. Set by hand: encoding so
much takes 10 ms; lists of tools have up to 300,000 characters."""

ITEMS_PER_MESSAGE = 4
"""Items of a conversation for every message that a chat may have: reasoning and calls are part of a message
there. Set by hand."""

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    # name: (values that change nothing, what to do instead)
    "background": ((False,), "is not supported; stream the response instead"),
    "conversation": ((), "is not supported; use previous_response_id, or send the items"),
    "explain": ((False,), f"is not supported; use {CHAT}"),
    "image": ((), "is not supported; text only"),
    "logprobs": ((False,), f"is not known here; use include: [{LOGPROBS!r}], and top_logprobs"),
    "max_completion_tokens": ((), "is not known here; use max_output_tokens"),
    "max_tokens": ((), "is not known here; use max_output_tokens"),
    "messages": ((), "is not known here; use input"),
    "moderation": ((), "is not supported"),
    "n": ((1,), "is not supported; a response is one answer"),
    "output_config": (({},), "is not known here; use text.format and reasoning.effort"),
    "output_format": ((), "is not known here; use text.format"),
    "prompt": ((), "is not supported; use input and instructions"),
    "prompt_logprobs": ((), f"is not supported; use {CHAT}"),
    "response_format": ((), "is not known here; use text.format"),
    "system": (("", []), "is not known here; use instructions"),
}
"""Fields that would change the output and cannot be honoured, beside those that a chat refuses."""

PARAMS = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
"""Fields of a chat that have another name here."""

FindConversation = Callable[[str], Sequence[Item]]
"""The items of a stored response, its input included, by its id. Raises ApiError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedResponse:
    """A request for a response: that of the chat, and what the response repeats of it."""

    parsed: ParsedRequest
    items: tuple[Item, ...]  # the conversation before the answer
    store: bool
    logprobs: bool
    encrypted: bool
    echo: dict[str, Any]  # fields of the response that repeat the request's


def parse_response(
    body: object, options: ParseOptions, *, earlier: FindConversation, find: FindItem
) -> ParsedResponse:
    """A body of `/v1/responses`. Raises ApiError, which names the field as it is called here."""
    return _parse(validate(ResponsesBody, body), options, earlier, find)


def _parse(
    body: ResponsesBody, options: ParseOptions, earlier: FindConversation, find: FindItem
) -> ParsedResponse:
    extra = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name, (neutral, message) in REFUSED.items():
        if name in extra and extra[name] not in neutral:
            raise unsupported(name, message)
        extra.pop(name, None)
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "is not supported; send fewer items")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise invalid("max_output_tokens", "give 1 or more")
    _check_repeated(body)
    items = _items(body, earlier, find, ITEMS_PER_MESSAGE * options.max_messages)
    if not items and body.instructions is None:
        raise ApiError("input is missing", param="input", code="missing_required_parameter")
    tools, choice = _tools(body)
    include = body.include or []
    logprobs = LOGPROBS in include or bool(body.top_logprobs)
    if logprobs and tools and choice != "none":
        raise unsupported("include", f"{LOGPROBS} is not supported where tools may be called")
    if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
        raise invalid("top_logprobs", f"give 0 to {MAX_LOGPROBS}")
    text_format = None if body.text is None else body.text.format
    chat = extra | {
        "model": body.model,
        "messages": messages_of(items, instructions=body.instructions),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": bool(body.stream),
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(text_format),
        "logprobs": True if logprobs else None,
        "top_logprobs": body.top_logprobs if logprobs else None,
        "user": body.user,
    }  # fmt: skip
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.verbosity is not None:
        chat["verbosity"] = body.text.verbosity
    parsed = parse_as_chat(chat, options, PARAMS)
    return ParsedResponse(
        parsed=parsed, items=tuple(items), store=body.store is not False, logprobs=logprobs,
        encrypted=ENCRYPTED in include, echo=_echo(body, parsed, tools),
    )  # fmt: skip


def _check_repeated(body: ResponsesBody) -> None:
    """Refuse large values that the response repeats: they are encoded several times, and kept."""
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"{len(metadata)} entries are more than {MAX_METADATA}")
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_NAME or len(value) > MAX_METADATA_VALUE:
            raise invalid(
                "metadata",
                f"{name[:MAX_METADATA_NAME]!r}: a name has at most {MAX_METADATA_NAME} characters, a value "
                f"{MAX_METADATA_VALUE}",
            )
    reasoning = None if body.reasoning is None else body.reasoning.model_dump()
    text = None if body.text is None else body.text.model_dump()
    repeated = {"tools": body.tools, "tool_choice": body.tool_choice, "text": text, "reasoning": reasoning}
    for name, value in repeated.items():
        if is_longer(value, MAX_REPEATED):
            raise invalid(name, f"is longer than {MAX_REPEATED >> 10} KiB as JSON; make it smaller")


def _items(body: ResponsesBody, earlier: FindConversation, find: FindItem, most: int) -> list[Item]:
    """The conversation before the answer. Its items are counted before any is looked up."""
    if isinstance(body.input, list):
        _refuse_many(len(body.input), most)
    items = [*(earlier(body.previous_response_id) if body.previous_response_id else ())]
    items += input_items(body.input, find)
    _refuse_many(len(items), most)
    return items


def _refuse_many(num_items: int, most: int) -> None:
    if num_items > most:
        raise invalid("input", f"{num_items} items are more than {most}; send fewer")


def _echo(body: ResponsesBody, parsed: ParsedRequest, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a response that repeat the request's, with what was used where it left them out."""
    reasoning = body.reasoning
    text = body.text
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else (reasoning.model_extra or {}).get("summary"),
        },
        "store": body.store is not False,
        "temperature": parsed.params.temperature,
        "text": {
            "format": (None if text is None else text.format) or {"type": "text"},
            **({} if text is None or text.verbosity is None else {"verbosity": text.verbosity}),
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": [_function_echo(tool["function"]) for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": parsed.params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _function_echo(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": bool(function.get("strict")),
    }


def _tools(body: ResponsesBody) -> tuple[list[dict[str, Any]], Any]:
    """The functions among the tools, and the choice between them, as a chat has them."""
    tools = [_function(tool) for tool in body.tools or () if tool.get("type") == "function"]
    choice = body.tool_choice
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            allowed = choice.get("tools")
            if not isinstance(allowed, list) or not all(isinstance(one, dict) for one in allowed):
                raise invalid("tool_choice", "allowed_tools has a list of tools")
            names = {name for one in allowed if isinstance(name := one.get("name"), str)}
            tools = [tool for tool in tools if str(tool["function"].get("name")) in names]
            choice = choice.get("mode", "auto")
        elif kind == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        else:
            raise unsupported("tool_choice", f"{str(kind)[:40]!r} is a tool that this server passes over")
    if not tools and choice == "auto":
        choice = None
    return tools, choice


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    known = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in known if tool.get(name) is not None},
    }


def _response_format(text_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as a chat's `response_format`: a schema's keys are one level deeper there."""
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    schema = {name: value for name, value in text_format.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


__all__ = [
    "ENCRYPTED",
    "LOGPROBS",
    "PARAMS",
    "REFUSED",
    "FindConversation",
    "ParsedResponse",
    "parse_response",
]
