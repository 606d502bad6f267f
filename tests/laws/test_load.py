"""Law 2, load independence: other requests, order, arrival, limits, preemption and aborts change no bit."""

import random
from dataclasses import replace

import pytest
from law_helpers import (
    CASES,
    Case,
    other_requests,
    random_prompt,
    run_cases,
    run_one,
    run_references,
    sampled,
)
from law_proposers import jitter

from samewise.draft.build import MAKERS
from samewise.engine import Engine
from samewise.errors import CallerError
from samewise.testing import preempting, shuffled
from samewise.types import Sampling


def in_order_of_cases(cases, outputs):
    by_name = {case.name: output for case, output in zip(cases, outputs, strict=True)}
    return [by_name[case.name] for case in CASES]


# -- other requests, order, arrival -------------------------------------------------------------------


def test_output_is_the_same_alone_and_together(variant):
    assert run_cases(variant.engine(), CASES) == variant.references


def test_reversed_order_changes_nothing(variant):
    cases = CASES[::-1]
    assert in_order_of_cases(cases, run_cases(variant.engine(), cases)) == variant.references


@pytest.mark.parametrize("seed", [1, 2])
def test_random_order_changes_nothing(basic, basic_references, seed):
    cases = shuffled(CASES, seed)
    assert in_order_of_cases(cases, run_cases(basic.engine(jitter), cases)) == basic_references


def test_staggered_arrivals_change_nothing(variant):
    rng = random.Random(variant.proposer)
    arrivals = [rng.randrange(25) for _ in CASES]
    assert run_cases(variant.engine(), CASES, arrivals=arrivals) == variant.references


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
def test_max_num_seqs_changes_nothing(basic, basic_references, max_num_seqs):
    def check_limit(engine, _):
        assert engine.scheduler.num_running <= max_num_seqs

    engine = basic.engine(jitter, max_num_seqs=max_num_seqs)
    assert run_cases(engine, CASES, after=check_limit) == basic_references


def test_the_same_request_seven_times_at_once_gives_the_same_output_each_time(setup, references):
    i = 3
    cases = [CASES[i]] * 7
    outputs = run_cases(setup.engine(jitter), cases, arrivals=[0, 0, 0, 1, 4, 4, 30])
    assert outputs == [references[i]] * 7


def test_salt_separates_caches_and_changes_no_bit(basic, basic_references):
    engine = basic.engine()
    salted = [replace(case, salt=b"tenant") for case in CASES[:5]]
    assert run_cases(engine, [*CASES[:5], *salted]) == basic_references[:5] * 2
    other_tenant = Case("other", CASES[4].prompt, salt=b"another tenant")
    assert run_one(engine, other_tenant).num_cached == 0


def test_earlier_requests_change_nothing(basic, basic_references):
    engine = basic.engine(jitter, max_num_seqs=6)
    for _ in range(3):
        run_cases(engine, other_requests(8, max_tokens=10))
        assert run_cases(engine, CASES[:4]) == basic_references[:4]


# -- priority -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_priorities_change_nothing(variant, seed):
    """Few places and few pages: priorities decide who is admitted, read and preempted."""
    rng = random.Random(seed)
    cases = [replace(case, priority=rng.choice([-3, 0, 0, 7])) for case in CASES]
    arrivals = [rng.randrange(15) for _ in cases]
    engine = variant.engine(num_pages=14, max_num_seqs=5)
    assert run_cases(engine, cases, arrivals=arrivals) == variant.references


def test_priorities_of_several_owners_change_nothing(basic, basic_references):
    cases = [replace(case, priority=i % 3 - 1, owner=bytes([65 + i % 2])) for i, case in enumerate(CASES)]
    engine = basic.engine(jitter, num_pages=14, max_num_seqs=6)
    assert run_cases(engine, cases) == basic_references


# -- preemption ---------------------------------------------------------------------------------------


def test_random_preemption_changes_nothing(variant):
    engine = variant.engine()
    outputs = run_cases(engine, CASES, step=lambda e: preempting(e, 3, 0.15))
    assert outputs == variant.references
    assert engine.scheduler.counters.preempted > 0


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_preemption_before_every_step_changes_nothing(basic, basic_references, caching):
    """A prompt that fits one frame still gets a token per step."""
    engine = basic.engine(enable_prefix_caching=caching)
    chosen = [i for i, case in enumerate(CASES) if len(case.prompt) == 1]
    outputs = run_cases(engine, [CASES[i] for i in chosen], step=lambda e: preempting(e, 1, 1.0))
    assert outputs == [basic_references[i] for i in chosen]
    assert engine.scheduler.counters.preempted >= 11 * len(chosen)


def test_too_few_pages_preempt_and_change_nothing(variant):
    # The longest case takes seven pages; one of the ten is the trash page.
    engine = variant.engine(num_pages=10)
    assert run_cases(engine, CASES) == variant.references
    assert engine.scheduler.counters.preempted > 0


def test_too_few_pages_without_prefix_cache_change_nothing(basic, basic_references):
    engine = basic.engine(jitter, num_pages=10, enable_prefix_caching=False)
    assert run_cases(engine, CASES) == basic_references
    assert engine.scheduler.counters.preempted > 0


def test_prompt_logprobs_come_once_each_and_in_order_under_preemption(setup):
    cases = [
        Case(f"scored-{n}", random_prompt(n, 20), sampled(n), 4, prompt_logprobs=1) for n in (1, 17, 40, 70)
    ]
    expected = run_references(setup, cases)
    assert [len(output.scores) for output in expected] == [len(case.prompt) - 1 for case in cases]
    engine = setup.engine(jitter, num_pages=14)
    assert run_cases(engine, cases, step=lambda e: preempting(e, 5, 0.25)) == expected


# -- aborts -------------------------------------------------------------------------------------------


def test_random_aborts_of_other_requests_change_nothing(variant):
    engine, rng = variant.engine(), random.Random(2)
    others: list[int] = []

    def add_and_abort(engine, step_index):
        if step_index < 30:
            others.append(other_requests(1, seed=step_index)[0].add(engine))
        if others and rng.random() < 0.5:
            engine.abort(others.pop(rng.randrange(len(others))))

    assert run_cases(engine, CASES, after=add_and_abort) == variant.references
    assert engine.scheduler.counters.aborted > 0


def test_aborting_all_other_requests_during_a_frame_changes_nothing(basic, basic_references):
    engine = basic.engine(jitter)
    others = [case.add(engine) for case in other_requests(6)]

    def abort_all(engine, step_index):
        if step_index == 2:
            for request in others:
                assert engine.abort(request) is not None
                assert engine.abort(request) is None

    assert run_cases(engine, CASES, after=abort_all) == basic_references


# -- verified beside unverified -----------------------------------------------------------------------


def test_verified_output_is_the_same_beside_unverified_requests(variant):
    others = other_requests(6, verify=False, max_tokens=24) + other_requests(3, seed=5, max_tokens=24)
    engine = variant.engine()
    outputs = run_cases(engine, [*others[:4], *CASES, *others[4:]])
    assert outputs[4 : 4 + len(CASES)] == variant.references
    # A frame of 128 rows has room for all of them; a smaller one leaves some to the fast path.
    roomy = engine.scheduler.limits.max_rows >= 128
    assert roomy or engine.scheduler.counters.unverified_tokens > 0


def test_verified_output_is_the_same_beside_unverified_requests_and_preemption(setup, references):
    others = other_requests(6, verify=False, max_tokens=30)
    engine = setup.engine(jitter, num_pages=14)
    outputs = run_cases(engine, [*CASES, *others], step=lambda e: preempting(e, 7, 0.1))
    assert outputs[: len(CASES)] == references
    assert all(len(output.tokens) == 30 for output in outputs[len(CASES) :])
    assert engine.scheduler.counters.preempted > 0


def test_a_verified_request_never_reads_the_kv_of_an_unverified_one_with_the_same_prompt(
    basic, basic_references
):
    unverified = [replace(case, verify=False, prompt_logprobs=None) for case in CASES]
    engine = basic.engine(jitter)
    arrivals = [0] * len(unverified) + [6] * len(CASES)
    assert run_cases(engine, [*unverified, *CASES], arrivals=arrivals)[len(unverified) :] == basic_references


# -- several engines ----------------------------------------------------------------------------------


def test_a_second_engine_over_one_model_agrees_or_is_refused(basic, basic_references):
    """The second engine must not leave the first one reading the wrong pages."""
    first = basic.engine()
    run_cases(first, CASES[:5])  # fills its prefix cache
    try:
        second = Engine(first.loaded, first.config)
    except CallerError:
        return
    assert run_cases(first, CASES[:5]) == basic_references[:5]
    assert run_cases(second, CASES[::-1]) == basic_references[::-1]
    assert run_cases(first, CASES[:5]) == basic_references[:5]


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_in_flight_behind_a_burst_of_prompts_change_nothing(basic, rows, seed):
    """Sequences that repeat a token have long drafts, and frames are launched one behind the other."""
    rng = random.Random(seed)
    setup = replace(basic, frame_rows=rows, sizes=None)
    repeating = Sampling(allowed_token_ids=(5, 7))
    loops = [Case(f"loop-{i}", random_prompt(3, i), repeating, max_tokens=40) for i in range(4)]
    others = [Case(f"other-{i}", random_prompt(2 + i, i), sampled(i), max_tokens=30) for i in range(6)]
    burst = [
        Case(f"burst-{i}", random_prompt(rng.choice((rows, 2 * rows, 33)), i), max_tokens=4) for i in range(6)
    ]
    cases = [*loops, *others, *burst]
    arrivals = [0] * 10 + [rng.randint(4, 30) for _ in burst]
    engine = setup.engine(MAKERS["auto"], ahead=True, max_num_seqs=20)
    assert run_cases(engine, cases, arrivals=arrivals) == run_references(setup, cases)
