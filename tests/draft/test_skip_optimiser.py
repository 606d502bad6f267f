"""SWIFT's phase 1: when the layer-set search runs, ends, opens again and drops a set."""

import json
import random

import pytest
import torch
from skip_cases import BEST, EVERY_SUBLAYER, LAYERS, generate, skip_engine, skip_with_best_set

from samewise.bench import timeline
from samewise.draft.skip.timeline import ACCELERATE
from samewise.testing import planted, submit, two_topics
from samewise.types import LayerSet, Sampling

pytestmark = pytest.mark.usefixtures("own_cache", "fused_hooks")


def observe_first_tokens(skip, rights):
    """First tokens that were accepted or not; the phases that the timeline gained by them."""
    events = skip.optimiser.timeline.events
    before = len(events)
    for right in rights:
        skip.active.first_tokens.observe(1, int(right))
        skip.observe([])
    return [event.phase for event in events[before:]]


# ---- phases and budget


def test_phases_come_in_order_and_are_reported():
    engine = skip_engine(search={"rounds": 12})
    generate(engine, 1, 400)
    events = engine.stats()["skip"]["timeline"]
    phases = [event["event"] for event in events]
    assert phases[0] == "accumulate"
    assert phases[1] == "optimise"
    assert phases[-1] == "accelerate"
    assert [event["tokens"] for event in events] == sorted(event["tokens"] for event in events)
    assert events[-1]["set"]["mlp"]
    assert events[-1]["score"] > 0


def test_the_search_keeps_to_its_share_of_the_time():
    for share in (0.05, 0.3):
        engine = skip_engine(search={"share": share, "rounds": 1000, "every": 1})
        generate(engine, 1, 200)
        search = engine.stats()["skip"]["search"]
        assert search["rounds"] > 0
        assert search["share"] <= share * 1.2


def test_ended_answers_are_scored_on_where_live_ones_are_too_short():
    engine = skip_engine(search={"every": 1})
    for seed in range(20):
        generate(engine, 1, 40, seed=seed)
    optimiser = engine.proposer.optimiser
    assert optimiser.scorer.text.num_answers
    assert optimiser.search.round > 0  # 40 tokens alone are not enough


def test_the_timeline_is_recorded_and_drawn(tmp_path):
    rng = random.Random(1)
    asked = {name: [[rng.randrange(256) for _ in range(10)] for _ in range(2)] for name in ("one", "two")}
    line = timeline.record(skip_engine(), asked, 1, 120)
    assert [topic for _, topic in line.topics] == ["one", "two"]
    assert [point.tokens for point in line.points] == sorted(point.tokens for point in line.points)
    assert {event["event"] for event in line.events} >= {"accumulate", "optimise"}
    assert any(point.acceptance for point in line.points)
    timeline.plot(line, tmp_path / "line.png", "planted", LAYERS)
    assert (tmp_path / "line.png").stat().st_size > 10_000
    assert json.loads(json.dumps(line.as_json()))["events"] == line.events


def test_the_timeline_counts_committed_tokens():
    engine = skip_engine(make=skip_with_best_set)
    generate(engine, 3, 20)  # drafts are cut where an answer ends
    engine.proposer.optimiser._record(ACCELERATE)
    assert engine.stats()["skip"]["timeline"][-1]["tokens"] == engine.scheduler.counters.output_tokens == 60


# ---- the search opens again


def test_a_set_that_stops_fitting_is_replaced():
    """First tokens are rejected, the search opens again and finds a good set."""
    engine = skip_engine(search={"rounds": 8})
    for seed in range(4):
        generate(engine, 1, 300, seed=seed)
    active, optimiser = engine.proposer.active, engine.proposer.optimiser
    assert not optimiser.search.open
    assert active.usual_rate is not None
    inner = LayerSet(frozenset(range(1, LAYERS - 1)), frozenset(range(1, LAYERS - 1)))
    optimiser.search.best.skipped = inner  # as after a change of topic: needed sublayers are skipped
    active.path = optimiser.scorer.path(inner)
    generate(engine, 1, 450, seed=5)
    phases = [event["event"] for event in engine.stats()["skip"]["timeline"]]
    assert phases[-1] == "accelerate"
    assert "optimise" in phases[phases.index("accelerate") :]
    assert engine.stats()["skip"]["matchness"] > 0.9
    assert not active.skipped.mlp - BEST.mlp


def test_two_topics_and_back_each_get_their_set():
    engine = skip_engine(two_topics(), search={"rounds": 10})
    skipped = []
    for seed, (low, high) in enumerate(((0, 160), (160, 320), (0, 160))):
        sampling = Sampling(temperature=0.7, seed=seed, allowed_token_ids=tuple(range(low, high)))
        rng = random.Random(seed)
        submit(engine, [rng.randrange(low, high) for _ in range(16)], sampling, max_tokens=380)
        while not engine.idle:
            engine.step()
        mlps = engine.stats()["skip"]["set"]["mlp"]
        skipped.append((3 in mlps, 8 in mlps))
    assert skipped == [(False, True), (True, False), (False, True)]
    phases = [event["event"] for event in engine.stats()["skip"]["timeline"]]
    assert phases.count("accelerate") == 3


def test_a_search_that_found_nothing_is_tried_again_after_doubling_pauses():
    engine = skip_engine(planted(LAYERS, 64, keep=EVERY_SUBLAYER), search={"rounds": 6, "retry_tokens": 100})
    for seed in range(4):
        generate(engine, 1, 400, seed=seed)
    report = engine.stats()["skip"]
    assert report["set"]["skipped"] == 0
    closed = [e["tokens"] for e in report["timeline"] if e["event"] == "accelerate"]
    after = [min(e["tokens"] for e in report["timeline"] if e["tokens"] > at) for at in closed[:3]]
    pauses = [b - a for a, b in zip(closed, after, strict=False)]
    assert [round(pause, -2) for pause in pauses] == [100, 200, 400]


def test_a_set_found_by_a_later_search_is_used():
    engine = skip_engine(search={"rounds": 6})
    skip = engine.proposer
    skip.optimiser.search.drop()
    skip.optimiser.search.close("nothing was found")
    skip.optimiser._retry_at = 200
    generate(engine, 1, 150)
    assert not skip.ready
    generate(engine, 1, 300, seed=1)
    assert len(skip.active.skipped) > 0.7 * len(BEST)
    assert engine.scheduler.counters.accepted > 0


def test_chance_variation_does_not_open_the_search_again():
    engine = skip_engine(search={"rounds": 6})
    generate(engine, 1, 300)
    skip, rng = engine.proposer, random.Random(0)
    skip.active.restart()
    observe_first_tokens(skip, (rng.random() < 0.7 for _ in range(2000)))
    assert not skip.optimiser.search.open
    observe_first_tokens(skip, (rng.random() < 0.05 for _ in range(100)))
    assert skip.optimiser.search.open


def test_new_weights_open_the_search_again():
    engine = skip_engine(search={"rounds": 6})
    generate(engine, 1, 300)
    assert not engine.proposer.optimiser.search.open
    engine.update_weights({"model.norm.weight": torch.ones(64)})
    assert engine.proposer.optimiser.search.open
    generate(engine, 1, 200)


# ---- sets that do not hold


def test_a_set_far_below_its_promise_is_dropped_during_a_search_and_not_loaded_again():
    loaded, loads = planted(LAYERS, 64), []
    generate(skip_engine(loaded, search={"rounds": 6}), 1, 300)
    engine = skip_engine(loaded, search={"rounds": 6})
    skip = engine.proposer
    load = skip.optimiser.store.load
    skip.optimiser.store.load = lambda: loads.append(1) or load()
    generate(engine, 1, 300)
    skip.active.restart()
    skip.optimiser.search.open = True
    assert observe_first_tokens(skip, [False] * 60) == ["optimise"]
    assert not skip.ready
    assert skip.optimiser.search.round == 0
    generate(engine, 1, 300, seed=9)
    assert len(skip.active.skipped) > 0.7 * len(BEST)
    assert loads == [1]


def test_a_moderate_fall_opens_the_search_and_keeps_the_set():
    engine = skip_engine(search={"rounds": 6})
    generate(engine, 1, 300)
    skip = engine.proposer
    skip.active.restart()
    skipped = skip.active.skipped
    assert observe_first_tokens(skip, [True] * 24 + [i % 3 > 0 for i in range(200)]) == ["optimise"]
    assert skip.optimiser.search.open
    assert skip.active.skipped == skipped


def test_a_set_whose_score_breaks_its_promise_is_dropped_and_not_stored():
    engine = skip_engine(search={"rounds": 64})
    generate(engine, 1, 300)
    skip, optimiser = engine.proposer, engine.proposer.optimiser
    stored = optimiser.store.load()
    optimiser.search.open, optimiser._scored_at, optimiser.budget.saved = True, 0, 1e9
    score = optimiser.scorer.score
    optimiser.scorer.score = lambda pieces, sets: [s._replace(num_right=0) for s in score(pieces, sets)]
    generate(engine, 1, 60, seed=5)
    assert not skip.ready
    assert optimiser.store.load() == stored


def test_after_three_dropped_sets_the_search_pauses():
    engine = skip_engine(search={"rounds": 6})
    generate(engine, 1, 300)
    skip, optimiser = engine.proposer, engine.proposer.optimiser
    best = optimiser.search.best
    for _ in range(3):
        optimiser.search.best = best
        optimiser._use()
        observe_first_tokens(skip, [False] * 30)
    assert not optimiser.search.open
    assert skip.quiet
    assert optimiser._retry_at > engine.scheduler.counters.output_tokens
