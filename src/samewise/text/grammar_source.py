"""A grammar's text → llguidance's matcher. Used by the process itself and by the child that tries it first.

llguidance bounds most of its work by counts ("fuel"), which are the same on every machine. Some work it does
not bound: the automaton of `multipleOf`, or the reading of a long schema. `is_plain` recognises schemas that
cause none of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from samewise.errors import BadParameter, InvariantBroken
from samewise.types import Grammar

WHITESPACE = r"( |\n {0,16})?"
"""White space between the parts of JSON: none, a space, or a new line and its indent. Without a limit a model
can generate white space for ever."""

MAX_TEXT = 1 << 20
"""Characters of a grammar's text, at most. Set by hand: the largest published schemas have about 300,000."""

MAX_LEXER_STATES = 20_000
"""States of a lexer, at most. A state takes 1 to 5 kB, so 100 MB at most; a JSON object needs about 100."""

LEXER_FUEL = 4_000_000
"""What a lexer may cost, in llguidance's own unit: a count of steps, about 10 ns each, so 40 ms. Ordinary
grammars cost up to 130,000 in all, a text whose length is limited 500 for each token of it."""

PARSER_ITEMS = 5000
"""Items that the parser may make for one mask. The largest schemas that llguidance follows at all, of about
300 optional properties, need 3,000. A text that can be read in many ways needs more with each token: a mask
of 5,000 takes up to 20 ms, one of llguidance's own limit of 50,000 up to 200 ms."""

PLAIN_TEXT = 2048
"""Characters of a plain schema, at most. The slowest one found, of 300 properties, compiles in 30 ms."""

PLAIN_DEPTH = 16
"""Levels of a plain schema, at most."""

_COST = re.compile(r'"lexer_cost": (\d+)')
_NOTES = frozenset(("default", "description", "examples", "title"))
_PLAIN_KEYS = _NOTES | {"additionalProperties", "const", "enum", "items", "properties", "required", "type"}


class GrammarRefused(BadParameter):
    """A grammar that llguidance cannot compile, or that admits nothing."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"grammar={kind}: {message}", param="grammar")


def compile_matcher(trie: Any, grammar: Grammar) -> Any:
    """llguidance's matcher at the start of a text, its first mask computed. Raises GrammarRefused.

    The first mask is the slowest: computed once, it serves all copies of the matcher.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, step_lexer_fuel=LEXER_FUEL, step_max_items=PARSER_ITEMS
    )
    matcher = LLMatcher(trie, _source(grammar), log_level=0, limits=limits)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarRefused(grammar.kind, _first_lines(matcher.get_error()))
    if not int.from_bytes(mask, "little") & ~bits(trie.eos_tokens):
        raise GrammarRefused(grammar.kind, "it admits only the empty text, or nothing this model can spell")
    return matcher


def lexer_cost(matcher: Any) -> int:
    """What the lexer of a matcher has cost by its last mask, all matchers that share the lexer together.

    llguidance tells it in the message of a failure alone, so a copy of the matcher is made to fail.
    """
    probe = matcher.deep_copy()
    probe.rollback(1 << 31)
    found = _COST.search(probe.get_error())
    if found is None:
        raise InvariantBroken("llguidance does not tell what a lexer has cost")
    return int(found[1])


def is_plain(grammar: Grammar) -> bool:
    """Whether compiling a grammar is cheap for certain: any JSON object, or a short schema of simple types.

    A plain schema has no numeric bounds, patterns, formats, references or counts, and no schemas that have to
    be merged, so each of its parts is compiled once and its cost grows with its length alone.
    """
    if grammar.kind == "json_object":
        return True
    if grammar.kind != "json_schema" or len(grammar.text) > PLAIN_TEXT:
        return False
    return _is_plain_schema(json.loads(grammar.text), PLAIN_DEPTH)


def bits(ids: Iterable[int]) -> int:
    """A number with the bits of these token ids set."""
    return sum(1 << token for token in ids)


def _is_plain_schema(schema: object, levels: int) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or levels == 0:
        return False
    if "anyOf" in schema:  # beside other keys, llguidance merges them into every choice
        choices = schema["anyOf"]
        return schema.keys() <= _NOTES | {"anyOf"} and _are_plain(choices, levels)
    properties = schema.get("properties", {})
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    within = [schema[name] for name in ("items", "additionalProperties") if name in schema]
    return (
        schema.keys() <= _PLAIN_KEYS
        and isinstance(values, list)
        and not any(isinstance(value, dict | list) for value in values)
        and isinstance(properties, dict)
        and _are_plain([*within, *properties.values()], levels)
    )


def _are_plain(schemas: object, levels: int) -> bool:
    return isinstance(schemas, list) and all(_is_plain_schema(one, levels - 1) for one in schemas)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    schema = json.loads(grammar.text) if grammar.text else {"type": "object"}
    if schema.pop("x-guidance", None) is not None:
        raise GrammarRefused(grammar.kind, "'x-guidance' is not part of JSON Schema; leave it out")
    _refuse_large_numbers(grammar.kind, schema)
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise GrammarRefused(grammar.kind, f"the schema cannot be read: {error}") from error


def _refuse_large_numbers(kind: str, schema: Mapping[str, Any]) -> None:
    """llguidance reads finite numbers and integers of at most 64 bits, and misreads others or fails."""
    parts: list[object] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, int) and not -(2**63) <= part < 2**64:
            size = f"a number of {part.bit_length()} bits"
            raise GrammarRefused(kind, f"the schema holds {size}; give integers of at most 64 bits")
        elif isinstance(part, float) and not math.isfinite(part):
            raise GrammarRefused(kind, "the schema holds a number beyond 1.8e308; give a smaller one")


def _first_lines(message: str) -> str:
    """An llguidance error without its dump of the parser's state."""
    return message.split("\n<state>", maxsplit=1)[0].strip()[:400]


__all__ = [
    "LEXER_FUEL",
    "MAX_LEXER_STATES",
    "MAX_TEXT",
    "PARSER_ITEMS",
    "PLAIN_DEPTH",
    "PLAIN_TEXT",
    "WHITESPACE",
    "GrammarRefused",
    "bits",
    "compile_matcher",
    "is_plain",
    "lexer_cost",
]
