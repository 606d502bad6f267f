"""Law 12, a failed frame is one failed frame: whatever ends a step, the next one works, to the same bits.

Faults are raised at every place of a step. A step that raised returned nothing, so what it had committed is
computed again; sequences, pages and proposers go on from what was received.
"""

import random
from dataclasses import replace

import pytest
import torch
from faults import AtEvent, AtRandom, EveryPlace, PlantedFault
from law_helpers import (
    CASES,
    Case,
    FullTranscript,
    Setup,
    Variant,
    all_pages_free,
    random_prompt,
    run_cases,
    run_references,
    sampled,
)

from samewise.errors import EngineLost, GuaranteeLost, InvariantBroken
from samewise.testing import preempting
from samewise.types import Grammar, Received, Request, Sampling

pytestmark = pytest.mark.usefixtures("one_thread", "no_garbage")

LLAMA = Setup("llama", "cpu", "float32", 16)
MISTRAL = Setup("mistral", "cpu", "float32", 16)
ERRORS = [PlantedFault, MemoryError, KeyboardInterrupt]

WALKED = [
    Variant(LLAMA, "none"),
    Variant(LLAMA, "none", chained=True),
    Variant(LLAMA, "ngram"),
    Variant(LLAMA, "decode"),
    Variant(LLAMA, "model"),
    Variant(LLAMA, "skip"),
    Variant(LLAMA, "auto", chained=True),
    Variant(MISTRAL, "bushy"),
]

CORE = [WALKED[1], WALKED[5], WALKED[6], WALKED[7]]  # in `make test`

DIGITS = Sampling(grammar=Grammar.regex("[0-9]+(,[0-9]+)*"))
REQUESTS = [replace(CASES[i], max_tokens=min(6, CASES[i].max_tokens)) for i in (0, 3, 8, 11, 12, 13)]
REQUESTS += [
    Case("grammar", random_prompt(9), DIGITS, 6),
    Case("scored", random_prompt(40), max_tokens=0, score_from=3),
    Case("again", random_prompt(33, 3), sampled(4), 3),  # its prompt is another one's prefix
]
UNVERIFIED = Case("unverified", random_prompt(5), sampled(4), 5, verify=False)


def expected_of(setup):
    return run_references(setup, REQUESTS)


def run_with_faults(engine, requests, faults, *, step=None, message="planted", limit=20_000):
    """Run requests; a step that raises a planted error, known by its message, returned nothing."""
    step = step or type(engine).step
    outputs = [FullTranscript() for _ in requests]
    by_id = {request.add(engine): output for request, output in zip(requests, outputs, strict=True)}
    for _ in range(limit):
        if engine.idle:
            break
        try:
            with faults:
                deltas = step(engine)
        except faults.error as error:
            assert message in str(error)  # noqa: PT017 - raised in hundreds of steps of one run
            continue
        for delta in deltas:
            by_id[delta.request_id].take(delta)
        engine.check()
    assert engine.idle
    assert all_pages_free(engine)
    return outputs


def assert_bits(outputs, setup):
    *verified, unverified = outputs
    assert verified == expected_of(setup)
    assert len(unverified.tokens) == UNVERIFIED.max_tokens


def walk(variant, error, kind):
    """Faults at every place that steps reach, those of the repair of earlier faults too."""
    engine, faults = variant.engine(num_pages=60), EveryPlace(error, kind)
    while True:
        before = faults.num_raised
        assert_bits(run_with_faults(engine, [*REQUESTS, UNVERIFIED], faults), variant.setup)
        if faults.num_raised == before:
            break
    assert faults.num_raised > 200  # functions of the package that a step runs
    return engine


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v in CORE else [pytest.mark.slow]) for v in WALKED], ids=str
)
def test_a_fault_where_any_function_begins_changes_no_bit(variant):
    engine = walk(variant, ERRORS[WALKED.index(variant) % 3], "calls")
    assert engine.stats()["recoveries"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("variant", WALKED, ids=str)
def test_a_fault_at_any_line_changes_no_bit(variant):
    walk(variant, ERRORS[WALKED.index(variant) % 3], "lines")


@pytest.mark.parametrize("kind", ["calls", pytest.param("lines", marks=pytest.mark.slow)])
def test_a_fault_between_preemptions_loses_no_token(kind):
    """Tokens that a preemption committed are returned by the next step, or by the one after its failure."""
    engine, faults = LLAMA.engine(num_pages=24), EveryPlace(kind=kind)
    requests = [*REQUESTS, UNVERIFIED]
    for seed in range(3):
        outputs = run_with_faults(engine, requests, faults, step=lambda e, s=seed: preempting(e, s, 0.3))
        assert_bits(outputs, LLAMA)
    assert engine.scheduler.counters.preempted > 0


@pytest.mark.parametrize(
    ("seed", "num"), [(6, 15), *(pytest.param(seed, 40, marks=pytest.mark.slow) for seed in range(6))]
)
def test_interrupts_at_random_moments_change_no_bit(seed, num):
    """A storm: requests arrive, run, are preempted and aborted; any call may be interrupted, repairs too."""
    rng = random.Random(seed)
    variant = WALKED[seed % len(WALKED)]
    engine = variant.engine(num_pages=40, max_num_seqs=5)
    faults = AtRandom(seed, 10_000, KeyboardInterrupt)
    requests = [replace(case, max_tokens=min(case.max_tokens, 9)) for case in CASES]
    expected = run_references(variant.setup, requests)
    live, received, done = {}, {}, 0
    while done < num:
        event = rng.random()
        try:
            with faults:
                if event < 0.2 and len(live) < 8:
                    chosen = rng.randrange(len(requests))
                    request = engine.new_id()
                    live[request], received[request] = chosen, FullTranscript()
                    add_as(engine, request, requests[chosen])
                elif event < 0.23 and live:
                    engine.abort(dropped := rng.choice(list(live)))
                    del live[dropped]
                elif event < 0.3 and live:
                    engine.preempt(rng.choice(list(live)))
                else:
                    for delta in engine.step():
                        received[delta.request_id].take(delta)
        except KeyboardInterrupt:
            engine.recover(has_received(live, received))
        engine.check()
        for request in [request for request in live if received[request].finish is not None]:
            assert received[request] == expected[live.pop(request)]
            done += 1
    for request in live:
        engine.abort(request)
    while not engine.idle:
        engine.step()
    assert all_pages_free(engine)
    assert faults.num_raised > 2


def add_as(engine, request_id, case):
    """Queue a case under an id that the caller knows beforehand."""
    fields = {"verify": case.verify, "prompt_logprobs": case.prompt_logprobs, "score_from": case.score_from}
    engine.add(Request(request_id, case.prompt, case.sampling, case.max_tokens, **fields))


def has_received(live, received):
    """For Engine.recover: what the caller has of each request, and which ones it does not want."""
    return {
        request: Received(len(output.tokens), len(output.scores)) if request in live else None
        for request, output in received.items()
    }


# -- what may fail ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("empty", RuntimeError),
        ("empty_like", MemoryError),
        ("tensor", MemoryError),
        ("where", torch.OutOfMemoryError),
    ],
)
def test_every_allocation_of_a_run_may_fail(monkeypatch, name, error):
    """The k-th call fails, for k = 1, 2, 3 ... 20, or until a run has fewer."""
    engine, allocate = Variant(LLAMA, "skip").engine(num_pages=60), getattr(torch, name)
    num_calls, failing = 0, 0

    def allocate_or_fail(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == failing:
            raise error("planted: DefaultCPUAllocator: can't allocate memory")
        return allocate(*args, **kwargs)

    monkeypatch.setattr(torch, name, allocate_or_fail)
    faults = AtEvent(None, error)  # only expects the error
    while failing <= min(num_calls, 20):
        num_calls, failing = 0, failing + 1
        assert_bits(run_with_faults(engine, [*REQUESTS, UNVERIFIED], faults), LLAMA)


FATAL = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
    GuaranteeLost("a compiled layer would be compiled again"),
    InvariantBroken("page 3 released more often than held"),
]
SURVIVED = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("anything else"),
    MemoryError(),
]


def failing_frame(monkeypatch, engine, error):
    """The third frame from now on raises."""
    frame, num_frames = engine.runner.frame, 0

    def frame_or_fail(inputs):
        nonlocal num_frames
        num_frames += 1
        if num_frames == 3:
            raise error
        return frame(inputs)

    monkeypatch.setattr(engine.runner, "frame", frame_or_fail)


@pytest.mark.parametrize("error", FATAL, ids=repr)
def test_after_a_device_error_or_a_broken_guarantee_every_call_says_that_the_engine_is_lost(
    monkeypatch, error
):
    engine = LLAMA.engine()
    failing_frame(monkeypatch, engine, error)
    with pytest.raises(type(error)):
        run_cases(engine, REQUESTS)
    calls = [
        engine.step,
        engine.check,
        engine.recover,
        lambda: engine.abort(0),
        lambda: engine.end(0),
        lambda: engine.preempt(0),
        lambda: REQUESTS[0].add(engine),
        lambda: engine.update_weights({}),
    ]
    for call in calls:
        with pytest.raises(EngineLost, match=r"this engine is lost: .*build another one") as caught:
            call()
        assert str(error) in str(caught.value)
        assert caught.value.__cause__ is error
    assert engine.lost is caught.value


@pytest.mark.parametrize("error", SURVIVED, ids=repr)
def test_after_a_lack_of_memory_or_another_error_the_engine_goes_on(monkeypatch, error):
    engine = LLAMA.engine()
    failing_frame(monkeypatch, engine, error)
    with pytest.raises(type(error)):
        run_cases(engine, REQUESTS)
    assert engine.lost is None
    for request in range(len(REQUESTS)):
        engine.abort(request)
    assert run_cases(engine, REQUESTS) == expected_of(LLAMA)


@pytest.mark.slow
def test_a_fault_in_an_update_of_weights_leaves_an_engine_that_takes_another(basic):
    """Until then it refuses to serve: no answer may name a contract that does not hold."""
    engine = basic.engine()
    name, weight = next(iter(engine.runner.model.named_parameters()))
    new = {name: weight.detach() * 1.5}
    counting = AtEvent(None)
    with counting:
        contract = engine.update_weights(new)
    expected = run_cases(engine, REQUESTS[:2])
    step = max(1, counting.num_events // 40)
    # A few calls at the end of the first update are not made again by later ones.
    for number in range(1, counting.num_events - step, step):
        with pytest.raises(PlantedFault), AtEvent(number):
            engine.update_weights(new)
        try:
            assert run_cases(engine, REQUESTS[:2]) == expected
        except GuaranteeLost:
            assert engine.update_weights(new) == contract
            assert run_cases(engine, REQUESTS[:2]) == expected


# -- who is to blame ----------------------------------------------------------------------------------


def test_with_blame_only_the_request_that_fails_alone_ends_with_an_error(monkeypatch):
    """Requests that shared its frame run one at a time until each has a token, and give their bits."""
    engine = Variant(LLAMA, "none", chained=True).engine(num_pages=60, max_num_seqs=4)
    poison = Case("poison", random_prompt(21, 9), max_tokens=9)
    run = engine.verifier.run

    def run_or_fail(spans, started=None):
        if any(span.prompt_len == 21 for span in spans):
            raise ZeroDivisionError("planted")
        return run(spans, started)

    monkeypatch.setattr(engine.verifier, "run", run_or_fail)
    outputs = [FullTranscript() for _ in range(len(REQUESTS) + 1)]
    requests = [*REQUESTS[:2], poison, *REQUESTS[2:]]
    by_id = {request.add(engine): output for request, output in zip(requests, outputs, strict=True)}
    num_failures = 0
    while not engine.idle:
        try:
            deltas = engine.step()
        except ZeroDivisionError:
            num_failures += 1
            engine.recover(blame=True)
            continue
        for delta in deltas:
            by_id[delta.request_id].take(delta)
        engine.check()
    failed = outputs.pop(2)
    assert (failed.tokens, failed.finish) == ([], "error")
    assert outputs == expected_of(LLAMA)
    assert num_failures == 2
    assert engine.stats()["failed"] == 1
    assert all_pages_free(engine)
