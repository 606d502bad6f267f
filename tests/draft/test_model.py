"""The proposer `model`: drafts of a second model over tiny engines."""

from dataclasses import replace

import pytest

from samewise.draft.build import make_model
from samewise.draft.tuning import ModelTuning, Tuning
from samewise.testing import run, tiny, tiny_engine
from samewise.types import Grammar, Sampling

PROMPTS = [[(7 * i + j) % 250 for j in range(5 + 30 * i)] for i in range(4)]
BUSY = ModelTuning(min_steps=10**9)
GREEDY = Sampling()


def engine_of(seed=0, tuning=BUSY, *, ahead=False, draft=None, clock=None, **settings):
    """An engine whose draft model is a tiny model of this seed; the target model has seed 0."""
    loaded = draft or tiny("llama", seed=seed)

    def make(parts):
        parts = replace(parts, load=lambda _: loaded, tuning=Tuning(model=tuning), chain=2 if ahead else 1)
        return make_model(parts if clock is None else replace(parts, clock=clock))

    return tiny_engine(make_proposer=make, proposer="model", draft_model="draft", **settings)


def outputs(engine, *samplings, num_tokens=24):
    asks = [(prompt, samplings[i % len(samplings)], num_tokens) for i, prompt in enumerate(PROMPTS)]
    return [(t.tokens, t.logprobs) for t in run(engine, asks)]


@pytest.fixture(scope="module")
def plain():
    return outputs(tiny_engine(), GREEDY)


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_of_the_same_model_are_all_accepted(plain, ahead):
    engine = engine_of(seed=0, ahead=ahead)
    assert outputs(engine, GREEDY) == plain
    report = engine.stats()["model"]
    assert set(report["acceptance_by_position"]) == {1.0}
    assert report["passes"] > 0
    assert engine.scheduler.counters.accepted > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_of_another_model_change_nothing(plain, ahead):
    engine = engine_of(seed=1, ahead=ahead)
    assert outputs(engine, GREEDY) == plain
    counters = engine.scheduler.counters
    assert 0 <= counters.accepted < counters.guessed


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.9, seed=3),
        Sampling(temperature=0.9, seed=3, top_k=20, top_p=0.9),
        Sampling(temperature=0.7, seed=3, repetition_penalty=1.3, frequency_penalty=0.5),
    ],
)
def test_sampled_and_edited_drafts_of_the_same_model_are_all_accepted(sampling, ahead):
    expected = outputs(tiny_engine(), sampling, GREEDY)
    engine = engine_of(seed=0, ahead=ahead)
    assert outputs(engine, sampling, GREEDY) == expected
    assert set(engine.stats()["model"]["acceptance_by_position"]) == {1.0}


def test_a_draft_follows_a_grammar():
    sampling = Sampling(grammar=Grammar.regex("[a-c]{4}[0-9]{8}"))
    expected = outputs(tiny_engine(eos=True), sampling, GREEDY)
    engine = engine_of(seed=0, eos=True)
    assert outputs(engine, sampling, GREEDY) == expected
    assert engine.scheduler.counters.accepted > 0


def test_on_a_cpu_the_draft_model_runs_by_the_target_models_kernels():
    engine = engine_of()
    runner = engine.proposer._runner
    assert (runner.native, runner.fused) == (engine.runner.native, engine.runner.fused)


def test_chains_for_all_sequences_share_their_passes():
    engine = engine_of(seed=0)
    outputs(engine, GREEDY)
    counters, report = engine.scheduler.counters, engine.stats()["model"]
    assert report["passes"] < counters.guessed


def test_prompts_are_read_in_pieces_of_bounded_size(plain):
    tuning = replace(BUSY, cpu_pass_rows=8, cpu_read_rows=16)
    engine = engine_of(seed=0, tuning=tuning, max_num_seqs=4)
    assert outputs(engine, GREEDY) == plain
    report = engine.stats()["model"]
    assert report["read_passes"] >= sum(len(prompt) - 1 for prompt in PROMPTS) // 8
    assert set(report["acceptance_by_position"]) == {1.0}


def test_sequences_that_the_draft_models_pages_do_not_hold_get_no_drafts(plain):
    engine = engine_of(seed=0)
    proposer = engine.proposer
    proposer._reader._num_pages = 4
    proposer.recover()
    assert outputs(engine, GREEDY) == plain
    assert engine.scheduler.counters.accepted > 0  # the shortest one fits


def test_pages_are_given_back():
    engine = engine_of(seed=1)
    free = engine.proposer._reader._pool.num_free
    outputs(engine, GREEDY)
    assert engine.proposer._reader._pool.num_free == free


def test_a_longer_context_than_the_draft_models_goes_on_without_drafts():
    draft = tiny("llama", seed=0, max_position_embeddings=64)
    engine = engine_of(draft=draft)
    expected = outputs(tiny_engine(), GREEDY, num_tokens=40)
    assert outputs(engine, GREEDY, num_tokens=40) == expected
    assert engine.scheduler.counters.accepted > 0


def test_drafting_pauses_where_it_does_not_pay():
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    tuning = ModelTuning(min_steps=4, pause_frames=6)
    engine = engine_of(seed=1, tuning=tuning, clock=clock)
    outputs(engine, GREEDY, num_tokens=60)
    report = engine.stats()["model"]
    assert report["pauses"] > 0
    assert engine.scheduler.counters.guessed > 0


def test_replaced_weights_of_the_target_model_are_measured_anew():
    engine = engine_of(seed=0)
    outputs(engine, GREEDY)
    proposer = engine.proposer
    assert (proposer.revision, len(proposer.stats()["model"]["acceptance_by_position"]) > 0) == (0, True)
    proposer.renew("sw-1")
    assert (proposer.revision, proposer.stats()["model"]["acceptance_by_position"]) == (1, [])


def test_after_recovery_drafts_are_made_again(plain):
    engine = engine_of(seed=0)
    outputs(engine, GREEDY)
    engine.recover()
    assert outputs(engine, GREEDY) == plain
    assert set(engine.stats()["model"]["acceptance_by_position"]) == {1.0}
