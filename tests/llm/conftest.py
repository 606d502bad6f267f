"""One engine for all tests of LLM that leave it as they found it."""

from collections.abc import Iterator

import pytest
from llm_cases import GREEDY, PROMPT, assert_idle, bits

from samewise import LLM
from samewise.testing import tiny_engine


@pytest.fixture(scope="session")
def shared_llm() -> LLM:
    return LLM.over(tiny_engine(eos=True, max_model_len=256))


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The shared LLM; checked after the test to hold no request and no page."""
    yield shared_llm
    assert_idle(shared_llm)


@pytest.fixture(scope="session")
def reference_bits(shared_llm: LLM) -> list[tuple[list[int], list[str]]]:
    """The greedy answer to PROMPT."""
    return bits(shared_llm.generate(PROMPT, GREEDY, use_tqdm=False))
