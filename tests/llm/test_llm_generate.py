"""LLM.generate: forms of prompts, order of outputs, n choices, seeds, text; load changes no bit."""

from typing import Any

import pytest
from llm_cases import (
    GREEDY,
    PAGE_BYTES,
    PROMPT,
    assert_idle,
    bits,
    encode,
    first_choice,
    generate,
    greedy,
    greedy_letters,
)

from samewise import LLM, SamplingParams
from samewise.errors import BadParameter
from samewise.llm.answer import Answer
from samewise.llm.step_loop import StepLoop
from samewise.testing import Scripted, tiny_engine


def test_text_token_ids_and_mappings_give_the_same_answer(llm: LLM) -> None:
    tokens = encode(PROMPT)
    forms: list[Any] = [
        PROMPT,
        tokens,
        tuple(tokens),
        {"prompt": PROMPT},
        {"prompt": tokens},
        {"prompt_token_ids": tokens},
        {"prompt": "another text", "prompt_token_ids": tokens},
    ]
    alone = [bits(generate(llm, form)) for form in forms]
    assert all(answer == alone[0] for answer in alone)
    together = generate(llm, forms)
    assert bits(together) == [answer[0] for answer in alone]
    assert all(out.prompt_token_ids == tokens for out in together)
    assert [out.prompt for out in together] == [PROMPT, None, None, PROMPT, None, None, "another text"]


def test_a_single_prompt_gives_a_list_of_one_output(llm: LLM) -> None:
    assert (
        len(generate(llm, "a"))
        == len(generate(llm, [5, 6]))
        == len(generate(llm, ["a"]))
        == len(generate(llm, [[5, 6]]))
        == 1
    )


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"{'word ' * (7 - i)}{i}" for i in range(7)]
    lengths = [3, 17, 1, 9, 2, 12, 5]
    outputs = generate(llm, prompts, [greedy(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [out.prompt for out in outputs] == prompts
    assert [len(out.outputs[0].token_ids) for out in outputs] == lengths
    assert [out.finished for out in outputs] == [True] * 7
    assert len({out.request_id for out in outputs}) == 7
    alone = [
        bits(generate(llm, p, greedy(max_tokens=n, ignore_eos=True)))[0]
        for p, n in zip(prompts, lengths, strict=True)
    ]
    assert bits(outputs) == alone


def test_a_list_of_parameters_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(BadParameter, match="2 prompts and 3 SamplingParams"):
        generate(llm, ["a", "b"], [GREEDY] * 3)
    with pytest.raises(BadParameter, match="SamplingParams"):
        generate(llm, ["a"], [{"temperature": 0}])


def test_without_parameters_the_checkpoints_defaults_are_used(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    assert bits(generate(llm, PROMPT, None)) == bits(generate(llm, PROMPT, SamplingParams()))


def test_use_tqdm_false_draws_no_progress_bar(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    generate(llm, "a")
    assert capfd.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capfd.readouterr().err


def test_n_choices_differ_and_the_first_equals_a_single_one(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, seed=7, ignore_eos=True)
    (out,) = generate(llm, PROMPT, params.clone(n=4))
    assert [choice.index for choice in out.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in out.outputs}) == 4
    assert bits([out])[0] == bits(generate(llm, PROMPT, params))[0]
    assert bits([out]) == bits(generate(llm, PROMPT, params.clone(n=4)))
    assert [choice.seed for choice in out.outputs] == [7] * 4


def test_the_reported_derived_seed_gives_the_same_answer(llm: LLM) -> None:
    once = generate(llm, PROMPT, SamplingParams(max_tokens=12))
    again = generate(llm, PROMPT, SamplingParams(max_tokens=12, seed=first_choice(once).seed))
    assert bits(once) == bits(again) == bits(generate(llm, PROMPT, SamplingParams(max_tokens=12)))


def test_generate_keeps_no_chunks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    submit = StepLoop.submit

    def recording_submit(*args: Any, **options: Any) -> Answer:
        answers.append(submit(*args, **options))
        return answers[-1]

    monkeypatch.setattr(StepLoop, "submit", recording_submit)
    outputs = generate(llm, [PROMPT, "b"], greedy(n=2))
    assert [answer.output() for answer in answers] == outputs
    assert all(answer.finished and not answer.pending for answer in answers)


def test_truncation_keeps_the_last_tokens(llm: LLM) -> None:
    (out,) = generate(llm, PROMPT, greedy(truncate_prompt_tokens=5))
    assert out.prompt_token_ids == encode(PROMPT)[-5:]
    assert bits([out]) == bits(generate(llm, encode(PROMPT)[-5:]))
    (out,) = generate(llm, [65] * 5000, greedy(truncate_prompt_tokens=20))
    assert len(out.prompt_token_ids) == 20
    (out,) = generate(llm, PROMPT, greedy(truncate_prompt_tokens=5000))
    assert out.prompt_token_ids == encode(PROMPT)


def test_special_tokens_are_left_out_of_the_text_by_default(llm: LLM) -> None:
    bias = {"logit_bias": {256: 100}, "max_tokens": 2}
    assert first_choice(generate(llm, PROMPT, greedy(**bias))).text == ""
    assert "<s>" in first_choice(generate(llm, PROMPT, greedy(skip_special_tokens=False, **bias))).text


def test_without_detokenizing_the_text_is_empty(llm: LLM) -> None:
    choice = first_choice(generate(llm, PROMPT, greedy_letters(detokenize=False)))
    assert choice.text == ""
    assert choice.token_ids == first_choice(generate(llm, PROMPT, greedy_letters())).token_ids


def test_bad_words_do_not_appear_in_the_text(llm: LLM) -> None:
    text = first_choice(generate(llm, PROMPT, greedy_letters())).text
    word = next(letter for letter in text if letter != " ")
    assert word not in first_choice(generate(llm, PROMPT, greedy_letters(bad_words=[word]))).text


def test_an_unverified_request_gives_the_same_tokens_and_is_counted(
    llm: LLM, reference_bits: list[Any]
) -> None:
    (out,) = generate(llm, PROMPT, greedy(verify=False, logprobs=2))
    assert out.outputs[0].token_ids == reference_bits[0][0]
    assert llm.stats()["unverified_tokens"] > 0


def test_preemption_under_a_small_kv_cache_changes_no_bit() -> None:
    prompts = [f"{i} {PROMPT}" for i in range(5)]
    params = greedy(max_tokens=30, ignore_eos=True)
    small = LLM.over(tiny_engine(kv_memory=10 * PAGE_BYTES, max_model_len=100))
    large = LLM.over(tiny_engine(max_model_len=100))
    assert bits(generate(small, prompts, params)) == bits(generate(large, prompts, params))
    assert small.stats()["preempted"] > 0
    assert_idle(small)


def test_an_interrupt_leaves_no_page_held() -> None:
    calls = [0]

    def interrupt(_: object) -> list[int]:
        calls[0] += 1
        if calls[0] == 9:
            raise KeyboardInterrupt
        return []

    llm = LLM.over(tiny_engine(make_proposer=lambda _: Scripted(interrupt)))
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a", "b", "c"], greedy(max_tokens=30))
    assert_idle(llm)
    plain = LLM.over(tiny_engine())
    assert bits(generate(llm, PROMPT)) == bits(generate(plain, PROMPT))
