"""Values: what each kind accepts, and the error that asks for it."""

import math

import pytest

from samewise.errors import BadParameter
from samewise.values import FINITE, FLAG, integer, number, one_of, string


@pytest.mark.parametrize(
    ("values", "good", "bad", "message"),
    [
        (one_of("a", "b"), ["a", "b"], ["c", None, ["a"]], "choose one of a, b"),
        (integer(1, 3), [1, 3], [0, 4, 2.0, True, "2"], "give a whole number from 1 to 3"),
        (integer(0), [0, 10**9], [-1, 0.5, False], "give a whole number, 0 or more"),
        (string("a name"), ["x"], ["", 1, b"x"], "give a name"),
        (string("a name", empty=True), ["", "x"], [1], "give a name"),
        (FLAG, [True, False], [0, 1, "false", None], "give True or False"),
        (FINITE, [0, -0.5], [math.nan, math.inf, True, "1", None], "give a finite number"),
    ],
)
def test_good_values_pass_and_bad_ones_are_refused_with_name_and_remedy(values, good, bad, message):
    for value in good:
        assert values.read("x", value) == value
    for value in bad:
        with pytest.raises(BadParameter) as error:
            values.read("x", value)
        assert str(error.value) == f"x={value!r}: {message}"
        assert error.value.param == "x"


def test_none_is_accepted_only_where_optional():
    assert integer(1).read("n", None, optional=True) is None
    with pytest.raises(BadParameter, match=r"1 or more, or None$"):
        integer(1).read("n", 0, optional=True)


def test_a_value_is_first_read_by_the_larger_set():
    share = number("0 to 1", minimum=0, maximum=1)
    with pytest.raises(BadParameter, match="x=nan: give a finite number"):
        share.read("x", math.nan)
    with pytest.raises(BadParameter, match="x=2: give 0 to 1"):
        share.read("x", 2)


def test_numbers_are_stored_as_floats():
    assert type(number("any").read("x", 1)) is float


def test_ranges_are_described_in_json_schema():
    assert integer(0).json_schema == {"minimum": 0}
    assert integer(1, 3).json_schema == {"minimum": 1, "maximum": 3}
    assert FLAG.json_schema == number("any").json_schema == {}
    share = number("more than 0, at most 1", above=0, maximum=1)
    assert share.json_schema == {"exclusiveMinimum": 0, "maximum": 1}
    assert share.read("x", 1) == 1
    for value in (0, 1.1):
        with pytest.raises(BadParameter, match="more than 0, at most 1"):
            share.read("x", value)
