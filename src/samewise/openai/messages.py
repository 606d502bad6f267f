"""Messages as OpenAI writes them → messages as chat templates read them. Host only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from samewise.openai.errors import ApiError, invalid, refused

ROLES = ("system", "developer", "user", "assistant", "tool")


def conversation(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Every message with plain text for content; `developer` is what templates call `system`."""
    if not messages:
        raise invalid("messages", "is empty; give at least one message")
    return tuple(_message(i, message) for i, message in enumerate(messages))


def _message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise invalid(
            "messages", f"messages[{i}].role is {str(role)[:40]!r}; choose one of {', '.join(ROLES)}"
        )
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise refused("messages", f"messages[{i}].{name} is not supported")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    found["content"] = _text(i, message.get("content"), needed=not (role == "assistant" and calls))
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise invalid("messages", f"messages[{i}].{name} is text")
            found[name] = message[name]
    if calls is not None and (listed := _calls(i, calls)):  # templates take an empty list for a call, too
        found["tool_calls"] = listed
    return found


def _text(i: int, content: Any, *, needed: bool) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(i, part) for part in content)
    if content is None and not needed:
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
    """Tool calls, their arguments as values: templates write them out again in their own way."""
    where = f"messages[{i}].tool_calls"
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise invalid("messages", f"{where} is a list of calls")
    found = []
    for call in calls:
        function = call.get("function")
        if call.get("type", "function") != "function" or not isinstance(function, dict):
            raise invalid("messages", f"{where}: a call is of type 'function' and has a 'function'")
        if not isinstance(function.get("name"), str):
            raise invalid("messages", f"{where}: a function has a name")
        found.append(
            call | {"type": "function", "function": function | {"arguments": _arguments(where, function)}}
        )
    return found


def _arguments(where: str, function: dict[str, Any]) -> Any:
    given = function.get("arguments")
    if isinstance(given, dict):
        return given
    try:
        read = json.loads(given or "{}")
    except (TypeError, ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise invalid("messages", f"{where}: arguments are a JSON object, written as text")
    return read


__all__ = ["conversation"]
