"""Answers → OpenAI's response bodies. Log-probabilities are JSON numbers that read back to the same bits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from samewise.openai.bodies import CompletionReply, Usage
from samewise.openai.errors import ApiError
from samewise.openai.reasoning import DecodeTokens
from samewise.openai.request import ParsedRequest
from samewise.outputs import ABORTED, CompletionOutput, Logprob, RequestOutput

BytesOfToken = Callable[[int], bytes | None]
"""The bytes a token stands for; None where they depend on its neighbours."""

MIN_LOGPROB = -9999.0
"""Written for minus infinity, which JSON cannot express. OpenAI's value."""


# One encoder each: json.dumps() with these options would construct one per call.
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_ENCODE_ASCII = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def encode_json(body: Any) -> bytes:
    """JSON in UTF-8; where a text holds a lone surrogate, which UTF-8 cannot express, escaped."""
    try:
        return _ENCODE(body).encode()
    except UnicodeEncodeError:
        return _ENCODE_ASCII(body).encode()


LINE_ENDS = "\u0085\u2028\u2029"
"""Characters beyond ASCII at which readers of lines split, httpx's `iter_lines` among them. JSON escapes
those of ASCII anyway."""

_ESCAPES = [(char.encode(), rf"\u{ord(char):04x}".encode()) for char in LINE_ENDS]


def encode_line(body: Any) -> bytes:
    """`encode_json`, with LINE_ENDS escaped: one line to every reader, and the same values."""
    return one_line(encode_json(body))


def encode_text(text: str) -> bytes:
    """`encode_line` of a text."""
    return _ENCODE(text).encode() if text.isascii() else encode_line(text)


def one_line(encoded: bytes) -> bytes:
    """JSON in UTF-8 with LINE_ENDS escaped."""
    for char, escape in _ESCAPES:  # in UTF-8 no other character contains these bytes
        encoded = encoded.replace(char, escape)
    return encoded


SLICE_DEPTH = 4
SLICE_ITEMS = 32
"""Down to this depth a body is encoded value by value, below it so many items of a list at a time, and value
by value where there is a longer list. Choices are at depth 2, their log-probabilities at 4, those of a
response at 5 or 6. Set by hand: a slice takes about a millisecond."""


def encode_slices(body: Any, depth: int = 0) -> Iterator[bytes]:
    """`encode_json`, in slices. Encoding a large body at once would stop every thread of the process."""
    if isinstance(body, dict) and (depth < SLICE_DEPTH or _has_long_list(body)):
        separator = b"{"
        for name, value in body.items():
            yield separator + encode_json(name) + b":"
            yield from encode_slices(value, depth + 1)
            separator = b","
        yield b"}" if body else b"{}"
    elif isinstance(body, list) and body:
        deep = depth < SLICE_DEPTH or (len(body) <= SLICE_ITEMS and any(map(_has_long_list, body)))
        nested = deep and isinstance(body[0], dict | list)
        size = 1 if nested else SLICE_ITEMS if isinstance(body[0], dict | list) else 32 * SLICE_ITEMS
        for start in range(0, len(body), size):
            yield b"," if start else b"["
            if nested:
                yield from encode_slices(body[start], depth + 1)
            else:
                yield encode_json(body[start : start + size])[1:-1]
        yield b"]"
    else:
        yield encode_json(body)


def _has_long_list(value: Any) -> bool:
    return isinstance(value, dict) and any(
        isinstance(one, list) and len(one) > SLICE_ITEMS for one in value.values()
    )


NULLS: dict[str, Any] = {
    "service_tier": None,
    "prompt_logprobs": None,
    "prompt_token_ids": None,
    "prompt_text": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}
"""Keys of a chat's reply that vLLM sends as null, where nothing else was asked for or there is nothing."""

COMPLETION_NULLS = {name: None for name in NULLS if not name.startswith("prompt_")}
"""The same of a completion, whose choices have those of the prompt."""

MESSAGE_NULLS: dict[str, Any] = {
    "refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None,
}  # fmt: skip
"""The same of a chat's message."""

CHOICE_NULLS: dict[str, Any] = {"token_ids": None, "routed_experts": None, "weight_versions": None}
"""The same of a choice."""


def respond(
    parsed: ParsedRequest,
    outputs: Sequence[RequestOutput],
    *,
    model: str,
    created: int,
    id: str,  # noqa: A002 - the field's name
    decode: DecodeTokens | None = None,
    token_bytes: BytesOfToken | None = None,
    receipts: Sequence[Mapping[str, Any]] | None = None,
) -> CompletionReply:
    """The response body. One output per prompt, in order; `decode` is needed to echo token ids."""
    choices: list[dict[str, Any]] = []
    for output in outputs:
        for completion in output.outputs:
            choices.append(_choice(parsed, output, completion, len(choices), decode, token_bytes))
    body: Any = {
        "id": id,
        "object": "chat.completion" if parsed.chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(outputs, reasoning=reasoning_tokens(parsed, outputs)),
    } | (NULLS if parsed.chat else COMPLETION_NULLS)
    last = max(outputs, key=lambda output: output.weights_version)
    body |= weights_fields(last.contract, last.weights_version)
    if parsed.chat:
        body |= _of_prompt(parsed, outputs[0])
    if receipts is not None:
        body["receipt"] = receipts[0] if len(receipts) == 1 else list(receipts)
    reply: CompletionReply = body
    return reply


def _of_prompt(parsed: ParsedRequest, output: RequestOutput) -> dict[str, Any]:
    """What a reply says of a prompt, null where it was not asked for."""
    scores = None if parsed.prompt_logprobs is None else _prompt_logprobs(output, parsed.prompt_logprobs)
    ids = output.prompt_token_ids if parsed.return_token_ids else None
    return {"prompt_logprobs": scores, "prompt_token_ids": ids}


def refuse_aborted(outputs: Sequence[RequestOutput]) -> None:
    """Raise if a choice was aborted, because its grammar could not be followed to the end, or failed."""
    reasons = {
        completion.finish_reason
        for output in outputs
        for completion in output.outputs
        if completion.stop_reason != ABORTED
    }
    if "error" in reasons:
        raise ApiError(
            "the request failed; the server's log says how",
            status=500, kind="server_error", code="request_failed",
        )  # fmt: skip
    if "abort" in reasons:
        raise ApiError(
            "the grammar could not be followed: no token fits, or it is too large; simplify response_format",
            param="response_format", code="grammar_failed",
        )  # fmt: skip


def weights_fields(contract: str, version: int) -> dict[str, Any]:
    """The fields of a response that say which weights its last token is of."""
    return {"system_fingerprint": contract, "weights_version": version}


def reasoning_tokens(parsed: ParsedRequest, outputs: Sequence[RequestOutput]) -> int:
    """Tokens of finished answers that are reasoning."""
    count = parsed.count_reasoning
    if count is None:
        return 0
    return sum(count(output, completion.token_ids) for output in outputs for completion in output.outputs)


def usage(outputs: Sequence[RequestOutput], *, reasoning: int = 0) -> Usage:
    """Tokens of a finished request."""
    completions = [completion for output in outputs for completion in output.outputs]
    return usage_of(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for completion in completions),
        sum(output.num_cached_tokens for output in outputs),
        sum(completion.accepted_prediction_tokens for completion in completions),
        sum(completion.rejected_prediction_tokens for completion in completions),
        reasoning,
    )


def usage_of(
    prompt: int, completion: int, cached: int, accepted: int, rejected: int, reasoning: int = 0
) -> Usage:
    """The `usage` field from its counts. `accepted` and `rejected`: tokens of the request's prediction."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
            "reasoning_tokens": reasoning,
        },
    }


def echo(parsed: ParsedRequest, output: RequestOutput, decode: DecodeTokens | None) -> str:
    """The prompt's text where the answer repeats it, else nothing."""
    if not parsed.echo:
        return ""
    if output.prompt is not None and parsed.params.truncate_prompt_tokens is None:
        return output.prompt
    return _decoder(decode)(output.prompt_token_ids)


def finish_reason(reason: str | None, *, called: bool) -> str | None:
    """The reason in OpenAI's words: `tool_calls` for a choice that ended by itself after calling a tool."""
    return "tool_calls" if called and reason == "stop" else reason


def _choice(
    parsed: ParsedRequest,
    output: RequestOutput,
    completion: CompletionOutput,
    index: int,
    decode: DecodeTokens | None,
    token_bytes: BytesOfToken | None,
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    reason = completion.finish_reason
    if parsed.chat:
        choice["message"], reason = _message(parsed, output, completion)
        choice["logprobs"] = chat_logprobs(parsed, completion.token_ids, completion.logprobs, token_bytes)
    else:
        choice["text"] = echo(parsed, output, decode) + completion.text
        choice["logprobs"] = None
        if parsed.params.logprobs is not None:
            table = LogprobTable(parsed)
            table.add_prompt(output, decode)
            table.add(completion.token_ids, completion.logprobs or [])
            choice["logprobs"] = table.columns
        choice |= _of_prompt(parsed, output)
    choice |= CHOICE_NULLS
    choice |= {"finish_reason": reason, "stop_reason": completion.stop_reason, "seed": completion.seed}
    if parsed.return_token_ids:
        choice["token_ids"] = completion.token_ids
    if len(completion.weights) > 1:
        choice["weights"] = [asdict(span) for span in completion.weights]
    return choice


def _message(
    parsed: ParsedRequest, output: RequestOutput, completion: CompletionOutput
) -> tuple[dict[str, Any], str | None]:
    """The assistant's message, and the finish reason: the deltas of the stream, joined."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.text} | MESSAGE_NULLS
    if parsed.make_parser is None:
        return message, completion.finish_reason
    parser = parsed.make_parser(output, completion.index)
    content, reasoning, calls = "", "", dict[int, dict[str, Any]]()
    for delta in (*parser.push(completion.text), *parser.flush()):
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(
                part["index"], {"id": "", "type": "function", "function": {"arguments": ""}}
            )
            call |= {name: part[name] for name in ("id", "type") if name in part}
            function = part.get("function", {})
            arguments = call["function"]["arguments"] + function.get("arguments", "")
            call["function"] |= function | {"arguments": arguments}
    message["content"] = content if content or not (calls or reasoning) else None
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message, finish_reason(completion.finish_reason, called=bool(calls))


def _decoder(decode: DecodeTokens | None) -> DecodeTokens:
    if decode is None:
        raise ValueError("respond() needs decode= to echo token ids")
    return decode


# ---- log-probabilities


class LogprobTable:
    """Log-probabilities of a completion: four columns of equal length; offsets count characters."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self._parsed, self._offset = parsed, 0
        self.columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def add_prompt(self, output: RequestOutput, decode: DecodeTokens | None) -> None:
        """Rows of the prompt, where it is echoed; its first token has no log-probability."""
        if not self._parsed.echo:
            return
        first, *others = output.prompt_token_ids
        text = f"token_id:{first}" if self._parsed.tokens_as_ids else _decoder(decode)([first])
        self._add_row(text, None, None)
        most = self._parsed.params.logprobs or 0
        rows = [_limited(entry, most) for entry in (output.prompt_logprobs or [])[1:] if entry is not None]
        self.add(others, rows)

    def add(self, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]]) -> None:
        """Rows of the tokens that follow."""
        for token, entry in zip(token_ids, entries, strict=True):
            tops: dict[str, float] = {}
            for other, logprob in entry.items():
                text = _token_text(self._parsed, other, logprob)
                # Tokens that are parts of characters have equal texts; the id keeps both in the table.
                tops[f"token_id:{other}" if text in tops else text] = finite(logprob.logprob)
            text = _token_text(self._parsed, token, entry[token])
            self._add_row(text, finite(entry[token].logprob), tops)

    def take(self) -> dict[str, list[Any]]:
        """The rows added since the last call."""
        taken, self.columns = self.columns, {name: [] for name in self.columns}
        return taken

    def _add_row(self, text: str, logprob: float | None, tops: dict[str, float] | None) -> None:
        self.columns["tokens"].append(text)
        self.columns["token_logprobs"].append(logprob)
        self.columns["top_logprobs"].append(tops)
        self.columns["text_offset"].append(self._offset)
        self._offset += len(text)


def chat_logprobs(
    parsed: ParsedRequest,
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob]] | None,
    token_bytes: BytesOfToken | None,
) -> dict[str, Any] | None:
    """Log-probabilities of a chat's choice; None unless they were asked for."""
    if entries is None or parsed.params.logprobs is None:
        return None
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        tops = [_chat_token(parsed, other, entry[other], token_bytes) for other in _listed(parsed, entry)]
        content.append(_chat_token(parsed, token, entry[token], token_bytes) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def _listed(parsed: ParsedRequest, entry: Mapping[int, Logprob]) -> list[int]:
    """The alternatives of a chat's token, in order: the most probable tokens, or those that were named."""
    named = parsed.params.logprob_token_ids
    if named is not None:
        return sorted((token for token in entry if token in named), key=lambda t: (-entry[t].logprob, t))
    most = parsed.params.logprobs or 0
    ranked = [(one.rank, token) for token, one in entry.items() if one.rank is not None and one.rank <= most]
    return [token for _, token in sorted(ranked)]


def _limited(entry: Mapping[int, Logprob], most: int) -> dict[int, Logprob]:
    """The chosen token, which stands first, and the `most` most probable ones."""
    chosen = next(iter(entry))
    return {
        token: one
        for token, one in entry.items()
        if token == chosen or (one.rank is not None and one.rank <= most)
    }


def _chat_token(
    parsed: ParsedRequest, token: int, logprob: Logprob, token_bytes: BytesOfToken | None
) -> dict[str, Any]:
    data, text = token_bytes(token) if token_bytes is not None else None, logprob.decoded_token
    if data is None and text is not None and "\ufffd" not in text:  # U+FFFD: a part of a character
        data = text.encode("utf-8", "replace")
    return {
        "token": _token_text(parsed, token, logprob),
        "logprob": finite(logprob.logprob),
        "bytes": None if data is None else list(data),
    }


def _prompt_logprobs(output: RequestOutput, most: int) -> list[dict[str, Any] | None]:
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token, logprob in _limited(entry, most).items()
        }
        for entry in output.prompt_logprobs or []
    ]


def _token_text(parsed: ParsedRequest, token: int, logprob: Logprob) -> str:
    if parsed.tokens_as_ids or logprob.decoded_token is None:
        return f"token_id:{token}"
    return logprob.decoded_token


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold. Raises ApiError for one that is no number."""
    if math.isnan(logprob):
        raise ApiError(
            "a log-probability is not a number: the model's weights are damaged",
            status=500, kind="server_error", code="request_failed",
        )  # fmt: skip
    return max(logprob, MIN_LOGPROB)


__all__ = [
    "CHOICE_NULLS",
    "COMPLETION_NULLS",
    "LINE_ENDS",
    "MESSAGE_NULLS",
    "MIN_LOGPROB",
    "NULLS",
    "BytesOfToken",
    "DecodeTokens",
    "LogprobTable",
    "chat_logprobs",
    "echo",
    "encode_json",
    "encode_line",
    "encode_slices",
    "encode_text",
    "finish_reason",
    "finite",
    "one_line",
    "reasoning_tokens",
    "refuse_aborted",
    "respond",
    "usage",
    "usage_of",
    "weights_fields",
]
