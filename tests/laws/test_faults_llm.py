"""Law 12 for LLM: an exception anywhere in a call ends that call's requests; open streams give their bits."""

import random

import pytest
from faults import AtRandom, EveryPlace, PlantedFault
from law_helpers import Setup, all_pages_free
from law_proposers import PROPOSERS

from samewise.llm.llm import LLM
from samewise.params import SamplingParams
from samewise.types import Grammar

pytestmark = pytest.mark.usefixtures("one_thread", "no_garbage")

LLAMA = Setup("llama", "cpu", "float32", 16)
PROMPTS = ["one prompt", "another prompt, which is longer", "the third"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=5, logprobs=2, stop="q"),
    SamplingParams(temperature=0, max_tokens=5, grammar=Grammar.regex("[a-f]{3}")),
]
STREAMED = SamplingParams(temperature=0.8, seed=1, max_tokens=8, n=2, logprobs=1)


def bits(outputs):
    return [
        (out.prompt_logprobs, o.text, o.token_ids, [v.hex() for v in o.token_logprobs], o.finish_reason)
        for out in outputs
        for o in out.outputs
    ]


def answer_all(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return bits(outputs), [score.logprobs for score in llm.score(PROMPTS[:2], ["abc", "defgh"])]


def joined(chunks):
    """By choice: the text, the tokens, their log-probabilities and the finish reason."""
    choices = [[chunk for chunk in chunks if chunk.index == index] for index in range(2)]
    return [
        (
            "".join(chunk.text for chunk in choice),
            [token for chunk in choice for token in chunk.token_ids],
            [value.hex() for chunk in choice for value in chunk.token_logprobs],
            choice[-1].finish_reason,
        )
        for choice in choices
    ]


@pytest.mark.parametrize(
    ("kind", "rooms"),
    [
        ("calls", ("llm/", "text/")),
        pytest.param("lines", ("llm/", "text/", "engine/", "schedule/"), marks=pytest.mark.slow),
        pytest.param("edges", ("",), marks=pytest.mark.slow),
    ],
)
def test_a_fault_anywhere_in_a_call_leaves_open_streams_their_bits(kind, rooms):
    llm = LLM.over(LLAMA.engine(PROPOSERS["jitter"], eos=True))
    expected, streamed = answer_all(llm), joined(list(llm.stream("a stream", STREAMED)))
    faults = EveryPlace(PlantedFault, kind, rooms)
    while True:
        stream = llm.stream("a stream", STREAMED)
        chunks = [next(stream) for _ in range(2)]
        before = faults.num_raised
        try:
            with faults:
                assert answer_all(llm) == expected
        except PlantedFault:
            pass
        assert joined(chunks + list(stream)) == streamed
        llm.engine.check()
        assert llm.engine.scheduler.idle
        if faults.num_raised == before:
            break
    assert faults.num_raised > 40
    assert answer_all(llm) == expected
    assert all_pages_free(llm.engine)
    assert not llm._loop._open


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_interrupts_at_random_moments_leave_an_llm_its_bits(seed, monkeypatch):
    """A storm: calls and streams are interrupted, and so is the end of an interrupted call."""
    rng = random.Random(seed)
    llm = LLM.over(LLAMA.engine(PROPOSERS[rng.choice(["none", "auto", "bushy"])], num_pages=60, eos=True))
    expected, streamed = answer_all(llm), joined(list(llm.stream("a stream", STREAMED)))
    faults = AtRandom(seed, 20_000, KeyboardInterrupt)
    abort = llm._loop.abort

    def interrupted_abort(answer):
        with faults:
            abort(answer)

    monkeypatch.setattr(llm._loop, "abort", interrupted_abort)
    for _ in range(12):
        stream = llm.stream("a stream", STREAMED)
        chunks = [next(stream) for _ in range(rng.randint(1, 4))]
        for _ in range(rng.randint(1, 3)):
            try:
                with faults:
                    assert answer_all(llm) == expected
            except KeyboardInterrupt:
                llm.engine.check()
        chunks += list(stream)
        assert joined(chunks) == streamed
    monkeypatch.undo()
    assert faults.num_raised > 4
    assert answer_all(llm) == expected
    assert all_pages_free(llm.engine)
