"""Content blocks → messages of a chat.

Blocks of tools that only Anthropic runs are passed over, as those tools are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from samewise.openai.errors import invalid, unsupported

Block = dict[str, Any]

BILLING = "x-anthropic-billing-header:"
"""Begins a system block that some clients send for their account: it is no instruction, and differs from one
request to the next."""

_PASSED = frozenset(("container_upload", "redacted_thinking", "server_tool_use", "mcp_tool_use"))


def chat_messages(system: Any, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. The system prompt and system messages at the start become one message."""
    leading = 0
    while leading < len(messages) and messages[leading].get("role") == "system":
        leading += 1
    prompts = [] if system is None else _system_texts("system", system)
    for i, message in enumerate(messages[:leading]):
        prompts += _system_texts(f"messages[{i}].content", message.get("content"))
    chat: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(prompts)}] if prompts else []
    for i, message in enumerate(messages[leading:], leading):
        role, where = message.get("role"), f"messages[{i}].content"
        if role == "assistant":
            chat += _assistant(where, message.get("content"))
        elif role == "user":
            chat += _user(where, message.get("content"))
        elif role == "system":
            texts = _system_texts(where, message.get("content"))
            chat += [{"role": role, "content": text} for text in texts]
        else:
            raise invalid("messages", f"messages[{i}].role is {str(role)[:40]!r}; it is user or assistant")
    return chat


def _system_texts(where: str, content: Any) -> list[str]:
    """The text of a system prompt or message as the one entry; none where no block is an instruction."""
    texts = [text for text in _texts(where, content) if not text.startswith(BILLING)]
    return ["\n".join(texts)] if texts else []


def _user(where: str, content: Any) -> list[dict[str, Any]]:
    """Text as messages of the user, results of tools as messages of their own, in their order."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in _blocks(where, content):
        if block.get("type") == "tool_result":
            if texts:
                messages.append({"role": "user", "content": "\n".join(texts)})
                texts = []
            messages.append(_result(where, block))
        elif (text := _text(where, block)) is not None:
            texts.append(text)
    if texts or not messages:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _result(where: str, block: Block) -> dict[str, Any]:
    tool_id = block.get("tool_use_id")
    if not isinstance(tool_id, str):
        raise invalid("messages", f"{where}: a tool_result has a tool_use_id")
    content = block.get("content")
    texts = [] if content is None else _texts(f"{where} of a tool_result", content)
    text = "\n".join(texts)
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": tool_id, "content": text}


def _assistant(where: str, content: Any) -> list[dict[str, Any]]:
    """One message: its text, what was thought before it, and calls of tools."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    thinking, calls = "", []
    for block in _blocks(where, content):
        kind = block.get("type")
        if kind == "thinking":
            thinking += _field(where, block, "thinking")
        elif kind == "tool_use":
            calls.append(_call(where, block))
        elif (text := _text(where, block)) is not None:
            message["content"] += text
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(where: str, block: Block) -> dict[str, Any]:
    given = block.get("input")
    if given is not None and not isinstance(given, dict):
        raise invalid("messages", f"{where}: the input of a tool_use is an object")
    function = {"name": _field(where, block, "name"), "arguments": json.dumps(given or {})}
    return {"id": _field(where, block, "id"), "type": "function", "function": function}


def _blocks(where: str, content: Any) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(where.partition("[")[0], f"{where} is text, or a list of content blocks")
    return content


def _texts(where: str, content: Any) -> list[str]:
    texts = [_text(where, block) for block in _blocks(where, content)]
    return [text for text in texts if text is not None]


def _text(where: str, block: Block) -> str | None:
    """The text of a block; None for one that is passed over."""
    kind, param = block.get("type"), where.partition("[")[0]
    if kind == "text":
        return _field(where, block, "text")
    if kind == "document" and isinstance(source := block.get("source"), dict):
        if source.get("type") == "text":
            return _field(where, source, "data")
        if source.get("type") == "content":
            return "\n".join(_texts(where, source.get("content")))
    if kind == "search_result":
        return "\n".join(_texts(where, block.get("content")))
    if kind == "tool_reference":
        return _field(where, block, "tool_name")
    if isinstance(kind, str) and (kind in _PASSED or kind.endswith("_tool_result")):
        return None
    raise unsupported(param, f"{where} holds a block of type {str(kind)[:40]!r}; this server reads text")


def _field(where: str, block: Block, name: str) -> str:
    if not isinstance(block.get(name), str):
        raise invalid(
            where.partition("[")[0], f"{where}: {name} of a {str(block.get('type'))[:40]!r} is text"
        )
    return str(block[name])


__all__ = ["BILLING", "Block", "chat_messages"]
