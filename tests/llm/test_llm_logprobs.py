"""Log-probabilities of output and prompt tokens: shape, order, and that asking for them changes no bit."""

import math

import pytest
from llm_cases import PROMPT, assert_idle, bits, encode, first_choice, generate, greedy

from samewise import LLM, SamplingParams
from samewise.testing import tiny_engine


@pytest.mark.parametrize("num", [0, 1, 5])
def test_logprobs_list_the_chosen_token_first_then_the_most_likely(llm: LLM, num: int) -> None:
    params = SamplingParams(max_tokens=6, seed=3, temperature=1.5, logprobs=num)
    choice = first_choice(generate(llm, PROMPT, params))
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    for token, value, position in zip(choice.token_ids, choice.token_logprobs, choice.logprobs, strict=True):
        entries = list(position.items())
        assert entries[0][0] == token
        assert entries[0][1].logprob == value <= 0
        ranks = sorted(entry.rank for _, entry in entries if entry.rank is not None)
        assert ranks == list(range(1, num + 1))
        ranked = sorted((e for e in position.values() if e.rank is not None), key=lambda e: e.rank or 0)
        assert [e.logprob for e in ranked] == sorted((e.logprob for e in ranked), reverse=True)
        assert len(entries) == num + (entries[0][1].rank is None)
    assert choice.cumulative_logprob == sum(choice.token_logprobs)


def test_logprobs_minus_one_gives_the_whole_vocabulary(llm: LLM) -> None:
    choice = first_choice(generate(llm, PROMPT, greedy(max_tokens=2, logprobs=-1)))
    assert choice.logprobs is not None
    for position in choice.logprobs:
        assert sorted(position) == list(range(320))
        assert sorted(e.rank for e in position.values() if e.rank) == list(range(1, 321))
        assert math.isclose(sum(math.exp(e.logprob) for e in position.values()), 1, rel_tol=1e-4)


def test_asking_for_logprobs_changes_no_bit(llm: LLM) -> None:
    plain = bits(generate(llm, PROMPT))
    for num in (0, 3, -1):
        assert bits(generate(llm, PROMPT, greedy(logprobs=num, prompt_logprobs=num))) == plain
    assert first_choice(generate(llm, PROMPT)).logprobs is None
    assert generate(llm, PROMPT)[0].prompt_logprobs is None


@pytest.mark.parametrize("num", [0, 2, -1])
def test_prompt_logprobs_do_not_depend_on_the_prefix_cache(num: int) -> None:
    llm = LLM.over(tiny_engine(frame_rows=16))
    prompt, params = PROMPT * 2, greedy(max_tokens=2, prompt_logprobs=num)
    (cold,), (warm,) = generate(llm, prompt, params), generate(llm, prompt, params)
    assert cold.prompt_logprobs is not None
    assert cold.prompt_logprobs == warm.prompt_logprobs
    assert cold.prompt_logprobs[0] is None
    assert len(cold.prompt_logprobs) == len(cold.prompt_token_ids)
    entries = zip(cold.prompt_token_ids[1:], cold.prompt_logprobs[1:], strict=True)
    for token, position in entries:
        assert position is not None
        assert next(iter(position)) == token
        assert len(position) in {num, num + 1} or (num == -1 and len(position) == 320)
    (scored,) = llm.score([prompt[:1]], [prompt[1:]])
    assert scored.logprobs == [
        p[t].logprob for t, p in zip(cold.prompt_token_ids, cold.prompt_logprobs, strict=True) if p
    ]
    assert_idle(llm)


def test_prompt_logprobs_of_a_single_token_are_a_single_none(llm: LLM) -> None:
    assert generate(llm, [65], greedy(prompt_logprobs=1))[0].prompt_logprobs == [None]


def test_prompt_logprobs_are_given_once_for_n_choices(llm: LLM) -> None:
    (out,) = generate(llm, PROMPT, SamplingParams(n=3, seed=1, max_tokens=2, prompt_logprobs=0))
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)


def test_max_tokens_0_only_reads_the_prompt(llm: LLM) -> None:
    (out,) = generate(llm, PROMPT, greedy(max_tokens=0, prompt_logprobs=0))
    assert out.outputs[0].token_ids == []
    assert out.outputs[0].text == ""
    assert out.outputs[0].finish_reason == "length"
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(encode(PROMPT))
