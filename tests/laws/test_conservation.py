"""Law 5, page conservation: after any run, including aborts and errors, the pool is what it was."""

import random

import pytest
from lawbook import CASES, Case, Rude, adversary, company, conserved, jitter, play, text, warm

from samewise.errors import BadPrompt, CallerError, QueueFull
from samewise.llm.llm import LLM
from samewise.params import SamplingParams
from samewise.testing import preempting
from samewise.types import Sampling


def drain(engine, limit=2000):
    for _ in range(limit):
        if engine.idle:
            return
        engine.step()
        engine.check()
    raise AssertionError(f"not idle after {limit} steps: {engine.stats()}")


def test_nothing_is_lost_or_gained(trial):
    engine = trial.engine(num_pages=20)
    play(engine, [*CASES, *company(4, verify=False, most=10)], step=lambda e: preempting(e, 1, 0.1))
    assert conserved(engine)
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["pages_available"]) == (0, 0, stats["pages"])


@pytest.mark.parametrize("at", range(7))
def test_aborting_all_after_any_step(plain, at):
    engine = plain.engine(jitter, num_pages=30, max_num_seqs=9)
    requests = [case.add(engine) for case in [*CASES, *company(3, verify=False)]]
    for _ in range(at):
        engine.step()
        engine.check()
    for request in requests:  # some wait, some read, some draft, and a frame is on its way
        engine.abort(request)
        engine.check()
    assert engine.scheduler.idle
    assert conserved(engine)
    assert engine.step() == []
    assert engine.idle
    assert conserved(engine)


@pytest.mark.parametrize("seed", range(5))
def test_any_mixture_of_everything(plain, seed):
    """A random walk over all that can happen to a request."""
    rng = random.Random(seed)
    make = [None, jitter, adversary][seed % 3]
    engine = plain.engine(make, num_pages=16, max_num_seqs=5, max_queued=8)
    live: list[int] = []
    for _ in range(60):
        what = rng.random()
        if what < 0.35:
            case = Case(
                "any", text(rng.randint(1, 60), seed), warm(seed), rng.randint(0, 20), rng.random() < 0.7
            )
            try:
                live.append(case.add(engine))
            except QueueFull:
                assert engine.scheduler.num_waiting >= 8
        elif what < 0.45 and live:
            engine.abort(live.pop(rng.randrange(len(live))))
        elif what < 0.5 and live:
            engine.end(live.pop(rng.randrange(len(live))))
        elif what < 0.6:
            preempting(engine, seed, 0.5)
        else:
            engine.step()
        engine.check()
    drain(engine)
    assert conserved(engine)


# ---- errors at the door


@pytest.mark.parametrize(
    ("prompt", "most"),
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
    ids=["empty", "too-large-id", "negative-id", "float", "text", "bool", "would-not-fit", "too-long"],
)
def test_a_refused_request_leaves_nothing_behind(plain, plain_truth, prompt, most):
    engine = plain.engine(num_pages=20)
    with pytest.raises(BadPrompt):
        engine.add(prompt, Sampling(), max_tokens=most)
    assert engine.idle
    assert conserved(engine)
    assert engine.scheduler.counters.requests == 0
    assert play(engine, CASES[:2]) == plain_truth[:2]


def test_a_full_queue_leaves_nothing_behind(plain):
    engine = plain.engine(max_queued=2)
    for _ in range(2):
        engine.add([1, 2], Sampling(), max_tokens=2)
    with pytest.raises(QueueFull):
        engine.add([1, 2], Sampling(), max_tokens=2)
    drain(engine)
    assert engine.scheduler.counters.finished == 2
    assert conserved(engine)


@pytest.mark.parametrize("n", [1, 4])
def test_generate_that_meets_a_full_queue_leaves_nothing_behind(plain, n):
    """All or nothing: what was queued before the queue was full must not run on unseen."""
    engine = plain.engine(max_queued=2)
    llm = LLM.over(engine)
    with pytest.raises(QueueFull):
        llm.generate([[1], [2], [3], [4]], SamplingParams(max_tokens=4, n=n, seed=1), use_tqdm=False)
    assert engine.scheduler.idle
    drain(engine)
    assert conserved(engine)


def test_score_that_meets_a_full_queue_leaves_nothing_behind(plain):
    engine = plain.engine(max_queued=1)
    with pytest.raises(QueueFull):
        LLM.over(engine).score([[1], [2], [3]], [[4], [5], [6]])
    assert engine.scheduler.idle
    drain(engine)
    assert conserved(engine)


def test_one_bad_prompt_among_many_queues_none(plain):
    engine = plain.engine()
    with pytest.raises(CallerError):
        LLM.over(engine).generate([[1], [], [2]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert engine.idle
    assert engine.scheduler.counters.requests == 0


def test_an_unknown_id_among_many_prompts_queues_none(plain):
    engine = plain.engine()
    with pytest.raises(CallerError):
        LLM.over(engine).generate([[1], [999], [2]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert engine.scheduler.idle
    drain(engine)
    assert conserved(engine)


# ---- readers that leave


def test_a_stream_left_early_gives_its_pages_back(plain):
    engine = plain.engine(jitter)
    stream = LLM.over(engine).stream([1, 2, 3], SamplingParams(max_tokens=40, seed=1))
    next(stream)
    stream.close()
    drain(engine)
    assert conserved(engine)
    assert engine.scheduler.counters.aborted == 1


def test_ending_a_sequence_that_was_preempted_meanwhile(plain):
    """A stop string is found in the text a frame later; by then its sequence may be waiting for pages."""
    engine = plain.engine()
    request = engine.add([1, 2, 3], Sampling(), max_tokens=40)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.preempt(request)
    engine.end(request)
    assert engine.scheduler.idle
    assert [delta for _ in range(3) for delta in engine.step()] == []
    assert conserved(engine)


def test_ending_a_sequence_twice_or_one_that_is_unknown(plain):
    engine = plain.engine()
    request = engine.add([1, 2, 3], Sampling(), max_tokens=40)
    for _ in range(3):
        engine.step()
    for _ in range(2):
        engine.end(request)
        engine.end(10**6)
    assert engine.abort(request) is None
    drain(engine)
    assert conserved(engine)


# ---- errors from inside


def test_a_proposer_that_raises_costs_no_page(plain):
    calls = 0

    def bug(asks):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("the proposer broke")
        return []

    engine = plain.engine(lambda _: Rude(bug))
    requests = [case.add(engine) for case in CASES]
    with pytest.raises(RuntimeError, match="the proposer broke"):
        drain(engine)
    engine.check()
    for request in requests:
        engine.abort(request)
    drain(engine)
    assert conserved(engine)


def test_new_weights_forget_every_page(plain):
    engine = plain.engine()
    play(engine, CASES)
    assert engine.scheduler.index.num_indexed > 0
    before = engine.contract
    name, weight = next(iter(engine.runner.model.named_parameters()))
    engine.update_weights({name: weight * 1.5})
    assert engine.contract != before
    assert engine.scheduler.index.num_indexed == 0
    assert conserved(engine)
    (heard,) = play(engine, [CASES[4]])
    assert heard.num_cached == 0
