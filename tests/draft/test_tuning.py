"""Tuning: impossible values of the layer-set search are refused."""

import pytest

from samewise.config import EngineConfig
from samewise.draft.tuning import SearchTuning
from samewise.errors import BadParameter


@pytest.mark.parametrize(
    ("name", "value"),
    [("share", 0), ("share", 1.5), ("share", "much"), ("every", 0), ("rounds", -1), ("window", 8)],
)
def test_impossible_search_values_are_refused_by_name(name, value):
    with pytest.raises(BadParameter, match=rf"search\.{name}") as error:
        SearchTuning(**{name: value})
    assert error.value.param == f"search.{name}"


def test_a_workload_that_is_no_text_is_refused():
    with pytest.raises(BadParameter, match="workload"):
        EngineConfig.of(workload=3)
