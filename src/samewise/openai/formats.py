"""`response_format` or `structured_outputs` → the grammar an answer must follow. Unknown keys are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from samewise.errors import BadParameter
from samewise.openai.gbnf import to_lark
from samewise.types import Grammar

_KEYS = {  # keys allowed beside `type`, by type
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema"),
    "grammar": ("syntax", "definition"),
}
_SCHEMA_KEYS = ("name", "description", "schema", "strict")
_SYNTAXES = ("regex", "lark")

MAX_GBNF = 1 << 15
"""Characters of a GBNF grammar, at most: it is converted in Python. Set by hand, for about 0.1 s."""


def grammar_of(response_format: dict[str, Any]) -> Grammar | None:
    """The grammar a `response_format` asks for; None for plain text.

    `text`, `json_object` and `json_schema` are OpenAI's; both of the latter may have a `schema`, as
    llama.cpp takes it. A schema is always followed exactly, with or without `strict`. `{"type": "grammar",
    "syntax": "regex" | "lark", "definition": …}` is OpenAI's form for the formats of custom tools.
    """
    if not isinstance(response_format, dict):
        raise _bad(response_format, 'give an object, such as {"type": "json_object"}')
    kind = response_format.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise _bad(kind, f"known types are {', '.join(_KEYS)}")
    _refuse_others(response_format, ("type", *_KEYS[kind]), kind)
    if response_format.get("schema") is not None:
        if response_format.get("json_schema") is not None:
            raise _bad(kind, "give schema or json_schema, one of them")
        return _schema({"schema": response_format["schema"]})
    if kind == "json_schema":
        return _schema(response_format.get("json_schema"))
    if kind == "grammar":
        return _grammar(response_format.get("syntax"), response_format.get("definition"))
    return Grammar.json_object() if kind == "json_object" else None


def _schema(given: Any) -> Grammar:
    if not isinstance(given, dict):
        raise _bad(given, 'json_schema is an object: {"name": …, "schema": {…}}')
    _refuse_others(given, _SCHEMA_KEYS, "json_schema")
    if given.get("strict") not in (None, True, False):
        raise _bad(given["strict"], "strict is true, false or null")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise _bad(schema, "json_schema.schema is missing: give a JSON Schema, which is an object")
    try:
        return Grammar.json_schema(schema)
    except BadParameter as error:
        raise BadParameter(f"response_format=json_schema: {error}", param="response_format") from error


def _grammar(syntax: Any, definition: Any) -> Grammar:
    if syntax not in _SYNTAXES:
        raise _bad(syntax, f"syntax is one of {', '.join(_SYNTAXES)}")
    if not isinstance(definition, str) or not definition:
        raise _bad(definition, "definition is the grammar's text")
    return Grammar(syntax, definition)


def grammar_of_outputs(given: dict[str, Any]) -> Grammar:
    """The grammar of vLLM's `structured_outputs`, which names exactly one of _OUTPUTS.

    A `grammar` is llguidance's Lark, or GBNF, which is written with `::=`.
    """
    kinds = [name for name in _OUTPUTS if given.get(name) not in (None, False)]
    others = [name for name, value in given.items() if name not in _OUTPUTS and value not in (None, False)]
    if others:
        raise _bad_outputs(min(map(str, others)), f"is not supported; known are {', '.join(_OUTPUTS)}")
    if len(kinds) != 1:
        raise _bad_outputs(", ".join(kinds) or "{}", f"give exactly one of {', '.join(_OUTPUTS)}")
    (kind,) = kinds
    try:
        return _OUTPUTS[kind](given[kind])
    except BadParameter as error:
        raise BadParameter(f"structured_outputs={kind}: {error}", param="structured_outputs") from error


def _outputs_json(schema: Any) -> Grammar:
    if not isinstance(schema, dict | str):
        raise _bad_outputs(schema, "a JSON Schema is an object, or its text")
    return Grammar.json_schema(schema)


def _outputs_regex(pattern: Any) -> Grammar:
    if not isinstance(pattern, str) or not pattern:
        raise _bad_outputs(pattern, "give a regular expression as text")
    return Grammar.regex(pattern)


def _outputs_choice(choices: Any) -> Grammar:
    if not isinstance(choices, list) or not choices:
        raise _bad_outputs(choices, "give a list of texts")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise _bad_outputs(choices, "a choice is text, and not empty")
    return Grammar.lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def _outputs_grammar(rules: Any) -> Grammar:
    if not isinstance(rules, str) or not rules.strip():
        raise _bad_outputs(rules, "give the grammar's text")
    if "::=" not in rules:
        return Grammar.lark(rules)
    if len(rules) > MAX_GBNF:
        raise _bad_outputs("grammar", f"{len(rules)} characters of GBNF are more than {MAX_GBNF}; use Lark")
    try:
        return Grammar.lark(to_lark(rules))
    except ModuleNotFoundError:
        raise _bad_outputs("grammar", "GBNF needs llguidance; pip install 'samewise[grammar]'") from None
    except Exception as error:  # the converter raises Exception itself for an unknown rule
        raise _bad_outputs("grammar", f"this is no GBNF: {str(error)[:200]}") from None


def _outputs_object(_: Any) -> Grammar:
    return Grammar.json_object()


_OUTPUTS: dict[str, Callable[[Any], Grammar]] = {
    "json": _outputs_json,
    "regex": _outputs_regex,
    "choice": _outputs_choice,
    "grammar": _outputs_grammar,
    "json_object": _outputs_object,
}


def _bad_outputs(value: object, remedy: str) -> BadParameter:
    return BadParameter(f"structured_outputs={str(value)[:60]}: {remedy}", param="structured_outputs")


def _refuse_others(given: dict[str, Any], known: tuple[str, ...], kind: str) -> None:
    others = sorted(str(name) for name in given if name not in known)
    if others:
        raise _bad(kind, f"{', '.join(others)} is not supported here; known are {', '.join(known)}")


def _bad(value: object, remedy: str) -> BadParameter:
    return BadParameter(f"response_format={str(value)[:60]}: {remedy}", param="response_format")


__all__ = ["MAX_GBNF", "grammar_of", "grammar_of_outputs"]
