"""Values: what each kind accepts, and the error that asks for it."""

import math

import pytest

from samewise.errors import BadParameter
from samewise.values import FLAG, integer, number, one_of, string


@pytest.mark.parametrize(
    ("values", "good", "bad", "message"),
    [
        (one_of("a", "b"), ["a", "b"], ["c", None, ["a"]], "choose one of a, b"),
        (integer(1, 3), [1, 3], [0, 4, 2.0, True, "2"], "give a whole number from 1 to 3"),
        (integer(0), [0, 10**9], [-1, 0.5, False], "give a whole number, 0 or more"),
        (string("a name"), ["x"], ["", 1, b"x"], "give a name"),
        (string("a name", empty=True), ["", "x"], [1], "give a name"),
        (FLAG, [True, False], [0, 1, "false", None], "give True or False"),
        (number("0 to 1", lambda x: 0 <= x <= 1), [0, 0.5], [2, math.nan, True, "1"], "give 0 to 1"),
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


def test_numbers_are_stored_as_floats():
    assert type(number("any", lambda _: True).read("x", 1)) is float
