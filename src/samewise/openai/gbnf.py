"""GBNF, llama.cpp's form of grammars → llguidance's Lark, in time that grows with the text's length.

llguidance has a converter, whose parser and renaming are used here. As a whole it takes quadratic time for
texts with many blank lines, and for those where each rule names the next.
"""

from __future__ import annotations

import re
from typing import Any

_LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:)")


def to_lark(text: str) -> str:
    """The grammar in Lark; Lark is left as it is. Raises what llguidance's converter raises."""
    if _LARK.search(text):
        return text
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    rules: dict[str, Any] = GrammarParser().parse(text)
    in_order = list(rules.values())
    # Rules before those that name them: `resolve` repeats a pass over all rules until nothing changes.
    ordered = _named_first(rules)
    resolve(ordered)
    return _text(in_order)


def _named_first(rules: dict[str, Any]) -> dict[str, Any]:
    """The rules, each after those that it names, as far as they do not name each other in a circle."""
    ordered: dict[str, Any] = {}
    begun: set[str] = set()
    for first in rules:
        waiting = [first]
        while waiting:
            name = waiting[-1]
            if name in begun or name not in rules:
                waiting.pop()
                if name in rules:
                    ordered.setdefault(name, rules[name])
            else:
                begun.add(name)
                waiting += [one for one in _names(rules[name]) if one not in begun]
    return ordered


def _names(rule: Any) -> list[str]:
    """The rules that a rule names."""
    names, nodes = [], [rule]
    while nodes:
        node = nodes.pop()
        nodes += node.children()
        if hasattr(node, "target"):
            names.append(node.name)
    return names


def _text(rules: list[Any]) -> str:
    """The rules as Lark, as llguidance's converter writes them."""
    parts, after_blank = ["%llguidance {}\n\n"], True
    for rule in rules:
        text = str(rule)
        is_long = "\n" in text
        parts.append("\n" * (is_long and not after_blank) + text + "\n" * (1 + is_long))
        after_blank = is_long
    return "".join(parts)


__all__ = ["to_lark"]
