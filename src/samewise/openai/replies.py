"""Answers → OpenAI's response bodies, whole or in chunks. Pure: what goes in is all there is to know.

Log-probabilities travel as JSON numbers that read back to the same bits.

Host only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from samewise.openai.errors import ApiError
from samewise.openai.parsed import Parsed, TextReader
from samewise.openai.sse import dump, event
from samewise.outputs import Chunk, CompletionOutput, Logprob, RequestOutput

Decode = Callable[[list[int]], str]
Spell = Callable[[int], bytes | None]
"""The bytes a token stands for; None where they are not known apart from its neighbours'."""
LEAST = -9999.0  # JSON knows no infinity
MARK = "\0the text of a chunk\0"


def respond(
    parsed: Parsed,
    outputs: Sequence[RequestOutput],
    *,
    model: str,
    created: int,
    id: str,  # noqa: A002 - the wire's own name
    decode: Decode | None = None,
    spell: Spell | None = None,
    receipts: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The whole response. One output per prompt, in order; `decode` is needed to echo token ids."""
    choices: list[dict[str, Any]] = []
    for output in outputs:
        for one in output.outputs:
            choices.append(_choice(parsed, output, one, len(choices), decode, spell))
    body: dict[str, Any] = {
        "id": id,
        "object": "chat.completion" if parsed.chat else "text_completion",
        "created": created,
        "model": model,
        "system_fingerprint": outputs[0].contract,
        "choices": choices,
        "usage": usage(outputs),
    }
    if parsed.chat:
        if parsed.return_token_ids:
            body["prompt_token_ids"] = outputs[0].prompt_token_ids
        if parsed.params.prompt_logprobs is not None:
            body["prompt_logprobs"] = _prompt_logprobs(outputs[0])
    if receipts is not None:
        body["receipt"] = receipts[0] if len(receipts) == 1 else list(receipts)
    return body


def refuse_aborted(outputs: Sequence[RequestOutput]) -> None:
    """An answer that its grammar could not be followed to the end of is no answer."""
    if any(one.finish_reason == "abort" for output in outputs for one in output.outputs):
        raise ApiError(
            "the grammar could not be followed: no token fits, or it is too large; simplify response_format",
            param="response_format", code="grammar_failed",
        )  # fmt: skip


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """What a request took."""
    metrics = [output.metrics for output in outputs]
    return _usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(one.token_ids) for output in outputs for one in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
        sum(one.num_accepted_tokens for one in metrics),
        sum(one.num_guessed_tokens for one in metrics),
    )


def _usage(prompt: int, completion: int, cached: int, accepted: int, guessed: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": guessed - accepted,
            "reasoning_tokens": 0,
        },
    }


def _choice(
    parsed: Parsed,
    output: RequestOutput,
    one: CompletionOutput,
    index: int,
    decode: Decode | None,
    spell: Spell | None,
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    finish = one.finish_reason
    if parsed.chat:
        choice["message"], finish = _message(parsed, output, one)
        choice["logprobs"] = _chat_logprobs(parsed, one.token_ids, one.logprobs, spell)
    else:
        echoed = echo(parsed, output, decode)
        table = Table(parsed)
        if parsed.params.logprobs is not None:
            table.echo(output, decode)
            table.add(one.token_ids, one.logprobs or [])
        choice["text"] = echoed + one.text
        choice["logprobs"] = table.body if parsed.params.logprobs is not None else None
        if parsed.params.prompt_logprobs is not None and not parsed.echo:
            choice["prompt_logprobs"] = _prompt_logprobs(output)
        if parsed.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
    choice |= {"finish_reason": finish, "stop_reason": one.stop_reason, "seed": one.seed}
    if parsed.return_token_ids:
        choice["token_ids"] = one.token_ids
    return choice


def _message(
    parsed: Parsed, output: RequestOutput, one: CompletionOutput
) -> tuple[dict[str, Any], str | None]:
    """What the assistant says, and why it ended: the stream's deltas, put together."""
    message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
    if parsed.reader is None:
        return message, one.finish_reason
    reader = parsed.reader(output, one.index)
    content, calls = "", dict[int, dict[str, Any]]()
    for delta in (*reader.push(one.text), *reader.flush()):
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(
                part["index"], {"id": "", "type": "function", "function": {"arguments": ""}}
            )
            call |= {name: part[name] for name in ("id", "type") if name in part}
            said = part.get("function", {})
            arguments = call["function"]["arguments"] + said.get("arguments", "")
            call["function"] |= said | {"arguments": arguments}
    message["content"] = content if content or not calls else None
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message, _why(one.finish_reason, called=bool(calls))


def _why(finish: str | None, *, called: bool) -> str | None:
    return "tool_calls" if called and finish == "stop" else finish


def echo(parsed: Parsed, output: RequestOutput, decode: Decode | None) -> str:
    """The prompt as it is repeated before the answer, if it is."""
    if not parsed.echo:
        return ""
    if output.prompt is not None and parsed.params.truncate_prompt_tokens is None:
        return output.prompt
    return _decoder(decode)(output.prompt_token_ids)


def _decoder(decode: Decode | None) -> Decode:
    if decode is None:
        raise ValueError("respond() needs decode= to echo token ids")
    return decode


# ---- log-probabilities


class Table:
    """Completions' log-probabilities: four columns that grow together, offsets counted in characters."""

    def __init__(self, parsed: Parsed) -> None:
        self._parsed, self._offset = parsed, 0
        self.body: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def echo(self, output: RequestOutput, decode: Decode | None) -> None:
        """The prompt's own rows; its first token has no probability."""
        if not self._parsed.echo:
            return
        first, *rest = output.prompt_token_ids
        text = f"token_id:{first}" if self._parsed.tokens_as_ids else _decoder(decode)([first])
        self._row(text, None, None)
        self.add(rest, [entry for entry in (output.prompt_logprobs or [])[1:] if entry is not None])

    def add(self, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]]) -> None:
        """Rows of tokens that follow."""
        for token, entry in zip(token_ids, entries, strict=True):
            tops: dict[str, float] = {}
            for other, found in entry.items():
                text = _said(self._parsed, other, found)
                # Two tokens may be written alike (parts of characters are): neither may hide the other.
                tops[f"token_id:{other}" if text in tops else text] = _number(found.logprob)
            self._row(_said(self._parsed, token, entry[token]), _number(entry[token].logprob), tops)

    def _row(self, text: str, logprob: float | None, tops: dict[str, float] | None) -> None:
        self.body["tokens"].append(text)
        self.body["token_logprobs"].append(logprob)
        self.body["top_logprobs"].append(tops)
        self.body["text_offset"].append(self._offset)
        self._offset += len(text)

    def take(self) -> dict[str, list[Any]]:
        """What was added since the last time."""
        taken, self.body = self.body, {name: [] for name in self.body}
        return taken


def _chat_logprobs(
    parsed: Parsed,
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob]] | None,
    spell: Spell | None,
) -> dict[str, Any] | None:
    if entries is None or parsed.params.logprobs is None:
        return None
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        ranked = sorted((found.rank, other) for other, found in entry.items() if found.rank is not None)
        tops = [_token(parsed, other, entry[other], spell) for _, other in ranked]
        content.append(_token(parsed, token, entry[token], spell) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def _token(parsed: Parsed, token: int, found: Logprob, spell: Spell | None) -> dict[str, Any]:
    spelt, text = spell(token) if spell is not None else None, found.decoded_token
    if spelt is None and text is not None and "\ufffd" not in text:  # else part of a character: who knows
        spelt = text.encode("utf-8", "replace")
    return {
        "token": _said(parsed, token, found),
        "logprob": _number(found.logprob),
        "bytes": None if spelt is None else list(spelt),
    }


def _prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": _number(found.logprob),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token, found in entry.items()
        }
        for entry in output.prompt_logprobs or []
    ]


def _said(parsed: Parsed, token: int, found: Logprob) -> str:
    if parsed.tokens_as_ids or found.decoded_token is None:
        return f"token_id:{token}"
    return found.decoded_token


def _number(logprob: float) -> float:
    return max(logprob, LEAST)


# ---- streams


def joined(chunks: Sequence[tuple[int, Chunk]]) -> list[tuple[int, Chunk]]:
    """Chunks that came together, of each choice as one: whoever reads slowly gets fewer, larger events."""
    found: dict[tuple[int, int], Chunk] = {}
    for place, chunk in chunks:
        before = found.get((place, chunk.index))
        found[place, chunk.index] = chunk if before is None else before.then(chunk)
    return [(place, chunk) for (place, _), chunk in found.items()]


class Streamer:
    """One response as chunks. Feed it what became final; it says what goes over the wire, in order."""

    def __init__(
        self,
        parsed: Parsed,
        *,
        model: str,
        created: int,
        id: str,  # noqa: A002 - the wire's own name
        fingerprint: str,
        decode: Decode | None = None,
        spell: Spell | None = None,
    ) -> None:
        self._parsed, self._decode, self._spell = parsed, decode, spell
        self._head: dict[str, Any] = {
            "id": id,
            "object": "chat.completion.chunk" if parsed.chat else "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._begun: set[int] = set()
        self._held: list[tuple[int, Chunk]] = []
        self._tables: dict[int, Table] = {}
        self._readers: dict[int, TextReader] = {}
        self._called: set[int] = set()  # choices that called a tool
        self._prompt = self._completion = self._cached = self._accepted = self._guessed = 0
        aside = (parsed.reader, parsed.params.logprobs)
        more = parsed.return_token_ids or parsed.explain or parsed.continuous_usage
        self._plain = aside == (None, None) and not more  # most chunks are their text and nothing else
        self._forms: dict[int, tuple[bytes, bytes]] = {}

    def wire(self, place: int, chunk: Chunk, prompt: Callable[[], RequestOutput]) -> bytes:
        """The same as `chunk`, as events. Where nothing but text is to be said, the rest is written once."""
        index = place * self._parsed.params.n + chunk.index
        if not self._plain or chunk.finish_reason is not None or index not in self._begun:
            return b"".join(map(event, self.chunk(place, chunk, prompt)))
        form = self._forms.get(index)
        if form is None:
            (said,) = self._say(place, replace(chunk, text=MARK), prompt)
            before, _, after = event(said).rpartition(dump(MARK))
            form = self._forms[index] = (before, after)
        return form[0] + dump(chunk.text) + form[1]

    def chunk(self, place: int, chunk: Chunk, prompt: Callable[[], RequestOutput]) -> list[dict[str, Any]]:
        """What to send of a chunk of the prompt at `place`; `prompt` tells what is known of that prompt."""
        if chunk.finish_reason == "abort":
            return []  # no client knows that reason; `refuse_aborted` tells what happened
        if self._must_wait(place, chunk):
            self._held.append((place, chunk))
            return []
        events = self._say(place, chunk, prompt)
        if not self._held:
            return events
        ready = [held for held in self._held if not self._must_wait(*held)]
        self._held = [held for held in self._held if self._must_wait(*held)]
        for _, held in ready:
            events += self._say(place, held, prompt)
        return events

    def end(
        self, outputs: Sequence[RequestOutput], receipts: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """What comes after the last chunk."""
        last: dict[str, Any] = {}
        if self._parsed.include_usage:
            last["usage"] = usage(outputs)
        if receipts is not None:
            last["receipt"] = receipts[0] if len(receipts) == 1 else list(receipts)
        return [self._head | {"choices": []} | last] if last else []

    def _must_wait(self, place: int, chunk: Chunk) -> bool:
        """The prompt's own log-probabilities come with the first choice: with them, the others follow it."""
        owed = self._parsed.echo and self._parsed.params.logprobs is not None and chunk.index > 0
        return owed and place * self._parsed.params.n not in self._begun

    def _say(self, place: int, chunk: Chunk, prompt: Callable[[], RequestOutput]) -> list[dict[str, Any]]:
        parsed, index = self._parsed, place * self._parsed.params.n + chunk.index
        opening = prompt() if index not in self._begun else None
        self._begun.add(index)
        self._completion += len(chunk.token_ids)
        self._accepted += chunk.num_accepted
        self._guessed += chunk.num_guessed
        if opening is not None and chunk.index == 0:
            self._prompt += len(opening.prompt_token_ids)
            self._cached += opening.num_cached_tokens
        choice: dict[str, Any] = {"index": index}
        events = []
        if parsed.chat:
            if opening is not None:
                events.append(self._event(self._role(index, opening)))
            *before, last = self._deltas(index, chunk, opening)
            events += [
                self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
                for delta in before
            ]
            choice["delta"] = last
            choice["logprobs"] = _chat_logprobs(parsed, chunk.token_ids, chunk.logprobs, self._spell)
        else:
            echoed = echo(parsed, opening, self._decode) if opening is not None else ""
            choice["text"] = echoed + chunk.text
            choice["logprobs"] = self._table(index, chunk, opening)
            if opening is not None and parsed.return_token_ids:
                choice["prompt_token_ids"] = opening.prompt_token_ids
        choice["finish_reason"] = _why(chunk.finish_reason, called=index in self._called)
        if chunk.finish_reason:
            choice |= {"stop_reason": chunk.stop_reason, "seed": chunk.seed}
        if parsed.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        if parsed.explain:
            choice["samewise"] = {"guessed": chunk.num_guessed, "accepted": chunk.num_accepted}
        return [*events, self._event(choice)]

    def _deltas(self, index: int, chunk: Chunk, opening: RequestOutput | None) -> list[dict[str, Any]]:
        """What a chat's chunk adds to its message; one at least."""
        if self._parsed.reader is None:
            return [{"content": chunk.text} if chunk.text or not chunk.finish_reason else {}]
        if opening is not None:
            self._readers[index] = self._parsed.reader(opening, chunk.index)
        reader = self._readers[index]
        deltas = reader.push(chunk.text) + (reader.flush() if chunk.finish_reason else [])
        if any("tool_calls" in delta for delta in deltas):
            self._called.add(index)
        return deltas or [{}]

    def _role(self, index: int, opening: RequestOutput) -> dict[str, Any]:
        """The first of a chat's chunks says who speaks."""
        choice: dict[str, Any] = {"index": index, "delta": {"role": "assistant", "content": ""}}
        if self._parsed.return_token_ids:
            choice["prompt_token_ids"] = opening.prompt_token_ids
        return choice | {"logprobs": None, "finish_reason": None}

    def _table(self, index: int, chunk: Chunk, opening: RequestOutput | None) -> dict[str, list[Any]] | None:
        if self._parsed.params.logprobs is None:
            return None
        table = self._tables.setdefault(index, Table(self._parsed))
        if opening is not None:
            table.echo(opening, self._decode)
        table.add(chunk.token_ids, chunk.logprobs or [])
        return table.take()

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = self._head | {"choices": [choice]}
        if self._parsed.continuous_usage:
            event["usage"] = _usage(
                self._prompt, self._completion, self._cached, self._accepted, self._guessed
            )
        elif self._parsed.include_usage:
            event["usage"] = None
        return event


__all__ = ["Decode", "Spell", "Streamer", "Table", "echo", "joined", "refuse_aborted", "respond", "usage"]
