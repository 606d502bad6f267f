"""A request body once it was understood, and the terms under which a server understands one.

Host only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from samewise.outputs import RequestOutput
from samewise.params import SamplingParams

Prompt = str | Sequence[int]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class TextReader(Protocol):
    """Reads one answer's text as it comes, and says it in OpenAI's deltas: content, or calls of tools."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """Add text; returns what became clear."""
        ...

    def flush(self) -> list[dict[str, Any]]:
        """No more text: returns what was held back."""
        ...


MakeReader = Callable[[RequestOutput, int], TextReader]
"""A reader for a choice, given what is known of the prompt and the choice's index."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model's chat template speaks of tools, as far as reading them out of an answer needs it."""

    template: Callable[[Any], str]  # the template's text, given the tools
    special: Mapping[str, int] = field(default_factory=dict)  # tokens that stand for themselves
    contract: str = ""  # names of calls are derived from it


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a server allows in one body, and what it takes where the body says nothing."""

    defaults: SamplingParams = field(default_factory=SamplingParams)  # temperature and the like
    proposer: str | None = None  # the engine's own; None: any known name will do
    receipts: bool = False  # whether a receipt can be given
    dialect: Dialect | None = None  # None: no chat template, or nobody knows it
    max_choices: int = 1024  # prompts × n
    max_n: int = 128
    max_logprobs: int = 20
    max_stops: int = 64
    max_stop_len: int = 1024
    max_listed: int = 1024  # entries of logit_bias, bad_words, stop_token_ids
    max_messages: int = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """A request: prompts (completions) or messages (chat), how to continue them, and how to say it."""

    endpoint: str  # "/v1/completions" or "/v1/chat/completions"
    model: str | None
    params: SamplingParams
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)  # keywords of chat_prompt
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    cache_salt: str | None = None
    receipt: bool = False
    explain: bool = False
    reader: MakeReader | None = field(default=None, compare=False)  # None: the text is content as it stands

    @property
    def chat(self) -> bool:
        """Whether it is a conversation."""
        return self.endpoint == CHAT

    @property
    def prompt_field(self) -> str:
        """The field of the body that says what is to be continued."""
        return "messages" if self.chat else "prompt"

    @property
    def num_choices(self) -> int:
        """How many answers it asks for in all."""
        return self.params.n * (1 if self.chat else len(self.prompts))


__all__ = ["CHAT", "COMPLETIONS", "Dialect", "MakeReader", "Parsed", "Prompt", "Terms", "TextReader"]
