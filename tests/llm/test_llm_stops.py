"""Where an answer ends: stop strings, stop tokens, the eos token, length limits."""

from typing import Any

import pytest
from llm_cases import PROMPT, assert_idle, first_choice, generate, greedy, greedy_letters

from samewise import LLM
from samewise.testing import Scripted, tiny_engine


def test_a_stop_string_is_removed_from_the_text_or_included(llm: LLM) -> None:
    full = first_choice(generate(llm, PROMPT, greedy_letters()))
    stop = full.text[5:8]
    at = full.text.index(stop)
    cut = first_choice(generate(llm, PROMPT, greedy_letters(stop=[stop, "never"])))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (full.text[:at], "stop", stop)
    included = first_choice(generate(llm, PROMPT, greedy_letters(stop=stop, include_stop_str_in_output=True)))
    assert (included.text, included.stop_reason) == (full.text[: at + 3], stop)
    assert cut.token_ids == included.token_ids == full.token_ids[: at + 3]
    assert cut.token_logprobs == full.token_logprobs[: at + 3]


def test_a_stop_string_before_min_tokens_does_not_count(llm: LLM) -> None:
    stop = first_choice(generate(llm, PROMPT, greedy_letters())).text[0]
    choice = first_choice(generate(llm, PROMPT, greedy_letters(stop=stop, min_tokens=5)))
    assert len(choice.token_ids) > 5
    assert choice.text.startswith(stop)


def test_a_stop_token_is_the_stop_reason_and_not_part_of_the_text(llm: LLM) -> None:
    full = first_choice(generate(llm, PROMPT, greedy_letters()))
    stop = full.token_ids[4]
    at = full.token_ids.index(stop)
    cut = first_choice(generate(llm, PROMPT, greedy_letters(stop_token_ids=[stop])))
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == full.token_ids[: at + 1]
    assert cut.text == full.text[:at]
    included = first_choice(
        generate(llm, PROMPT, greedy_letters(stop_token_ids=[stop], include_stop_str_in_output=True))
    )
    assert included.text == full.text[: at + 1]


def test_the_eos_token_ends_the_text_without_a_stop_reason(llm: LLM) -> None:
    choice = first_choice(generate(llm, PROMPT, greedy(logit_bias={257: 100})))
    assert (choice.token_ids, choice.text) == ([257], "")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_with_ignore_eos_the_answer_goes_on_after_the_eos_token(llm: LLM) -> None:
    choice = first_choice(generate(llm, PROMPT, greedy(logit_bias={257: 100}, ignore_eos=True)))
    assert (choice.token_ids, choice.finish_reason) == ([257] * 8, "length")


def test_an_eos_token_given_as_stop_token_is_the_stop_reason(llm: LLM) -> None:
    """With ignore_eos, as in vLLM."""
    choice = first_choice(
        generate(llm, PROMPT, greedy(logit_bias={257: 100}, ignore_eos=True, stop_token_ids=[257]))
    )
    assert (choice.finish_reason, choice.stop_reason) == ("stop", 257)


def test_min_tokens_excludes_the_eos_token_before_it(llm: LLM) -> None:
    choice = first_choice(generate(llm, PROMPT, greedy(logit_bias={257: 100}, min_tokens=5)))
    assert 257 not in choice.token_ids[:5]
    assert choice.token_ids[5:] == [257]


@pytest.mark.parametrize("verify", [True, False])
def test_without_max_tokens_the_answer_fills_the_context(llm: LLM, verify: bool) -> None:
    choice = first_choice(generate(llm, [65] * 200, greedy(max_tokens=None, ignore_eos=True, verify=verify)))
    assert (len(choice.token_ids), choice.finish_reason) == (56, "length")


def test_max_tokens_is_limited_by_the_context(llm: LLM) -> None:
    choice = first_choice(generate(llm, [65] * 250, greedy(max_tokens=1000, ignore_eos=True)))
    assert len(choice.token_ids) == 6


def test_a_stop_string_ends_a_sequence_that_was_just_preempted() -> None:
    """A sequence can lose its pages in the step that commits the end of the stop string."""
    text = first_choice(generate(LLM.over(tiny_engine()), PROMPT, greedy_letters())).text
    at = next(i for i in range(3, len(text)) if text[i] not in text[:i])
    llms: list[LLM] = []

    def preempt(ask: Any) -> list[int]:
        if len(ask.tokens) - ask.prompt_len == at + 1:
            llms[0].engine.scheduler.preempt(ask.seq_id)
        return []

    llms.append(LLM.over(tiny_engine(make_proposer=lambda _: Scripted(preempt))))
    choice = first_choice(generate(llms[0], PROMPT, greedy_letters(stop=text[at])))
    assert (choice.text, choice.stop_reason) == (text[:at], text[at])
    assert_idle(llms[0])
