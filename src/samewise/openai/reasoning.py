"""Reasoning: what a model says between its thinking marks, apart from its answer.

    marks     <think>…</think>, [THINK]…[/THINK] and others      Qwen3, DeepSeek-R1 and their kind
    channels  <|channel|>analysis<|message|>…<|end|>             gpt-oss and its kind

The chat template names the marks, else the tokenizer's vocabulary does. A template may open the marks itself,
at the end of the prompt: the answer then begins inside of them. Newlines beside a mark belong to it. The
result depends on the text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from samewise.openai.errors import invalid
from samewise.openai.tool_calls import ToolCallParser

DecodeTokens = Callable[[list[int]], str]

MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thought>", "</thought>"),
)
"""Opening and closing marks of model families. The first pair that a template names is the model's."""

CHANNEL, START, MESSAGE, END = "<|channel|>", "<|start|>", "<|message|>", "<|end|>"
_MESSAGE_ENDS = (END, START, CHANNEL, "<|return|>", "<|call|>")
_FINAL = CHANNEL + "final"

TAIL_TOKENS = 64
"""Tokens at the end of a prompt, and at the start of an answer, in which opening marks are looked for. A
template writes a few words there; a tokenizer of bytes needs about fifty tokens for them."""

_WORD = re.compile(r"[A-Za-z0-9_.\-]{1,32}")
_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)


class Piece(NamedTuple):
    """A piece of an answer's text."""

    text: str
    reasoning: bool


class Splitter(Protocol):
    """Splits a text that grows into reasoning and content."""

    def push(self, text: str) -> list[Piece]:
        """Add text; returns the pieces that it completes."""
        ...

    def flush(self) -> list[Piece]:
        """The text has ended: returns what was held back."""
        ...


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model writes its reasoning. `special`: a mark is a special token, which the text must keep."""

    opening: str
    closing: str
    special: bool = False

    @property
    def channels(self) -> bool:
        """Whether messages in channels take the place of marks."""
        return self.opening == CHANNEL

    def splitter(self, before: str) -> Splitter:
        """A splitter for the text that follows `before`, the end of the prompt."""
        if self.channels:
            return ChannelSplitter(before)
        return MarkSplitter(self, inside=self.opens(before))

    def opens(self, before: str) -> bool:
        """Whether a text leaves the marks open at its end."""
        if not self.channels:
            return before.rstrip().endswith(self.opening)
        header = before.rpartition(START)[2]
        return MESSAGE in header and _is_analysis(header)

    def num_tokens(self, before: str, token_ids: Sequence[int], decode: DecodeTokens) -> int:
        """How many of an answer's tokens are reasoning, its marks included."""
        head = decode(list(token_ids[:TAIL_TOKENS])).lstrip()
        begun = _is_analysis(head.partition(MESSAGE)[0]) if self.channels else head.startswith(self.opening)
        if not begun and not self.opens(before):
            return 0
        text = decode(list(token_ids))
        closing = _FINAL if self.channels else self.closing
        if closing not in text:
            return len(token_ids)
        low, high = 1, len(token_ids)  # the smallest number of tokens whose text has the closing mark
        while low < high:
            middle = (low + high) // 2
            if closing in decode(list(token_ids[:middle])):
                high = middle
            else:
                low = middle + 1
        return low


def reasoning_format_of(
    template: str | None, tokens: Collection[str] = (), special: Collection[str] = ()
) -> ReasoningFormat | None:
    """The format of a model. None: its answers have no reasoning.

    `tokens` are the tokenizer's own words beside its vocabulary of text, `special` those that are special.
    """
    text = template or ""
    if CHANNEL in text and "analysis" in text:
        return ReasoningFormat(CHANNEL, MESSAGE, special=CHANNEL in special)
    for opening, closing in MARKS:
        if closing in text or (opening in tokens and closing in tokens):
            return ReasoningFormat(opening, closing, special=opening in special or closing in special)
    return None


class MarkSplitter:
    """Reasoning between two marks, before the content. `inside`: the prompt has opened them."""

    def __init__(self, marks: ReasoningFormat, *, inside: bool) -> None:
        self._marks, self._text = marks, ""
        self._state: Callable[[], list[Piece] | None] = self._opened if inside else self._start

    def push(self, text: str) -> list[Piece]:
        """Add text; returns the pieces that it completes."""
        self._text += text
        pieces: list[Piece] = []
        while (more := self._state()) is not None:
            pieces += more
        return pieces

    def flush(self) -> list[Piece]:
        """The text has ended: returns what was held back."""
        inside = self._state in (self._opened, self._inside)
        text, self._text = self._text, ""
        if self._state == self._after or not text:
            return []
        return [Piece(text, inside)]

    # ---- states: each consumes a part of `_text`; None: more text is needed

    def _start(self) -> list[Piece] | None:
        """At the start of the answer, outside of the marks."""
        text, opening = self._text.lstrip(), self._marks.opening
        if len(text) < len(opening) and opening.startswith(text):
            return None
        if text.startswith(opening):
            self._text, self._state = text[len(opening) :], self._opened
        else:
            self._state = self._outside
        return []

    def _opened(self) -> list[Piece] | None:
        """After the opening mark: newlines, and the mark again where prompt and model both wrote it."""
        text, opening = self._text.lstrip("\n"), self._marks.opening
        if len(text) < len(opening) and opening.startswith(text):
            return None
        if text.startswith(opening):
            self._text = text[len(opening) :]
        else:
            self._text, self._state = text, self._inside
        return []

    def _inside(self) -> list[Piece] | None:
        text, closing = self._text, self._marks.closing
        at = text.find(closing)
        if at >= 0:
            self._text, self._state = text[at + len(closing) :], self._after
            return _pieces(text[:at].rstrip("\n"), reasoning=True)
        cut = len(text) - held_len(text, (closing,))
        cut = len(text[:cut].rstrip("\n"))  # newlines before the closing mark belong to it
        self._text = text[cut:]
        return _pieces(text[:cut], reasoning=True) or None

    def _after(self) -> list[Piece] | None:
        """After the closing mark: newlines."""
        self._text = self._text.lstrip("\n")
        if not self._text:
            return None
        self._state = self._outside
        return []

    def _outside(self) -> list[Piece] | None:
        text, self._text = self._text, ""
        return _pieces(text, reasoning=False) or None


class ChannelSplitter:
    """Messages in channels: `analysis` is reasoning, every other channel is content."""

    def __init__(self, before: str) -> None:
        self._text, self._said, self._apart = "", False, False
        header = before.rpartition(START)[2]
        self._in_body = START in before and MESSAGE in header
        self._reasoning = self._in_body and _is_analysis(header)

    def push(self, text: str) -> list[Piece]:
        """Add text; returns the pieces that it completes."""
        self._text += text
        pieces: list[Piece] = []
        while (more := self._body() if self._in_body else self._header()) is not None:
            pieces += more
        return pieces

    def flush(self) -> list[Piece]:
        """The text has ended: returns what was held back. A header that was cut off is dropped."""
        text, self._text = self._text, ""
        return self._said_more(text) if self._in_body else []

    def _header(self) -> list[Piece] | None:
        """What stands before a message's text: its role, channel and recipient."""
        text = self._text.lstrip()
        at = text.find(MESSAGE)
        if at >= 0:
            self._text, self._in_body = text[at + len(MESSAGE) :], True
            self._reasoning = _is_analysis(text[:at])
            self._apart = self._said
            return []
        if not text or text.startswith("<|") or "<|".startswith(text):
            return None
        self._in_body, self._reasoning = True, False  # a model that writes no header
        return []

    def _body(self) -> list[Piece] | None:
        text = self._text
        ends = [at for mark in _MESSAGE_ENDS if (at := text.find(mark)) >= 0]
        if not ends:
            cut = len(text) - held_len(text, _MESSAGE_ENDS)
            self._text = text[cut:]
            return self._said_more(text[:cut]) or None
        at = min(ends)
        mark = next(mark for mark in _MESSAGE_ENDS if text.startswith(mark, at))
        # A channel or a start belongs to the header that follows.
        self._text = text[at:] if mark in (START, CHANNEL) else text[at + len(mark) :]
        self._in_body = False
        return self._said_more(text[:at])

    def _said_more(self, text: str) -> list[Piece]:
        """A message's text; a second reasoning message begins on a line of its own."""
        if not text:
            return []
        if self._reasoning and self._apart:
            text = "\n" + text
        self._apart = False
        self._said = self._said or self._reasoning
        return [Piece(text, self._reasoning)]


class AnswerParser:
    """One choice's text as OpenAI's deltas: reasoning, content and tool calls.

    `show`: whether reasoning is part of the answer; it is left out otherwise.
    """

    def __init__(self, splitter: Splitter, tools: ToolCallParser | None, *, show: bool = True) -> None:
        self._splitter, self._tools, self._show = splitter, tools, show

    def push(self, text: str) -> list[dict[str, Any]]:
        """Add text; returns the deltas that it completes."""
        return self._deltas(self._splitter.push(text))

    def flush(self) -> list[dict[str, Any]]:
        """The text has ended: returns what was held back."""
        deltas = self._deltas(self._splitter.flush())
        return deltas + (self._tools.flush() if self._tools is not None else [])

    def _deltas(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for text, reasoning in pieces:
            if reasoning:
                deltas += [{"reasoning": text, "reasoning_content": text}] if self._show else []
            else:
                deltas += [{"content": text}] if self._tools is None else self._tools.push(text)
        return deltas


# ---- what reaches the chat template


def thinking_kwargs(
    template: str | None,
    *,
    enable_thinking: bool | None = None,
    reasoning_effort: str | None = None,
    verbosity: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fields about reasoning as template variables, where the template knows them; elsewhere they pass.

    The effort `none` is `enable_thinking: false` for a template that knows that and no effort; templates that
    call it `thinking` are given that. `given` is the body's chat_template_kwargs, which must not contradict.
    """
    if enable_thinking is None and reasoning_effort is None and verbosity is None:
        return {}
    code = " ".join(_CODE.findall(template or ""))

    def knows(name: str) -> bool:
        return re.search(rf"\b{name}\b", code) is not None

    for name, word in (("reasoning_effort", reasoning_effort), ("verbosity", verbosity)):
        if word is not None and not _WORD.fullmatch(word):
            raise invalid(name, f"{word[:40]!r} is not a word such as 'low', 'medium' or 'high'")
    if enable_thinking is None and reasoning_effort == "none" and not knows("reasoning_effort"):
        enable_thinking = False
    switch = "enable_thinking" if knows("enable_thinking") else "thinking"
    wanted = {switch: enable_thinking, "reasoning_effort": reasoning_effort, "verbosity": verbosity}
    kwargs = {name: value for name, value in wanted.items() if value is not None and knows(name)}
    for name, value in (given or {}).items():
        if name in kwargs and kwargs[name] != value:
            raise invalid("chat_template_kwargs", f"{name} contradicts a field of the body; give one of them")
    return kwargs


# ---- helpers


def held_len(text: str, marks: Collection[str]) -> int:
    """Length of the longest suffix of `text` that may be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    for size in range(min(len(text), longest), 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def _pieces(text: str, *, reasoning: bool) -> list[Piece]:
    return [Piece(text, reasoning)] if text else []


def _is_analysis(header: str) -> bool:
    return header.rpartition(CHANNEL)[2].lstrip().startswith("analysis") and CHANNEL in header


__all__ = [
    "MARKS",
    "TAIL_TOKENS",
    "AnswerParser",
    "ChannelSplitter",
    "DecodeTokens",
    "MarkSplitter",
    "Piece",
    "ReasoningFormat",
    "Splitter",
    "held_len",
    "reasoning_format_of",
    "thinking_kwargs",
]
