"""bench/real_text.py: what an engine knows when its time is taken."""

from pathlib import Path

import pytest

from samewise import user_cache
from samewise.draft.estimates import first_weights
from samewise.draft.skip import layer_set_store
from samewise.testing import tiny

BENCH = Path(__file__).parents[2] / "bench"
SETTINGS = {"model": "tiny", "device": "cpu", "kv_memory": 2**24, "max_num_seqs": 2, "max_model_len": 256}


@pytest.fixture
def real_text(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import real_text

    return real_text


def test_nothing_is_learned_from_the_warm_up_but_what_frames_cost(real_text):
    engine, built = real_text.start(tiny(), SETTINGS | {"proposer": "auto"})
    assert built > 0
    stats = engine.stats()
    assert stats["frames"] > 20
    assert stats["frame_seconds"]
    assert (stats["tree"]["trees"], stats["tree"]["store_bytes"], stats["tree"]["table_bytes"]) == (0, 0, 0)
    assert stats["auto"]["brought"] == 1.0
    assert not stats["auto"]["decisions"].get("tree")
    drafter = engine.proposer._trees._drafter
    assert list(getattr(drafter, "weights", None) or drafter.estimates.weights) == first_weights()
    assert engine.verifier.with_candidates
    result, answers = real_text.run(engine, [("kind", [5, 6, 7] * 8)], 12, 1)
    assert result["tokens"] == 12
    assert result["kinds"]["kind"]["tokens_per_frame"] >= 1.0
    plain, _ = real_text.start(tiny(), SETTINGS | {"proposer": "none"})
    assert not plain.verifier.with_candidates
    assert real_text.run(plain, [("kind", [5, 6, 7] * 8)], 12, 1)[1][0].bits == answers[0].bits


def test_layer_sets_are_not_saved(real_text, monkeypatch):
    saved = []
    monkeypatch.setattr(user_cache, "put", lambda folder, *_: saved.append(folder))
    engine, _ = real_text.start(tiny(num_hidden_layers=6), SETTINGS | {"proposer": "skip"})
    real_text.run(engine, [("kind", [5, 6, 7] * 8)], 60, 1)
    assert engine.proposer.optimiser.store.contract_id is None
    assert layer_set_store.FOLDER not in saved
