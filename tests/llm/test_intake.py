"""Intake: what a checked request holds, and which parameter each refusal names."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from llm_cases import PROMPT, encode, greedy

from samewise import LLM, SamplingParams
from samewise.errors import BadParameter, BadPrompt, CallerError, PromptTooLong
from samewise.llm.intake import CheckedScore, Intake
from samewise.llm.step_loop import StepLoop
from samewise.params import derive_seed
from samewise.schedule.limits import Limits
from samewise.types import Grammar

ENGINE_SEED = 11
LIMITS = Limits(num_pages=17, page=16, max_rows=16, max_num_seqs=4, max_model_len=64)


@pytest.fixture
def intake(shared_llm: LLM) -> Intake:
    """Intake of the tiny llama for contexts of 64 tokens."""
    return Intake(shared_llm.engine.loaded, LIMITS, seed=ENGINE_SEED, date=None)


@pytest.fixture
def intake_without_tokenizer(shared_llm: LLM) -> Intake:
    loaded = dataclasses.replace(shared_llm.engine.loaded, tokenizer=None)
    return Intake(loaded, LIMITS, seed=ENGINE_SEED, date=None)


def test_a_missing_seed_is_derived_from_the_engines_seed_and_the_prompt(intake: Intake) -> None:
    derived = intake.check("ab", greedy())
    assert derived.seed == derive_seed(ENGINE_SEED, encode("ab")) == intake.check(encode("ab"), greedy()).seed
    assert derived.seed != intake.check("ba", greedy()).seed
    assert intake.check("ab", greedy(seed=5)).seed == 5
    assert intake.check("ab", greedy(seed=0)).seed == 0


def test_choices_of_a_request_share_its_prompts_tokens(intake: Intake) -> None:
    checked = intake.check("abc", greedy(n=3, temperature=1))
    requests = [checked.request(i, i, salt=b"", leader=None) for i in range(3)]
    assert requests[0].prompt == tuple(encode("abc"))
    assert all(request.prompt is requests[0].prompt for request in requests)


def test_a_prompt_is_truncated_to_its_last_tokens(intake: Intake) -> None:
    checked = intake.check("a" * 500 + "bc", greedy(truncate_prompt_tokens=3))
    assert checked.token_ids == encode("abc")
    assert checked.seed == derive_seed(ENGINE_SEED, encode("abc"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_prompt_to_be_truncated_no_more_is_read_than_a_context_can_hold(
    intake: Intake, side: str
) -> None:
    text, read = "a" * 5000 + "b" * 5000, []
    inner = intake.tokenizer
    intake.tokenizer = SimpleNamespace(encode=lambda one, **kw: read.append(one) or inner.encode(one, **kw))
    checked = intake.check(text, greedy(truncate_prompt_tokens=3, truncation_side=side))
    assert read == [text[-64 * 32 :] if side == "left" else text[: 64 * 32]]
    assert checked.token_ids == encode("bbb" if side == "left" else "aaa")
    assert checked.text == text


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "expected"),
    [(4, None, 60), (63, None, 1), (4, 7, 7), (4, 0, 0), (4, 500, 500)],
)
def test_max_tokens_none_is_what_the_context_leaves(
    intake: Intake, prompt_len: int, max_tokens: int | None, expected: int
) -> None:
    assert intake.check([65] * prompt_len, greedy(max_tokens=max_tokens)).max_tokens == expected


def test_max_tokens_none_is_bounded_by_the_kv_cache(shared_llm: LLM) -> None:
    limits = dataclasses.replace(LIMITS, num_pages=3)
    intake = Intake(shared_llm.engine.loaded, limits, seed=0, date=None)
    assert intake.check([65] * 4, greedy(max_tokens=None)).max_tokens == 2 * 16 - 4


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ([1, 320], {}, BadPrompt, "prompt"),
        ([1, -1], {}, BadPrompt, "prompt"),
        ([1, True], {}, BadPrompt, "prompt"),
        ([1, 2.5], {}, BadPrompt, "prompt"),
        ([], {}, BadPrompt, "prompt"),
        ("", {}, BadPrompt, "prompt"),
        ("\ud800", {}, BadPrompt, "prompt"),
        ({"text": "a"}, {}, BadPrompt, "prompt"),
        (5, {}, BadPrompt, "prompt"),
        ([65] * 64, {}, PromptTooLong, "prompt"),
        ("a", {"stop_token_ids": [400]}, BadParameter, "stop_token_ids"),
        ("a", {"allowed_token_ids": [400]}, BadParameter, "allowed_token_ids"),
        ("a", {"grammar": Grammar.regex("(")}, BadParameter, "grammar"),
    ],
)
def test_a_refusal_names_its_parameter(
    intake: Intake, prompt: Any, params: dict[str, Any], error: type[CallerError], param: str
) -> None:
    with pytest.raises(error) as refused:
        intake.check(prompt, greedy(**params))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [("text", {}, "prompt"), ([1], {"stop": "x"}, "stop"), ([1], {"bad_words": ["x"]}, "bad_words")],
)
def test_without_a_tokenizer_text_is_refused(
    intake_without_tokenizer: Intake, prompt: Any, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(CallerError, match="no tokenizer") as refused:
        intake_without_tokenizer.check(prompt, greedy(**params))
    assert refused.value.param == param


def test_without_a_tokenizer_token_ids_are_accepted(intake_without_tokenizer: Intake) -> None:
    checked = intake_without_tokenizer.check([1, 2], greedy(stop_token_ids=[3]))
    assert (checked.text, checked.token_ids) == (None, [1, 2])
    assert intake_without_tokenizer.text_stream(checked) is None
    assert intake_without_tokenizer.decode_token(1) is None
    assert intake_without_tokenizer.check_score([1], [2]) == CheckedScore([1], [2])


def test_the_requests_of_n_choices_differ_in_their_index_only(intake: Intake) -> None:
    checked = intake.check(PROMPT, greedy(n=2, prompt_logprobs=1, speculate=False))
    first = checked.request(4, 0, salt=b"s", leader=None)
    second = checked.request(5, 1, salt=b"s", leader=4)
    assert (first.prompt, first.salt, first.speculate) == (tuple(encode(PROMPT)), b"s", False)
    assert (first.prompt_logprobs, second.prompt_logprobs) == (1, None)
    assert second == dataclasses.replace(
        first, id=5, leader=4, prompt_logprobs=None, sampling=dataclasses.replace(first.sampling, index=1)
    )


def test_a_checked_score_reads_prompt_and_completion_and_generates_nothing(intake: Intake) -> None:
    checked = intake.check_score("ab", "cd")
    assert (
        checked == CheckedScore(encode("ab"), encode("cd")) == intake.check_score(encode("ab"), encode("cd"))
    )
    request = checked.request(9)
    assert (request.prompt, request.max_tokens, request.score_from) == (tuple(encode("abcd")), 0, 2)


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        ("", "a", "the prompt is empty"),
        ("a", "", "the completion is empty"),
        ("a", [], "the completion is empty"),
        ("a", [999], "holds 999"),
        ([999], "a", "holds 999"),
        ("a", 5, "not int"),
        ("a" * 40, "b" * 25, "65 tokens and max_model_len is 64"),
    ],
)
def test_a_completion_that_cannot_be_scored_is_refused_at_intake(
    intake: Intake, prompt: Any, completion: Any, message: str
) -> None:
    with pytest.raises(BadPrompt, match=message):
        intake.check_score(prompt, completion)


def test_only_a_request_with_a_grammar_gets_a_guide(intake: Intake) -> None:
    assert intake.guide(intake.check("a", greedy())) is None
    checked = intake.check("a", greedy(grammar=Grammar.regex("[ab]+")))
    assert intake.guide(checked) is not intake.guide(checked)  # each sequence has a guide of its own


@pytest.mark.parametrize(
    ("generation", "params"),
    [
        ({}, SamplingParams()),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 40},
            SamplingParams(temperature=0.6, top_p=0.9, top_k=40),
        ),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0)),
        ({"do_sample": True, "temperature": None}, SamplingParams()),
        (
            {"repetition_penalty": 1.1, "max_new_tokens": 99},
            SamplingParams(repetition_penalty=1.1, max_tokens=99),
        ),
        ({"eos_token_id": [1, 2], "pad_token_id": 0, "transformers_version": "5"}, SamplingParams()),
    ],
)
def test_default_parameters_come_from_the_generation_config(
    shared_llm: LLM, generation: dict[str, Any], params: SamplingParams
) -> None:
    engine = copy.copy(shared_llm.engine)
    engine.loaded = dataclasses.replace(engine.loaded, generation=generation)
    assert StepLoop(engine).intake.default_params() == params
    assert LLM.over(engine).get_default_sampling_params() == params
