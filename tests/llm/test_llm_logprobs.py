"""Log-probabilities of output and prompt tokens: shape, order, and that asking for them changes no bit."""

import math
from typing import Any

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
        ranks = sorted(entry.rank or 0 for entry in position.values())
        chosen = entries[0][1].rank or 0
        assert ranks == [*range(1, num + 1), *([chosen] if chosen > num else [])]
        ranked = sorted(position.values(), key=lambda e: e.rank or 0)
        assert [e.logprob for e in ranked] == sorted((e.logprob for e in ranked), reverse=True)
    assert choice.cumulative_logprob == sum(choice.token_logprobs)


@pytest.mark.parametrize("verify", [True, False])
def test_ranks_are_places_in_the_whole_vocabulary(llm: LLM, verify: bool) -> None:
    """Of chosen tokens and of the prompt's, whatever else is asked for."""
    params = SamplingParams(
        max_tokens=8, seed=3, temperature=1.8, logprobs=-1, prompt_logprobs=-1, verify=verify
    )
    (full,) = generate(llm, PROMPT, params)
    places = [list_of_ranks(full.outputs[0].logprobs), list_of_ranks(full.prompt_logprobs)]
    assert max(places[0]) > 5
    assert max(places[1]) > 5
    for num in (0, 2):
        (few,) = generate(llm, PROMPT, params.clone(logprobs=num, prompt_logprobs=num))
        assert [list_of_ranks(few.outputs[0].logprobs), list_of_ranks(few.prompt_logprobs)] == places


def list_of_ranks(positions: Any) -> list[int]:
    """The rank of each chosen token, checked against the others of its position where all are there."""
    ranks = []
    for entry in positions:
        if entry is None:  # the first token of a prompt
            continue
        (token, chosen), *_ = entry.items()
        if len(entry) == 320:
            before = [t for t, e in entry.items() if (-e.logprob, t) < (-chosen.logprob, token)]
            assert chosen.rank == 1 + len(before)
        ranks.append(chosen.rank)
    return ranks


@pytest.mark.parametrize("verify", [True, False])
def test_logprob_token_ids_are_shown_in_place_of_the_most_likely(llm: LLM, verify: bool) -> None:
    params = SamplingParams(max_tokens=6, seed=3, temperature=1.5, verify=verify)
    (full,) = generate(llm, PROMPT, params.clone(logprobs=-1))
    (named,) = generate(llm, PROMPT, params.clone(logprob_token_ids=[300, 7, 7, 65]))
    assert full.outputs[0].token_ids == named.outputs[0].token_ids
    pairs = zip(full.outputs[0].logprobs or [], named.outputs[0].logprobs or [], strict=True)
    for token, (all_of_them, entry) in zip(named.outputs[0].token_ids, pairs, strict=True):
        assert next(iter(entry)) == token
        assert set(entry) == {token, 300, 7, 65}
        assert entry[token].rank == all_of_them[token].rank
        assert {t: e.logprob for t, e in entry.items()} == {t: all_of_them[t].logprob for t in entry}
        others = [e.logprob for t, e in entry.items() if t != token]
        assert others == sorted(others, reverse=True)


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
