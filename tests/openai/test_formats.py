"""`response_format`: the grammar it asks for, and what is refused by name."""

import pytest

from samewise.errors import BadParameter
from samewise.openai.formats import grammar_of
from samewise.types import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar.json_object()),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            Grammar.json_schema(SCHEMA),
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            Grammar.json_schema(SCHEMA),
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": None, "description": "d"}},
            Grammar.json_schema(SCHEMA),
        ),
        ({"type": "grammar", "syntax": "regex", "definition": "a+"}, Grammar.regex("a+")),
        ({"type": "grammar", "syntax": "lark", "definition": "start: /a/"}, Grammar.lark("start: /a/")),
    ],
)
def test_known_formats_give_their_grammar(given, grammar):
    assert grammar_of(given) == grammar


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("json_object", "give an object"),
        ({}, "known types are text, json_object, json_schema, grammar"),
        ({"type": "xml"}, "response_format=xml: known types"),
        ({"type": ["text"]}, "known types"),
        ({"type": "json_object", "schema": SCHEMA}, "schema is not supported here"),
        ({"type": "json_schema"}, "json_schema is an object"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema is missing"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "schema is missing"),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "yes"}},
            "strict is true, false",
        ),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "lenient": True}}, "lenient is not"),
        ({"type": "json_schema", "json_schema": {"schema": {"a": float("nan")}}}, "not JSON"),
        ({"type": "grammar", "syntax": "gbnf", "definition": "x"}, "syntax is one of regex, lark"),
        ({"type": "grammar", "syntax": "lark"}, "definition is the grammar's text"),
    ],
)
def test_other_formats_are_refused_by_name(given, message):
    with pytest.raises(BadParameter, match=message) as caught:
        grammar_of(given)
    assert str(caught.value).startswith("response_format=")
    assert caught.value.param == "response_format"
