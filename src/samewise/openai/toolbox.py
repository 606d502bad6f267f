"""What a request's `tools` and `tool_choice` come to: what the template is told, and what grammar holds.

    none              the template hears of no tools, and nothing is looked for in the answer
    auto              the model decides; the arguments of strict functions follow their schemas
    required          a grammar over the tools: one call or more, and nothing else
    a named function  a grammar over that one: exactly one call

Pure, host only. What is not supported is refused by name; a message begins with the field it is about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samewise.errors import BadParameter
from samewise.openai.tools import Family, Ids, ToolStream, family_of
from samewise.text.grammar import WHITESPACE
from samewise.types import Grammar

MOST = 128  # tools in one request
_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}")
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, checked.

    `tools` go to the chat template (None: none). A request with a `family` needs
    `skip_special_tokens=False`, since some families open a call with a special token, and a `stream` over
    each answer's text.
    """

    tools: tuple[dict[str, Any], ...] | None = None
    family: Family | None = None  # None: answers are plain text
    grammar: Grammar | None = None
    single: bool = False  # whatever follows the first call is dropped

    def stream(self, ids: Ids) -> ToolStream:
        """A reader of one answer's text."""
        assert self.family is not None
        return ToolStream(self.family, ids, single=self.single)


def toolbox_of(
    tools: Any,
    choice: Any = None,
    *,
    parallel: bool | None = None,
    template: str | None,
    special: Mapping[str, int] | None = None,
    response: Grammar | None = None,
) -> Toolbox:
    """`tools`, `tool_choice` and `parallel_tool_calls` under a model's chat template.

    `special` are the tokenizer's `special_tokens`. `response` is what `response_format` asks for; while the
    model may choose to call, it cannot be promised.
    """
    wanted = _choice(choice, tools)
    if not tools:
        if tools is not None and not isinstance(tools, list):
            raise _bad("tools", tools, "give a list of functions")
        return Toolbox(grammar=response)
    functions = _functions(tools)
    if wanted == "none":
        return Toolbox(grammar=response)
    family = family_of(template) if template else None
    if family is None:
        raise _bad(
            "tools", f"{len(functions)} functions", "this model's chat template knows no tools, or writes "
            "calls in a way this server cannot read; describe them in a message instead",
        )  # fmt: skip
    if response is not None and wanted == "auto":
        raise _bad(
            "response_format", response.kind,
            "cannot be promised while the model may call tools; set tool_choice to none or required",
        )  # fmt: skip
    single = parallel is False or isinstance(wanted, dict)
    if isinstance(wanted, dict):
        functions = [_named(wanted["name"], functions)]
    free = wanted == "auto"
    strict = any(function.get("strict") for function in functions)
    grammar = (
        _grammar(family, functions, special or {}, free=free, single=single) if strict or not free else None
    )
    return Toolbox(tuple(tools), family, grammar, single)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Tokens that stand for themselves in a grammar, and for no text: name → id."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return {
        token.content: number
        for number, token in added
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


# ---- what was asked


def _choice(choice: Any, tools: Any) -> Any:
    """none, auto, required, or a function's {"name": …}."""
    if choice is None:
        return "auto" if tools else "none"
    if choice in ("none", "auto", "required") and isinstance(choice, str):
        if choice == "required" and not tools:
            raise _bad("tool_choice", choice, "there are no tools to choose from; give tools")
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            if not tools:
                raise _bad("tool_choice", function["name"], "there are no tools to choose from; give tools")
            return {"name": function["name"]}
    raise _bad(
        "tool_choice",
        choice,
        'give "none", "auto", "required" or {"type": "function", "function": {"name": …}}',
    )


def _functions(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise _bad("tools", tools, "give a list of functions")
    if len(tools) > MOST:
        raise _bad("tools", f"{len(tools)} tools", f"give at most {MOST}")
    found = [_function(i, tool) for i, tool in enumerate(tools)]
    names = [function["name"] for function in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _bad("tools", twice[0], "two functions have this name; give each its own")
    return found


def _function(i: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise _bad("tools", kind, f'tools[{i}]: only {{"type": "function", "function": {{…}}}} is supported')
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(
            "tools", name, f"tools[{i}]: a function has a name of letters, digits, _ and -, at most 64"
        )
    for key, kind in (("parameters", dict), ("description", str), ("strict", bool)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise _bad("tools", function[key], f"tools[{i}].function.{key} is of type {kind.__name__}")
    return function


def _named(name: str, functions: list[dict[str, Any]]) -> dict[str, Any]:
    for function in functions:
        if function["name"] == name:
            return function
    names = ", ".join(function["name"] for function in functions)
    raise _bad("tool_choice", name, f"there is no such function; known are {names}")


def _bad(field: str, value: object, remedy: str) -> BadParameter:
    return BadParameter(f"{field}={str(value)[:60]}: {remedy}")


# ---- the grammar over them


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a family writes calls: what opens them, what a call is made of, and what follows the opening."""

    opening: str | None
    before_name: str
    before_arguments: str
    after: str
    closing: str = ""
    block: str = "call"  # what an opening opens
    lone: str = "call"  # the same with exactly one call
    between: str | None = None  # what stands between two blocks; None: there is but one


_SHAPES = {
    Family.HERMES: _Shape(
        "<tool_call>", '\n{"name": "', '", "arguments": ', "}\n", "</tool_call>", between='"\\n" '
    ),
    Family.LLAMA: _Shape(None, '{"name": "', '", "parameters": ', "}"),
    Family.MISTRAL: _Shape(
        "[TOOL_CALLS]", '{"name": "', '", "arguments": ', "}",
        block='" "? "[" call (", " call)* "]"', lone='" "? "[" call "]"',
    ),
    Family.MISTRAL_ARGS: _Shape("[TOOL_CALLS]", "", "[ARGS]", "", between=""),
}  # fmt: skip


def _grammar(
    family: Family, functions: list[dict[str, Any]], special: Mapping[str, int], *, free: bool, single: bool
) -> Grammar:
    """One call or more; with `free`, text before them or instead."""
    shape = _SHAPES[family]
    rules = [f"call_{i}: {_call(shape, function, special)}" for i, function in enumerate(functions)]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    start, more = _start(shape, special, free=free, single=single)
    return Grammar.lark("\n".join([f"start: {start}", *rules, *more]))


def _start(shape: _Shape, special: Mapping[str, int], *, free: bool, single: bool) -> tuple[str, list[str]]:
    """The first rule, and those it needs."""
    block = shape.lone if single else shape.block
    again = shape.between if not single else None
    if shape.opening is None:  # a call from the first character, or none
        return (f"{block} | PLAIN", ["PLAIN: /([^\\s{](.|\\n)*)?/"]) if free else (block, [])
    opening = _mark(shape.opening, special)
    if not free:
        return f"{opening} {block}" + ("" if again is None else f" ({again}{opening} {block})*"), []
    text = "TEXT: /(.|\\n)*/"
    if shape.opening in special:  # text cannot be mistaken for it
        return f"TEXT ({opening} {block}" + (")?" if again is None else " TEXT)*"), [text]
    opened = f"free[lazy]: TEXT {opening}"
    return (f"TEXT | free {block}" if again is None else f"(free {block})* TEXT"), [text, opened]


def _call(shape: _Shape, function: dict[str, Any], special: Mapping[str, int]) -> str:
    name = _quoted(shape.before_name + function["name"])
    parts = [name, _mark(shape.before_arguments, special), _schema(function)]
    parts += [_quoted(shape.after)] if shape.after else []
    parts += [_mark(shape.closing, special)] if shape.closing else []
    return " ".join(parts)


def _mark(text: str, special: Mapping[str, int]) -> str:
    """A marker in a grammar: the token of that name where there is one, else its letters."""
    return f"<[{special[text]}]>" if text in special else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _schema(function: dict[str, Any]) -> str:
    schema = dict(function.get("parameters") or _NOTHING)
    if "x-guidance" in schema:
        raise _bad("tools", function["name"], "its schema has 'x-guidance', which is not part of JSON Schema")
    if schema.get("type", "object") != "object":
        raise _bad("tools", function["name"], "its parameters are an object: a JSON Schema of type object")
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return "%json " + json.dumps({"type": "object"} | schema | options)


__all__ = ["MOST", "Toolbox", "special_tokens", "toolbox_of"]
