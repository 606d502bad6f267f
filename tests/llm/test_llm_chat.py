"""LLM.chat and chat templates: what reaches the model, dates, refusals."""

from typing import Any

import pytest
from llm_cases import GREEDY, MESSAGES, bits, decode, generate

from samewise import LLM
from samewise.errors import BadPrompt
from samewise.testing import tiny_engine

GUARDED_DATE = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}no date{% endif %}"
BARE_DATE = "today is {{ strftime_now('%Y-%m-%d') }}"


def test_chat_adds_nothing_to_the_template(llm: LLM) -> None:
    tokens = llm.chat_prompt(MESSAGES)
    assert decode(llm, tokens) == "<s>user: hello\n<s>assistant: "
    assert tokens.count(256) == 2  # the tokenizer adds no begin-of-text token
    assert bits(llm.chat(MESSAGES, GREEDY, use_tqdm=False)) == bits(generate(llm, tokens))
    assert decode(llm, llm.chat_prompt(MESSAGES, add_generation_prompt=False)) == "<s>user: hello\n"


def test_several_conversations_are_answered_as_each_alone(llm: LLM) -> None:
    other = [*MESSAGES, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]
    both = llm.chat([MESSAGES, other], GREEDY, use_tqdm=False)
    assert bits(both) == bits(llm.chat(MESSAGES, GREEDY, use_tqdm=False)) + bits(
        llm.chat(other, GREEDY, use_tqdm=False)
    )


def test_stream_chat_gives_the_tokens_of_chat(llm: LLM) -> None:
    tokens = [t for chunk in llm.stream_chat(MESSAGES, GREEDY) for t in chunk.token_ids]
    assert tokens == bits(llm.chat(MESSAGES, GREEDY, use_tqdm=False))[0][0]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the conversation is empty"),
        ([[]], "the conversation is empty"),
        (["hello"], "'role' and 'content'"),
        ("hello", "'role' and 'content'"),
        ([{"role": "user"}], "'role' and 'content'"),
        ([{"content": "x"}], "'role' and 'content'"),
    ],
)
def test_a_malformed_conversation_is_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(BadPrompt, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_template_arguments_reach_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", "{{ style }}!")
    (out,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, chat_template_kwargs={"style": "brief"})
    assert decode(llm, out.prompt_token_ids) == "brief!"


def test_a_template_cannot_read_the_clock(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", GUARDED_DATE)
    assert decode(llm, llm.chat_prompt(MESSAGES)) == "no date"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", BARE_DATE)
    with pytest.raises(BadPrompt, match="date"):
        llm.chat_prompt(MESSAGES)


def test_a_template_gets_the_configured_date() -> None:
    llm = LLM.over(tiny_engine(date="2024-07-26"))
    llm.get_tokenizer().chat_template = GUARDED_DATE
    assert decode(llm, llm.chat_prompt(MESSAGES)) == "26 Jul 2024"
    llm.get_tokenizer().chat_template = BARE_DATE
    assert decode(llm, llm.chat_prompt(MESSAGES)) == "today is 2024-07-26"


def test_a_refusal_by_the_template_is_raised_with_its_reason(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadPrompt, match="roles must alternate"):
        llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", None)
    with pytest.raises(BadPrompt, match=r"no chat template; use generate\(\)"):
        llm.chat(MESSAGES, GREEDY, use_tqdm=False)
