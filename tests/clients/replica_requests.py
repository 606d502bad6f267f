"""Mixed requests for servers over replicas, and what of their answers is a function of the request."""

import json
import time
from typing import Any

import httpx

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object", "properties": {"town": {"enum": ["Ulm", "Bonn"]}}, "required": ["town"],
            },
        },
    }
]  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "top_p": 0.9, "logprobs": True, "top_logprobs": 4},
    {"temperature": 1, "n": 2, "logprobs": True},
    {"temperature": 0.8, "presence_penalty": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"temperature": 1.2, "stop": ["e", "zz", "~"], "min_tokens": 12},
    {"temperature": 1, "response_format": {"type": "json_object"}},
    {"temperature": 0, "tools": TOOLS, "tool_choice": "required"},
    {"temperature": 0, "prediction": {"type": "content", "content": "once upon a time"}},
]


COMPLETION_KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1, "top_k": 40, "n": 3, "logprobs": 1},
    {"temperature": 0.8, "presence_penalty": 0.9, "repetition_penalty": 1.2, "min_tokens": 9},
    {"temperature": 1.2, "stop": ["e", "zz", "~"], "n": 2},
    {"temperature": 1, "structured_outputs": {"regex": "[a-d]{5,60} (yes|no)"}, "logprobs": 0},
]


def requests(num: int, max_tokens: int = 48) -> list[dict[str, Any]]:
    """`num` chat requests of all kinds, each with a seed of its own; some share the beginning of a prompt."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"topic {i % 7}: " + "once upon a time " * (i % 5) + str(i % 11)}
            ],
            "max_completion_tokens": max_tokens + i % 9, "seed": i, "ignore_eos": True,
            "return_token_ids": True,
        }
        | KINDS[i % len(KINDS)]
        for i in range(num)
    ]  # fmt: skip


def completions(num: int, max_tokens: int = 48) -> list[dict[str, Any]]:
    """`num` requests of all kinds for completions, each with a seed of its own."""
    return [
        {
            "prompt": f"topic {i % 7}: " + "once upon a time " * (i % 5), "max_tokens": max_tokens + i % 9,
            "seed": i, "ignore_eos": True, "return_token_ids": True,
        }
        | COMPLETION_KINDS[i % len(COMPLETION_KINDS)]
        for i in range(num)
    ]  # fmt: skip


def mixed(num: int) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of chats and completions of all kinds, every other one of each kind as a stream."""
    chats = [(CHATS, body) for body in requests(num // 2)]
    others = [(COMPLETIONS, body) for body in completions(num - num // 2)]
    kinds = {CHATS: len(KINDS), COMPLETIONS: len(COMPLETION_KINDS)}
    return [
        (path, body | {"stream": body["seed"] // kinds[path] % 2 == 1})
        for pair in zip(chats, others, strict=True)
        for path, body in pair
    ]


def whole(reply: dict[str, Any]) -> list[Any]:
    """Of a complete answer."""
    return [
        (
            choice["index"], *_said(choice), choice["finish_reason"], choice["stop_reason"], choice["seed"],
            choice["token_ids"], _logprobs(choice),
        )
        for choice in reply["choices"]
    ]  # fmt: skip


def _said(choice: dict[str, Any]) -> tuple[str, list[Any]]:
    """Text and calls of a choice of a chat or a completion."""
    message = choice.get("message", {})
    return choice.get("text") or message.get("content") or "", _calls(message)


def _logprobs(choice: dict[str, Any]) -> list[Any] | None:
    """By token, of a chat or a completion; of a choice or a part of it."""
    found = choice["logprobs"]
    if not found:
        return None
    if "content" in found:
        return list(found["content"])
    rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    return [list(row) for row in rows]


def _calls(message: dict[str, Any]) -> list[Any]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []
    ]


class StreamedAnswer:
    """The events of one stream, joined."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.error: Any = None
        self.done = False
        self.longest_wait = 0.0  # seconds, for the next piece of it

    def add(self, line: str) -> None:
        """A line of the event stream."""
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.done = True
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.error = event["error"]
            return
        for choice in event["choices"]:
            into = self.choices.setdefault(
                choice["index"], {"content": "", "calls": {}, "ids": [], "logprobs": None, "end": None}
            )
            delta = choice.get("delta", {})
            into["content"] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                name, arguments = into["calls"].get(call["index"], ("", ""))
                function = call["function"]
                into["calls"][call["index"]] = (
                    name + (function.get("name") or ""), arguments + (function.get("arguments") or ""),
                )  # fmt: skip
            into["ids"] += choice.get("token_ids") or []
            if choice.get("logprobs"):
                into["logprobs"] = (into["logprobs"] or []) + (_logprobs(choice) or [])
            if choice["finish_reason"]:
                into["end"] = choice["finish_reason"], choice["stop_reason"], choice["seed"]

    def result(self) -> list[Any]:
        """In the form of `whole`."""
        return [
            (
                index, one["content"], list(one["calls"].values()), *one["end"], one["ids"], one["logprobs"],
            )
            for index, one in sorted(self.choices.items())
        ]  # fmt: skip


async def streamed(
    client: httpx.AsyncClient, body: dict[str, Any], path: str = CHATS, *, max_pieces: int | None = None
) -> StreamedAnswer:
    """Ask for a stream and read it to its end, or so many pieces of it, and leave."""
    answer = StreamedAnswer()
    num_pieces, last = 0, time.monotonic()
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        held = b""
        async for piece in response.aiter_bytes():  # aiter_lines would also split at separators within a text
            num_pieces += 1
            last, waited = time.monotonic(), time.monotonic() - last
            answer.longest_wait = max(answer.longest_wait, waited)
            if num_pieces == max_pieces:
                break
            *lines, held = (held + piece).split(b"\n")
            for line in lines:
                answer.add(line.decode())
    return answer
