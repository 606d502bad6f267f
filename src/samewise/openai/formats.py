"""`response_format` → the grammar an answer must follow. Unknown keys are refused by name."""

from __future__ import annotations

from typing import Any

from samewise.errors import BadParameter
from samewise.types import Grammar

_KEYS = {  # keys allowed beside `type`, by type
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "grammar": ("syntax", "definition"),
}
_SCHEMA_KEYS = ("name", "description", "schema", "strict")
_SYNTAXES = ("regex", "lark")


def grammar_of(response_format: dict[str, Any]) -> Grammar | None:
    """The grammar a `response_format` asks for; None for plain text.

    `text`, `json_object` and `json_schema` are OpenAI's. A schema is always followed exactly, with or without
    `strict`. `{"type": "grammar", "syntax": "regex" | "lark", "definition": …}` is OpenAI's form for the
    formats of custom tools.
    """
    if not isinstance(response_format, dict):
        raise _bad(response_format, 'give an object, such as {"type": "json_object"}')
    kind = response_format.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise _bad(kind, f"known types are {', '.join(_KEYS)}")
    _refuse_others(response_format, ("type", *_KEYS[kind]), kind)
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


def _refuse_others(given: dict[str, Any], known: tuple[str, ...], kind: str) -> None:
    others = sorted(str(name) for name in given if name not in known)
    if others:
        raise _bad(kind, f"{', '.join(others)} is not supported here; known are {', '.join(known)}")


def _bad(value: object, remedy: str) -> BadParameter:
    return BadParameter(f"response_format={str(value)[:60]}: {remedy}", param="response_format")


__all__ = ["grammar_of"]
