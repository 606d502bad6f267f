"""Found layer sets are stored for the next process, by contract and workload."""

import json
import logging

import pytest
from skip_cases import LAYERS, generate, skip_engine

from samewise.draft.skip.layer_set_store import LayerSetStore
from samewise.testing import planted
from samewise.types import LayerSet

pytestmark = pytest.mark.usefixtures("own_cache", "fused_hooks")


def test_a_stored_set_is_scored_before_the_next_process_uses_it():
    loaded = planted(LAYERS, 64)
    engine = skip_engine(loaded, search={"rounds": 6})
    generate(engine, 1, 300)
    stored = engine.stats()["skip"]["set"]
    again = skip_engine(loaded, search={"rounds": 6})
    assert again.stats()["skip"]["set"]["skipped"] == 0
    generate(again, 1, 90)
    first = again.stats()["skip"]["timeline"][1]
    assert first["set"]["mlp"] == stored["mlp"]
    other = skip_engine(loaded, workload="another")
    assert other.proposer.optimiser.store.load() is None


@pytest.mark.parametrize(
    "entry",
    ['"soup"', "{", '{"key": 3}', '{"attention": "abc", "mlp": [1]}', '{"attention": [77], "mlp": []}'],
)
def test_a_damaged_entry_is_ignored_with_a_warning_and_rewritten(entry, caplog, own_cache):
    engine = skip_engine(planted(LAYERS, 64), search={"rounds": 6})
    optimiser = engine.proposer.optimiser
    optimiser.store.save(LayerSet(mlp=frozenset({1})), 0.5)
    (path,) = (own_cache / "facts" / "layersets").glob("*.json")
    if entry.startswith('{"a'):
        path.write_text(json.dumps({"key": optimiser.store._key, "value": json.loads(entry)}))
    else:
        path.write_text(entry)
    with caplog.at_level(logging.WARNING, logger="samewise"):
        generate(engine, 1, 300)
    assert not optimiser.search.open
    assert "ignoring" in caplog.text
    assert optimiser.store.load()[0] == optimiser.search.best.skipped


def test_without_a_contract_nothing_is_read_or_written(own_cache):
    store = LayerSetStore("")
    store.save(LayerSet(mlp=frozenset({1})), 0.5)
    assert store.load() is None
    assert not list(own_cache.iterdir())
