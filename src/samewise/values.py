"""Kinds of values that settings and sampling parameters may have, with the wording of their errors.

Host only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samewise.errors import BadParameter


@dataclass(frozen=True, slots=True)
class Values:
    """A set of values, described by `text`. `verb` begins its error; `convert` gives the stored form.

    `within` is a larger set with an error of its own: a value is read by it first. `json_schema` is the range
    in JSON Schema's words, for documents; it checks nothing.
    """

    text: str
    contains: Callable[[Any], bool]
    verb: str = "give"
    convert: Callable[[Any], Any] | None = None
    within: Values | None = None
    json_schema: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def read(self, name: str, value: Any, *, optional: bool = False) -> Any:
        """The value as it is stored; BadParameter where it is not one of these (or None, if `optional`)."""
        if value is None and optional:
            return None
        known = value if self.within is None else self.within.read(name, value)
        if not self.contains(known):
            also = ", or None" if optional else ""
            raise BadParameter(f"{name}={value!r}: {self.verb} {self.text}{also}", param=name)
        return known if self.convert is None else self.convert(known)


def one_of(*choices: str) -> Values:
    """One of several words."""
    return Values(f"one of {', '.join(choices)}", lambda value: value in choices, "choose")


def integer(low: int, high: int | None = None) -> Values:
    """A whole number from `low` to `high`, both included."""
    if high is None:
        return Values(
            f"a whole number, {low} or more",
            lambda value: is_integer(value) and value >= low,
            json_schema={"minimum": low},
        )
    return Values(
        f"a whole number from {low} to {high}",
        lambda value: is_integer(value) and low <= value <= high,
        json_schema={"minimum": low, "maximum": high},
    )


def number(
    text: str, *, minimum: float | None = None, above: float | None = None, maximum: float | None = None
) -> Values:
    """A finite number of a range, stored as a float. `above` is a lower bound that is not itself allowed."""
    bounds = {"minimum": minimum, "exclusiveMinimum": above, "maximum": maximum}
    return Values(
        text,
        lambda value: (
            (minimum is None or value >= minimum)
            and (above is None or value > above)
            and (maximum is None or value <= maximum)
        ),
        within=FINITE,
        json_schema={name: bound for name, bound in bounds.items() if bound is not None},
    )


def string(text: str, *, empty: bool = False) -> Values:
    """A string; `empty`: also the empty one."""
    return Values(text, lambda value: isinstance(value, str) and (empty or value != ""))


FLAG = Values("True or False", lambda value: isinstance(value, bool))
FINITE = Values("a finite number", lambda value: is_number(value) and math.isfinite(value), convert=float)


def is_integer(value: object) -> bool:
    """Whether a value is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


__all__ = ["FINITE", "FLAG", "Values", "integer", "is_integer", "is_number", "number", "one_of", "string"]
