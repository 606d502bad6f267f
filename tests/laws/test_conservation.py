"""Law 5, page conservation: after any run, also with aborts and errors, every page is free again."""

import random

import pytest
from law_helpers import (
    CASES,
    Case,
    all_pages_free,
    other_requests,
    random_prompt,
    run_cases,
    run_one,
    sampled,
)
from law_proposers import BuggyProposer, adversary, jitter

from samewise.errors import BadPrompt, CallerError, QueueFull
from samewise.llm.llm import LLM
from samewise.params import SamplingParams
from samewise.testing import preempting, submit
from samewise.types import Sampling


def run_to_the_end(engine, limit=2000):
    for _ in range(limit):
        if engine.idle:
            return
        engine.step()
        engine.check()
    raise AssertionError(f"not idle after {limit} steps: {engine.stats()}")


def add_long_request(engine):
    """A request of 40 tokens that has run for three steps."""
    request = submit(engine, [1, 2, 3], Sampling(), max_tokens=40)
    for _ in range(3):
        engine.step()
    return request


def test_all_pages_are_free_after_a_run(variant):
    engine = variant.engine(num_pages=20)
    cases = [*CASES, *other_requests(4, verify=False, max_tokens=10)]
    run_cases(engine, cases, step=lambda e: preempting(e, 1, 0.1))
    assert all_pages_free(engine)
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["pages_available"]) == (0, 0, stats["pages"])


@pytest.mark.parametrize("num_steps", range(7))
def test_all_pages_are_free_after_aborting_every_request(basic, num_steps):
    """Some requests wait, some are in prefill, some have drafts, and a frame is in flight."""
    engine = basic.engine(jitter, num_pages=30, max_num_seqs=9)
    requests = [case.add(engine) for case in [*CASES, *other_requests(3, verify=False)]]
    for _ in range(num_steps):
        engine.step()
        engine.check()
    for request in requests:
        engine.abort(request)
        engine.check()
    assert engine.scheduler.idle
    assert all_pages_free(engine)
    assert engine.step() == []
    assert engine.idle
    assert all_pages_free(engine)


@pytest.mark.parametrize("seed", range(5))
def test_all_pages_are_free_after_any_mixture_of_events(basic, seed):
    """A random sequence of requests, aborts, early ends, preemptions and steps."""
    rng = random.Random(seed)
    make = [None, jitter, adversary][seed % 3]
    engine = basic.engine(make, num_pages=16, max_num_seqs=5, max_queued=8)
    live: list[int] = []
    for _ in range(60):
        event = rng.random()
        if event < 0.35:
            prompt = random_prompt(rng.randint(1, 60), seed)
            case = Case("any", prompt, sampled(seed), rng.randint(0, 20), rng.random() < 0.7)
            try:
                live.append(case.add(engine))
            except QueueFull:
                assert engine.scheduler.num_waiting >= 8
        elif event < 0.45 and live:
            engine.abort(live.pop(rng.randrange(len(live))))
        elif event < 0.5 and live:
            engine.end(live.pop(rng.randrange(len(live))))
        elif event < 0.6:
            preempting(engine, seed, 0.5)
        else:
            engine.step()
        engine.check()
    run_to_the_end(engine)
    assert all_pages_free(engine)


# -- refused requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [
        ([], 4),
        ([320], 4),
        ([-1], 4),
        ([1.0], 4),
        (["a"], 4),
        ([True], 4),
        (list(range(200)), 400),
        ([1] * 513, 1),
    ],
    ids=["empty", "too-large-id", "negative-id", "float", "text", "bool", "too-few-pages", "too-long"],
)
def test_a_refused_request_leaves_nothing_behind(basic, basic_references, prompt, max_tokens):
    engine = basic.engine(num_pages=20)
    with pytest.raises(BadPrompt):
        LLM.over(engine).generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=max_tokens))
    assert engine.idle
    assert all_pages_free(engine)
    assert engine.scheduler.counters.requests == 0
    assert run_cases(engine, CASES[:2]) == basic_references[:2]


def test_a_full_queue_leaves_nothing_behind(basic):
    engine = basic.engine(max_queued=2)
    for _ in range(2):
        submit(engine, [1, 2], Sampling(), max_tokens=2)
    with pytest.raises(QueueFull):
        submit(engine, [1, 2], Sampling(), max_tokens=2)
    run_to_the_end(engine)
    assert engine.scheduler.counters.finished == 2
    assert all_pages_free(engine)


@pytest.mark.parametrize("n", [1, 4])
def test_generate_into_a_full_queue_leaves_nothing_behind(basic, n):
    """Requests queued before the queue was full are aborted."""
    engine = basic.engine(max_queued=2)
    with pytest.raises(QueueFull):
        LLM.over(engine).generate(
            [[1], [2], [3], [4]], SamplingParams(max_tokens=4, n=n, seed=1), use_tqdm=False
        )
    assert engine.scheduler.idle
    run_to_the_end(engine)
    assert all_pages_free(engine)


def test_score_into_a_full_queue_leaves_nothing_behind(basic):
    engine = basic.engine(max_queued=1)
    with pytest.raises(QueueFull):
        LLM.over(engine).score([[1], [2], [3]], [[4], [5], [6]])
    assert engine.scheduler.idle
    run_to_the_end(engine)
    assert all_pages_free(engine)


def test_an_empty_prompt_among_several_queues_none(basic):
    engine = basic.engine()
    with pytest.raises(CallerError):
        LLM.over(engine).generate([[1], [], [2]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert engine.idle
    assert engine.scheduler.counters.requests == 0


def test_an_unknown_id_among_several_prompts_leaves_nothing_behind(basic):
    engine = basic.engine()
    with pytest.raises(CallerError):
        LLM.over(engine).generate([[1], [999], [2]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert engine.scheduler.idle
    run_to_the_end(engine)
    assert all_pages_free(engine)


# -- requests that end early --------------------------------------------------------------------------


def test_a_closed_stream_gives_its_pages_back(basic):
    engine = basic.engine(jitter)
    stream = LLM.over(engine).stream([1, 2, 3], SamplingParams(max_tokens=40, seed=1))
    next(stream)
    stream.close()
    run_to_the_end(engine)
    assert all_pages_free(engine)
    assert engine.scheduler.counters.aborted == 1


def test_ending_a_preempted_sequence_frees_it(basic):
    """A stop string is found a frame late; its sequence may be preempted by then."""
    engine = basic.engine()
    request = add_long_request(engine)
    assert engine.scheduler.preempt(request)
    engine.end(request)
    assert engine.scheduler.idle
    assert [delta for _ in range(3) for delta in engine.step()] == []
    assert all_pages_free(engine)


def test_ending_a_finished_or_unknown_sequence_does_nothing(basic):
    engine = basic.engine()
    request = add_long_request(engine)
    for _ in range(2):
        engine.end(request)
        engine.end(10**6)
    assert engine.abort(request) is None
    run_to_the_end(engine)
    assert all_pages_free(engine)


# -- errors inside a step -----------------------------------------------------------------------------


def test_a_proposer_that_raises_keeps_no_page(basic):
    num_calls = 0

    def raise_once(asks):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 6:
            raise RuntimeError("the proposer broke")
        return []

    engine = basic.engine(lambda _: BuggyProposer(raise_once))
    requests = [case.add(engine) for case in CASES]
    with pytest.raises(RuntimeError, match="the proposer broke"):
        run_to_the_end(engine)
    engine.check()
    for request in requests:
        engine.abort(request)
    run_to_the_end(engine)
    assert all_pages_free(engine)


def test_new_weights_empty_the_prefix_cache(basic):
    engine = basic.engine()
    run_cases(engine, CASES)
    assert engine.scheduler.index.num_indexed > 0
    before = engine.contract
    name, weight = next(iter(engine.runner.model.named_parameters()))
    engine.update_weights({name: weight * 1.5})
    assert engine.contract != before
    assert engine.scheduler.index.num_indexed == 0
    assert all_pages_free(engine)
    assert run_one(engine, CASES[4]).num_cached == 0
