"""`samewise chat`: turns, /new and /quit."""

import pytest

from samewise import SamplingParams
from samewise.cli import chat as command


@pytest.fixture
def loaded(monkeypatch):
    """The LLMs that the command loads."""
    llms = []
    load = command.load_llm
    monkeypatch.setattr(command, "load_llm", lambda **settings: llms.append(load(**settings)) or llms[-1])
    return llms


def as_shown(text):
    """Text as rich prints it to a terminal: without control characters such as bells."""
    return text.translate(dict.fromkeys([7, 8, 11, 12, 13])).strip()


def test_the_second_turn_computes_only_its_new_tokens(run, model, loaded, llm):
    result = run("chat", "-m", model, "-n", "6", "--device", "cpu", stdin="tell me of rivers\nand of hills\n")
    assert result.code == 0
    assert "contract sw-" in result.out
    params = SamplingParams(temperature=0, max_tokens=6)
    question = {"role": "user", "content": "tell me of rivers"}
    first = llm.chat([question], params, use_tqdm=False)[0].outputs[0].text
    assert as_shown(first) in result.out
    stats = loaded[0].stats()
    assert stats["requests"] == stats["finished"] == 2
    assert stats["cached_tokens"] >= 32
    messages = [
        question,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and of hills"},
    ]
    assert as_shown(llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text) in result.out


def test_new_starts_over_and_quit_leaves(run, model, loaded):
    stdin = "hello\n\n/new\nhello\n/quit\nnever\n"
    result = run("chat", "-m", model, "-n", "3", "--device", "cpu", stdin=stdin)
    assert result.code == 0
    assert loaded[0].stats()["requests"] == 2
    prompt_len = len(loaded[0].chat_prompt([{"role": "user", "content": "hello"}]))
    assert loaded[0].stats()["prompt_tokens"] == 2 * prompt_len
