"""Bodies of `/v1/messages` → the parsed request of a chat.

Fields that the translation does not name go to the chat as they are: those a chat knows work, those it
refuses are refused, and others pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samewise.anthropic.blocks import chat_messages
from samewise.anthropic.bodies import CountTokensBody, MessagesBody
from samewise.openai.bodies import CHAT
from samewise.openai.errors import invalid, unsupported
from samewise.openai.exchange import parse_as_chat
from samewise.openai.json_body import validate
from samewise.openai.request import ParsedRequest, ParseOptions

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    # name: (values that change nothing, what to do instead)
    "container": ((), "is not supported; this server runs no code"),
    "explain": ((False,), f"is not supported; use {CHAT}"),
    "input": (("", []), "is not known here; use messages"),
    "instructions": (("",), "is not known here; use system"),
    "max_completion_tokens": ((), "is not known here; use max_tokens"),
    "mcp_servers": (([],), "is not supported; the server has no network access"),
    "n": ((1,), "is not supported; a message is one answer"),
    "prompt": (("", []), "is not known here; use messages"),
    "prompt_logprobs": ((), f"is not supported; use {CHAT}"),
    "response_format": ((), "is not known here; use output_config.format"),
    "stop": ((), "is not known here; use stop_sequences"),
    "text": (({"format": {"type": "text"}},), "is not known here; use output_config.format"),
}
"""Fields that would change the output and cannot be honoured, beside those that a chat refuses."""

PARAMS = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Fields of a chat that have another name here."""

THINKING = {"adaptive": None, "between_tools": None, "disabled": False, "enabled": True}
"""`thinking.type`: whether the template is told to reason; None: it is left to the template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedMessage:
    """A request for a message: that of the chat, and what only Messages have."""

    parsed: ParsedRequest
    show_thinking: bool  # False: thinking blocks are empty


def parse_message(body: object, options: ParseOptions) -> ParsedMessage:
    """A body of `/v1/messages`. Raises ApiError, which names the field as it is called here."""
    checked = validate(MessagesBody, body)
    if checked.max_tokens < 0:
        raise invalid("max_tokens", "give 0 or more")
    return _parse(checked, options, {
        "max_tokens": checked.max_tokens,
        "stop": checked.stop_sequences,
        "stream": bool(checked.stream),
        "temperature": checked.temperature,
        "top_k": checked.top_k,
        "top_p": checked.top_p,
    })  # fmt: skip


def parse_count(body: object, options: ParseOptions) -> ParsedRequest:
    """A body of `/v1/messages/count_tokens`. Raises ApiError."""
    checked = validate(CountTokensBody, body)
    for name in (*MessagesBody.model_fields.keys() - CountTokensBody.model_fields.keys(), "stream"):
        (checked.model_extra or {}).pop(name, None)  # fields of a message that are not part of its prompt
    return _parse(checked, options, {}).parsed


def _parse(body: CountTokensBody, options: ParseOptions, own: dict[str, Any]) -> ParsedMessage:
    extra = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name, (neutral, message) in REFUSED.items():
        if name in extra and extra[name] not in neutral:
            raise unsupported(name, message)
        extra.pop(name, None)
    messages = chat_messages(body.system, body.messages)
    prefilled = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    thinking = body.thinking or {"type": "disabled"}
    config = body.output_config or {}
    tools = [_function(i, tool) for i, tool in enumerate(body.tools or ()) if _is_function(tool)]
    choice, parallel = _choice(body.tool_choice, has_tools=bool(tools))
    chat = extra | own | {
        "model": body.model,
        "messages": messages,
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "response_format": _response_format(config.get("format") or body.output_format),
    }  # fmt: skip
    if prefilled:
        chat.setdefault("continue_final_message", True)
    if (effort := config.get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if "enable_thinking" not in chat:
        chat["enable_thinking"] = _enable_thinking(thinking)
    parsed = parse_as_chat(chat, options, PARAMS)
    return ParsedMessage(parsed=parsed, show_thinking=thinking.get("display") != "omitted")


def _enable_thinking(thinking: dict[str, Any]) -> bool | None:
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in THINKING:
        raise invalid("thinking", f"type is {str(kind)[:40]!r}; choose one of {', '.join(THINKING)}")
    budget = thinking.get("budget_tokens")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise invalid("thinking", "budget_tokens is a whole number, 1 or more")
    return THINKING[kind]


def _is_function(tool: dict[str, Any]) -> bool:
    """Whether a tool is the client's own. Types that the API's provider defines are passed over."""
    return tool.get("type") in (None, "custom")


def _function(i: int, tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise invalid("tools", f"tools[{i}].input_schema is a JSON Schema, which is an object")
    function = {"name": tool.get("name"), "parameters": schema}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any] | None, *, has_tools: bool) -> tuple[Any, bool | None]:
    """A chat's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    kind = choice.get("type")
    if kind == "auto":
        return ("auto" if has_tools else None), parallel
    if kind == "none":
        return "none", None
    if kind == "any":
        return "required", parallel
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}, parallel
    raise invalid("tool_choice", 'give {"type": "auto"}, "any", "none", or {"type": "tool", "name": …}')


def _response_format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise invalid("output_config.format", 'give {"type": "json_schema", "schema": {…}}')
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.get("schema")}}


__all__ = ["PARAMS", "REFUSED", "THINKING", "ParsedMessage", "parse_count", "parse_message"]
