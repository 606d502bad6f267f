"""SWIFT's phase 2: how far drafts go, and where they have alternatives."""

from array import array

import pytest
from skip_cases import BEST, LAYERS, generate, skip_engine, skip_with_best_set

from samewise.draft.cost_model import FrameCosts
from samewise.draft.decode import Decode
from samewise.draft.skip.active_set import ActiveSet
from samewise.draft.skip.pacing import ConfidencePacing
from samewise.draft.skip.pricing import PassPricing
from samewise.draft.skip.search import Search
from samewise.testing import planted
from samewise.types import ROOT, Ask, Proposal, Sampling, Verdict

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


def test_unsure_tokens_have_alternatives_where_rows_are_free():
    """Frames have one size, so alternatives fill padding."""
    engine = skip_engine(planted(LAYERS, 64, faint=0.05), linear="torch", frame_rows=64, max_model_len=256)
    generate(engine, 1, 200)
    assert engine.stats()["skip"]["alternatives"] > 5


def test_drafts_have_few_alternatives_where_every_row_costs():
    engine = skip_engine(planted(LAYERS, 64, faint=0.05), max_model_len=256)
    generate(engine, 4, 100)
    drafter = engine.scheduler.counters.drafters["skip"]
    assert engine.stats()["skip"]["alternatives"] < 0.2 * drafter.drafts


# ---- trees


def pacing():
    """Pacing where rows are free, draft passes are cheap and nothing was verified yet."""
    frames = FrameCosts((64,))
    frames.observe(1, 0.010)
    pricing = PassPricing([(1.0, 3.0)] * LAYERS, 2.0, 0.5, frames, 16)
    pricing.observe_full_pass(1, 0.001)
    search = Search(LAYERS)
    search.start_from(BEST, 0.9)
    active = ActiveSet(search)
    active.use(None)
    return ConfidencePacing(active, pricing, chain=1)


def ask(draft, room, max_nodes=32):
    return Ask(7, [1, 2, 3], 2, draft, 2, array("i"), Sampling(), room, max_nodes=max_nodes)


def drafted(pacing, ask, token, others, confidence):
    """The proposal for one more token, with alternatives to it."""
    asks = pacing.admit([ask])
    ids = [token, *others]
    confidences = [confidence] + [(1.0 - confidence) / len(ids)] * len(others)
    proposals = [Proposal(7, (token,), drafter="skip", more=True)]
    return pacing.pace(asks, proposals, {7: [(ids, confidences)]})[0]


def test_a_draft_is_a_chain_until_it_is_complete():
    paced = pacing()
    first = drafted(paced, ask([], 2), 10, [11, 12], 0.7)
    assert (first.tokens, first.parents, first.more) == ((10,), (), True)
    last = drafted(paced, ask([10], 1), 20, [21], 0.7)
    assert not last.more
    assert last.tokens[0] == 20
    assert last.parents[0] == 0
    leaves = dict(zip(last.tokens[1:], last.parents[1:], strict=True))
    assert leaves == {21: 0, 11: ROOT, 12: ROOT}  # beside the token that they are alternatives to
    assert list(leaves) == [21, 11, 12]  # depth-first


def test_a_tree_has_no_more_nodes_than_there_is_room_for():
    paced = pacing()
    drafted(paced, ask([], 2), 10, [11, 12], 0.7)
    last = drafted(paced, ask([10], 1, max_nodes=2), 20, [21], 0.7)
    assert len(last.tokens) == len(last.parents) == 2


def test_an_accepted_alternative_counts_as_a_rejected_chain():
    paced = pacing()
    drafted(paced, ask([], 1), 10, [11, 12], 0.7)
    verdict = Verdict(7, (11, 30), (0.0, 0.0), (), 4, 3, 1, drafter="skip", path=(1,))
    paced.observe(verdict, own=True)
    assert paced._active.first_tokens.hits == 0
    assert paced._active.first_tokens.trials == 1
    assert paced._by_rank[0].value > paced._by_rank[1].value
    assert paced.num_alternatives == 2
