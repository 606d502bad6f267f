"""LLM.close: what is refused afterwards."""

from typing import Any

import pytest
from llm_cases import MESSAGES, generate, greedy

from samewise import LLM
from samewise.errors import BadParameter
from samewise.testing import tiny_engine


def test_closing_twice_is_fine() -> None:
    with LLM.over(tiny_engine()) as llm:
        generate(llm, "a")
    llm.close()  # leaving the context has closed it


@pytest.fixture(scope="module")
def closed_llm() -> LLM:
    llm = LLM.over(tiny_engine())
    llm.close()
    return llm


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: generate(llm, "a"),
        lambda llm: list(llm.stream("a")),
        lambda llm: llm.stats(),
        lambda llm: llm.contract,
        lambda llm: llm.update_weights({}),
        lambda llm: llm.get_default_sampling_params(),
        lambda llm: llm.chat(MESSAGES),
        lambda llm: list(llm.stream_chat(MESSAGES)),
        lambda llm: llm.chat_prompt(MESSAGES),
        lambda llm: llm.score(["a"], ["b"]),
        lambda llm: llm.get_tokenizer(),
    ],
)
def test_every_call_after_closing_is_refused(use: Any, closed_llm: LLM) -> None:
    with pytest.raises(BadParameter, match="this LLM was closed; make a new one"):
        use(closed_llm)


def test_closing_with_an_open_stream_raises_nothing() -> None:
    llm = LLM.over(tiny_engine())
    stream = llm.stream("a", greedy(max_tokens=50))
    next(stream)
    llm.close()
    stream.close()  # type: ignore[attr-defined]
