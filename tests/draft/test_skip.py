"""`skip` as a proposer: it finds the planted set, drafts with it, and writes no page of others."""

import random

import pytest
import torch
from skip_cases import BEST, EVERY_SUBLAYER, LAYERS, generate, skip_engine

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.errors import BadParameter
from samewise.testing import planted, submit, tiny, tiny_engine
from samewise.types import LayerSet, Sampling

pytestmark = pytest.mark.usefixtures("own_cache", "fused_hooks")


@pytest.mark.parametrize(("live", "temperature"), [(1, 0.0), (3, 0.0), (2, 0.7)])
def test_the_planted_set_is_found_and_used(live, temperature):
    engine = skip_engine()
    generate(engine, live, 160, temperature=temperature)
    report = engine.stats()["skip"]
    skipped = LayerSet(frozenset(report["set"]["attention"]), frozenset(report["set"]["mlp"]))
    assert not skipped.attention - BEST.attention, "a needed sublayer is skipped"
    assert not skipped.mlp - BEST.mlp
    assert len(skipped) > 0.7 * len(BEST)
    assert report["matchness"] > 0.9
    assert report["first_guess_acceptance"] > 0.8
    assert engine.stats()["tokens_per_frame"] > 1.5 * live


def test_a_layer_of_another_structure_is_refused_by_name():
    loaded = tiny(num_hidden_layers=4)
    loaded.model.model.layers[2].extra = torch.nn.Linear(64, 64)
    with pytest.raises(BadParameter, match=r"skip.*llama.*mlp, extra"):
        Engine(loaded, EngineConfig(model="odd", device="cpu", kv_memory=2**22, proposer="skip"))
    engine = Engine(loaded, EngineConfig(model="odd", device="cpu", kv_memory=2**22, proposer="auto"))
    assert "skip" not in engine.stats()["auto"]["drafters"]


def test_a_model_of_two_layers_is_never_drafted_for():
    engine = tiny_engine(proposer="skip", overrides={"num_hidden_layers": 2})
    generate(engine, 1, 40)
    assert engine.stats()["skip"]["set"]["skipped"] == 0
    assert engine.scheduler.counters.guessed == 0


def test_without_a_set_skip_is_only_called_for_steps_of_the_search():
    engine = skip_engine(planted(LAYERS, 64, keep=EVERY_SUBLAYER), search={"share": 0.02})
    calls, propose = [], engine.proposer.propose
    engine.proposer.propose = lambda asks: calls.append(len(asks)) or propose(asks)
    generate(engine, 1, 600)
    rounds = engine.stats()["skip"]["search"]["rounds"]
    assert 0 < rounds <= len(calls) < 60


def test_only_scratch_and_its_own_pages_are_written():
    engine = skip_engine(search={"every": 1, "share": 1.0})
    rng = random.Random(1)
    request = submit(engine, [rng.randrange(256) for _ in range(20)], Sampling(), max_tokens=60)
    store, canonical = engine.runner.store, {}
    while not engine.idle:
        seq = engine.scheduler._running.get(request)
        if seq is not None:
            for page in range(seq.kv_len // 16):
                bits = [layer.k[seq.pages[page]].clone() for layer in store.layers]
                known = canonical.setdefault(page, bits)
                assert all(torch.equal(a, b) for a, b in zip(bits, known, strict=True))
        engine.step()
    assert engine.stats()["skip"]["search"]["rounds"] > 3


def test_auto_uses_skip_where_it_pays():
    engine = skip_engine(proposer="auto")
    generate(engine, 1, 400)
    assert engine.stats()["auto"]["decisions"]["skip"] > 20
    assert engine.scheduler.counters.drafters["skip"].accepted > 100


def test_auto_does_not_use_skip_where_it_does_not_pay():
    loaded = planted(LAYERS, 64, keep=EVERY_SUBLAYER)
    engine = skip_engine(loaded, proposer="auto", search={"share": 0.02})
    plain = skip_engine(planted(LAYERS, 64, keep=EVERY_SUBLAYER), proposer="none")
    assert generate(engine, 1, 600) == generate(plain, 1, 600)
    drafter = engine.scheduler.counters.drafters.get("skip")
    assert drafter is None or drafter.guessed < 60
    assert engine._clock.now < 1.05 * plain._clock.now
