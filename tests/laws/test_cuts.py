"""Law 3, cut independence: how a prompt is cut into chunks, cached or continued changes no bit.

`frame_rows` is part of the contract: bits are compared within one.
"""

import random
from dataclasses import replace

import pytest
from law_helpers import (
    CASES,
    PAGE,
    Case,
    other_requests,
    random_prompt,
    run_alone,
    run_cases,
    run_one,
    run_reference,
    run_references,
    sampled,
)
from law_proposers import jitter

from samewise.types import Sampling


@pytest.mark.parametrize("free_rows", [1, 11])
def test_the_chunk_size_of_a_prompt_changes_nothing(setup, references, free_rows):
    """Other sequences take all rows of a frame but `free_rows`, so prompts are cut into chunks of that."""
    others = other_requests(setup.frame_rows - free_rows, max_tokens=8 + 400 // (free_rows + 7))
    engine = setup.engine(num_pages=1200)
    arrivals = [0] * len(others) + [3] * len(CASES)
    outputs = run_cases(engine, [*others, *CASES], arrivals=arrivals)
    assert outputs[len(others) :] == references


def test_random_chunk_sizes_change_nothing(variant):
    """Drafts of random length share the frames, so the free rows change from frame to frame."""
    rng = random.Random(variant.proposer)
    others = other_requests(8, max_tokens=30)
    arrivals = [rng.randrange(4) for _ in others] + [rng.randrange(12) for _ in CASES]
    outputs = run_cases(variant.engine(), [*others, *CASES], arrivals=arrivals)
    assert outputs[len(others) :] == variant.references


@pytest.mark.parametrize("rows", [8, 48])
def test_chunk_sizes_change_nothing_at_other_frame_rows(basic, rows):
    setup = replace(basic, frame_rows=rows, sizes=None)
    others = other_requests(rows - 5, max_tokens=10)
    engine = setup.engine(jitter)
    outputs = run_cases(engine, [*others, *CASES], arrivals=[0] * len(others) + [2] * len(CASES))
    assert outputs[len(others) :] == run_references(setup, CASES)


# -- the prefix cache ---------------------------------------------------------------------------------


def test_output_is_the_same_with_a_cold_warm_or_disabled_prefix_cache(variant):
    engine = variant.engine()
    assert run_cases(engine, CASES) == variant.references  # cold
    outputs = run_cases(engine, CASES)  # warm
    assert outputs == variant.references
    for case, output in zip(CASES, outputs, strict=True):
        if case.prompt_logprobs is None:  # scored prompts recompute every row
            assert output.num_cached == (len(case.prompt) - 1) // PAGE * PAGE, case.name
    disabled = variant.engine(enable_prefix_caching=False)
    for _ in range(2):
        outputs = run_cases(disabled, CASES[:6])
        assert outputs == variant.references[:6]
        assert all(output.num_cached == 0 for output in outputs)


def test_a_fully_cached_prompt_still_computes_its_last_token(basic):
    case = Case("cached", random_prompt(32, 3), sampled(1))
    engine = basic.engine()
    cold, warm = run_alone(engine, [case, case])
    assert (cold.num_cached, warm.num_cached) == (0, 16)
    assert cold == warm


def test_prompts_that_differ_within_or_between_pages_share_the_pages_before(setup):
    stem = random_prompt(70, 4)
    lengths = (1, 15, 16, 17, 31, 32, 48, 69)
    cases = [Case(f"part-{n}", (*stem[:n], 9, *random_prompt(20, n)), sampled(n)) for n in lengths]
    engine = setup.engine(jitter)
    run_one(engine, Case("stem", stem))
    outputs = run_cases(engine, cases)
    assert outputs == run_references(setup, cases)
    assert [output.num_cached for output in outputs] == [n // PAGE * PAGE for n in lengths]


def test_a_partly_evicted_prefix_changes_nothing(setup):
    """Other prompts take pages from the cache; the pages left of a prefix are still right."""
    cases = [Case(f"turn-{n}", random_prompt(60 + n, 6), sampled(n), 6) for n in range(3)]
    engine = setup.engine(jitter, num_pages=12)
    num_cached = []
    for _ in range(2):
        for case in cases:
            expected = run_reference(setup, case)
            for _ in range(2):
                output = run_one(engine, case)
                assert output == expected
            num_cached.append(output.num_cached)
    assert any(num_cached)
    assert engine.scheduler.index.num_indexed <= 11


# -- continuing a text --------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), sampled(5, top_p=0.8)], ids=["greedy", "sampled"])
def test_several_turns_from_the_cache_equal_those_from_scratch(variant, sampling):
    engine = variant.engine()
    prompt, previous = random_prompt(21, 8), ()
    for turn in range(3):
        case = Case(f"turn-{turn}", prompt, sampling, 19)
        output = run_one(engine, case)
        assert output == run_reference(variant.setup, case)
        # All full pages of earlier prompts and answers are found. The last token has no KV yet.
        assert output.num_cached == max(0, len(previous) - 1) // PAGE * PAGE
        previous = (*prompt, *output.tokens)
        prompt = (*previous, *random_prompt(7, turn))


def test_a_request_continued_by_another_gives_the_same_tokens(setup):
    """Twelve tokens at once, or five and then seven: noise is keyed by absolute position."""
    for case in (
        Case("greedy", random_prompt(17, 9)),
        Case("sampled", random_prompt(17, 9), sampled(3, top_k=50)),
    ):
        expected = run_reference(setup, case)
        engine = setup.engine(jitter)
        for num_first in (1, 5, 11):
            first = run_one(engine, replace(case, max_tokens=num_first))
            prompt = (*case.prompt, *first.tokens)
            second = run_one(engine, replace(case, prompt=prompt, max_tokens=12 - num_first))
            assert first.tokens + second.tokens == expected.tokens
            assert first.logprobs + second.logprobs == expected.logprobs


def test_scoring_an_answer_gives_the_log_probabilities_of_generating_it(setup, references):
    """In parallel with the answer given, or token by token."""
    answered = [
        (case, output)
        for case, output in zip(CASES, references, strict=True)
        if case.prompt_logprobs is None
    ]  # fmt: skip
    scored = [
        Case(case.name, (*case.prompt, *output.tokens), max_tokens=0, score_from=len(case.prompt))
        for case, output in answered
    ]
    for engine in (setup.engine(), setup.engine(jitter, num_pages=12)):
        for _ in range(2):  # cold and warm
            for output, (_, expected) in zip(run_cases(engine, scored), answered, strict=True):
                assert output.scores == expected.logprobs
                assert output.tokens == []


def test_cases_one_after_the_other_on_one_engine_change_nothing(basic, basic_references):
    """Each case finds cached pages of the ones before."""
    engine = basic.engine(jitter, num_pages=40)
    assert run_alone(engine, CASES) == basic_references
    assert run_alone(engine, reversed(CASES)) == list(reversed(basic_references))
