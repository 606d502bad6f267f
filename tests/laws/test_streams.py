"""Law 6, stream = whole: chunks add up to the output, and a streamed token is never taken back."""

import asyncio
import string

import pytest
from law_helpers import other_requests
from law_proposers import PROPOSERS, adversary, jitter

from samewise.llm.aio import AsyncLLM
from samewise.llm.llm import LLM
from samewise.params import SamplingParams
from samewise.testing import byte_tokenizer, preempting

LETTERS = [byte_tokenizer().encode(letter)[0] for letter in string.ascii_lowercase]
PROMPTS = ["a", "Once upon a time", "The same words, the same answer.", "Zwölf Boxkämpfer ✓ jagen"]
CORE_PROPOSERS = ("none", "jitter", "bushy", "auto")


def params(**settings):
    return SamplingParams(**({"max_tokens": 24, "temperature": 0.8, "seed": 5} | settings))


def letters(**settings):
    """One letter per token, so that each token is one character of text."""
    return params(allowed_token_ids=LETTERS, **settings)


@pytest.fixture(scope="module")
def llm(basic):
    """Without proposer."""
    return LLM.over(basic.engine())


@pytest.fixture(
    scope="module",
    params=[pytest.param(p, marks=[] if p in CORE_PROPOSERS else [pytest.mark.slow]) for p in PROPOSERS],
)
def drafting_llm(request, basic):
    """With each proposer."""
    return LLM.over(basic.engine(PROPOSERS[request.param]))


def generate(llm, prompt, sampling):
    (output,) = llm.generate(prompt, sampling, use_tqdm=False)
    return output.outputs[0]


def streamed_bits(llm, prompt, sampling):
    """The chunks of a stream added up: text, token ids, log-probability bits, finish and stop reason."""
    chunks = list(llm.stream(prompt, sampling))
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    return (
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.token_ids],
        [value.hex() for chunk in chunks for value in chunk.token_logprobs],
        chunks[-1].finish_reason,
        chunks[-1].stop_reason,
    )


def bits(output):
    """The same fields of a whole output."""
    return (
        output.text,
        output.token_ids,
        [value.hex() for value in output.token_logprobs],
        output.finish_reason,
        output.stop_reason,
    )


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "sampling", [params(), params(temperature=0), letters()], ids=["bytes", "greedy", "letters"]
)
def test_chunks_add_up_to_the_output(llm, drafting_llm, prompt, sampling):
    expected = bits(generate(llm, prompt, sampling))
    assert streamed_bits(drafting_llm, prompt, sampling) == expected
    assert bits(generate(drafting_llm, prompt, sampling)) == expected


@pytest.mark.parametrize("include", [False, True], ids=["without", "with"])
@pytest.mark.parametrize(("at", "size"), [(0, 1), (0, 3), (5, 2), (9, 4), (20, 4)])
def test_a_stop_string_across_tokens_ends_the_output(llm, drafting_llm, at, size, include):
    prompt = PROMPTS[1]
    free = generate(llm, prompt, letters())
    assert len(free.text) == 24
    stop = free.text[at : at + size]
    first = free.text.find(stop)
    sampling = letters(stop=[stop, "never ever"], include_stop_str_in_output=include)
    expected = bits(generate(llm, prompt, sampling))
    text, tokens, logprobs, finish_reason, stop_reason = expected
    assert text == free.text[: first + (size if include else 0)]
    assert tokens == free.token_ids[: first + size]
    assert logprobs == [value.hex() for value in free.token_logprobs[: first + size]]
    assert (finish_reason, stop_reason) == ("stop", stop)
    assert streamed_bits(drafting_llm, prompt, sampling) == expected
    assert drafting_llm.engine.scheduler.idle  # the sequence ended; its text was not only cut


def test_streamed_text_is_never_taken_back(llm, drafting_llm):
    """Text that may become a stop string is held back until it is one, or cannot be one."""
    prompt = PROMPTS[2]
    free = generate(llm, prompt, letters())
    beginning = free.text[3:7] + "#"  # begins in the text and never ends there
    for stops in ([beginning], [beginning, free.text[15:18]]):
        final = generate(llm, prompt, letters(stop=stops)).text
        streamed = ""
        for chunk in drafting_llm.stream(prompt, letters(stop=stops)):
            streamed += chunk.text
            assert final.startswith(streamed)
        assert streamed == final


@pytest.mark.parametrize("n", [2, 5])
def test_choices_differ_and_are_reproducible(llm, drafting_llm, n):
    sampling = params(n=n)
    (first,) = llm.generate(PROMPTS[1], sampling, use_tqdm=False)
    (second,) = drafting_llm.generate(PROMPTS[1], sampling, use_tqdm=False)
    expected = [bits(output) for output in first.outputs]
    assert [bits(output) for output in second.outputs] == expected
    assert len({tuple(output.token_ids) for output in first.outputs}) == n
    assert [output.index for output in first.outputs] == list(range(n))
    # The first choice equals the output of a request with n=1.
    assert bits(generate(drafting_llm, PROMPTS[1], params())) == expected[0]


def test_streamed_choices_equal_whole_ones(llm, drafting_llm):
    (expected,) = llm.generate(PROMPTS[2], params(n=3), use_tqdm=False)
    texts, tokens = {}, {}
    for chunk in drafting_llm.stream(PROMPTS[2], params(n=3)):
        texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
        tokens[chunk.index] = tokens.get(chunk.index, []) + chunk.token_ids
    assert [texts[i] for i in range(3)] == [output.text for output in expected.outputs]
    assert [tokens[i] for i in range(3)] == [output.token_ids for output in expected.outputs]


def test_a_derived_seed_is_returned_and_reproduces_the_output(llm, drafting_llm):
    unseeded = SamplingParams(max_tokens=12, temperature=1.0)
    first = generate(llm, PROMPTS[0], unseeded)
    assert bits(generate(drafting_llm, PROMPTS[0], unseeded)) == bits(first)
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=first.seed)
    assert bits(generate(drafting_llm, PROMPTS[0], seeded)) == bits(first)


def test_different_seeds_give_different_outputs(llm):
    seeds = (0, 1, 2, -1, 2**64 - 2)
    assert len({tuple(generate(llm, PROMPTS[1], params(seed=seed)).token_ids) for seed in seeds}) == 5


def test_streamed_logprobs_equal_whole_ones(llm, drafting_llm):
    sampling = params(logprobs=3)
    expected = generate(llm, PROMPTS[3], sampling)
    entries = [entry for chunk in drafting_llm.stream(PROMPTS[3], sampling) for entry in chunk.logprobs]
    assert entries == expected.logprobs
    assert all(len(entry) in (3, 4) for entry in entries)


def test_scores_equal_the_log_probabilities_of_generating(llm, drafting_llm):
    outputs = [generate(llm, prompt, params(temperature=0.0)) for prompt in PROMPTS]
    scores = drafting_llm.score(PROMPTS, [output.token_ids for output in outputs])
    for score, output in zip(scores, outputs, strict=True):
        assert [value.hex() for value in score.logprobs] == [value.hex() for value in output.token_logprobs]


@pytest.mark.parametrize("make", [jitter, adversary])
def test_streams_are_the_same_under_preemption(basic, llm, make):
    """Beside other requests, with too few pages and a stop string."""
    free = generate(llm, PROMPTS[1], letters())
    sampling = letters(stop=free.text[11:14])
    expected = bits(generate(llm, PROMPTS[1], sampling))
    engine = basic.engine(make, num_pages=7)
    for case in other_requests(5, max_tokens=40):
        case.add(engine)
    loop = LLM.over(engine)._loop
    answer = loop.submit(loop.intake.check(PROMPTS[1], sampling), streamed=True)
    chunks = []
    while not answer.finished:
        loop.step()
        chunks += answer.pending
        answer.pending.clear()
        engine.check()
    assert engine.scheduler.counters.preempted > 0
    assert "".join(chunk.text for chunk in chunks) == expected[0]
    assert bits(answer.output().outputs[0]) == expected
    while not engine.idle:
        preempting(engine, 1, 0.1)
        engine.check()


def test_asynchronous_streams_give_the_same_text(basic, llm):
    samplings = [params(seed=i) for i in range(len(PROMPTS))]
    expected = [generate(llm, prompt, one).text for prompt, one in zip(PROMPTS, samplings, strict=True)]

    async def read(async_llm, prompt, sampling):
        return "".join([chunk.text async for chunk in async_llm.stream(prompt, sampling)])

    async def read_all():
        async with AsyncLLM.over(basic.engine(jitter)) as async_llm:
            streams = (read(async_llm, prompt, one) for prompt, one in zip(PROMPTS, samplings, strict=True))
            return await asyncio.gather(*streams)

    assert asyncio.run(read_all()) == expected
