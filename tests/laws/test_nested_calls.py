"""Law 12 for calls inside calls: the garbage collector or a signal handler may abort a request at any moment.

An abort from inside a step is queued and carried out by the next call: it changes no bit of other requests
and loses no page.
"""

import gc
import threading

import pytest
from faults import EveryPlace, PlantedFault
from law_helpers import CASES, Setup, all_pages_free, run_cases, run_references
from law_proposers import PROPOSERS

from samewise.errors import CallerError
from samewise.llm.llm import LLM
from samewise.params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = Setup("llama", "cpu", "float32", 16)
PROMPTS = ["one prompt", "another prompt, which is longer"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=5, logprobs=2, stop="q"),
]
LONG = SamplingParams(temperature=0.8, seed=1, max_tokens=50, ignore_eos=True)
BATCH = 12
"""Streams left open, so places of one run at which one of them is closed."""


class Acting(EveryPlace):
    """Does something instead of raising, as often as `left` says; with `then_raise` it raises afterwards."""

    def __init__(self, act, kind="calls", *, then_raise=False):
        super().__init__(PlantedFault, kind)
        self.act, self.left, self.num_acts, self._then_raise = act, 0, 0, then_raise

    def wanted(self, place):
        if not self.left or not super().wanted(place):
            return False
        self.left -= 1
        self.num_acts += 1
        self.act()
        return self._then_raise


@pytest.fixture
def cheap_collections():
    """The garbage collector runs only when called, and looks at no object made before the test."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def answer_all(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    bits = [
        (out.prompt_logprobs, o.text, o.token_ids, [v.hex() for v in o.token_logprobs], o.finish_reason)
        for out in outputs
        for o in out.outputs
    ]
    return bits, [score.logprobs for score in llm.score(PROMPTS, ["abc", "defgh"])]


def half_read(llm):
    stream = llm.stream("a stream that is left", LONG)
    next(stream)
    return stream


@pytest.mark.parametrize("then_raise", [False, True])
@pytest.mark.parametrize("kind", ["calls", pytest.param("lines", marks=pytest.mark.slow)])
@pytest.mark.parametrize("proposer", ["none", "jitter"])
@pytest.mark.usefixtures("cheap_collections")
def test_a_left_stream_may_be_collected_anywhere_in_a_call(proposer, kind, then_raise):
    llm = LLM.over(LLAMA.engine(PROPOSERS[proposer], eos=True))
    expected, streams = answer_all(llm), []

    def collect():
        cycle = [streams.pop()]
        cycle.append(cycle)
        del cycle
        gc.collect()

    walk = Acting(collect, kind, then_raise=then_raise)
    while True:
        before, walk.left = walk.num_acts, 1 if then_raise else BATCH
        streams += [half_read(llm) for _ in range(walk.left - len(streams))]
        try:
            with walk:
                assert answer_all(llm) == expected
        except PlantedFault:
            pass
        llm.engine.check()
        assert len(llm._loop._open) <= len(streams) + 1  # a close in the last call waits for the next one
        if walk.num_acts == before:
            break
    streams.clear()
    assert walk.num_acts > 150
    assert answer_all(llm) == expected
    assert all_pages_free(llm.engine)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("proposer", ["none", "bushy"])
def test_a_request_may_be_aborted_anywhere_in_a_step(proposer, chained):
    engine = LLAMA.engine(PROPOSERS[proposer], ahead=chained)
    expected, unwanted = run_references(LLAMA, CASES[:4]), []
    walk = Acting(lambda: engine.abort(unwanted.pop()))

    def step(engine):
        if not engine.scheduler.idle:
            unwanted.extend(CASES[4].add(engine) for _ in range(2))
        walk.left = len(unwanted)
        with walk:
            return engine.step()

    def abort_what_is_left(engine, _):
        while unwanted:
            engine.abort(unwanted.pop())

    while True:
        before = walk.num_acts
        assert run_cases(engine, CASES[:4], step=step, after=abort_what_is_left) == expected
        if walk.num_acts == before:
            break
    assert walk.num_acts > 100
    assert engine.stats()["recoveries"] == 0


def test_only_aborts_are_allowed_inside_a_call():
    """Any other call inside a call is refused, and the call around it gives its bits."""
    llm = LLM.over(LLAMA.engine())
    stream, refused = half_read(llm), []
    expected, launch = answer_all(llm), llm.engine.verifier.launch
    calls = [
        lambda: answer_all(llm),
        lambda: llm.score(["a"], ["b"]),
        lambda: next(llm.stream("a", LONG)),
        lambda: llm.update_weights({}),
        llm.engine.step,
        llm.engine.check,
        llm.engine.recover,
        llm._loop.recover,
        lambda: CASES[0].add(llm.engine),
        lambda: llm.engine.preempt(0),
    ]

    def calling(spans):
        if len(refused) < len(calls):
            with pytest.raises(CallerError, match="from inside another call"):
                calls[len(refused)]()
            refused.append(True)
        return launch(spans)

    llm.engine.verifier.launch = calling
    assert answer_all(llm) == expected
    assert len(refused) == len(calls)
    assert len(list(stream)) > 10
    assert all_pages_free(llm.engine)


def test_a_stream_closed_in_another_thread_is_aborted_by_the_next_call():
    """The garbage collector runs in any thread; the engine may be inside a step meanwhile."""
    llm = LLM.over(LLAMA.engine())
    expected, launch = answer_all(llm), llm.engine.verifier.launch
    streams = [half_read(llm) for _ in range(8)]

    def closing(spans):
        if streams:
            thread = threading.Thread(target=streams.pop().close)
            thread.start()
            thread.join()
        return launch(spans)

    llm.engine.verifier.launch = closing
    assert answer_all(llm) == expected
    assert not llm._loop._open
    assert all_pages_free(llm.engine)
