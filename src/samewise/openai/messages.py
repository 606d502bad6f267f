"""Messages and predictions of a body → messages and keywords for the model's chat template, and text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from samewise.openai.bodies import ROLE_PATTERN, ChatBody, TokenizeBody
from samewise.openai.errors import ApiError, invalid, unsupported
from samewise.openai.nesting import MAX_NESTING, is_longer, nests_deeper
from samewise.text.chat_template import KNOWN_ROLES

ROLE = re.compile(ROLE_PATTERN)

TEMPLATE_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "messages",
    "special_tokens_in_content",
    "tools",
)
"""Template variables that have a field of their own and cannot be set in chat_template_kwargs."""

NOT_TEMPLATE = (
    "chat_template",
    "conversation",
    "conversations",
    "date",
    "documents",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "self",
    "tokenize",
    "tokenizer",
    "tokenizer_kwargs",
    "truncation",
)
"""Keywords of the functions that render a template, here and in transformers; no template can see them."""


MAX_TEMPLATE_KWARGS = 1 << 16
"""Characters of chat_template_kwargs as JSON. Set by hand: templates know a few words and numbers."""


def conversation(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The messages with plain text as content. `developer` becomes `system`, the role that templates know."""
    if not messages:
        raise invalid("messages", "is empty; give at least one message")
    return tuple(_message(i, message) for i, message in enumerate(messages))


def _message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise invalid(
            "messages",
            f"messages[{i}].role is {str(role)[:40]!r}; give {', '.join(KNOWN_ROLES)}, or another word of "
            "letters, digits, '_', '-' and '.' that the chat template knows",
        )
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise unsupported("messages", f"messages[{i}].{name} is not supported")
    result: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    content, required = message.get("content"), True
    if role == "assistant" and content is None:  # so are replies of calls or reasoning alone, and refusals
        content = message.get("refusal")
        required = not (calls or message.get("reasoning") or message.get("reasoning_content"))
    result["content"] = _text(i, content, required=required)
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise invalid("messages", f"messages[{i}].{name} is text")
            result[name] = message[name]
    if "reasoning" in result:  # one thing under two names; templates know the older one
        result.setdefault("reasoning_content", result.pop("reasoning"))
    if calls is not None and (checked := _calls(i, calls)):  # templates render an empty list as a call
        result["tool_calls"] = checked
    return result


def _text(i: int, content: Any, *, required: bool) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(i, part) for part in content)
    if content is None and not required:
        return ""
    raise invalid("messages", f"messages[{i}].content is text, or a list of parts of type 'text'")


def _part(i: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind != "text":
        raise ApiError(
            f"messages[{i}].content holds a part of type {str(kind)[:40]!r}; this server reads text",
            param="messages", code="unsupported_parameter",
        )  # fmt: skip
    if not isinstance(part.get("text"), str):
        raise invalid("messages", f"messages[{i}].content: a part of type 'text' needs text")
    return str(part["text"])


def _calls(i: int, calls: Any) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects, which templates serialise in their own form."""
    where = f"messages[{i}].tool_calls"
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise invalid("messages", f"{where} is a list of calls")
    checked = []
    for call in calls:
        function = call.get("function")
        if call.get("type", "function") != "function" or not isinstance(function, dict):
            raise invalid("messages", f"{where}: a call is of type 'function' and has a 'function'")
        if not isinstance(function.get("name"), str):
            raise invalid("messages", f"{where}: a function has a name")
        checked.append(
            call | {"type": "function", "function": function | {"arguments": _arguments(where, function)}}
        )
    return checked


def _arguments(where: str, function: dict[str, Any]) -> Any:
    given = function.get("arguments")
    if isinstance(given, dict):
        return given
    try:
        value = json.loads(given or "{}")
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or nests_deeper(value, MAX_NESTING):
        raise invalid("messages", f"{where}: arguments are a JSON object, written as text; not too deep")
    return value


def predicted_text(prediction: Any) -> str | None:
    """The text of a body's `prediction`: `{"type": "content", "content": text or parts of type 'text'}`."""
    if prediction is None:
        return None
    if not isinstance(prediction, dict) or prediction.get("type") != "content":
        raise invalid("prediction", "is an object of type 'content' with a 'content'")
    content = prediction.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("prediction", "prediction.content is text, or a list of parts of type 'text'")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise invalid(
                "prediction", "prediction.content holds a part that is not of type 'text' with text"
            )
    return "".join(part["text"] for part in content)


def template_kwargs(body: ChatBody | TokenizeBody, *, special: bool = True) -> dict[str, Any]:
    """Keywords for the chat template. `special`: whether messages may hold special tokens."""
    if body.special_tokens_in_content and not special:
        raise invalid(
            "special_tokens_in_content", "this server reads control tokens in messages as text; leave it out"
        )
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise invalid("continue_final_message", "excludes add_generation_prompt; give one of them")
    kwargs = dict(body.chat_template_kwargs or {})
    if is_longer(kwargs, MAX_TEMPLATE_KWARGS):
        raise invalid("chat_template_kwargs", f"is longer than {MAX_TEMPLATE_KWARGS >> 10} KiB as JSON")
    for name in kwargs:
        if name in TEMPLATE_FIELDS:
            raise invalid("chat_template_kwargs", f"{name} has a field of its own; set it there")
        if name in NOT_TEMPLATE or not name.isidentifier():
            raise invalid("chat_template_kwargs", f"{name!r} is not for a template")
    kwargs["add_generation_prompt"] = (
        not continued if body.add_generation_prompt is None else body.add_generation_prompt
    )
    if not special or body.special_tokens_in_content is False:
        kwargs["special_tokens_in_content"] = False
    return kwargs | ({"continue_final_message": True} if continued else {})


__all__ = ["conversation", "predicted_text", "template_kwargs"]
