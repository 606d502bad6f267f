"""What bench/soak.py asks: requests that make sense with their references, and bodies that make none."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIB = 2**20


def engine(**settings):
    """The engine of server and references: a tiny random model that may end its answers."""
    from samewise.testing import tiny_engine

    return tiny_engine(eos=True, **settings)


@dataclass(frozen=True)
class Ask:
    """A request, and what a verified one must give: per choice, ids, log-probabilities, text, end."""

    path: str
    body: dict
    wanted: tuple | None = None


def bodies(num: int, rng: random.Random) -> list[tuple[str, dict]]:
    """All sorts of requests that make sense."""
    words = ["frame", "span", "row", "page", "truth", "guess", "replay", "bit", "crowd", "alone", "ß", "日本"]
    shared = " ".join(rng.choices(words, k=16))  # a beginning that many have in common
    found = []
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
            found.append((CHAT, body | {"messages": messages, "logprobs": True, "top_logprobs": 2}))
        else:
            echo = {"echo": True} if i % 11 == 8 else {}
            prompt = list(text.encode()) if i % 12 == 9 else text
            found.append((COMPLETIONS, body | {"prompt": prompt, "logprobs": 1} | echo))
    return found


def references(asked: list[tuple[str, dict]]) -> tuple[list[Ask], str]:
    """Each of them alone, in this process, and the contract they were computed under."""
    from samewise import LLM
    from samewise.openai.parse import parse
    from samewise.openai.replies import respond
    from samewise.testing import byte_tokenizer

    llm = LLM.over(engine(proposer="none", enable_prefix_caching=False, max_num_seqs=1))
    found = []
    for path, body in asked:
        parsed = parse(path, body)
        prompt = llm.chat_prompt(parsed.messages, **parsed.template) if parsed.chat else parsed.prompts[0]
        outputs = llm.generate([prompt], parsed.params, use_tqdm=False)
        reply = respond(parsed, outputs, model="x", created=0, id="x", decode=byte_tokenizer().decode)
        found.append(Ask(path, body, tuple(said(choice) for choice in reply["choices"])))
    return found, llm.engine.contract.id


def said(choice: dict) -> tuple:
    """What must be the same: token ids, log-probabilities, text, and why it ended."""
    logprobs = choice["logprobs"]
    values = logprobs["token_logprobs"] if "token_logprobs" in logprobs else [
        one["logprob"] for one in logprobs["content"]
    ]  # fmt: skip
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return tuple(choice["token_ids"]), tuple(values), text, choice["finish_reason"]


def joined(events: list[dict]) -> tuple:
    """The same, from a stream."""
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


def dumped(body: object) -> bytes:
    return json.dumps(body).encode()


MALFORMED: list[tuple[str, str, bytes, int]] = [
    ("POST", COMPLETIONS, b"{", 400),
    ("POST", COMPLETIONS, b"\xff\xfe\x00", 400),
    ("POST", COMPLETIONS, b"[]", 400),
    ("POST", COMPLETIONS, b"[" * 100_000, 400),
    ("POST", COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
    ("POST", COMPLETIONS, dumped({}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": 5}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": ["a", ""]}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": [[1, 2], [10**9]]}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": [-1]}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": "x" * 5000}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": "x", "max_tokens": "5"}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": "x", "max_tokens": 10**9}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": "x", "n": 0}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": "x", "n": 128}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": "x", "logprobs": 21}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": "x", "suffix": "y"}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": "x", "model": "other"}), 404),
    ("POST", COMPLETIONS, dumped({"prompt": "x", "response_format": {"type": "json_schema"}}), 400),
    ("POST", COMPLETIONS, dumped({"prompt": "x", "stop": [""] * 100}), 400),
    ("POST", CHAT, dumped({"messages": []}), 400),
    ("POST", CHAT, dumped({"messages": [{"role": "nobody", "content": "x"}]}), 400),
    ("POST", CHAT, dumped({"messages": [{"role": "user", "content": 5}]}), 400),
    ("POST", CHAT, b" " * (9 * MIB), 413),
    ("POST", "/v1/responses", dumped({"input": "x"}), 404),
    ("GET", COMPLETIONS, b"", 405),
    ("GET", "/nowhere", b"", 404),
]
"""(method, path, body, status): none of these may be answered in any other way."""
