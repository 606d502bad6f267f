"""One request to `/v1/responses` and its answer, whole or as events; and what of it can be stored."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from samewise.openai.errors import ApiError, invalid
from samewise.openai.exchange import (
    VALUE_BYTES,
    AnswerFacts,
    ChoiceDeltas,
    EventWriter,
    Receipts,
    kept_bytes,
    named_event,
)
from samewise.openai.replies import (
    BytesOfToken,
    chat_logprobs,
    encode_json,
    encode_slices,
    usage,
    weights_fields,
)
from samewise.openai.request import ParsedRequest, ParseOptions
from samewise.openai.responses.builder import Event, ResponseBuilder
from samewise.openai.responses.items import Item
from samewise.openai.responses.parse import ParsedResponse, parse_response
from samewise.outputs import ABORTED, Chunk, Logprob, RequestOutput

PREFIX = "resp_"

MAX_READ = 32 * 2**20
"""Bytes of stored responses that one request may refer to: twice the largest one, with items that it repeats.
Set by hand: reading them takes 0.3 s of a thread."""


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A complete response as it is stored: as JSON, so that its size is known."""

    id: str
    reply: bytes
    items: bytes  # the conversation, the answer included

    @property
    def num_bytes(self) -> int:
        """The memory it takes, but for a constant."""
        return len(self.reply) + len(self.items)

    def conversation(self) -> list[Item]:
        """The items of the conversation, the answer included."""
        items: list[Item] = json.loads(self.items)
        return items


class Records:
    """The stored responses of one caller, as one request may refer to them. `get` raises ApiError.

    Each is read once, however often the request refers to its items, and at most MAX_READ bytes of them.
    """

    def __init__(self, get: Callable[[str], ResponseRecord]) -> None:
        self._get = get
        self._conversations: dict[str, list[Item]] = {}
        self._items: dict[str, dict[str, Item]] = {}  # by response and item
        self._sizes: dict[str, int] = {}  # of items that were referred to, as JSON
        self._num_bytes = 0

    def conversation(self, response_id: str) -> list[Item]:
        """The items of a stored response, its input included."""
        if response_id not in self._conversations:
            record = self._get(response_id)
            self._count(len(record.items))
            self._conversations[response_id] = record.conversation()
        return self._conversations[response_id]

    def item(self, item_id: str) -> Item:
        """An item of a stored response: its id contains the response's."""
        found = self._of_response(PREFIX + item_id.partition("_")[2].partition("_")[0]).get(item_id)
        if found is None:
            raise ApiError(
                f"the item {item_id[:80]!r} is not stored here; send the item itself",
                status=404, param="input", code="item_not_found",
            )  # fmt: skip
        if item_id not in self._sizes:
            self._sizes[item_id] = len(encode_json(found))
        self._count(self._sizes[item_id])
        return found

    def _of_response(self, response_id: str) -> dict[str, Item]:
        """The items of a response by their ids; the first of several with one id. Empty if it is unknown."""
        if response_id not in self._items:
            try:
                items = self.conversation(response_id)
            except ApiError as error:
                if error.status != 404:
                    raise
                items = []
            found = {one["id"]: one for one in reversed(items) if isinstance(one.get("id"), str)}
            self._items[response_id] = found
        return self._items[response_id]

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_READ:
            raise invalid(
                "input",
                f"refers to more than {MAX_READ >> 20} MiB of stored responses; send the items themselves",
            )


class ResponsesExchange:
    """A request for a response. `keep` is called with the record of a complete one that is to be stored."""

    def __init__(
        self, body: Any, options: ParseOptions, *, records: Records, keep: Callable[[ResponseRecord], object]
    ) -> None:
        self._request = parse_response(body, options, earlier=records.conversation, find=records.item)
        self._keep, self._id = keep, PREFIX + uuid4().hex
        # Encoded now, in the thread that read the body: conversations may be long where answers are short.
        self._before = encode_json(list(self._request.items)) if self._request.store else b""
        repeated = encode_json(self._request.echo)
        self.kept_bytes = (
            kept_bytes(self.parsed) + len(self._before) + len(repeated) + VALUE_BYTES * repeated.count(b",")
        )

    @property
    def parsed(self) -> ParsedRequest:
        """The request, as a chat."""
        return self._request.parsed

    def begun(self) -> None:
        """The request was checked: what only its prompt needed is dropped."""
        self._request = replace(self._request, parsed=self.parsed.without_conversation(), items=())

    def reply(
        self, facts: AnswerFacts, outputs: Sequence[RequestOutput], receipts: Receipts | None
    ) -> Mapping[str, Any]:
        """The body of a whole response: that of the last event."""
        writer = self._writer(facts)
        writer.begin()
        (output,) = outputs
        (answer,) = output.outputs
        writer.add(answer.text, answer.token_ids, answer.logprobs, lambda: output, finished=True)
        response: dict[str, Any] = writer.end(outputs, receipts)[-1]["response"]
        return response

    def writer(self, facts: AnswerFacts) -> EventWriter:
        """A writer for a streamed response."""
        return self._writer(facts)

    def _writer(self, facts: AnswerFacts) -> _ResponseWriter:
        return _ResponseWriter(self._request, facts, self._id, self._store)

    def _store(self, reply: dict[str, Any]) -> None:
        """Store a complete response, if it is to be."""
        if self._request.store:
            items = _joined(self._before, b"".join(encode_slices(reply["output"])))
            self._keep(ResponseRecord(self._id, b"".join(encode_slices(reply)), items))


class _ResponseWriter:
    """Writes one response as events."""

    def __init__(
        self,
        request: ParsedResponse,
        facts: AnswerFacts,
        response_id: str,
        store: Callable[[dict[str, Any]], object],
    ) -> None:
        self._request, self._facts, self._store = request, facts, store
        head = {
            "id": response_id,
            "object": "response",
            "created_at": facts.created,
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": facts.model,
            "output": [],
            "usage": None,
            "system_fingerprint": facts.contract,
        }
        self._builder = ResponseBuilder(head | request.echo, encrypted=request.encrypted)
        self._deltas = ChoiceDeltas(request.parsed)
        self._token_ids: list[int] = []
        self._held: list[dict[int, Logprob]] = []  # of tokens that may belong to the reasoning
        self._text_begun = False

    def first(self) -> bytes:
        """The events before the answer."""
        return _encode(self.begin())

    def encode(self, prompt_index: int, chunk: Chunk, output: Callable[[], RequestOutput]) -> bytes:  # noqa: ARG002 - there is one prompt
        """The events of a chunk."""
        if chunk.finish_reason in ("abort", "error") and chunk.stop_reason != ABORTED:
            return b""  # `failed` tells of it
        return _encode(
            self.add(
                chunk.text, chunk.token_ids, chunk.logprobs, output, finished=chunk.finish_reason is not None
            )
        )

    def keep_alive(self) -> bytes:
        """An event: Codex counts the seconds since the last one, and no comment resets its clock."""
        return _encode(self._builder.keep_alive())

    def last(self, outputs: Sequence[RequestOutput], receipts: Receipts | None) -> bytes:
        """The events that complete the response."""
        return b"".join(named_event(event, large=True) for event in self.end(outputs, receipts))

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a response that failed."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        return _encode(self._builder.fail(error.message, code))

    # ---- the same, not encoded

    def begin(self) -> list[Event]:
        """The events before the answer."""
        return self._builder.begin()

    def add(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[dict[int, Logprob]] | None,
        output: Callable[[], RequestOutput],
        *,
        finished: bool,
    ) -> list[Event]:
        """The events of a piece of the answer."""
        deltas = self._deltas.of(text, output, finished=finished)
        entries = None
        if self._request.logprobs:
            begun = finished or any(delta.get("content") for delta in deltas)
            entries = self._entries(token_ids, logprobs or (), output, begun=begun)
        return self._builder.add(deltas, entries)

    def end(self, outputs: Sequence[RequestOutput], receipts: Receipts | None) -> list[Event]:
        """The events that complete the response, which is then stored."""
        (output,) = outputs
        (answer,) = output.outputs
        count = self._request.parsed.count_reasoning
        counts = usage(outputs)
        fields: dict[str, Any] = {
            "completed_at": int(time.time()),
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
                    "cache_write_tokens": 0,
                },
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": 0 if count is None else count(output, answer.token_ids)
                },
                "total_tokens": counts["total_tokens"],
            },
            "seed": answer.seed,
        } | weights_fields(output.contract, output.weights_version)
        if self._request.parsed.return_token_ids:
            fields |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": answer.token_ids}
        if receipts is not None:
            fields["receipt"] = receipts[0]
        details = {"reason": "max_output_tokens"} if answer.finish_reason == "length" else None
        cut = answer.finish_reason in ("length", "abort")  # what failed does not come here
        events = self._builder.end(cut=cut, incomplete_details=details, **fields)
        self._store(events[-1]["response"])
        return events

    def _entries(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[dict[int, Logprob]],
        output: Callable[[], RequestOutput],
        *,
        begun: bool,
    ) -> list[dict[str, Any]]:
        """Log-probabilities of a piece's tokens, without those of the reasoning.

        Where reasoning ends is known when the text after it begins: until then they are held back.
        """
        self._token_ids += token_ids
        self._held += logprobs
        if not begun:
            return []
        first = len(self._token_ids) - len(self._held)
        count = self._request.parsed.count_reasoning
        skipped = count(output(), self._token_ids) if count is not None and not self._text_begun else 0
        self._text_begun = True
        start = max(0, skipped - first)
        tokens, held, self._held = self._token_ids[first + start :], self._held[start:], []
        return _rows(self._request.parsed, tokens, held, self._facts.token_bytes)


def _rows(
    parsed: ParsedRequest,
    token_ids: Sequence[int],
    entries: Sequence[dict[int, Logprob]],
    token_bytes: BytesOfToken,
) -> list[dict[str, Any]]:
    """Log-probabilities as a response has them: bytes are a list, empty where they are not known."""
    found = chat_logprobs(parsed, token_ids, entries, token_bytes)
    rows: list[dict[str, Any]] = [] if found is None else found["content"]
    for row in rows:
        for one in (row, *row["top_logprobs"]):
            one["bytes"] = one["bytes"] or []
    return rows


def _joined(one: bytes, two: bytes) -> bytes:
    """Two JSON lists as one."""
    return b"[" + b",".join(part[1:-1] for part in (one, two) if part != b"[]") + b"]"


def _encode(events: Sequence[Event]) -> bytes:
    return b"".join(map(named_event, events))


__all__ = ["PREFIX", "Records", "ResponseRecord", "ResponsesExchange"]
