"""Answers → server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from samewise.openai.replies import (
    BytesOfToken,
    DecodeTokens,
    LogprobTable,
    chat_logprobs,
    echo,
    encode_line,
    encode_slices,
    encode_text,
    finish_reason,
    one_line,
    reasoning_tokens,
    usage,
    usage_of,
    weights_fields,
)
from samewise.openai.request import DeltaParser, ParsedRequest
from samewise.outputs import ABORTED, Chunk, RequestOutput

DONE = b"data: [DONE]\n\n"
TEXT_PLACEHOLDER = "\0the text of a chunk\0"
"""Stands for a chunk's text while the constant parts of its event are encoded."""


def encode_event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_line(body) + b"\n\n"


def encode_large_event(body: Any) -> bytes:
    """`encode_event`, for a thread: encoding a large body at once would stop every other one."""
    return b"data: " + one_line(b"".join(encode_slices(body))) + b"\n\n"


MAX_EVENT_VALUES = 1024
"""Tokens and log-probabilities of chunks that are joined to one event. Set by hand: encoding them takes about
a millisecond, in which no other client is served."""


def join_chunks(chunks: Sequence[tuple[int, Chunk]]) -> list[tuple[int, Chunk]]:
    """(prompt index, chunk), the chunks of each choice joined: a slow client gets fewer, larger events."""
    complete: list[tuple[int, Chunk]] = []
    joined: dict[tuple[int, int], Chunk] = {}
    for prompt_index, chunk in chunks:
        key = prompt_index, chunk.index
        before = joined.get(key)
        too_large = before is not None and _num_values(before) + _num_values(chunk) > MAX_EVENT_VALUES
        if before is not None and (too_large or not before.precedes(chunk)):
            complete.append((prompt_index, before))
            before = None
        joined[key] = chunk if before is None else before.then(chunk)
    return complete + [(prompt_index, chunk) for (prompt_index, _), chunk in joined.items()]


def _num_values(chunk: Chunk) -> int:
    return len(chunk.token_ids) * (1 + (len(chunk.logprobs[0]) if chunk.logprobs else 0))


class StreamWriter:
    """Writes the chunks of one response as events. Used by one task.

    `output` returns what is known of a chunk's prompt. It is called once per choice, at its first chunk.
    """

    def __init__(
        self,
        parsed: ParsedRequest,
        *,
        model: str,
        created: int,
        id: str,  # noqa: A002 - the field's name
        fingerprint: str,
        decode: DecodeTokens | None = None,
        token_bytes: BytesOfToken | None = None,
    ) -> None:
        self._parsed, self._decode, self._token_bytes = parsed, decode, token_bytes
        self._head: dict[str, Any] = {
            "id": id,
            "object": "chat.completion.chunk" if parsed.chat else "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._begun: set[int] = set()  # choices that had their first chunk
        self._held: list[tuple[int, Chunk]] = []
        self._tables: dict[int, LogprobTable] = {}
        self._parsers: dict[int, DeltaParser] = {}
        self._called: set[int] = set()  # choices that called a tool
        self._prompts: set[int] = set()  # prompts of which a choice had its first chunk
        self._prompt = self._completion = self._cached = self._accepted = self._rejected = 0  # for usage
        self._repeats_prompt = parsed.echo and parsed.params.logprobs is not None
        extras = parsed.return_token_ids or parsed.explain or parsed.continuous_usage
        self._text_only = parsed.make_parser is None and parsed.params.logprobs is None and not extras
        # By choice and contract, where events differ in text alone.
        self._around_text: dict[tuple[int, str], tuple[bytes, bytes]] = {}

    def encode(self, prompt_index: int, chunk: Chunk, output: Callable[[], RequestOutput]) -> bytes:
        """`events`, encoded. Where events differ in their text alone, the constant parts are encoded once."""
        index = prompt_index * self._parsed.params.n + chunk.index
        if not self._text_only or chunk.finish_reason is not None or index not in self._begun:
            encode = encode_large_event if self._repeats_prompt and index not in self._begun else encode_event
            return b"".join(map(encode, self.events(prompt_index, chunk, output)))
        around = self._around_text.get((index, chunk.contract))
        if around is None:
            (event,) = self._events(prompt_index, replace(chunk, text=TEXT_PLACEHOLDER), output)
            before, _, after = encode_event(event).rpartition(encode_line(TEXT_PLACEHOLDER))
            around = self._around_text[index, chunk.contract] = (before, after)
        return b"%b%b%b" % (around[0], encode_text(chunk.text), around[1])

    def events(
        self, prompt_index: int, chunk: Chunk, output: Callable[[], RequestOutput]
    ) -> list[dict[str, Any]]:
        """The events of one chunk."""
        if chunk.finish_reason in ("abort", "error") and chunk.stop_reason != ABORTED:
            return []  # not a reason that clients know; `refuse_aborted` reports it
        if self._must_wait(prompt_index, chunk):
            self._held.append((prompt_index, chunk))
            return []
        events = self._events(prompt_index, chunk, output)
        if not self._held:
            return events
        ready = [held for held in self._held if not self._must_wait(*held)]
        self._held = [held for held in self._held if self._must_wait(*held)]
        for _, held in ready:
            events += self._events(prompt_index, held, output)
        return events

    def last_events(
        self, outputs: Sequence[RequestOutput], receipts: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """The events after the last chunk."""
        last: dict[str, Any] = {}
        if self._parsed.include_usage:
            last["usage"] = usage(outputs, reasoning=reasoning_tokens(self._parsed, outputs))
        if receipts is not None:
            last["receipt"] = receipts[0] if len(receipts) == 1 else list(receipts)
        return [self._head | {"choices": []} | last] if last else []

    def _must_wait(self, prompt_index: int, chunk: Chunk) -> bool:
        """An echoed prompt's log-probabilities arrive with its first choice; the other choices follow it."""
        waits = self._parsed.echo and self._parsed.params.logprobs is not None and chunk.index > 0
        return waits and prompt_index * self._parsed.params.n not in self._begun

    def _events(
        self, prompt_index: int, chunk: Chunk, output: Callable[[], RequestOutput]
    ) -> list[dict[str, Any]]:
        parsed, index = self._parsed, prompt_index * self._parsed.params.n + chunk.index
        opening = output() if index not in self._begun else None
        self._head |= weights_fields(
            chunk.contract or self._head["system_fingerprint"], chunk.weights_version
        )
        choice: dict[str, Any] = {"index": index}
        events = []
        if opening is not None:
            first = not self._begun
            self._begun.add(index)
            self._count_prompt(prompt_index, chunk, opening)
            if parsed.chat and first:
                events += self._roles(opening)
        self._count(chunk)
        if parsed.chat:
            *before, last = self._deltas(index, chunk, opening)
            events += [
                self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
                for delta in before
            ]
            choice["delta"] = last
            choice["logprobs"] = chat_logprobs(parsed, chunk.token_ids, chunk.logprobs, self._token_bytes)
        else:
            echoed = echo(parsed, opening, self._decode) if opening is not None else ""
            choice["text"] = echoed + chunk.text
            choice["logprobs"] = self._table(index, chunk, opening)
            shown = opening is not None and parsed.return_token_ids
            choice["prompt_token_ids"] = opening.prompt_token_ids if opening is not None and shown else None
        choice["finish_reason"] = finish_reason(chunk.finish_reason, called=index in self._called)
        choice["stop_reason"] = chunk.stop_reason
        if chunk.finish_reason:
            choice["seed"] = chunk.seed
        choice["token_ids"] = chunk.token_ids if parsed.return_token_ids else None
        if parsed.explain:
            choice["samewise"] = {"guessed": chunk.num_guessed, "accepted": chunk.num_accepted}
        return [*events, self._event(choice)]

    def _count_prompt(self, prompt_index: int, chunk: Chunk, opening: RequestOutput) -> None:
        if prompt_index not in self._prompts:
            self._prompts.add(prompt_index)
            self._prompt += len(opening.prompt_token_ids)
        if chunk.index == 0:  # which reads the prompt
            self._cached += opening.num_cached_tokens

    def _count(self, chunk: Chunk) -> None:
        self._completion += len(chunk.token_ids)
        self._accepted += chunk.accepted_prediction_tokens
        self._rejected += chunk.rejected_prediction_tokens

    def _deltas(self, index: int, chunk: Chunk, opening: RequestOutput | None) -> list[dict[str, Any]]:
        """What a chunk adds to a chat's message; at least one delta."""
        if self._parsed.make_parser is None:
            return [{"content": chunk.text} if chunk.text or not chunk.finish_reason else {}]
        if opening is not None:
            self._parsers[index] = self._parsed.make_parser(opening, chunk.index)
        parser = self._parsers[index]
        deltas = parser.push(chunk.text) + (parser.flush() if chunk.finish_reason else [])
        if any("tool_calls" in delta for delta in deltas):
            self._called.add(index)
        return deltas or [{}]

    def _roles(self, opening: RequestOutput) -> list[dict[str, Any]]:
        """The first events of a chat, one for each choice: they have no token, and the prompt's ids."""
        ids = opening.prompt_token_ids if self._parsed.return_token_ids else None
        nothing: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        return [
            self._event({"index": index, "delta": {"role": "assistant", "content": ""}} | nothing)
            | {"prompt_token_ids": ids}
            for index in range(self._parsed.params.n)
        ]

    def _table(self, index: int, chunk: Chunk, opening: RequestOutput | None) -> dict[str, list[Any]] | None:
        if self._parsed.params.logprobs is None:
            return None
        table = self._tables.setdefault(index, LogprobTable(self._parsed))
        if opening is not None:
            table.add_prompt(opening, self._decode)
        table.add(chunk.token_ids, chunk.logprobs or [])
        return table.take()

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = self._head | {"choices": [choice]}
        if self._parsed.continuous_usage:
            event["usage"] = usage_of(
                self._prompt, self._completion, self._cached, self._accepted, self._rejected
            )
        elif self._parsed.include_usage:
            event["usage"] = None
        return event


__all__ = ["DONE", "StreamWriter", "encode_event", "encode_large_event", "join_chunks"]
