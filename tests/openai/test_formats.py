"""`response_format` and `structured_outputs`: the grammar it asks for, and what is refused by name."""

import collections
import sys

import pytest

from samewise.errors import BadParameter
from samewise.openai.formats import grammar_of, grammar_of_outputs
from samewise.openai.gbnf import to_lark
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
        ({"type": "json_object", "schema": SCHEMA}, Grammar.json_schema(SCHEMA)),  # llama.cpp's
        ({"type": "json_object", "schema": None}, Grammar.json_object()),
        ({"type": "json_schema", "schema": SCHEMA}, Grammar.json_schema(SCHEMA)),
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
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "json_schema is not supported here"),
        ({"type": "json_object", "schema": "{}"}, "schema is missing"),
        ({"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": SCHEMA}}, "one of them"),
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


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"json": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"json": '{"type": "object"}', "regex": None}, Grammar.json_schema('{"type": "object"}')),
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"choice": ["yes", 'no "x"', "ä"]}, Grammar.lark('start: "yes" | "no \\"x\\"" | "ä"')),
        ({"grammar": "start: /a/"}, Grammar.lark("start: /a/")),
        ({"json_object": True, "disable_any_whitespace": False}, Grammar.json_object()),
    ],
)
def test_structured_outputs_give_their_grammar(given, grammar):
    assert grammar_of_outputs(given) == grammar


def test_structured_outputs_may_be_written_in_gbnf():
    grammar = grammar_of_outputs({"grammar": 'root ::= "a" | b\nb ::= [0-9]+ "x"'})
    assert grammar.kind == "lark"
    assert "start:" in grammar.text
    for wrong in ("root ::= (", "root ::= unknown", "root ::= " + "(" * 2000):
        with pytest.raises(BadParameter, match="this is no GBNF"):
            grammar_of_outputs({"grammar": wrong})


GBNF = """
# what llama.cpp writes
root ::= object | "x" {2,3}
ws ::= [ \\t\\n]*

value ::= object | array | string | (number ws)?
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws value-list "]"
value-list ::= value |
  value "," value-list
number ::= digit+ # of decimals
digit ::= [0-9]
string ::= "\\"" [^"]* "\\""
"""


@pytest.mark.parametrize("text", [GBNF, 'root ::= b\nb ::= Cc\nCc ::= "x"', 'root::=a\na::="1"\n\n\nb::=a b'])
def test_gbnf_is_converted_as_llguidance_does(text):
    from llguidance.gbnf_to_lark import any_to_lark

    assert to_lark(text) == any_to_lark(text)
    lark = to_lark(text)
    assert to_lark(lark) == lark == any_to_lark(lark)


def test_converting_gbnf_takes_work_that_grows_with_its_length():
    """Calls are counted: a quadratic conversion makes some 50 times as many for 8 times the text."""

    def calls(text):
        counts = collections.Counter()
        sys.setprofile(lambda frame, event, _: counts.update([event]))
        try:
            to_lark(text)
        finally:
            sys.setprofile(None)
        return counts["call"]

    def chain(length):
        return "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(length)) + f'r{length} ::= "a"'

    assert calls(chain(800)) < 12 * calls(chain(100))


def test_gbnf_with_many_blank_lines_is_converted():
    assert grammar_of_outputs({"grammar": 'root ::= "a"' + "\n" * 30_000}).text.endswith('start: "a"\n')


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "choice": ["b"]}, "regex, choice: give exactly one"),
        ({"json_object": False}, "give exactly one"),
        ({"structural_tag": "{}"}, "structural_tag: is not supported"),
        ({"json": SCHEMA, "whitespace_pattern": " "}, "whitespace_pattern: is not supported"),
        ({"json": 5}, "a JSON Schema is an object"),
        ({"json": "["}, "json: the JSON schema is not JSON"),
        ({"regex": 5}, "as text"),
        ({"choice": []}, "list of texts"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"choice": "ab"}, "list of texts"),
        ({"grammar": " "}, "the grammar's text"),
        ({"grammar": 'root ::= "a"\n' * 9999}, "more than 32768; use Lark"),
    ],
)
def test_other_structured_outputs_are_refused_by_name(given, message):
    with pytest.raises(BadParameter, match=message) as caught:
        grammar_of_outputs(given)
    assert str(caught.value).startswith("structured_outputs=")
    assert caught.value.param == "structured_outputs"
