"""Requests of bench/soak.py: valid ones with their reference answers, and malformed ones."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass

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
    return {name: body[name] for name in body if name not in ("stop", "response_format")}


def references(bodies: list[tuple[str, dict]]) -> tuple[list[SoakRequest], str]:
    """Answer each request alone, in this process; returns them with their contract id."""
    from samewise import LLM
    from samewise.anthropic.exchange import MessagesExchange
    from samewise.openai.exchange import AnswerFacts, OpenAIExchange
    from samewise.openai.parse import ParseOptions
    from samewise.openai.responses.exchange import Records, ResponsesExchange
    from samewise.testing import byte_tokenizer

    def read(path: str, body: dict):
        if path == RESPONSES:
            return ResponsesExchange(body, options, records=Records(lambda _: None), keep=lambda _: None)
        return MessagesExchange(body, options) if path == MESSAGES else OpenAIExchange(path, body, options)

    llm = LLM.over(make_engine(proposer="none", enable_prefix_caching=False, max_num_seqs=1))
    options = ParseOptions()
    facts = AnswerFacts(
        model="x", created=0, request_id="x", contract="x", decode=byte_tokenizer().decode,
        token_bytes=lambda _: None,
    )  # fmt: skip
    requests = []
    for path, body in bodies:
        exchange = read(path, body)
        parsed = exchange.parsed
        prompt = llm.chat_prompt(parsed.messages, **parsed.template) if parsed.chat else parsed.prompts[0]
        outputs = llm.generate([prompt], parsed.params, use_tqdm=False)
        requests.append(SoakRequest(path, body, results_of(path, exchange.reply(facts, outputs, None))))
    return requests, llm.engine.contract.id


def results_of(path: str, reply: dict) -> tuple:
    """The results of each choice of a whole answer; agents' answers have one."""
    if path == RESPONSES:
        (message,) = reply["output"]
        (part,) = message["content"]
        values = tuple(row["logprob"] for row in part["logprobs"])
        return ((tuple(reply["token_ids"]), values, part["text"], reply["status"]),)
    if path == MESSAGES:
        text = "".join(block["text"] for block in reply["content"])
        values = tuple(row["logprob"] for row in reply["logprobs"]["content"])
        return ((tuple(reply["token_ids"]), values, text, reply["stop_reason"]),)
    return tuple(choice_result(choice) for choice in reply["choices"])


def streamed_results_of(path: str, events: list[dict]) -> tuple:
    """The results of each choice of a stream."""
    if path == RESPONSES:
        whole = results_of(path, events[-1]["response"])
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        return ((*whole[0][:2], text, whole[0][3]),)
    if path == MESSAGES:
        deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        last = next(event for event in events if event["type"] == "message_delta")
        text = [{"text": "".join(deltas)}]
        return results_of(path, last | {"content": text, "stop_reason": last["delta"]["stop_reason"]})
    return stream_result(events)


def is_complete(path: str, events: list[dict], *, done: bool) -> bool:
    """Whether a stream was ended as its endpoint ends one. `done`: it had OpenAI's end mark."""
    last = events[-1].get("type") if events else None
    if path == RESPONSES:
        return last in ("response.completed", "response.incomplete")
    return last == "message_stop" if path == MESSAGES else done


def choice_result(choice: dict) -> tuple:
    """What must equal the reference: token ids, log-probabilities, text, finish reason."""
    logprobs = choice["logprobs"]
    values = logprobs["token_logprobs"] if "token_logprobs" in logprobs else [
        one["logprob"] for one in logprobs["content"]
    ]  # fmt: skip
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return tuple(choice["token_ids"]), tuple(values), text, choice["finish_reason"]


def stream_result(events: list[dict]) -> tuple:
    """The `choice_result` of each choice of a stream."""
    ids, values, texts, ends = defaultdict(list), defaultdict(list), defaultdict(str), {}
    for event in events:
        for choice in event["choices"]:
            i, logprobs = choice["index"], choice["logprobs"] or {}
            ids[i] += choice.get("token_ids", [])
            values[i] += logprobs.get("token_logprobs", []) + [
                one["logprob"] for one in logprobs.get("content", [])
            ]
            texts[i] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            ends[i] = choice["finish_reason"] or ends.get(i)
    return tuple((tuple(ids[i]), tuple(values[i]), texts[i], ends[i]) for i in sorted(ends))


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
