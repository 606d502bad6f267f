"""One request to `/v1/messages` and its answer, whole or as events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from samewise.anthropic.builder import Event, MessageBuilder
from samewise.anthropic.errors import error_body
from samewise.anthropic.parse import ParsedMessage, parse_message
from samewise.openai.errors import ApiError, unavailable
from samewise.openai.exchange import AnswerFacts, ChoiceDeltas, EventWriter, Receipts, kept_bytes, named_event
from samewise.openai.replies import chat_logprobs, weights_fields
from samewise.openai.request import ParsedRequest, ParseOptions
from samewise.outputs import Chunk, CompletionOutput, RequestOutput


class MessagesExchange:
    """A request for a message."""

    def __init__(self, body: Any, options: ParseOptions) -> None:
        self._request = parse_message(body, options)
        self.kept_bytes = kept_bytes(self.parsed)

    @property
    def parsed(self) -> ParsedRequest:
        """The request, as a chat."""
        return self._request.parsed

    def begun(self) -> None:
        """The request was checked: what only its prompt needed is dropped."""
        self._request = replace(self._request, parsed=self.parsed.without_conversation())

    def reply(
        self, facts: AnswerFacts, outputs: Sequence[RequestOutput], receipts: Receipts | None
    ) -> Mapping[str, Any]:
        """The body of a whole message: its first event, with what the others added."""
        writer = _MessageWriter(self._request, facts)
        (output,) = outputs
        (answer,) = output.outputs
        _refuse_aborted(answer)
        (start,) = writer.begin(output)
        writer.add(answer.text, lambda: output, finished=True)
        *_, delta, _ = writer.end(outputs, receipts)
        message: dict[str, Any] = start["message"] | delta.pop("delta")
        message |= {"content": writer.blocks, "usage": message["usage"] | delta.pop("usage")}
        del delta["type"]
        return message | delta

    def writer(self, facts: AnswerFacts) -> EventWriter:
        """A writer for a streamed message."""
        return _MessageWriter(self._request, facts)


class _MessageWriter:
    """Writes one message as events."""

    def __init__(self, request: ParsedMessage, facts: AnswerFacts) -> None:
        self._request, self._facts, self._begun = request, facts, False
        head = {
            "id": "msg_" + facts.request_id,
            "type": "message",
            "role": "assistant",
            "model": facts.model,
            "system_fingerprint": facts.contract,
        }
        self._builder = MessageBuilder(head, contract=facts.contract, show_thinking=request.show_thinking)
        self._deltas = ChoiceDeltas(request.parsed)

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The message's content."""
        return self._builder.blocks

    def first(self) -> bytes:
        """Nothing: the message begins with its first chunk, when its usage is known."""
        return b""

    def encode(self, prompt_index: int, chunk: Chunk, output: Callable[[], RequestOutput]) -> bytes:  # noqa: ARG002 - there is one prompt
        """The events of a chunk."""
        if chunk.finish_reason in ("abort", "error"):
            return b""  # `failed` tells of it
        events = [] if self._begun else self.begin(output())
        return _encode([*events, *self.add(chunk.text, output, finished=chunk.finish_reason is not None)])

    def keep_alive(self) -> bytes:
        """Anthropic's own event for it, which may come at any time."""
        return named_event({"type": "ping"})

    def last(self, outputs: Sequence[RequestOutput], receipts: Receipts | None) -> bytes:
        """The events that complete the message."""
        return _encode(self.end(outputs, receipts))

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a message that failed."""
        return named_event(error_body(error, self._facts.request_id))

    # ---- the same, not encoded

    def begin(self, output: RequestOutput) -> list[Event]:
        """The event before the answer."""
        self._begun = True
        cached = output.num_cached_tokens
        return self._builder.begin({
            "input_tokens": len(output.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0,
        })  # fmt: skip

    def add(self, text: str, output: Callable[[], RequestOutput], *, finished: bool) -> list[Event]:
        """The events of a piece of the answer."""
        return self._builder.add(self._deltas.of(text, output, finished=finished))

    def end(self, outputs: Sequence[RequestOutput], receipts: Receipts | None) -> list[Event]:
        """The events that complete the message."""
        (output,) = outputs
        (answer,) = output.outputs
        _refuse_aborted(answer)
        parsed = self._request.parsed
        begun = [] if self._begun else self.begin(output)
        usage: dict[str, Any] = {"output_tokens": len(answer.token_ids)}
        if parsed.count_reasoning is not None:
            thought = parsed.count_reasoning(output, answer.token_ids)
            usage["output_tokens_details"] = {"thinking_tokens": thought}
        reason, sequence = self._stop(answer)
        fields: dict[str, Any] = {"seed": answer.seed}
        fields |= weights_fields(output.contract, output.weights_version)
        if parsed.params.logprobs is not None:
            fields["logprobs"] = chat_logprobs(
                parsed, answer.token_ids, answer.logprobs, self._facts.token_bytes
            )
        if parsed.return_token_ids:
            fields |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": answer.token_ids}
        if receipts is not None:
            fields["receipt"] = receipts[0]
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [*begun, *self._builder.end(delta, usage, **fields)]

    def _stop(self, answer: CompletionOutput) -> tuple[str, str | None]:
        """(stop_reason, stop_sequence) in Anthropic's words."""
        if answer.finish_reason == "length":
            limit = self._request.parsed.params.max_tokens
            reached = limit is not None and len(answer.token_ids) >= limit
            return ("max_tokens" if reached else "model_context_window_exceeded"), None
        if isinstance(answer.stop_reason, str):
            return "stop_sequence", answer.stop_reason
        return ("tool_use" if self._builder.called else "end_turn"), None


def _refuse_aborted(answer: CompletionOutput) -> None:
    """Raise if the answer was cut off by a trainer: there is no stop reason that says so."""
    if answer.finish_reason == "abort":
        raise unavailable("a pause or /abort_requests ended the answer; send the request again", "aborted")


def _encode(events: Sequence[Event]) -> bytes:
    return b"".join(map(named_event, events))


__all__ = ["MessagesExchange"]
