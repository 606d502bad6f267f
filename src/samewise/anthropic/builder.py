"""An answer as content blocks, and the events that tell of them as it grows.

A whole message is what the events of a stream add up to: both come from here.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from samewise.openai.json_body import load_json
from samewise.openai.nesting import MAX_NESTING, nests_deeper

Event = dict[str, Any]

MAX_INPUT_NESTING = MAX_NESTING - 8
"""Levels of objects and lists in a call's input. The next request has it four levels deeper."""


class MessageBuilder:
    """The blocks of one message, made from a choice's deltas. `head` are its fields that do not change.

    The input of a call is sent when it is complete: clients read it piece by piece, and what a model writes
    may turn out not to be JSON. A thinking block's signature is a digest of the contract and the text: equal
    answers have equal blocks.
    """

    def __init__(self, head: dict[str, Any], *, contract: str, show_thinking: bool = True) -> None:
        self._head, self._contract, self._show = head, contract, show_thinking
        self._blocks: list[dict[str, Any]] = []
        self._open = False  # whether the last block can still grow
        self._call: int | None = None  # the index of the open call
        self._growing = ""  # the text, thinking or input of the open block

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return any(block["type"] == "tool_use" for block in self._blocks)

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The blocks so far; complete after `end`."""
        return self._blocks

    def begin(self, usage: dict[str, Any]) -> list[Event]:
        """The event before the answer."""
        message = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def add(self, deltas: list[dict[str, Any]]) -> list[Event]:
        """The events of some deltas."""
        events: list[Event] = []
        for delta in deltas:
            if text := delta.get("reasoning"):
                events += self._grow({"type": "thinking", "thinking": "", "signature": ""}, text)
            if text := delta.get("content"):
                events += self._grow({"type": "text", "text": ""}, text)
            for part in delta.get("tool_calls", ()):
                events += self._call_part(part)
        return events

    def end(self, delta: dict[str, Any], usage: dict[str, Any], **fields: Any) -> list[Event]:
        """The events that complete the message. `delta` has the stop reason, `fields` are the message's."""
        return [
            *self._finish(),
            {"type": "message_delta", "delta": delta, "usage": usage} | fields,
            {"type": "message_stop"},
        ]

    def _grow(self, empty: dict[str, Any], text: str) -> list[Event]:
        """Add text to the last block, if it is of this type, or to a new one."""
        events: list[Event] = []
        kind = empty["type"]
        if not (self._open and self._blocks[-1]["type"] == kind):
            events += self._begin(empty)
        self._growing += text
        if kind == "thinking" and not self._show:
            return events
        self._blocks[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call_part(self, part: dict[str, Any]) -> list[Event]:
        events, function = [], part.get("function", {})
        if part["index"] != self._call:
            events += self._begin(
                {"type": "tool_use", "id": part["id"], "name": function["name"], "input": {}}
            )
            self._call = part["index"]
        self._growing += function.get("arguments", "")
        return events

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self._finish()
        self._blocks.append(dict(block))
        self._open, self._growing = True, ""
        return [
            *events,
            {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block},
        ]

    def _finish(self) -> list[Event]:
        """End the open block, if there is one."""
        if not self._open:
            return []
        block, events = self._blocks[-1], list[Event]()
        if block["type"] == "thinking":
            block["signature"] = _signature(self._contract, self._growing)
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        elif block["type"] == "tool_use":
            text, block["input"] = _input(self._growing)
            events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        self._open, self._call = False, None
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _signature(contract: str, thinking: str) -> str:
    return sha256(f"{contract}\0{thinking}".encode("utf-8", "surrogatepass")).hexdigest()


def _input(arguments: str) -> tuple[str, dict[str, Any]]:
    """A call's input, as JSON text and as a value.

    Arguments that were cut off, that are no JSON object, or that clients cannot read (half of a surrogate
    pair, deep nesting) are an empty object.
    """
    try:
        value = load_json(arguments)
        if isinstance(value, dict) and not nests_deeper(value, MAX_INPUT_NESTING):
            json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
            return arguments, value
    except (ValueError, RecursionError):
        pass
    return "{}", {}


__all__ = ["MAX_INPUT_NESTING", "Event", "MessageBuilder"]
