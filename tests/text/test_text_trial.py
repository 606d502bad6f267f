"""The contract's fact about text: equal for equal tokenizers and templates, another for any that differs."""

import pytest

from samewise.testing import byte_tokenizer, tiny_engine
from samewise.text import text_trial
from samewise.text.text_trial import date_fact, text_fact


def digest(tokenizer, date=None):
    return text_fact(tokenizer, date).split(", ")[-1]


def test_an_engine_without_a_tokenizer_takes_ids_only():
    assert text_fact(None, None) == "ids only"


def test_equal_tokenizers_have_one_fact_and_it_names_the_libraries():
    assert text_fact(byte_tokenizer(), None) == text_fact(byte_tokenizer(), None)
    tokenizers, jinja2, _ = text_fact(byte_tokenizer(), None).split(", ")
    assert tokenizers.startswith("tokenizers ")
    assert jinja2.startswith("jinja2 ")


def test_another_template_is_another_fact():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += " "
    assert digest(tokenizer) != digest(byte_tokenizer())
    tokenizer.chat_template = None
    assert digest(tokenizer) != digest(byte_tokenizer())


def test_other_token_ids_are_another_fact():
    """One added token that occurs in the texts."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["capital"])
    assert digest(tokenizer) != digest(byte_tokenizer())


def test_a_template_with_a_date_gives_a_fact_with_and_without_one():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{{ strftime_now('%d %B %Y') }}"
    facts = {digest(tokenizer), digest(tokenizer, "2026-01-02"), digest(tokenizer, "2026-01-03")}
    assert len(facts) == 3


def test_a_second_template_for_tools_is_another_fact():
    def with_tools(template):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": template}
        return digest(tokenizer)

    facts = {digest(byte_tokenizer()), with_tools("{{ tools[0].function.name }}"), with_tools("tools")}
    assert len(facts) == 3


def test_what_a_template_does_with_tools_is_part_of_the_fact(monkeypatch):
    """The same template, rendered otherwise only where there are tools."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{% if tools %}{{ tools | tojson }}{% endif %}"
    before = digest(tokenizer)
    original = text_trial.render_chat

    def altered(tokenizer, messages, *, tools=None, **kwargs):
        return original(tokenizer, messages, tools=tools, **kwargs) + ("!" if tools else "")

    monkeypatch.setattr(text_trial, "render_chat", altered)
    assert digest(tokenizer) != before


def test_jinja2_and_the_date_count_only_where_a_prompt_depends_on_them():
    plain, dated, without = byte_tokenizer(), byte_tokenizer(), byte_tokenizer()
    dated.chat_template = {"default": "hello", "tool_use": "{{ strftime_now('%d %B %Y') }}"}
    without.chat_template = None
    assert date_fact(dated, "2026-01-02") == "2026-01-02"
    assert {date_fact(dated, None), *(date_fact(each, "2026-01-02") for each in (plain, without, None))} == {
        "none"
    }
    assert "jinja2" not in text_fact(without, None)
    assert text_fact(plain, "2026-01-02") == text_fact(plain, None)


def test_a_template_that_refuses_a_conversation_still_gives_a_fact():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert digest(tokenizer) == digest(tokenizer)


def test_a_library_that_is_not_installed_is_named_absent(monkeypatch):
    monkeypatch.setattr(text_trial, "version", _missing)
    assert text_fact(byte_tokenizer(), None).startswith("tokenizers absent, jinja2 absent, ")


def _missing(package):
    raise text_trial.PackageNotFoundError(package)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_every_contract_has_the_fact(family):
    assert dict(tiny_engine(family).contract.facts)["text"] == text_fact(byte_tokenizer(), None)
