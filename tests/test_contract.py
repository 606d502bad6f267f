"""Contract: equal facts give equal ids; and which facts an engine writes into it."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from samewise.config import EngineConfig
from samewise.contract import ENGINE_VERSION, Contract
from samewise.engine import Engine
from samewise.testing import byte_tokenizer, tiny, tiny_engine

FACTS = st.dictionaries(st.text(min_size=1, max_size=6), st.text(max_size=6), max_size=6)


@settings(deadline=None)
@given(FACTS, st.randoms(use_true_random=False))
def test_the_id_does_not_depend_on_the_order_of_facts(facts: dict[str, str], random: object) -> None:
    items = list(facts.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    one, other = Contract.of(facts), Contract.of(dict(items))
    assert one == other
    assert one.id == other.id == str(one)
    assert one.differences(other) == []


@settings(deadline=None)
@given(FACTS, FACTS)
def test_ids_are_equal_exactly_when_facts_are(one: dict[str, str], two: dict[str, str]) -> None:
    one, two = ({k: v for k, v in facts.items() if k != "engine"} for facts in (one, two))
    assert (Contract.of(one).id == Contract.of(two).id) == (one == two)


@settings(deadline=None)
@given(FACTS, st.text(min_size=1, max_size=6), st.text(max_size=6))
def test_changing_one_fact_shows_in_the_id_and_in_differences(
    facts: dict[str, str], name: str, value: str
) -> None:
    assume(name != "engine" and facts.get(name) != value)
    one, other = Contract.of(facts), Contract.of(facts | {name: value})
    assert one.id != other.id
    assert one.differences(other) == [(name, facts.get(name, "(absent)"), value)]


def test_a_missing_fact_differs_from_an_empty_one() -> None:
    one, other = Contract.of({}), Contract.of({"rope": ""})
    assert one.id != other.id
    assert one.differences(other), "two ids without a difference"


def test_differences_are_mirrored_when_the_sides_are_swapped() -> None:
    one = Contract.of({"dtype": "float32", "torch": "2.11", "cpu": "x"})
    other = Contract.of({"dtype": "bfloat16", "torch": "2.11", "gpu": "y"})
    assert one.differences(other) == [
        ("cpu", "x", "(absent)"),
        ("dtype", "float32", "bfloat16"),
        ("gpu", "(absent)", "y"),
    ]
    assert other.differences(one) == [(name, b, a) for name, a, b in one.differences(other)]


def test_the_engine_version_cannot_be_overridden_by_a_fact() -> None:
    assert dict(Contract.of({"engine": "mine"}).facts)["engine"] == ENGINE_VERSION


def test_an_id_is_short_and_ascii() -> None:
    contract_id = Contract.of({"weights": "абв", "dtype": "float32"}).id
    assert contract_id.isascii()
    assert contract_id.startswith("sw-")
    assert len(contract_id) == 23
    assert contract_id == Contract.of({"dtype": "float32", "weights": "абв"}).id


@pytest.fixture(scope="module")
def default_contract() -> Contract:
    return tiny_engine().contract


def test_equal_engines_have_equal_contracts(default_contract: Contract) -> None:
    assert tiny_engine().contract == default_contract


def test_settings_that_cannot_change_a_bit_are_no_facts(default_contract: Contract) -> None:
    other = tiny_engine(
        max_num_seqs=3, kv_memory=2**20, enable_prefix_caching=False, max_queued=4, seed=0, date="2024-07-26"
    ).contract
    assert default_contract.differences(other) == []


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"seed": 1}, "weights"),
        ({"linear": "torch"}, "linear"),
        ({"max_model_len": 100}, "context"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"attention": "torch"}, "attention"),
        ({"family": "qwen2"}, "architecture"),
    ],
)
def test_settings_that_can_change_a_bit_change_the_contract(
    change: dict[str, object], fact: str, default_contract: Contract
) -> None:
    other = tiny_engine(**change).contract  # type: ignore[arg-type]
    assert other.id != default_contract.id
    assert fact in [name for name, _, _ in default_contract.differences(other)]


def test_a_date_is_a_fact_where_the_chat_template_asks_for_one() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}"
    loaded, config = replace(tiny(), tokenizer=tokenizer), EngineConfig(model="tiny", kv_memory=2**22)
    facts = [
        dict(Engine(loaded, replace(config, device="cpu", date=date)).contract.facts)
        for date in (None, "2024-07-26", "2024-07-27")
    ]
    assert [each["date"] for each in facts] == ["none", "2024-07-26", "2024-07-27"]


def test_an_engines_contract_names_weights_libraries_and_probe_digest(default_contract: Contract) -> None:
    facts = dict(default_contract.facts)
    assert len(facts["probe"]) == 64
    assert {"weights", "dtype", "page"} <= facts.keys()
    assert all(isinstance(value, str) for value in facts.values())
    with_torch = dict(tiny_engine(linear="torch").contract.facts)
    assert {"torch", "transformers", "cpu", "frame rows"} <= with_torch.keys()
