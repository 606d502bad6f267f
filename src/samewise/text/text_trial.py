"""A digest of what a tokenizer and its chat template do with fixed texts: the contract's fact about text.

Prompts reach the model as token ids, so whatever turns text into ids is part of the promise. The libraries
that do it are named by their versions; the digest shows a difference that no version tells. Host only.
"""

from __future__ import annotations

import json
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from samewise.errors import BadPrompt
from samewise.text.chat_template import asks_for_date, render_chat

TEXTS = (
    "The capital of France is",
    "  two spaces,\ttabs\r\nand 1234567890 numbers: 3.14159, -1e-05, 0x1F",
    "def f(x):\n    return {'a': [x ** 2, \"b\"]}  # comment\n\n\n",
    "Größe, naïve, Ελλάδα, Москва, שלום, العربية, हिन्दी, 日本語の文章、한국어, 中文。",
    "👩‍👩‍👧‍👦 🇫🇷 é vs é, ﬁ ligature, ½, ﷽, zero\u200bwidth, \u00a0nbsp",
    "don't can't won't I'll <|im_end|> </s> [INST] <tool_call>",
)

CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello!"}],
    [
        {"role": "system", "content": "Answer in one word. "},
        {"role": "user", "content": " Two plus two?\n"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "And three?"},
    ],
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Größe & <name>"}},
                "required": ["city"],
            },
        },
    }
]

WITH_TOOLS: tuple[list[dict[str, Any]], ...] = (
    CONVERSATIONS[0],
    [
        {"role": "user", "content": "Is it raining in Paris?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call00001",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Paris"}},
                }
            ],
        },
        {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": '{"rain": true}'},
    ],
)


def text_fact(tokenizer: Any, date: str | None) -> str:
    """Versions of the libraries that turn text into ids, and the digest; "ids only" without a tokenizer.

    jinja2 is named where there is a chat template.
    """
    if tokenizer is None:
        return "ids only"
    results: list[object] = []
    for text in TEXTS:
        ids = list(tokenizer(text)["input_ids"])
        results.append([ids, tokenizer.decode(ids)])
    libraries = f"tokenizers {_version('tokenizers')}"
    templates = getattr(tokenizer, "chat_template", None)
    if templates:
        results.append(templates)  # one, or several by name
        results += [_rendered(tokenizer, conversation, date) for conversation in CONVERSATIONS]
        results += [_rendered(tokenizer, conversation, date, TOOLS) for conversation in WITH_TOOLS]
        libraries += f", jinja2 {_version('jinja2')}"
    digest = sha256(json.dumps(results, ensure_ascii=True, sort_keys=True).encode()).hexdigest()[:16]
    return f"{libraries}, {digest}"


def date_fact(tokenizer: Any, date: str | None) -> str:
    """The configured date if a chat template asks for today's; "none" where no prompt depends on it."""
    templates = getattr(tokenizer, "chat_template", None) or ""
    texts = templates.values() if isinstance(templates, dict) else [templates]
    return date if date and any(asks_for_date(text) for text in texts) else "none"


def _rendered(tokenizer: Any, conversation: list[dict[str, Any]], date: str | None, tools: Any = None) -> str:
    try:
        return render_chat(tokenizer, conversation, date=date, tools=tools)
    except BadPrompt:
        return "refused"  # the template wants a date, or roles in another order


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


__all__ = ["date_fact", "text_fact"]
