"""An answer as the items of a response, and the events that tell of them as it grows.

A whole response is what the events of a stream add up to: both come from here.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from samewise.openai.responses.items import seal

Event = dict[str, Any]


class ResponseBuilder:
    """The items of one response, made from a choice's deltas. `head` are the fields that do not change.

    `entries` are log-probabilities of tokens that belong to the message; they go out with the next text.
    """

    def __init__(self, head: dict[str, Any], *, encrypted: bool = False) -> None:
        self._head, self._encrypted = head, encrypted
        self._ids = str(head["id"]).removeprefix("resp_")
        self._number = 0  # of the next event
        self._items: list[dict[str, Any]] = []
        self._close: Callable[[str], list[Event]] | None = None  # ends the open item, given its status
        self._call: int | None = None  # the index of the open call
        self._entries: list[dict[str, Any]] = []  # not sent yet

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items so far; complete after `end`."""
        return self._items

    def begin(self) -> list[Event]:
        """The events before the answer."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def keep_alive(self) -> list[Event]:
        """The event that says once more that the response is in progress. It names no items."""
        return [self._event("response.in_progress", response=self._head | {"status": "in_progress"})]

    def add(self, deltas: list[dict[str, Any]], entries: list[dict[str, Any]] | None = None) -> list[Event]:
        """The events of some deltas."""
        self._entries += entries or []
        events: list[Event] = []
        for delta in deltas:
            if text := delta.get("reasoning"):
                events += self._open("reasoning") + self._reasoning(text)
            if text := delta.get("content"):
                events += self._open("message") + self._text(text)
            for part in delta.get("tool_calls", ()):
                events += self._call_part(part)
        return events

    def end(self, *, cut: bool, **fields: Any) -> list[Event]:
        """The events that complete the answer. `cut`: before its own end. `fields` are of the response."""
        events: list[Event] = []
        if not cut and not any(item["type"] != "reasoning" for item in self._items):
            events += self._open("message")  # a complete answer has a message, also an empty one
        status = "incomplete" if cut else "completed"
        events += self._finish(status)
        response = self._response(status, **fields)
        return [*events, self._event(f"response.{status}", response=response)]

    def fail(self, message: str, code: str) -> list[Event]:
        """The event that ends an answer that failed."""
        return [self._event("response.failed", response=self._response(
            "failed", error={"code": code, "message": message}
        ))]  # fmt: skip

    # ---- items

    def _open(self, kind: str) -> list[Event]:
        """Begin an item of this kind, unless it is the one that is open."""
        if self._close is not None and self._call is None and self._items[-1]["type"] == kind:
            return []
        events = self._finish("completed")
        if kind == "message":
            item = {"id": self._id("msg"), "type": kind, "role": "assistant", "content": []}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._close = self._close_message
        else:
            item = {"id": self._id("rs"), "type": kind, "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
            self._close = self._close_reasoning
        events.append(self._added(item))
        events.append(self._of_part("response.content_part.added", part=part))
        self._items[-1]["content"] = [deepcopy(part)]  # the event keeps the part as it begins
        return events

    def _reasoning(self, text: str) -> list[Event]:
        self._items[-1]["content"][0]["text"] += text
        return [self._of_part("response.reasoning_text.delta", delta=text)]

    def _text(self, text: str) -> list[Event]:
        part, entries = self._items[-1]["content"][0], self._take_entries()
        part["text"] += text
        part["logprobs"] += entries
        return [self._of_part("response.output_text.delta", delta=text, logprobs=entries)]

    def _call_part(self, part: dict[str, Any]) -> list[Event]:
        events, function = [], part.get("function", {})
        if part["index"] != self._call:
            events += self._finish("completed")
            item = {
                "id": self._id("fc"), "type": "function_call", "call_id": part["id"],
                "name": function["name"], "arguments": "",
            }  # fmt: skip
            events.append(self._added(item))
            self._call, self._close = part["index"], self._close_call
        if arguments := function.get("arguments"):
            self._items[-1]["arguments"] += arguments
            events.append(self._of_item("response.function_call_arguments.delta", delta=arguments))
        return events

    def _finish(self, status: str) -> list[Event]:
        """End the open item, if there is one."""
        close, self._close, self._call = self._close, None, None
        if close is None:
            return []
        events = close(status)
        self._items[-1]["status"] = status
        return [*events, self._event(
            "response.output_item.done", output_index=len(self._items) - 1, item=dict(self._items[-1])
        )]  # fmt: skip

    def _close_message(self, _: str) -> list[Event]:
        part = self._items[-1]["content"][0]
        part["logprobs"] += self._take_entries()
        return [
            self._of_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._of_part("response.content_part.done", part=part),
        ]

    def _close_reasoning(self, _: str) -> list[Event]:
        item = self._items[-1]
        part = item["content"][0]
        if self._encrypted:
            item["encrypted_content"] = seal(part["text"])
        return [
            self._of_part("response.reasoning_text.done", text=part["text"]),
            self._of_part("response.content_part.done", part=part),
        ]

    def _close_call(self, _: str) -> list[Event]:
        item = self._items[-1]
        return [
            self._of_item(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        ]

    def _take_entries(self) -> list[dict[str, Any]]:
        taken, self._entries = self._entries, []
        return taken

    # ---- events

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._ids}_{len(self._items)}"

    def _added(self, item: dict[str, Any]) -> Event:
        item["status"] = "in_progress"
        self._items.append(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _of_item(self, kind: str, **fields: Any) -> Event:
        index = len(self._items) - 1
        return self._event(kind, item_id=self._items[index]["id"], output_index=index, **fields)

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return event

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return self._head | {"status": status, "output": list(self._items)} | fields


__all__ = ["Event", "ResponseBuilder"]
