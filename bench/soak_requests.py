"""Requests of bench/soak.py: valid ones with their reference answers, and malformed ones."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass

TEMPLATE = (
    "{% if tools %}<tool_call>{% for tool in tools %} {{ tool.function.name }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n\n{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
"""A chat template with tools and reasoning, whose prompts are short: the model's context is 512 bytes."""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": ["Ulm", "Bonn"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
LOOSE = {"type": "function", "function": {"name": "look"}}
THOUGHT = {"regex": "<think>\n[a-c]{2,8}\n</think>\n\n[d-f]{3,6}"}
CHAT_EXTRAS: list[dict] = [
    {},
    {},
    {"tools": [LOOSE], "tool_choice": "auto"},
    {"tools": [TOOL, LOOSE], "tool_choice": "auto"},  # by a grammar, with any text beside calls
    {"tools": [TOOL], "tool_choice": "required", "max_tokens": 90},
    {"structured_outputs": THOUGHT},
]
FOLLOW_UP = {"input": "and then?", "max_output_tokens": 12, "seed": 3, "return_token_ids": True}

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MIB = 2**20


def make_engine(**settings):
    """The engine of the server and of the references: a tiny random model with an end-of-text token."""
    from samewise.testing import tiny_engine

    return tiny_engine(eos=True, **settings)


@dataclass(frozen=True)
class SoakRequest:
    """A request and the `choice_result` of each choice of its verified answer."""

    path: str
    body: dict
    expected: tuple
    follow_up: tuple = ()  # of a response that FOLLOW_UP continues: the same of that; else nothing


def random_bodies(num: int, rng: random.Random) -> list[tuple[str, dict]]:
    """(path, body) of valid requests with many combinations of parameters."""
    words = ["frame", "span", "row", "page", "truth", "guess", "replay", "bit", "crowd", "alone", "ß", "日本"]
    shared = " ".join(rng.choices(words, k=16))  # a common prefix
    requests = []
    for i in range(num):
        text = " ".join(rng.choices(words, k=rng.choice((1, 3, 8, 20))))
        text = f"{shared} {text}"[:220] if i % 3 == 0 else text
        body = {"max_tokens": rng.choice((1, 4, 12, 30, 30, 70)), "seed": i, "return_token_ids": True}
        body["temperature"] = rng.choice((0, 0, 0.8, 1.3))
        if i % 4 == 1:
            body |= {"top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        if i % 5 == 2:
            body |= {"top_k": 20, "min_p": 0.01, "stop": ["q", "zz"]}
        if i % 7 == 3:
            body |= {"ignore_eos": True, "min_tokens": 1}
        if i % 6 == 4:
            body["n"] = 2
        if i % 8 == 5:
            body["proposer"] = "none"
        if i % 9 == 6:
            body["cache_salt"] = f"customer {i % 2}"
        if i % 10 == 7:
            body["response_format"] = {"type": "json_object"}
        if rng.random() < 0.3:
            messages = [{"role": "user", "content": text}]
            chat = body | {"messages": messages, "logprobs": True, "top_logprobs": 2}
            if "response_format" not in chat:
                chat |= rng.choice(CHAT_EXTRAS)
            requests.append((CHAT, chat))
            if "n" not in body:
                requests += [(RESPONSES, as_response(chat)), (MESSAGES, as_message(chat))]
        else:
            echo = {"echo": True} if i % 11 == 8 else {}
            prompt = list(text.encode()) if i % 12 == 9 else text
            requests.append((COMPLETIONS, body | {"prompt": prompt, "logprobs": 1} | echo))
    return requests


def as_response(chat: dict) -> dict:
    """The chat's request as one for a response."""
    body = dict(chat) | {"input": chat["messages"], "max_output_tokens": chat["max_tokens"]}
    body |= {"include": ["message.output_text.logprobs"], "metadata": {"from": "the soak"}}
    if "response_format" in chat:
        body["text"] = {"format": chat["response_format"]}
    if "tools" in chat:  # where log-probabilities are refused
        body["tools"] = [{"type": "function"} | tool["function"] for tool in chat["tools"]]
        body |= {"include": [], "top_logprobs": None}
    return {
        name: body[name]
        for name in body
        if name not in ("messages", "max_tokens", "logprobs", "response_format")
    }


def as_message(chat: dict) -> dict:
    """The chat's request as one for a message."""
    body = dict(chat) | {"metadata": {"user_id": "the soak"}}
    if "stop" in chat:
        body["stop_sequences"] = chat["stop"]
    if "response_format" in chat:
        body["output_config"] = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    if "tools" in chat:
        body["tool_choice"] = {"type": "any" if chat["tool_choice"] == "required" else "auto"}
        body["tools"] = [
            {name: value for name, value in tool["function"].items() if name != "parameters"}
            | {"input_schema": tool["function"].get("parameters", {"type": "object"})}
            for tool in chat["tools"]
        ]
    return {name: body[name] for name in body if name not in ("stop", "response_format")}


def references(bodies: list[tuple[str, dict]]) -> tuple[list[SoakRequest], str]:
    """Answer each request alone, in this process; returns them with their contract id."""
    from samewise import LLM
    from samewise.anthropic.exchange import MessagesExchange
    from samewise.openai.exchange import AnswerFacts, OpenAIExchange
    from samewise.openai.request import ParseOptions
    from samewise.openai.responses.exchange import Records, ResponseRecord, ResponsesExchange

    llm = LLM.over(make_engine(proposer="none", enable_prefix_caching=False, max_num_seqs=1))
    llm.get_tokenizer().chat_template = TEMPLATE
    contract, intake = llm.engine.contract.id, llm._loop.intake
    options = ParseOptions.of(intake, proposer="auto", contract_id=contract)
    facts = AnswerFacts(
        model="x", created=0, request_id="x", contract=contract, decode=intake.decode,
        token_bytes=intake.token_bytes,
    )  # fmt: skip
    stored: dict[str, ResponseRecord] = {}
    records = Records(stored.__getitem__)

    def read(path: str, body: dict):
        if path == RESPONSES:
            keep = lambda record: stored.setdefault(record.id, record)  # noqa: E731
            return ResponsesExchange(body, options, records=records, keep=keep)
        return MessagesExchange(body, options) if path == MESSAGES else OpenAIExchange(path, body, options)

    def reply_to(path: str, body: dict) -> dict:
        exchange = read(path, body)
        parsed = exchange.parsed
        prompt = llm.chat_prompt(parsed.messages, **parsed.template) if parsed.chat else parsed.prompts[0]
        return exchange.reply(facts, llm.generate([prompt], parsed.params, use_tqdm=False), None)

    requests = []
    for path, body in bodies:
        reply = reply_to(path, body)
        follow_up = ()
        if path == RESPONSES and body["max_output_tokens"] != 70:  # whose conversation may not fit
            follow_up = results_of(path, reply_to(path, FOLLOW_UP | {"previous_response_id": reply["id"]}))
        requests.append(SoakRequest(path, body, results_of(path, reply), follow_up))
    return requests, contract


# ---- results: token ids, log-probabilities, what was said, and how it ended


def results_of(path: str, reply: dict) -> tuple:
    """The results of each choice of a whole answer; agents' answers have one."""
    if path == RESPONSES:
        parts = [part for item in reply["output"] for part in item.get("content", [])]
        values = tuple(row["logprob"] for part in parts for row in part.get("logprobs", ()))
        said = tuple(map(item_said, reply["output"]))
        return ((tuple(reply["token_ids"]), values, said, reply["status"]),)
    if path == MESSAGES:
        values = tuple(row["logprob"] for row in reply["logprobs"]["content"])
        said = tuple(as_json(block) for block in reply["content"])
        return ((tuple(reply["token_ids"]), values, said, reply["stop_reason"]),)
    return tuple(choice_result(choice) for choice in reply["choices"])


def item_said(item: dict) -> tuple:
    """What an item of a response says; items and responses have ids of their own."""
    texts = [part["text"] for part in item.get("content", [])]
    return item["type"], *texts, *(item.get(name) for name in ("call_id", "name", "arguments"))


def streamed_results_of(path: str, events: list[dict]) -> tuple:
    """The results of each choice of a stream, joined from its deltas."""
    if path == RESPONSES:
        return streamed_response(events)
    return streamed_message(events) if path == MESSAGES else stream_result(events)


def streamed_response(events: list[dict]) -> tuple:
    items: list[dict] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(dict(event["item"]))
        elif kind == "content_part.added":
            items[-1]["content"] = [dict(event["part"])]
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[-1]["content"][0]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
    (whole,) = results_of(RESPONSES, events[-1]["response"])
    return ((*whole[:2], tuple(map(item_said, items)), whole[3]),)


def streamed_message(events: list[dict]) -> tuple:
    blocks: list[dict] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"].removesuffix("_delta")
            if kind == "input_json":
                blocks[-1]["input"] = json.loads(event["delta"]["partial_json"])
            else:
                blocks[-1][kind] += event["delta"][kind]
    last = next(event for event in events if event["type"] == "message_delta")
    return results_of(MESSAGES, last | {"content": blocks, "stop_reason": last["delta"]["stop_reason"]})


def is_complete(path: str, events: list[dict], *, done: bool) -> bool:
    """Whether a stream was ended as its endpoint ends one. `done`: it had OpenAI's end mark."""
    last = events[-1].get("type") if events else None
    if path == RESPONSES:
        return last in ("response.completed", "response.incomplete")
    return last == "message_stop" if path == MESSAGES else done


def choice_result(choice: dict) -> tuple:
    """What must equal the reference of a choice of a completion or a chat."""
    logprobs, message = choice["logprobs"], choice.get("message", choice)
    values = logprobs["token_logprobs"] if "token_logprobs" in logprobs else [
        one["logprob"] for one in logprobs["content"]
    ]  # fmt: skip
    text = message["text"] if "text" in message else message["content"] or ""
    said = text, message.get("reasoning") or "", tuple(map(call_said, message.get("tool_calls", ())))
    return tuple(choice["token_ids"]), tuple(values), said, choice["finish_reason"]


def call_said(call: dict) -> tuple:
    return call["id"], call["function"]["name"], call["function"]["arguments"]


def stream_result(events: list[dict]) -> tuple:
    """The `choice_result` of each choice of a stream."""
    ids, values, texts, thoughts = (defaultdict(kind) for kind in (list, list, str, str))
    calls, ends = defaultdict(dict), {}
    for event in events:
        for choice in event["choices"]:
            i, logprobs, delta = choice["index"], choice["logprobs"] or {}, choice.get("delta", {})
            ids[i] += choice.get("token_ids") or []
            values[i] += logprobs.get("token_logprobs", []) + [
                one["logprob"] for one in logprobs.get("content", [])
            ]
            texts[i] += choice["text"] if "text" in choice else delta.get("content") or ""
            thoughts[i] += delta.get("reasoning") or ""
            for part in delta.get("tool_calls", ()):
                call = calls[i].setdefault(part["index"], part)
                if call is not part:
                    call["function"]["arguments"] += part["function"]["arguments"]
            ends[i] = choice["finish_reason"] or ends.get(i)
    said = {i: (texts[i], thoughts[i], tuple(map(call_said, calls[i].values()))) for i in ends}
    return tuple((tuple(ids[i]), tuple(values[i]), said[i], ends[i]) for i in sorted(ends))


def as_json(body: object) -> bytes:
    return json.dumps(body).encode()


MALFORMED: list[tuple[str, str, bytes, int]] = [
    ("POST", COMPLETIONS, b"{", 400),
    ("POST", COMPLETIONS, b"\xff\xfe\x00", 400),
    ("POST", COMPLETIONS, b"[]", 400),
    ("POST", COMPLETIONS, b"[" * 100_000, 400),
    ("POST", COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
    ("POST", COMPLETIONS, as_json({}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": 5}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": ["a", ""]}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": [[1, 2], [10**9]]}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": [-1]}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": "x" * 5000}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": "x", "max_tokens": "5"}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": "x", "max_tokens": 10**9}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": "x", "n": 0}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": "x", "n": 128}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": "x", "logprobs": 21}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": "x", "suffix": "y"}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": "x", "model": "other"}), 404),
    ("POST", COMPLETIONS, as_json({"prompt": "x", "response_format": {"type": "json_schema"}}), 400),
    ("POST", COMPLETIONS, as_json({"prompt": "x", "stop": [""] * 100}), 400),
    ("POST", CHAT, as_json({"messages": []}), 400),
    ("POST", CHAT, as_json({"messages": [{"role": "no role", "content": "x"}]}), 400),
    ("POST", CHAT, as_json({"messages": [{"role": "user", "content": 5}]}), 400),
    ("POST", CHAT, b" " * (9 * MIB), 413),
    ("POST", RESPONSES, as_json({"input": "x", "background": True}), 400),
    ("POST", RESPONSES, as_json({"input": [{"type": "unknown"}]}), 400),
    ("POST", RESPONSES, as_json({"input": "x", "previous_response_id": "resp_0"}), 404),
    ("GET", RESPONSES + "/resp_0", b"", 404),
    ("DELETE", RESPONSES + "/resp_0", b"", 404),
    ("POST", MESSAGES, as_json({"messages": [], "max_tokens": 1}), 400),
    ("POST", MESSAGES, as_json({"messages": [{"role": "user", "content": "x"}]}), 400),
    ("POST", MESSAGES + "/count_tokens", b"{", 400),
    ("GET", MESSAGES, b"", 405),
    ("GET", COMPLETIONS, b"", 405),
    ("GET", "/nowhere", b"", 404),
]
"""(method, path, body, status of the error the server must answer with)."""
