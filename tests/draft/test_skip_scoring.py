"""How layer sets are scored: one pass for each set, or one gated pass for several."""

import random

import pytest
from skip_cases import BEST, EVERY_SUBLAYER, LAYERS, generate, skip_engine

from samewise.draft.skip.scoring_passes import GatedPass, PassPerSet, SetPaths
from samewise.kernels.attention.base import PAGE
from samewise.testing import planted, submit
from samewise.types import LayerSet, Sampling

pytestmark = pytest.mark.usefixtures("own_cache", "fused_hooks")

SETS = [BEST, LayerSet(), LayerSet(mlp=frozenset({2, 5, 8})), LayerSet(frozenset({3}), frozenset({3, 4}))]


def half_way(engine, samplings):
    """What a proposer is asked in the middle of answers."""
    rng = random.Random(4)
    for sampling in samplings:
        submit(engine, [rng.randrange(256) for _ in range(30)], sampling, max_tokens=80)
    while engine.scheduler.counters.output_tokens < 50 * len(samplings):
        engine.step()
    return engine.scheduler.asks(verified=True)


def both_ways(engine, batch):
    """The two kinds of passes over one runner."""
    runner, sampler, scorer = engine.runner, engine.parts.sampler, engine.proposer.optimiser.scorer
    views, window = runner.views(), scorer.text.window
    one = PassPerSet(runner, sampler, views, SetPaths(runner, views, 8))
    return one, GatedPass(runner, sampler, views, window=window, batch=batch)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_gated_pass_predicts_what_a_pass_for_each_set_does(temperature):
    engine = skip_engine(search={"cpu_batch": 4, "share": 1e-9})
    samplings = [Sampling(), Sampling(temperature=temperature, top_k=20, seed=3)]
    asks = half_way(engine, samplings)
    text = engine.proposer.optimiser.scorer.text
    text.add_answer([7, 9, 11, 13] * 16, 4)
    pieces = text.gather(asks)
    assert pieces
    one, gated = both_ways(engine, batch=4)
    expected, predicted = one.predict(pieces, SETS), gated.predict(pieces, SETS)
    assert [p.tokens for p in predicted] == [p.tokens for p in expected]
    for ours, theirs in zip(predicted, expected, strict=True):
        greedy = [p for p in theirs.probabilities if p is not None]
        assert [p for p in ours.probabilities if p is not None] == pytest.approx(greedy, abs=1e-4)
        assert (None in theirs.probabilities) == (None in ours.probabilities) == (temperature > 0)
    assert gated.predict(pieces, SETS * 2) == predicted * 2  # more sets than a pass holds
    for a, b in zip(one.residual_shares(pieces), gated.residual_shares(pieces), strict=True):
        assert a == pytest.approx(b, rel=1e-3)


def test_the_sets_of_a_gated_pass_write_pages_of_their_own():
    engine = skip_engine(search={"cpu_batch": 4, "share": 1e-9})
    pieces = engine.proposer.optimiser.scorer.text.gather(half_way(engine, [Sampling()]))
    _, gated = both_ways(engine, batch=4)
    pages = [gated._placed(piece.span, i).pages for i in range(4) for piece in pieces]
    own = [page for table in pages for page in table[pieces[0].span.start // PAGE :]]
    assert len(own) == len(set(own))
    assert set(own) <= set(engine.parts.scratch_pages)


@pytest.mark.parametrize(("live", "temperature"), [(1, 0.0), (3, 0.7)])
def test_the_planted_set_is_found_by_gated_passes(live, temperature):
    engine = skip_engine(search={"cpu_batch": 4})
    generate(engine, live, 200, temperature=temperature)
    report = engine.stats()["skip"]
    assert not set(report["set"]["attention"]) - BEST.attention, "a needed sublayer is skipped"
    assert not set(report["set"]["mlp"]) - BEST.mlp
    assert report["set"]["skipped"] > 0.7 * len(BEST)
    assert report["search"]["sets_per_step"] == 4
    assert report["search"]["sets"] > report["search"]["tokens"] / 100


def test_the_output_is_the_same_with_gated_passes():
    engine = skip_engine(search={"cpu_batch": 3})
    assert generate(engine, 3, 90) == generate(skip_engine(proposer="none"), 3, 90)
    assert engine.stats()["skip"]["search"]["sets"] > 3


# ---- what stats() says of the search


def test_a_search_without_text_says_so():
    engine = skip_engine(search={"every": 1, "share": 1.0, "min_targets": 60})
    generate(engine, 1, 30)
    search = engine.stats()["skip"]["search"]
    assert search["sets"] == 0
    assert "fewer than 60 tokens" in search["waits_for"]


def test_a_search_that_has_spent_its_share_of_the_time_says_so():
    engine = skip_engine(search={"share": 0.001})
    generate(engine, 1, 60)
    assert "at 0% of the time" in engine.stats()["skip"]["search"]["waits_for"]


def test_a_search_that_found_nothing_says_when_it_goes_on():
    engine = skip_engine(planted(LAYERS, 64, keep=EVERY_SUBLAYER), search={"rounds": 4, "share": 1.0})
    generate(engine, 1, 200)
    search = engine.stats()["skip"]["search"]
    assert not search["open"]
    assert search["ended"] == "4 sets were scored"
    assert "more tokens: nothing that pays was found" in search["waits_for"]


def test_a_short_first_round_does_not_wait_for_its_share_of_the_time():
    tuning = {"share": 1e-6, "every": 1, "cpu_batch": 4, "min_rounds": 8}
    waiting = skip_engine(planted(LAYERS, 64, keep=EVERY_SUBLAYER), search=tuning)
    at_once = skip_engine(planted(LAYERS, 64, keep=EVERY_SUBLAYER), search=tuning | {"max_first_round": 10.0})
    for engine in (waiting, at_once):
        generate(engine, 1, 100)
    assert waiting.stats()["skip"]["search"]["sets"] == 0
    assert 8 <= at_once.stats()["skip"]["search"]["sets"] <= 12
    assert at_once.proposer.optimiser.budget.saved < 0  # to be made up for
