"""Tool calls in an answer's text, found as it streams, in the formats that chat templates define.

    hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>        Qwen, Hermes, many others
    llama         {"name": …, "parameters": {…}}, nothing before it           Llama 3
    mistral       [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]             Mistral up to tokenizer v7
    mistral-args  [TOOL_CALLS]name[ARGS]{…}                                   Mistral since

The result depends on the text alone, not on how it was cut into pieces. Text that begins like a call and is
none is returned as content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple


class ToolFormat(StrEnum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral-args"


def tool_format_of(template: str) -> ToolFormat | None:
    """The format a chat template uses. None: it knows no tools, or writes calls in another format."""
    if not re.search(r"\btools\b", template):
        return None
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL_ARGS if "[ARGS]" in template else ToolFormat.MISTRAL
    if "<tool_call>" in template:
        # Other templates write XML between the same two tags.
        return None if re.search(r"<function=|<arg_key>|<parameter", template) else ToolFormat.HERMES
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return ToolFormat.LLAMA
    return None


class ToolCall(NamedTuple):
    """A call of a function. `arguments` is the JSON text the model wrote; it may be invalid or cut off."""

    name: str
    arguments: str


CallIds = Callable[[int], str]
"""A call's id, given its index within the answer."""


def call_ids(tool_format: ToolFormat, contract: str, prompt: Iterable[int], choice: int = 0) -> CallIds:
    """Ids for the calls of one choice, derived from the request: the same request gives the same ids."""
    text = f"{contract} {choice} {','.join(map(str, prompt))}"
    digest = sha256(text.encode()).hexdigest()
    # Mistral's templates refuse ids other than nine letters and digits.
    prefix, size = ("", 9) if tool_format in (ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS) else ("call_", 24)
    return lambda number: prefix + sha256(f"{digest} {number}".encode()).hexdigest()[:size]


def parse_tool_calls(
    tool_format: ToolFormat, text: str, *, single: bool = False
) -> tuple[str | None, tuple[ToolCall, ...]]:
    """(content, calls) of a complete answer; content is None where an answer is calls alone."""
    parser = ToolCallParser(tool_format, lambda _: "", single=single)
    deltas = [*parser.push(text), *parser.flush()]
    content = "".join(delta.get("content", "") for delta in deltas)
    return (content or None) if parser.calls else content, tuple(parser.calls)


_OPEN = {
    ToolFormat.HERMES: "<tool_call>",
    ToolFormat.LLAMA: "<|python_tag|>",
    ToolFormat.MISTRAL: "[TOOL_CALLS]",
    ToolFormat.MISTRAL_ARGS: "[TOOL_CALLS]",
}
_CLOSE = "</tool_call>"
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)', re.DOTALL
)
_NAME_THEN_ARGUMENTS = re.compile(r"([\w.\-]+)(?:\[CALL_ID\][\w\-]*)?(?:\[ARGS\])?\s*(?=\{)")
_NAME_PREFIX = re.compile(r"[\w.\-]*(?:\[[A-Z_]*\]?[\w\-]*)?(?:\[[A-Z]*\]?)?\s*")


class ToolCallParser:
    """Pieces of text in, OpenAI's deltas out: `{"content": …}` or `{"tool_calls": [{…}]}`.

    A call's first delta has its index, id, type and name; later ones carry its arguments as they arrive. With
    `single`, text after the first call is dropped.
    """

    def __init__(self, tool_format: ToolFormat, ids: CallIds, *, single: bool = False) -> None:
        self._format, self._ids, self._single = tool_format, ids, single
        self.calls: list[ToolCall] = []  # so far; the arguments of the last may still grow
        self._text = ""  # received and not yet parsed
        self._opening = ""  # text that opened the current call: content if it turns out to be none
        self._space = ""  # white space held back at the end of content
        self._scan = _JsonScanner()
        self._in_list = False  # within a list of calls
        self._wrapped = False  # the arguments are a value within an object
        self._out: list[dict[str, Any]] = []
        self._state: Callable[[], bool] = self._start if tool_format is ToolFormat.LLAMA else self._outside

    def push(self, text: str) -> list[dict[str, Any]]:
        """Add text; returns the deltas that it completes."""
        self._text += text
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    def flush(self) -> list[dict[str, Any]]:
        """The text has ended: returns what was held back. A call cut off before its name ends is content."""
        if self._state not in (self._arguments, self._leaving, self._closing, self._done):
            self._add_content(self._opening + self._text)
        if not self.calls and self._space:
            self._out.append({"content": self._space})
        self._text = self._opening = self._space = ""
        self._state = self._done
        out, self._out = self._out, []
        return out

    # ---- states: each consumes a part of `_text`; True: call the next state, False: more text is needed

    def _done(self) -> bool:
        self._text = ""
        return False

    def _plain(self) -> bool:
        """The remaining text is content."""
        self._add_content(self._text)
        self._text = ""
        return False

    def _outside(self) -> bool:
        """Content, up to the opening of a call."""
        opening = _OPEN[self._format]
        at = self._text.find(opening)
        if at < 0:
            keep = _prefix_len(self._text, opening)
            cut = len(self._text) - keep
            self._add_content(self._text[:cut])
            self._text = self._text[cut:]
            return False
        self._add_content(self._text[:at])
        self._text, self._opening = self._text[at + len(opening) :], opening
        if self._format is ToolFormat.HERMES:
            return self._enter()
        self._state = self._opened
        return True

    def _start(self) -> bool:
        """Llama: an answer is a call from its first character, or content."""
        opening, text = _OPEN[self._format], self._text.lstrip()
        if not text or (len(text) < len(opening) and opening.startswith(text)):
            return False
        space = self._text[: len(self._text) - len(text)]
        if text.startswith(opening):
            self._text, self._opening = text[len(opening) :], space + opening
        elif text.startswith("{"):
            self._text, self._opening = text, space
        else:
            self._state = self._plain
            return True
        return self._enter()

    def _opened(self) -> bool:
        """Mistral: a list of calls, a call, or a name and its arguments."""
        text = self._text.lstrip()
        if not text:
            return False
        if text[0] == "[" and self._format is ToolFormat.MISTRAL:
            self._opening += self._text[: len(self._text) - len(text) + 1]
            self._text, self._in_list = text[1:], True
            return self._enter()
        if text[0] == "{":
            return self._enter()
        self._opening += self._text[: len(self._text) - len(text)]
        self._text, self._state = text, self._naming
        return True

    def _naming(self) -> bool:
        """Mistral: `name[ARGS]{…}`."""
        match = _NAME_THEN_ARGUMENTS.match(self._text)
        if match is None:
            return False if _NAME_PREFIX.fullmatch(self._text) else self._no_call(0)
        self._begin_call(match[1])
        self._text, self._wrapped = self._text[match.end() :], False
        self._scan, self._state = _JsonScanner(), self._arguments
        return True

    def _enter(self) -> bool:
        self._scan, self._state = _JsonScanner(), self._heading
        return True

    def _heading(self) -> bool:
        """In a call's object, before its arguments."""
        match = _HEAD.match(self._text)
        if match is not None and (name := _loads(match[1])) is not None:
            self._begin_call(name)
            self._text, self._wrapped = self._text[match.end() :], True
            self._scan, self._state = _JsonScanner(), self._arguments
            return True
        text = self._text.lstrip()
        if text and text[0] != "{":
            return self._no_call(0)
        end = self._scan.end(self._text)
        if end is None:
            return False
        call = _call(self._text[:end])
        if call is None:
            return self._no_call(end)
        self._begin_call(call.name)
        self._add_arguments(call.arguments)
        self._text, self._state = self._text[end:], self._closing
        return True

    def _arguments(self) -> bool:
        """The value of a call's arguments, returned as it arrives."""
        end = self._scan.end(self._text)
        value = self._text if end is None else self._text[:end]
        if self._scan.kind == "{":
            self._add_arguments(value)
            self._text = self._text[len(value) :]
            self._scan.forget(len(value))
        elif end is not None:  # a string that holds JSON, or null
            loaded = _loads(value)
            self._add_arguments(loaded if isinstance(loaded, str) else "{}" if value == "null" else value)
            self._text = self._text[end:]
        if end is None:
            return False
        self._state = self._leaving if self._wrapped else self._closing
        self._scan = _JsonScanner(depth=1)
        return True

    def _leaving(self) -> bool:
        """After the arguments, to the end of their object, or to the closing tag if the object has no end."""
        end, close = self._scan.end(self._text), self._text.find(_CLOSE)
        if end is None and close < 0:
            return False
        self._text = self._text[close if end is None or 0 <= close < end else end :]
        self._state = self._closing
        return True

    def _closing(self) -> bool:
        """After a call."""
        self._opening = ""
        if self._single:
            self._state = self._done
            return True
        text = self._text.lstrip()
        if self._format is ToolFormat.HERMES:
            if len(text) < len(_CLOSE) and _CLOSE.startswith(text):
                return False
            self._text = text[len(_CLOSE) :] if text.startswith(_CLOSE) else self._text
            self._state = self._outside
            return True
        if not text:
            return False
        if self._in_list or self._format is ToolFormat.LLAMA:
            return self._next(text)
        self._state = self._outside
        return True

    def _next(self, text: str) -> bool:
        """The next call of a list, or the end of the list."""
        rest = text.lstrip(",; \n\t\r")
        if rest.startswith("{"):
            self._text = rest
            return self._enter()
        if not rest:
            return False
        if self._in_list:
            self._text, self._in_list, self._state = rest.removeprefix("]"), False, self._outside
        else:
            self._state = self._plain
        return True

    # ---- output

    def _no_call(self, size: int) -> bool:
        """The opening and the next `size` characters are content, not a call."""
        self._add_content(self._opening + self._text[:size])
        self._text, self._opening, self._in_list = self._text[size:], "", False
        self._state = self._plain if self._format is ToolFormat.LLAMA else self._outside
        return True

    def _add_content(self, text: str) -> None:
        """Content. White space at its end is held back, and dropped if a call follows."""
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        if content:
            self._out.append({"content": content})

    def _begin_call(self, name: str) -> None:
        number = len(self.calls)
        self.calls.append(ToolCall(name, ""))
        self._space = self._opening = ""
        function = {"name": name, "arguments": ""}
        call = {"index": number, "id": self._ids(number), "type": "function", "function": function}
        self._out.append({"tool_calls": [call]})

    def _add_arguments(self, piece: str) -> None:
        if not piece:
            return
        number, (name, before) = len(self.calls) - 1, self.calls[-1]
        self.calls[-1] = ToolCall(name, before + piece)
        self._out.append({"tool_calls": [{"index": number, "function": {"arguments": piece}}]})


class _JsonScanner:
    """Finds the end of a JSON value in text that grows; each character is read once."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._at = depth, 0
        self._quoted = self._escaped = False
        self.kind = "{" if depth else ""  # the value's first character

    def end(self, text: str) -> int | None:
        """The index after the value, or None while it is incomplete."""
        for at in range(self._at, len(text)):
            char = text[at]
            if not self.kind:
                if char.isspace():
                    continue
                self.kind = "{" if char in "{[" else char
                if self.kind not in ("{", '"'):
                    self.kind = "0"
            if char == "<" and self.kind == "{" and not self._quoted:
                return at  # not JSON outside a string: the value was cut off
            if self._step(char):
                return at + 1
            if self.kind == "0" and (char in ",}]" or char.isspace()):
                return at
        self._at = len(text)
        return None

    def forget(self, num: int) -> None:
        """The first `num` characters were removed from the text."""
        self._at = max(0, self._at - num)

    def _step(self, char: str) -> bool:
        """Whether the value ends with this character."""
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
                return self._depth == 0
        elif char == '"':
            self._quoted = True
        elif char in "{[" and self.kind == "{":
            self._depth += 1
        elif char in "}]" and self.kind == "{":
            self._depth -= 1
            return self._depth == 0
        return False


def _call(text: str) -> ToolCall | None:
    """An object as a call, with its keys in any order."""
    call = _loads(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    if not set(call) <= {"name", "arguments", "parameters", "id", "type"}:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return ToolCall(call["name"], arguments)
    return ToolCall(call["name"], json.dumps({} if arguments is None else arguments, ensure_ascii=False))


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _prefix_len(text: str, opening: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `opening`."""
    for size in range(min(len(text), len(opening) - 1), 0, -1):
        if opening.startswith(text[-size:]):
            return size
    return 0


__all__ = [
    "CallIds",
    "ToolCall",
    "ToolCallParser",
    "ToolFormat",
    "call_ids",
    "parse_tool_calls",
    "tool_format_of",
]
