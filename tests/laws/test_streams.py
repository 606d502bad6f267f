"""Law 6, stream = whole: chunks add up to the answer, and nothing streamed is taken back."""

import asyncio
import string

import pytest
from lawbook import PROPOSERS, adversary, company, jitter

from samewise.llm.aio import AsyncLLM
from samewise.llm.llm import LLM
from samewise.params import SamplingParams
from samewise.testing import byte_tokenizer, preempting

LETTERS = [byte_tokenizer().encode(letter)[0] for letter in string.ascii_lowercase]
PROMPTS = ["a", "Once upon a time", "The same words, the same answer.", "Zwölf Boxkämpfer ✓ jagen"]


def params(**settings):
    return SamplingParams(**({"max_tokens": 24, "temperature": 0.8, "seed": 5} | settings))


def in_letters(**settings):
    """One letter a token, so that text has a meaning."""
    return params(allowed_token_ids=LETTERS, **settings)


@pytest.fixture(scope="module")
def llm(plain):
    return LLM.over(plain.engine())


@pytest.fixture(scope="module", params=PROPOSERS)
def other(request, plain):
    return LLM.over(plain.engine(PROPOSERS[request.param], eos=False))


def whole(llm, prompt, sampling):
    (output,) = llm.generate(prompt, sampling, use_tqdm=False)
    return output.outputs[0]


def streamed(llm, prompt, sampling):
    """Chunks, added up."""
    chunks = list(llm.stream(prompt, sampling))
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    return (
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.token_ids],
        [value.hex() for chunk in chunks for value in chunk.token_logprobs],
        chunks[-1].finish_reason,
        chunks[-1].stop_reason,
    )


def as_streamed(output):
    return (
        output.text,
        output.token_ids,
        [value.hex() for value in output.token_logprobs],
        output.finish_reason,
        output.stop_reason,
    )


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "sampling", [params(), params(temperature=0), in_letters()], ids=["bytes", "greedy", "abc"]
)
def test_chunks_add_up_to_the_whole(llm, other, prompt, sampling):
    expected = as_streamed(whole(llm, prompt, sampling))
    assert streamed(other, prompt, sampling) == expected
    assert as_streamed(whole(other, prompt, sampling)) == expected


@pytest.mark.parametrize("include", [False, True], ids=["without", "with"])
@pytest.mark.parametrize(("at", "size"), [(0, 1), (0, 3), (5, 2), (9, 4), (20, 4)])
def test_stop_strings_across_tokens(llm, other, at, size, include):
    prompt = PROMPTS[1]
    free = whole(llm, prompt, in_letters())
    assert len(free.text) == 24  # one letter a token
    stop = free.text[at : at + size]
    first = free.text.find(stop)
    sampling = in_letters(stop=[stop, "never ever"], include_stop_str_in_output=include)
    expected = as_streamed(whole(llm, prompt, sampling))
    text, tokens, logprobs, finish, reason = expected
    assert text == free.text[: first + (size if include else 0)]
    assert tokens == free.token_ids[: first + size]
    assert logprobs == [value.hex() for value in free.token_logprobs[: first + size]]
    assert (finish, reason) == ("stop", stop)
    assert streamed(other, prompt, sampling) == expected
    assert other.engine.scheduler.idle  # it ended there, and was not only cut


def test_nothing_is_taken_back(llm, other):
    """What may become a stop string is held back until it is one, or is not."""
    prompt = PROMPTS[2]
    free = whole(llm, prompt, in_letters())
    almost = free.text[3:7] + "#"  # begins in the text and never ends there
    for stops in ([almost], [almost, free.text[15:18]]):
        final = whole(llm, prompt, in_letters(stop=stops)).text
        seen = ""
        for chunk in other.stream(prompt, in_letters(stop=stops)):
            seen += chunk.text
            assert final.startswith(seen)
        assert seen == final


@pytest.mark.parametrize("n", [2, 5])
def test_choices_differ_and_come_again(llm, other, n):
    sampling = params(n=n)
    (first,) = llm.generate(PROMPTS[1], sampling, use_tqdm=False)
    (second,) = other.generate(PROMPTS[1], sampling, use_tqdm=False)
    said = [as_streamed(one) for one in first.outputs]
    assert [as_streamed(one) for one in second.outputs] == said
    assert len({tuple(one.token_ids) for one in first.outputs}) == n
    assert [one.index for one in first.outputs] == list(range(n))
    # The first choice is what is said when only one is asked for.
    assert as_streamed(whole(other, PROMPTS[1], params())) == said[0]


def test_streamed_choices(llm, other):
    (expected,) = llm.generate(PROMPTS[2], params(n=3), use_tqdm=False)
    texts, tokens = {}, {}
    for chunk in other.stream(PROMPTS[2], params(n=3)):
        texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
        tokens[chunk.index] = tokens.get(chunk.index, []) + chunk.token_ids
    assert [texts[i] for i in range(3)] == [one.text for one in expected.outputs]
    assert [tokens[i] for i in range(3)] == [one.token_ids for one in expected.outputs]


def test_an_unnamed_seed_is_told_and_can_be_asked_for_again(llm, other):
    unnamed = SamplingParams(max_tokens=12, temperature=1.0)
    first = whole(llm, PROMPTS[0], unnamed)
    assert as_streamed(whole(other, PROMPTS[0], unnamed)) == as_streamed(first)
    again = whole(other, PROMPTS[0], SamplingParams(max_tokens=12, temperature=1.0, seed=first.seed))
    assert as_streamed(again) == as_streamed(first)


def test_seeds_matter(llm):
    said = {tuple(whole(llm, PROMPTS[1], params(seed=seed)).token_ids) for seed in (0, 1, 2, -1, 2**64 - 2)}
    assert len(said) == 5


def test_log_probabilities_asked_for_are_the_same_streamed(llm, other):
    sampling = params(logprobs=3)
    expected = whole(llm, PROMPTS[3], sampling)
    dicts = [entry for chunk in other.stream(PROMPTS[3], sampling) for entry in chunk.logprobs]
    assert dicts == expected.logprobs
    assert all(len(entry) in (3, 4) for entry in dicts)


def test_scores_are_those_of_generating(llm, other):
    answers = [whole(llm, prompt, params(temperature=0.0)) for prompt in PROMPTS]
    scores = other.score(PROMPTS, [answer.token_ids for answer in answers])
    for score, answer in zip(scores, answers, strict=True):
        assert [v.hex() for v in score.logprobs] == [v.hex() for v in answer.token_logprobs]


@pytest.mark.parametrize("make", [jitter, adversary])
def test_streams_under_pressure(plain, llm, make):
    """In company, preempted, with a stop string: the text is the same."""
    free = whole(llm, PROMPTS[1], in_letters())
    sampling = in_letters(stop=free.text[11:14])
    expected = as_streamed(whole(llm, PROMPTS[1], sampling))
    engine = plain.engine(make, num_pages=7)
    for case in company(5, most=40):
        case.add(engine)
    hurried = LLM.over(engine)
    desk = hurried._desk
    answer = desk.submit(desk.ask(PROMPTS[1], sampling))
    pieces = []
    while not answer.finished:
        desk.step()
        pieces += answer.pending
        answer.pending.clear()
        engine.check()
    assert engine.scheduler.counters.preempted > 0
    assert "".join(chunk.text for chunk in pieces) == expected[0]
    assert as_streamed(answer.output().outputs[0]) == expected
    while not engine.idle:
        preempting(engine, 1, 0.1)
        engine.check()


def test_asynchronous_streams_say_the_same(plain, llm):
    sampling = [params(seed=i) for i in range(len(PROMPTS))]
    expected = [whole(llm, p, s).text for p, s in zip(PROMPTS, sampling, strict=True)]

    async def read(face, prompt, one):
        return "".join([chunk.text async for chunk in face.stream(prompt, one)])

    async def main():
        async with AsyncLLM.over(plain.engine(jitter)) as face:
            return await asyncio.gather(
                *(read(face, p, s) for p, s in zip(PROMPTS, sampling, strict=True))
            )  # fmt: skip

    assert asyncio.run(main()) == expected
