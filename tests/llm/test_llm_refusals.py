"""Refused requests: what the error says, that nothing stays queued, and that the next one is answered."""

import math
from typing import Any

import pytest
from llm_cases import GREEDY, PAGE_BYTES, PROMPT, assert_idle, bits, generate, greedy

from samewise import LLM, SamplingParams
from samewise.errors import BadParameter, BadPrompt, QueueFull
from samewise.testing import tiny_engine


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty; give some text"),
        ([], "no prompts were given"),
        ([[]], "the prompt is empty; give at least one token"),
        ([""], "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"text": "a"}, "holds 'text': 'a', which is not supported; known are 'prompt', 'prompt_token_ids'"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "holds 'multi_modal_data'"),
        ({"prompt_token_ids": [65], "cache_salt": "x"}, "holds 'cache_salt': 'x'"),
        ({"prompt": "a", 3: 1}, "holds 3: '1'"),
        ({"prompt": None}, "not NoneType"),
        ({"prompt_token_ids": None}, "token ids"),
        ({"prompt_token_ids": 5}, "token ids"),
        ([b"bytes"], "not bytes"),
        ([None], "not NoneType"),
        ([3.5], "not float"),
        ([320], "holds 320; token ids of this model are 0 to 319"),
        ([-1], "holds -1"),
        ([[1, 2.5]], r"holds 2\.5"),
        ([[1, True]], "holds True"),
        ([["a", "b"]], "holds 'a'"),
        ([65] * 256, r"256 tokens and max_model_len is 256; shorten it, set truncate_prompt_tokens"),
        (["fine", [65] * 300], "300 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_is_answered(
    llm: LLM, prompt: Any, message: str, reference_bits: list[Any]
) -> None:
    with pytest.raises(BadPrompt, match=message):
        generate(llm, prompt)
    assert_idle(llm)
    assert bits(generate(llm, PROMPT)) == reference_bits


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "the prompt is empty"),
        ([320], 4, "holds 320; token ids of this model are 0 to 319"),
        ([1, -1], 4, "holds -1"),
        ([1, "a"], 4, "holds 'a'"),
        ([1] * 512, 1, "512 tokens and max_model_len is 512"),
    ],
)
def test_a_refused_request_is_not_counted(prompt: list[Any], max_tokens: int, message: str) -> None:
    engine = tiny_engine()
    with pytest.raises(BadPrompt, match=message):
        LLM.over(engine).generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=max_tokens))
    assert engine.idle
    assert engine.scheduler.counters.requests == 0


def test_a_lone_surrogate_is_refused(llm: LLM, reference_bits: list[Any]) -> None:
    with pytest.raises(BadPrompt):
        generate(llm, "half a pair \ud800")
    assert bits(generate(llm, PROMPT)) == reference_bits


@pytest.mark.parametrize("bad", [[320], [-1], [[1, 2.5]], {"prompt_token_ids": [1, 999]}])
def test_one_bad_prompt_refuses_the_call_and_nothing_is_queued(bad: Any) -> None:
    llm = LLM.over(tiny_engine(max_model_len=64))
    expected = bits(generate(llm, PROMPT))
    with pytest.raises(BadPrompt):
        generate(
            llm, [PROMPT, "another", bad[0] if isinstance(bad, list) and isinstance(bad[0], list) else bad]
        )
    assert_idle(llm)
    assert bits(generate(llm, PROMPT)) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"n": 0}, "n=0: give a whole number, 1 or more"),
        ({"temperature": math.nan}, "temperature=nan: give a finite number"),
        ({"top_p": 0}, "top_p=0: give more than 0"),
        ({"max_tokens": -1}, "max_tokens=-1"),
    ],
)
def test_bad_parameters_are_refused_when_they_are_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        SamplingParams(**given)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_parameters_are_checked_against_the_vocabulary(
    llm: LLM, name: str, reference_bits: list[Any]
) -> None:
    with pytest.raises(BadParameter, match=rf"{name}=\[400\]: this model's token ids are 0 to 319"):
        generate(llm, [PROMPT, "b"], [GREEDY, greedy(**{name: [3, 400]})])
    assert_idle(llm)
    assert bits(generate(llm, PROMPT)) == reference_bits


def test_a_request_that_can_never_fit_is_refused(reference_bits: list[Any]) -> None:
    llm = LLM.over(tiny_engine(eos=True, kv_memory=6 * PAGE_BYTES, max_model_len=256))
    with pytest.raises(BadPrompt, match=r"grow to 143 tokens and the KV cache holds 80; lower max_tokens"):
        generate(llm, PROMPT, greedy(max_tokens=100))
    assert_idle(llm)
    assert bits(generate(llm, PROMPT)) == reference_bits


@pytest.mark.parametrize("params", [greedy(), greedy(n=2)])
def test_a_full_queue_refuses_the_call_and_the_next_is_answered(
    params: SamplingParams, reference_bits: list[Any]
) -> None:
    llm = LLM.over(tiny_engine(eos=True, max_queued=3, max_num_seqs=1, max_model_len=256))
    with pytest.raises(QueueFull, match="max_queued is 3"):
        generate(llm, ["a", "b", "c", "d"], params)
    assert_idle(llm)
    assert bits(generate(llm, PROMPT)) == reference_bits
