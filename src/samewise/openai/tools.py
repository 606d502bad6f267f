"""Tool calls in an answer's text: found whole or as it streams, for the formats template families define.

    hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>        Qwen, Hermes, many others
    llama         {"name": …, "parameters": {…}}, nothing before it           Llama 3
    mistral       [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]             Mistral up to tokenizer v7
    mistral-args  [TOOL_CALLS]name[ARGS]{…}                                   Mistral since

What is given out is a function of the text, however it was cut into pieces; so `parse_tool_calls` is the
stream read to its end. What begins like a call and turns out to be none is given back as content.

Host only: knows text, and nothing of HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple


class Family(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral-args"


def family_of(template: str) -> Family | None:
    """Which format a chat template teaches its model. None: it knows no tools, or writes them otherwise."""
    if not re.search(r"\btools\b", template):
        return None
    if "[TOOL_CALLS]" in template:
        return Family.MISTRAL_ARGS if "[ARGS]" in template else Family.MISTRAL
    if "<tool_call>" in template:
        # Others write XML between the same two tags.
        return None if re.search(r"<function=|<arg_key>|<parameter", template) else Family.HERMES
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return Family.LLAMA
    return None


class ToolCall(NamedTuple):
    """A function to be called. `arguments` is JSON as the model wrote it, which may be wrong or cut off."""

    name: str
    arguments: str


Ids = Callable[[int], str]


def call_ids(family: Family, contract: str, prompt: Iterable[int], choice: int = 0) -> Ids:
    """Names for the calls of one answer, by number: the same request gives them the same names."""
    text = f"{contract} {choice} {','.join(map(str, prompt))}"
    digest = sha256(text.encode()).hexdigest()
    # Mistral's templates refuse a name that is not nine letters and digits.
    start, size = ("", 9) if family in (Family.MISTRAL, Family.MISTRAL_ARGS) else ("call_", 24)
    return lambda number: start + sha256(f"{digest} {number}".encode()).hexdigest()[:size]


def parse_tool_calls(
    family: Family, text: str, *, single: bool = False
) -> tuple[str | None, tuple[ToolCall, ...]]:
    """(content, calls) of a whole answer; content is None where there is none beside the calls."""
    stream = ToolStream(family, lambda _: "", single=single)
    deltas = [*stream.push(text), *stream.flush()]
    content = "".join(delta.get("content", "") for delta in deltas)
    return (content or None) if stream.calls else content, tuple(stream.calls)


_OPEN = {
    Family.HERMES: "<tool_call>",
    Family.LLAMA: "<|python_tag|>",
    Family.MISTRAL: "[TOOL_CALLS]",
    Family.MISTRAL_ARGS: "[TOOL_CALLS]",
}
_CLOSE = "</tool_call>"
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)', re.DOTALL
)
_NAMED = re.compile(r"([\w.\-]+)(?:\[CALL_ID\][\w\-]*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_YET = re.compile(r"[\w.\-]*(?:\[[A-Z_]*\]?[\w\-]*)?(?:\[[A-Z]*\]?)?\s*")


class ToolStream:
    """Pieces of text in, OpenAI's deltas out: `{"content": …}` or `{"tool_calls": [{…}]}`.

    A call's first delta has its index, id, type and name; those after it carry arguments as they come. With
    `single`, whatever follows the first call is dropped.
    """

    def __init__(self, family: Family, ids: Ids, *, single: bool = False) -> None:
        self._family, self._ids, self._single = family, ids, single
        self.calls: list[ToolCall] = []  # so far; the last one's arguments may still grow
        self._text = ""  # not yet understood
        self._opening = ""  # what began the call that is being read, should it be none after all
        self._space = ""  # between content and whatever comes next
        self._scan = _Scan()
        self._listed = False  # within a list of calls
        self._wrapped = False  # the arguments stand within an object
        self._out: list[dict[str, Any]] = []
        self._state: Callable[[], bool] = self._start if family is Family.LLAMA else self._outside

    def push(self, text: str) -> list[dict[str, Any]]:
        """Add text; returns what became clear."""
        self._text += text
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    def flush(self) -> list[dict[str, Any]]:
        """No more text: returns what was held back. A call that broke off before its name was none."""
        if self._state not in (self._arguments, self._leaving, self._closing, self._done):
            self._say(self._opening + self._text)
        if not self.calls and self._space:
            self._out.append({"content": self._space})
        self._text = self._opening = self._space = ""
        self._state = self._done
        out, self._out = self._out, []
        return out

    # ---- states: each takes what it understands from `_text`; True: look again, False: more is needed

    def _done(self) -> bool:
        self._text = ""
        return False

    def _plain(self) -> bool:
        """Nothing but content from here on."""
        self._say(self._text)
        self._text = ""
        return False

    def _outside(self) -> bool:
        """Content, until a call is opened."""
        opening = _OPEN[self._family]
        at = self._text.find(opening)
        if at < 0:
            keep = _may_begin(self._text, opening)
            cut = len(self._text) - keep
            self._say(self._text[:cut])
            self._text = self._text[cut:]
            return False
        self._say(self._text[:at])
        self._text, self._opening = self._text[at + len(opening) :], opening
        if self._family is Family.HERMES:
            return self._enter()
        self._state = self._opened
        return True

    def _start(self) -> bool:
        """Llama: the answer is a call from its first character, or it is none."""
        opening, text = _OPEN[self._family], self._text.lstrip()
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
        if text[0] == "[" and self._family is Family.MISTRAL:
            self._opening += self._text[: len(self._text) - len(text) + 1]
            self._text, self._listed = text[1:], True
            return self._enter()
        if text[0] == "{":
            return self._enter()
        self._opening += self._text[: len(self._text) - len(text)]
        self._text, self._state = text, self._naming
        return True

    def _naming(self) -> bool:
        """Mistral: `name[ARGS]{…}`."""
        found = _NAMED.match(self._text)
        if found is None:
            return False if _NAMED_YET.fullmatch(self._text) else self._no_call(0)
        self._begin(found[1])
        self._text, self._wrapped = self._text[found.end() :], False
        self._scan, self._state = _Scan(), self._arguments
        return True

    def _enter(self) -> bool:
        self._scan, self._state = _Scan(), self._heading
        return True

    def _heading(self) -> bool:
        """Within a call's object, before its arguments."""
        found = _HEAD.match(self._text)
        if found is not None and (name := _loads(found[1])) is not None:
            self._begin(name)
            self._text, self._wrapped = self._text[found.end() :], True
            self._scan, self._state = _Scan(), self._arguments
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
        self._begin(call.name)
        self._argue(call.arguments)
        self._text, self._state = self._text[end:], self._closing
        return True

    def _arguments(self) -> bool:
        """The value of a call's arguments, given out as it comes."""
        end = self._scan.end(self._text)
        value = self._text if end is None else self._text[:end]
        if self._scan.kind == "{":
            self._argue(value)
            self._text = self._text[len(value) :]
            self._scan.forget(len(value))
        elif end is not None:  # text that holds JSON, or nothing at all
            read = _loads(value)
            self._argue(read if isinstance(read, str) else "{}" if value == "null" else value)
            self._text = self._text[end:]
        if end is None:
            return False
        self._state = self._leaving if self._wrapped else self._closing
        self._scan = _Scan(depth=1)
        return True

    def _leaving(self) -> bool:
        """Behind the arguments, to the end of the object they stood in, or of the call that forgot it."""
        end, close = self._scan.end(self._text), self._text.find(_CLOSE)
        if end is None and close < 0:
            return False
        self._text = self._text[close if end is None or 0 <= close < end else end :]
        self._state = self._closing
        return True

    def _closing(self) -> bool:
        """Behind a call."""
        self._opening = ""
        if self._single:
            self._state = self._done
            return True
        text = self._text.lstrip()
        if self._family is Family.HERMES:
            if len(text) < len(_CLOSE) and _CLOSE.startswith(text):
                return False
            self._text = text[len(_CLOSE) :] if text.startswith(_CLOSE) else self._text
            self._state = self._outside
            return True
        if not text:
            return False
        if self._listed or self._family is Family.LLAMA:
            return self._next(text)
        self._state = self._outside
        return True

    def _next(self, text: str) -> bool:
        """Another call of a list, or its end."""
        rest = text.lstrip(",; \n\t\r")
        if rest.startswith("{"):
            self._text = rest
            return self._enter()
        if not rest:
            return False
        if self._listed:
            self._text, self._listed, self._state = rest.removeprefix("]"), False, self._outside
        else:
            self._state = self._plain
        return True

    # ---- what is said

    def _no_call(self, size: int) -> bool:
        """What was opened is no call: it and `size` characters more are content."""
        self._say(self._opening + self._text[:size])
        self._text, self._opening, self._listed = self._text[size:], "", False
        self._state = self._plain if self._family is Family.LLAMA else self._outside
        return True

    def _say(self, text: str) -> None:
        """Content; the space at its end waits for what comes next, and is dropped before a call."""
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._out.append({"content": said})

    def _begin(self, name: str) -> None:
        number = len(self.calls)
        self.calls.append(ToolCall(name, ""))
        self._space = self._opening = ""
        function = {"name": name, "arguments": ""}
        call = {"index": number, "id": self._ids(number), "type": "function", "function": function}
        self._out.append({"tool_calls": [call]})

    def _argue(self, piece: str) -> None:
        if not piece:
            return
        number, (name, before) = len(self.calls) - 1, self.calls[-1]
        self.calls[-1] = ToolCall(name, before + piece)
        self._out.append({"tool_calls": [{"index": number, "function": {"arguments": piece}}]})


class _Scan:
    """Looks for the end of a JSON value in a text that grows; what was looked at is not looked at again."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._at = depth, 0
        self._quoted = self._escaped = False
        self.kind = "{" if depth else ""  # the value's first character

    def end(self, text: str) -> int | None:
        """Where the value ends, or None if it goes on."""
        for at in range(self._at, len(text)):
            char = text[at]
            if not self.kind:
                if char.isspace():
                    continue
                self.kind = "{" if char in "{[" else char
                if self.kind not in ("{", '"'):
                    self.kind = "0"
            if char == "<" and self.kind == "{" and not self._quoted:
                return at  # no JSON has that: the value broke off
            if self._step(char):
                return at + 1
            if self.kind == "0" and (char in ",}]" or char.isspace()):
                return at
        self._at = len(text)
        return None

    def forget(self, num: int) -> None:
        """The first `num` characters were taken away."""
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
    """An object read as a call, whatever the order of its keys."""
    found = _loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    if not set(found) <= {"name", "arguments", "parameters", "id", "type"}:
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        return ToolCall(found["name"], arguments)
    return ToolCall(found["name"], json.dumps({} if arguments is None else arguments, ensure_ascii=False))


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _may_begin(text: str, opening: str) -> int:
    """Length of the longest ending of `text` that `opening` begins with."""
    for size in range(min(len(text), len(opening) - 1), 0, -1):
        if opening.startswith(text[-size:]):
            return size
    return 0


__all__ = ["Family", "Ids", "ToolCall", "ToolStream", "call_ids", "family_of", "parse_tool_calls"]
