"""LLM.score: log-probabilities of given completions have the bits of generating them."""

from typing import Any

import pytest
from llm_cases import PROMPT, encode, generate

from samewise import LLM, SamplingParams
from samewise.errors import CallerError


def test_scores_have_the_bits_of_generating(llm: LLM) -> None:
    prompts = [PROMPT, "x", "a longer prompt " * 6]
    outputs = generate(llm, prompts, SamplingParams(max_tokens=24, seed=5, ignore_eos=True))
    scored = llm.score(prompts, [out.outputs[0].token_ids for out in outputs])
    for out, score in zip(outputs, scored, strict=True):
        assert score.logprobs == out.outputs[0].token_logprobs
        assert score.token_ids == out.outputs[0].token_ids
        assert score.prompt_token_ids == out.prompt_token_ids
        assert score.cumulative_logprob == out.outputs[0].cumulative_logprob
    assert (
        llm.score(prompts, [out.outputs[0].token_ids for out in outputs]) == scored
    )  # from the prefix cache


def test_a_completion_may_be_text_or_token_ids(llm: LLM) -> None:
    assert llm.score(["ab"], ["cd"]) == llm.score([encode("ab")], [encode("cd")])
    assert len(llm.score(["ab"], ["cd"])[0].logprobs) == 2


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        (["a"], [], "1 prompts and 0 completions"),
        (["a"], [""], "the completion is empty"),
        ([""], ["a"], "the prompt is empty"),
        (["a", "b"], ["c", [999]], "999"),
        (["a" * 200], ["b" * 100], "300 tokens and max_model_len is 256"),
    ],
)
def test_a_completion_that_cannot_be_scored_is_refused(
    llm: LLM, prompts: Any, completions: Any, message: str
) -> None:
    with pytest.raises(CallerError, match=message):
        llm.score(prompts, completions)


def test_prompt_and_completion_may_fill_the_context(llm: LLM) -> None:
    assert len(llm.score([[65] * 200], [[66] * 56])[0].logprobs) == 56
