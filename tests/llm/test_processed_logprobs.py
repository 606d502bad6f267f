"""`logprobs_mode`: log-probabilities of the model's own logits, or of what tokens are drawn from."""

import math
from typing import Any

import pytest
from llm_cases import PROMPT, bits, encode, generate, greedy

from samewise import LLM, SamplingParams
from samewise.errors import BadParameter

PROCESSED = {"logprobs_mode": "processed_logprobs"}


def sampled(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.6, "max_tokens": 10, "seed": 4, "ignore_eos": True} | given)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(BadParameter, match="logprobs_mode='cooked': choose one of raw_logprobs, processed"):
        SamplingParams(logprobs_mode="cooked")


def test_the_mode_changes_no_token(llm: LLM) -> None:
    for params in (sampled(), sampled(top_k=5, presence_penalty=1.0), greedy()):
        raw, processed = generate(llm, PROMPT, params), generate(llm, PROMPT, params.clone(**PROCESSED))
        assert raw[0].outputs[0].token_ids == processed[0].outputs[0].token_ids
        same = raw[0].outputs[0].token_logprobs == processed[0].outputs[0].token_logprobs
        assert same == (params.temperature == 0.0)


def test_processed_values_are_those_of_scoring_at_the_temperature(llm: LLM) -> None:
    (output,) = generate(llm, PROMPT, sampled(**PROCESSED))
    (choice,) = output.outputs
    (score,) = llm.score([PROMPT], [choice.token_ids], temperature=0.6)
    assert score.logprobs == choice.token_logprobs
    (raw,) = llm.score([PROMPT], [choice.token_ids])
    assert raw.logprobs != choice.token_logprobs


def test_alternatives_are_a_distribution_over_what_filters_leave(llm: LLM) -> None:
    (output,) = generate(llm, PROMPT, sampled(top_k=7, logprobs=-1, **PROCESSED))
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True):
        values = [one.logprob for one in entry.values() if one.logprob > -math.inf]
        assert len(values) == 7
        assert math.fsum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-5)
        assert entry[token].logprob in values


def test_processed_values_are_computed_from_the_raw_ones(llm: LLM) -> None:
    (raw,) = generate(llm, PROMPT, sampled(logprobs=-1, max_tokens=1))
    (processed,) = generate(llm, PROMPT, sampled(logprobs=-1, max_tokens=1, **PROCESSED))
    (before,), (after,) = raw.outputs[0].logprobs, processed.outputs[0].logprobs
    scaled = {token: one.logprob / 0.6 for token, one in before.items()}
    total = math.log(math.fsum(map(math.exp, scaled.values())))
    for token, value in scaled.items():
        assert after[token].logprob == pytest.approx(value - total, abs=1e-4)


def test_the_prompts_log_probabilities_have_the_temperature(llm: LLM) -> None:
    (output,) = generate(llm, PROMPT, sampled(prompt_logprobs=1, max_tokens=1, **PROCESSED))
    tokens = encode(PROMPT)
    (score,) = llm.score([tokens[:1]], [tokens[1:]], temperature=0.6)
    values = [
        entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
    ]
    assert values == score.logprobs


def test_load_changes_no_processed_value(llm: LLM) -> None:
    params = [sampled(seed=i, top_p=0.8, repetition_penalty=1.2, **PROCESSED) for i in range(6)]
    together = generate(llm, [PROMPT] * 6, params)
    assert [bits([one]) for one in together] == [bits(generate(llm, PROMPT, one)) for one in params]
