"""A request's `tools` and `tool_choice` → tools for the chat template, and a grammar for the answer.

    none              no tools in the template; the answer is plain text
    auto              the model decides; the arguments of strict functions follow their schemas
    required          a grammar over the tools: one call or more, and nothing else
    a named function  a grammar over that one: exactly one call

What is not supported is refused by name.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samewise.errors import BadParameter
from samewise.openai.tool_calls import CallIds, ToolCallParser, ToolFormat, tool_format_of
from samewise.text.grammar import WHITESPACE
from samewise.types import Grammar

MAX_TOOLS = 1024
"""Tools in one request. Coding agents with MCP servers send hundreds. Set by hand: checking takes 1 ms."""
_NAME = re.compile(r"[A-Za-z0-9_\-]{1,128}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of one request, checked.

    A request with a `tool_format` needs a parser over each choice's text, and `skip_special_tokens=False`:
    some formats open a call with a special token.
    """

    tools: tuple[dict[str, Any], ...] = ()  # for the chat template
    tool_format: ToolFormat | None = None  # None: answers are plain text
    grammar: Grammar | None = None
    single: bool = False  # text after the first call is dropped
    free: bool = False  # the grammar, if there is one, admits text of any kind

    def parser(self, ids: CallIds) -> ToolCallParser:
        """A parser for one choice's text."""
        assert self.tool_format is not None
        return ToolCallParser(self.tool_format, ids, single=self.single)


def request_tools(
    tools: Any,
    choice: Any = None,
    *,
    parallel: bool | None = None,
    template: str | None,
    special: Mapping[str, int] | None = None,
    response: Grammar | None = None,
) -> RequestTools:
    """`tools`, `tool_choice` and `parallel_tool_calls` under a model's chat template.

    `special` are the tokenizer's `special_tokens`. `response` is the grammar of `response_format`: while the
    model may choose, an answer is calls alone or a text that follows it.
    """
    chosen = _choice(choice, tools)
    if not tools:
        if tools is not None and not isinstance(tools, list):
            raise _bad("tools", tools, "give a list of functions")
        return RequestTools(grammar=response)
    functions = _functions(tools)
    if chosen == "none":
        return RequestTools(grammar=response)
    tool_format = tool_format_of(template) if template else None
    if tool_format is None:
        raise _bad(
            "tools", f"{len(functions)} functions", "this model's chat template knows no tools, or writes "
            "calls in a way this server cannot read; describe them in a message instead",
        )  # fmt: skip
    document = _document(response, tool_format) if response is not None and chosen == "auto" else None
    single = parallel is False or isinstance(chosen, dict)
    if isinstance(chosen, dict):
        functions = [_named(chosen["name"], functions)]
    free = chosen == "auto" and document is None
    strict = any(function.get("strict") for function in functions)
    grammar = None
    if strict or not free:
        grammar = _grammar(tool_format, functions, special or {}, free=free, single=single, document=document)
    return RequestTools(tuple(tools), tool_format, grammar, single, free)


def checked_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """The tools of a conversation for its template alone, whether or not calls in answers can be read."""
    if tools is None:
        return ()
    _functions(tools)
    return tuple(tools)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Tokens that a grammar names by id, because they stand for no text: content → id."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return {
        token.content: number
        for number, token in added
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def special_names(tokenizer: Any) -> frozenset[str]:
    """Tokens that an answer's text leaves out. Most tokenizers list only some of them by their roles."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    listed: Sequence[str] = getattr(tokenizer, "all_special_tokens", ())
    return frozenset(listed) | {token.content for token in added if token.special}


# ---- checking


def _choice(choice: Any, tools: Any) -> Any:
    """`none`, `auto`, `required`, or {"name": …} of a function."""
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
    if len(tools) > MAX_TOOLS:
        raise _bad("tools", f"{len(tools)} tools", f"give at most {MAX_TOOLS}")
    functions = [_function(i, tool) for i, tool in enumerate(tools)]
    counts = Counter(function["name"] for function in functions)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise _bad("tools", repeated[0], "two functions have this name; give each its own")
    return functions


def _function(i: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise _bad("tools", kind, f'tools[{i}]: only {{"type": "function", "function": {{…}}}} is supported')
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(
            "tools", name, f"tools[{i}]: a function has a name of letters, digits, _ and -, at most 128"
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
    return BadParameter(f"{field}={str(value)[:60]}: {remedy}", param=field)


# ---- the grammar


@dataclass(frozen=True, slots=True)
class _CallSyntax:
    """How calls are written in a tool format, as parts of a Lark grammar."""

    opening: str | None  # before the first call; None: nothing
    before_name: str
    before_arguments: str
    after: str  # after the arguments
    closing: str = ""
    block: str = "call"  # what follows an opening
    single_block: str = "call"  # the same with exactly one call
    between: str | None = None  # between two blocks; None: there is only one


_SYNTAX = {
    ToolFormat.HERMES: _CallSyntax(
        "<tool_call>", '\n{"name": "', '", "arguments": ', "}\n", "</tool_call>", between='"\\n" '
    ),
    ToolFormat.LLAMA: _CallSyntax(None, '{"name": "', '", "parameters": ', "}"),
    ToolFormat.MISTRAL: _CallSyntax(
        "[TOOL_CALLS]", '{"name": "', '", "arguments": ', "}",
        block='" "? "[" call (", " call)* "]"', single_block='" "? "[" call "]"',
    ),
    ToolFormat.MISTRAL_ARGS: _CallSyntax("[TOOL_CALLS]", "", "[ARGS]", "", between=""),
}  # fmt: skip


def _grammar(
    tool_format: ToolFormat,
    functions: list[dict[str, Any]],
    special: Mapping[str, int],
    *,
    free: bool,
    single: bool,
    document: str | None,
) -> Grammar:
    """One call or more; with `free`, text before them or instead of them; else `document` instead of them."""
    syntax = _SYNTAX[tool_format]
    rules = [f"call_{i}: {_call(syntax, function, special)}" for i, function in enumerate(functions)]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    start, more = _start(syntax, special, free=free, single=single)
    if document is not None:
        start, more = f"{start} | document", [*more, f"document: {document}"]
    return Grammar.lark("\n".join([f"start: {start}", *rules, *more]))


def _document(response: Grammar, tool_format: ToolFormat) -> str:
    """The answer that a `response_format` asks for, as a part of a Lark grammar beside calls."""
    if tool_format is ToolFormat.LLAMA or response.kind not in ("json_object", "json_schema"):
        raise _bad(
            "response_format", response.kind,
            "cannot be promised while the model may call tools; set tool_choice to none or required",
        )  # fmt: skip
    schema = json.loads(response.text) if response.kind == "json_schema" else {"type": "object"}
    return _json(schema if isinstance(schema, dict) else {"allOf": [schema]})


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}})


def _start(
    syntax: _CallSyntax, special: Mapping[str, int], *, free: bool, single: bool
) -> tuple[str, list[str]]:
    """The start rule, and the rules it refers to."""
    block = syntax.single_block if single else syntax.block
    again = syntax.between if not single else None
    if syntax.opening is None:  # a call from the first character, or plain text
        return (f"{block} | PLAIN", ["PLAIN: /([^\\s{](.|\\n)*)?/"]) if free else (block, [])
    opening = _mark(syntax.opening, special)
    if not free:
        return f"{opening} {block}" + ("" if again is None else f" ({again}{opening} {block})*"), []
    text = "TEXT: /(.|\\n)*/"
    if syntax.opening in special:  # a special token, which text cannot contain
        return f"TEXT ({opening} {block}" + (")?" if again is None else " TEXT)*"), [text]
    opened = f"free[lazy]: TEXT {opening}"
    return (f"TEXT | free {block}" if again is None else f"(free {block})* TEXT"), [text, opened]


def _call(syntax: _CallSyntax, function: dict[str, Any], special: Mapping[str, int]) -> str:
    name = _quoted(syntax.before_name + function["name"])
    parts = [name, _mark(syntax.before_arguments, special), _schema(function)]
    parts += [_quoted(syntax.after)] if syntax.after else []
    parts += [_mark(syntax.closing, special)] if syntax.closing else []
    return " ".join(parts)


def _mark(text: str, special: Mapping[str, int]) -> str:
    """A marker in a grammar: the special token of that name where there is one, else its characters."""
    return f"<[{special[text]}]>" if text in special else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _schema(function: dict[str, Any]) -> str:
    schema = dict(function.get("parameters") or _NO_PARAMETERS)
    if "x-guidance" in schema:
        raise _bad("tools", function["name"], "its schema has 'x-guidance', which is not part of JSON Schema")
    if schema.get("type", "object") != "object":
        raise _bad("tools", function["name"], "its parameters are an object: a JSON Schema of type object")
    return _json({"type": "object"} | schema)


__all__ = [
    "MAX_TOOLS",
    "RequestTools",
    "checked_tools",
    "request_tools",
    "special_names",
    "special_tokens",
]
