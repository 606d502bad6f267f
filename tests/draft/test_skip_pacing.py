"""SWIFT's phase 2: how far drafts go, and where they branch."""

import pytest
from skip_cases import BEST, LAYERS, generate, skip_engine, skip_with_best_set

from samewise.draft.decode import Decode
from samewise.testing import planted

pytestmark = pytest.mark.usefixtures("own_cache", "fused_hooks")


def throughput(engine, live, max_tokens=48):
    """Tokens per second of its clock, after some text."""
    generate(engine, live, max_tokens)
    began = engine._clock.now
    num_tokens = sum(len(answer) for answer in generate(engine, live, max_tokens, seed=3))
    return num_tokens / (engine._clock.now - began)


@pytest.mark.parametrize("live", [1, 8])
def test_no_fixed_draft_length_is_clearly_faster(live):
    loaded = planted(LAYERS, 64)

    def fixed_length(parts):
        path = parts.runner.skip_path(parts.runner.views(), BEST)
        return Decode(parts.runner, parts.sampler, path=path)

    lengths = {1: (8, 15), 8: (3, 5, 7, 15)}[live]
    fixed = [throughput(skip_engine(loaded, make=fixed_length, draft_tokens=num), live) for num in lengths]
    assert throughput(skip_engine(loaded, make=skip_with_best_set), live) > 0.95 * max(fixed)


def test_a_found_set_is_as_fast_as_a_given_one():
    loaded = planted(LAYERS, 64)
    engine, given = skip_engine(loaded, search={"rounds": 8}), skip_engine(loaded, make=skip_with_best_set)
    generate(engine, 8, 64)
    assert engine.proposer.active.skipped == BEST
    assert not engine.proposer.optimiser.search.open
    assert throughput(engine, 8) > 0.95 * throughput(given, 8)


def test_draft_passes_are_priced_as_measured():
    engine = skip_engine(make=skip_with_best_set)
    generate(engine, 2, 40)
    left = (2 + 1) * 0.35e-3 + (2 + 2) * 0.65e-3  # the first and the last layer, and the planted sublayers
    assert engine.proposer._pricing.pass_seconds(BEST, 2) == pytest.approx(left * 1.1, rel=0.01)


def test_unsure_tokens_branch_where_rows_are_free():
    """Frames have one size, so branches fill padding."""
    engine = skip_engine(planted(LAYERS, 64, faint=0.05), linear="torch", frame_rows=64, max_model_len=256)
    generate(engine, 1, 200)
    assert engine.stats()["skip"]["branches"] > 5


def test_drafts_hardly_branch_where_every_row_costs():
    engine = skip_engine(planted(LAYERS, 64, faint=0.05), max_model_len=256)
    generate(engine, 4, 100)
    drafter = engine.scheduler.counters.drafters["skip"]
    assert engine.stats()["skip"]["branches"] < 0.2 * drafter.drafts
