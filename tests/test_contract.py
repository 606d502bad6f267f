"""Contract: equal facts, equal name; and what an engine writes into it."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from samewise.contract import ENGINE_VERSION, Contract
from samewise.testing import tiny_engine

FACTS = st.dictionaries(st.text(min_size=1, max_size=6), st.text(max_size=6), max_size=6)


@settings(deadline=None)
@given(FACTS, st.randoms(use_true_random=False))
def test_order_does_not_matter(facts: dict[str, str], random: object) -> None:
    items = list(facts.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    one, other = Contract.of(facts), Contract.of(dict(items))
    assert one == other
    assert one.id == other.id == str(one)
    assert one.differences(other) == []


@settings(deadline=None)
@given(FACTS, FACTS)
def test_any_other_fact_is_another_name(one: dict[str, str], two: dict[str, str]) -> None:
    one, two = ({k: v for k, v in facts.items() if k != "engine"} for facts in (one, two))
    assert (Contract.of(one).id == Contract.of(two).id) == (one == two)


@settings(deadline=None)
@given(FACTS, st.text(min_size=1, max_size=6), st.text(max_size=6))
def test_changing_one_fact_shows_in_name_and_differences(
    facts: dict[str, str], name: str, value: str
) -> None:
    assume(name != "engine" and facts.get(name) != value)
    one, other = Contract.of(facts), Contract.of(facts | {name: value})
    assert one.id != other.id
    assert one.differences(other) == [(name, facts.get(name, "(absent)"), value)]


def test_a_fact_that_is_missing_differs_from_one_that_is_empty() -> None:
    one, other = Contract.of({}), Contract.of({"rope": ""})
    assert one.id != other.id
    assert one.differences(other), "two names, and nothing to show for it"


def test_differences_read_both_ways() -> None:
    one = Contract.of({"dtype": "float32", "torch": "2.11", "cpu": "x"})
    other = Contract.of({"dtype": "bfloat16", "torch": "2.11", "gpu": "y"})
    assert one.differences(other) == [
        ("cpu", "x", "(absent)"),
        ("dtype", "float32", "bfloat16"),
        ("gpu", "(absent)", "y"),
    ]
    assert other.differences(one) == [(name, b, a) for name, a, b in one.differences(other)]


def test_the_engine_version_is_a_fact_nobody_else_may_set() -> None:
    assert dict(Contract.of({"engine": "mine"}).facts)["engine"] == ENGINE_VERSION


def test_a_name_is_short_plain_and_fixed() -> None:
    found = Contract.of({"weights": "абв", "dtype": "float32"}).id
    assert found.isascii()
    assert found.startswith("sw-")
    assert len(found) == 23
    assert found == Contract.of({"dtype": "float32", "weights": "абв"}).id


@pytest.fixture(scope="module")
def plain() -> Contract:
    return tiny_engine().contract


def test_the_same_engine_twice_has_one_contract(plain: Contract) -> None:
    assert tiny_engine().contract == plain


def test_what_cannot_change_a_bit_is_no_part_of_it(plain: Contract) -> None:
    other = tiny_engine(
        max_num_seqs=3, kv_memory=2**20, enable_prefix_caching=False, max_queued=4, seed=0, max_model_len=100
    ).contract
    assert plain.differences(other) == []


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"seed": 1}, "weights"),
        ({"frame_rows": 32}, "frame rows"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"date": "2024-07-26"}, "date"),
        ({"attention": "torch"}, "attention"),
        ({"family": "qwen2"}, "architecture"),
    ],
)
def test_what_can_change_a_bit_changes_it(change: dict[str, object], fact: str, plain: Contract) -> None:
    other = tiny_engine(**change).contract  # type: ignore[arg-type]
    assert other.id != plain.id
    assert fact in [name for name, _, _ in plain.differences(other)]


def test_it_certifies_itself(plain: Contract) -> None:
    facts = dict(plain.facts)
    assert len(facts["probe"]) == 64
    assert {"weights", "dtype", "torch", "transformers", "cpu", "frame rows", "page"} <= facts.keys()
    assert all(isinstance(value, str) for value in facts.values())
