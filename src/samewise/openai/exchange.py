"""One request of an endpoint and its answer on the wire: what the server asks of every endpoint that answers.

Completions and chats are here; `openai.responses` and `anthropic` have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from samewise.openai.bodies import CHAT
from samewise.openai.errors import ApiError
from samewise.openai.parse import parse
from samewise.openai.replies import BytesOfToken, DecodeTokens, respond
from samewise.openai.request import DeltaParser, ParsedRequest, ParseOptions
from samewise.openai.stream import DONE, StreamWriter, encode_event, encode_large_event
from samewise.outputs import Chunk, RequestOutput

Receipts = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFacts:
    """What an answer says of the server and of itself."""

    model: str
    created: int  # seconds since 1970
    request_id: str
    contract: str
    decode: DecodeTokens
    token_bytes: BytesOfToken


class EventWriter(Protocol):
    """Writes one answer as server-sent events. Used by one task."""

    def first(self) -> bytes:
        """What is sent before the first chunk; may be empty."""
        ...

    def encode(self, prompt_index: int, chunk: Chunk, output: Callable[[], RequestOutput]) -> bytes:
        """The events of a chunk. `output` returns what is known of the chunk's prompt."""
        ...

    def keep_alive(self) -> bytes:
        """What is sent where nothing else was for a while; clients and proxies give up a silent stream."""
        ...

    def last(self, outputs: Sequence[RequestOutput], receipts: Receipts | None) -> bytes:
        """What ends a complete answer."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """What ends an answer that failed."""
        ...


class Exchange(Protocol):
    """A request and the form of its answer."""

    @property
    def parsed(self) -> ParsedRequest:
        """The request."""
        ...

    @property
    def kept_bytes(self) -> int:
        """About how many bytes of the request stay in memory until its answer ends."""
        ...

    def begun(self) -> None:
        """The request was checked: what only its prompt needed is dropped."""
        ...

    def reply(
        self, facts: AnswerFacts, outputs: Sequence[RequestOutput], receipts: Receipts | None
    ) -> Mapping[str, Any]:
        """The body of a whole answer."""
        ...

    def writer(self, facts: AnswerFacts) -> EventWriter:
        """A writer for a streamed answer."""
        ...


Reader = Callable[[Any, ParseOptions], Exchange]
"""Reads a body, as JSON, under a model's options. Raises ApiError."""


VALUE_BYTES = 32
"""Bytes of memory of a small value, such as a token id in a list. Measured: 8 to 70."""


def kept_bytes(parsed: ParsedRequest) -> int:
    """About how many bytes of a request stay in memory until its answer ends, but for its prompts' tokens."""
    params = parsed.params
    grammar = "" if params.grammar is None else params.grammar.text
    values = [*parsed.prompts, grammar, params.prediction or ""]
    num_ids = len(params.allowed_token_ids or ())
    return sum(len(one) for one in values if isinstance(one, str)) + VALUE_BYTES * num_ids


class OpenAIExchange:
    """A request to `/v1/completions` or `/v1/chat/completions`."""

    def __init__(self, endpoint: str, body: Any, options: ParseOptions) -> None:
        self.parsed = parse(endpoint, body, options)
        self.kept_bytes = kept_bytes(self.parsed)

    def begun(self) -> None:
        """The request was checked: what only its prompt needed is dropped."""
        self.parsed = self.parsed.without_conversation()

    def reply(
        self, facts: AnswerFacts, outputs: Sequence[RequestOutput], receipts: Receipts | None
    ) -> Mapping[str, Any]:
        """The body of a whole answer."""
        return respond(self.parsed, outputs, **self._fields(facts), receipts=receipts)

    def writer(self, facts: AnswerFacts) -> EventWriter:
        """A writer for a streamed answer."""
        return _OpenAIWriter(StreamWriter(self.parsed, **self._fields(facts), fingerprint=facts.contract))

    def _fields(self, facts: AnswerFacts) -> dict[str, Any]:
        return {
            "model": facts.model,
            "created": facts.created,
            "id": ("chatcmpl-" if self.parsed.chat else "cmpl-") + facts.request_id,
            "decode": facts.decode,
            "token_bytes": facts.token_bytes,
        }


class _OpenAIWriter:
    def __init__(self, writer: StreamWriter) -> None:
        self._writer, self.encode = writer, writer.encode

    def first(self) -> bytes:
        """Nothing: the first chunk opens each choice."""
        return b""

    def keep_alive(self) -> bytes:
        """A comment: these streams have no event that adds nothing."""
        return b": keep-alive\n\n"

    def last(self, outputs: Sequence[RequestOutput], receipts: Receipts | None) -> bytes:
        """Usage and receipts, and the end mark."""
        return b"".join(map(encode_event, self._writer.last_events(outputs, receipts))) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error, and the end mark."""
        return encode_event(error.body()) + DONE


def parse_as_chat(chat: Mapping[str, Any], options: ParseOptions, names: Mapping[str, str]) -> ParsedRequest:
    """An agent's request, translated to the body of a chat. `names` are those of the fields before.

    Where the prompt and max_tokens exceed the context, the context ends the answer: agents always ask for as
    much as their own models can write. Raises ApiError.
    """
    try:
        return replace(parse(CHAT, dict(chat), options), fit_max_tokens=True, names=names)
    except ApiError as error:
        error.param = names.get(error.param or "", error.param)
        raise


class ChoiceDeltas:
    """The deltas of the one choice that an agent's request has: reasoning, content and tool calls."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self._parsed = parsed
        self._parser: DeltaParser | None = None

    def of(
        self, text: str, output: Callable[[], RequestOutput], *, finished: bool = False
    ) -> list[dict[str, Any]]:
        """The deltas that a piece of text completes. `finished`: it is the last piece."""
        if self._parsed.make_parser is None:
            return [{"content": text}] if text else []
        if self._parser is None:
            self._parser = self._parsed.make_parser(output(), 0)
        return self._parser.push(text) + (self._parser.flush() if finished else [])


def named_event(body: Mapping[str, Any], *, large: bool = False) -> bytes:
    """One server-sent event with its type as the event's name. `large`: it is encoded in a thread."""
    encode = encode_large_event if large else encode_event
    return b"event: " + str(body["type"]).encode() + b"\n" + encode(body)


__all__ = [
    "VALUE_BYTES",
    "AnswerFacts",
    "ChoiceDeltas",
    "EventWriter",
    "Exchange",
    "OpenAIExchange",
    "Reader",
    "Receipts",
    "kept_bytes",
    "named_event",
    "parse_as_chat",
]
