"""Items of a conversation, as `/v1/responses` has them → messages of a chat.

Calls of tools that only OpenAI runs, and what they returned, are passed over, as those tools are.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

from samewise.openai.errors import invalid, unsupported
from samewise.openai.nesting import MAX_NESTING, nests_deeper

Item = dict[str, Any]
FindItem = Callable[[str], Item]
"""An item of a stored response by its id. Raises ApiError."""

SEALED = "samewise1."
"""Begins `encrypted_content` of this server: reasoning in base64, for clients that return nothing else."""

_CALLS = {  # calls of tools that run at the client: the field that holds what they were called with
    "apply_patch_call": "operation",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
}
_RESULTS = frozenset(
    ("function_call_output", *(f"{kind}_output" for kind in _CALLS), "tool_result"),
)
_PASSED = frozenset(
    (
        "additional_tools",
        "compaction",
        "compaction_summary",
        "compaction_trigger",
        "configuration_update",
        "context_compaction",
        "ghost_snapshot",
        "program",
    )
)
_PASSED_ENDINGS = ("_call", "_output", "_approval_request", "_approval_response", "_list_tools")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`. It is not secret: it went to the client as text too."""
    return SEALED + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def input_items(given: Any, find: FindItem) -> list[Item]:
    """A body's `input` as items, with those it refers to in place of references.

    Each is referred to once: a body of references to one long item would exceed any limit on bodies.
    """
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise invalid("input", "is text, or a list of items")
    named: set[str] = set()
    return [_found(f"input[{i}]", item, find, named) for i, item in enumerate(given)]


def _found(where: str, item: Item, find: FindItem, named: set[str]) -> Item:
    """The item, or the one it refers to, whose id is then `named`."""
    if item.get("type") != "item_reference":
        return item
    name = _text_field(where, item, "id")
    if name in named:
        raise invalid("input", f"{where} refers to {name[:80]!r} once more; refer to an item once")
    named.add(name)
    return find(name)


def messages_of(items: Sequence[Item], *, instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat. Instructions and system messages at the start become one system message."""
    reader = _Reader()
    for i, item in enumerate(items):
        reader.read(i, item)
    messages = reader.messages
    leading = 0
    while leading < len(messages) and messages[leading]["role"] in ("system", "developer"):
        leading += 1
    texts = [] if instructions is None else [instructions]
    texts += ["\n".join(_plain(message["content"])) for message in messages[:leading]]
    system = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return system + messages[leading:]


class _Reader:
    """Reads items in their order. Reasoning, text and calls of one turn become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []

    def read(self, i: int, item: Item) -> None:
        """Add an item."""
        where = f"input[{i}]"
        kind = _type_of(where, item)
        if kind == "message":
            self._message(where, item)
        elif kind == "reasoning":
            self._reasoning.append(_reasoning_of(where, item))
        elif kind == "function_call":
            self._call(where, item, _arguments(item.get("arguments")))
        elif kind in _CALLS:
            given = item.get(_CALLS[kind])
            self._call(where, {"name": kind.removesuffix("_call")} | item,
                       given if isinstance(given, dict) else {_CALLS[kind]: given})  # fmt: skip
        elif kind in _RESULTS:
            self._result(where, item)
        elif kind not in _PASSED and not kind.endswith(_PASSED_ENDINGS):
            raise unsupported("input", f"{where} is of type {kind[:40]!r}, which is not known here")

    def _message(self, where: str, item: Item) -> None:
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise invalid("input", f"{where}.role is {str(role)[:40]!r}; it is user, assistant or developer")
        content = item.get("content")
        texts = [content] if isinstance(content, str) else _parts(f"{where}.content", content)
        message: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": one} for one in texts]}
        if role == "assistant":
            message["content"] = "".join(texts)
            message |= self._take_reasoning()
        self._end_reasoning()
        self.messages.append(message)

    def _call(self, where: str, item: Item, arguments: dict[str, Any]) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant" or self._reasoning:
            self.messages.append({"role": "assistant", "content": ""} | self._take_reasoning())
        call_id = item.get("call_id") or item.get("id")
        if not isinstance(call_id, str):
            raise invalid("input", f"{where}.call_id is text")
        name = _text_field(where, item, "name")
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls: list[dict[str, Any]] = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _result(self, where: str, item: Item) -> None:
        output = item.get("output")
        if isinstance(output, dict):
            output = json.dumps(output, ensure_ascii=False)
        text = output if isinstance(output, str) else "\n".join(_parts(f"{where}.output", output))
        call_id = item.get("call_id") or item.get("id")
        if not isinstance(call_id, str):
            raise invalid("input", f"{where}.call_id is text")
        self._end_reasoning()
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _end_reasoning(self) -> None:
        """Reasoning without text or calls, because its turn was cut off, is a message of its own."""
        if reasoning := self._take_reasoning():
            self.messages.append({"role": "assistant", "content": ""} | reasoning)

    def _take_reasoning(self) -> dict[str, str]:
        taken, self._reasoning = "".join(self._reasoning), []
        return {"reasoning_content": taken} if taken else {}


def _type_of(where: str, item: Item) -> str:
    kind = item.get("type") or ("message" if "role" in item else None)
    if not isinstance(kind, str):
        raise invalid("input", f"{where} has no type; give 'message' or another type of item")
    return kind


def _reasoning_of(where: str, item: Item) -> str:
    """The text of a reasoning item: in full, as this server sealed it, or its summary."""
    if item.get("content"):
        return "\n".join(_parts(f"{where}.content", item["content"]))
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(SEALED):
        try:
            data = base64.b64decode(sealed.removeprefix(SEALED), validate=True)
            return data.decode("utf-8", "surrogatepass")
        except ValueError:
            raise invalid("input", f"{where}.encrypted_content is damaged; leave it out") from None
    return "\n".join(_parts(f"{where}.summary", item.get("summary") or []))


def _parts(where: str, parts: Any) -> list[str]:
    """The texts of a list of parts."""
    if not isinstance(parts, list):
        raise invalid("input", f"{where} is text, or a list of parts of type 'input_text'")
    return [_part(where, part) for part in parts]


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "refusal":
        return _text_field(where, part, "refusal")
    if kind not in _TEXTS:
        raise unsupported("input", f"{where} holds a part of type {str(kind)[:40]!r}; this server reads text")
    return _text_field(where, part, "text")


def _plain(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _arguments(given: Any) -> dict[str, Any]:
    """A call's arguments. What a model wrote and is no JSON object goes back to it as a text."""
    try:
        value = given if isinstance(given, dict) else json.loads(given or "{}")
    except (TypeError, ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and not nests_deeper(value, MAX_NESTING):
        return value
    return {"arguments": str(given)}


def _text_field(where: str, item: Item, name: str) -> str:
    if not isinstance(item.get(name), str):
        raise invalid("input", f"{where}.{name} is text")
    return str(item[name])


__all__ = ["SEALED", "FindItem", "Item", "input_items", "messages_of", "seal"]
