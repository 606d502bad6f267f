"""Fixtures of the laws: a setup (model, device, dtype), and its truth."""

from collections.abc import Iterator

import pytest
import torch
from lawbook import CASES, Heard, Setup, reference

SETUPS = [
    Setup("llama", "cpu", "float32", 16),
    Setup("mistral", "cpu", "float32", 16),  # a window of 24: shorter than the prompts
    Setup("qwen3", "cpu", "bfloat16", 16),
    pytest.param(Setup("llama", "cuda", "float32", 16), marks=pytest.mark.gpu),
    pytest.param(Setup("mistral", "cuda", "bfloat16", 128, compile=True), marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models run fastest on one thread, above all where others use the machine too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def setup(request: pytest.FixtureRequest, one_thread: None) -> Setup:
    """Every kind of machine and model: for the laws themselves."""
    return _if_there(request.param)


@pytest.fixture(scope="module", params=[SETUPS[0], SETUPS[3]], ids=str)
def plain(request: pytest.FixtureRequest, one_thread: None) -> Setup:
    """The plainest model, once a device: for the corners of a law."""
    return _if_there(request.param)


def _if_there(setup: Setup) -> Setup:
    if setup.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return setup


@pytest.fixture(scope="module")
def truth(setup: Setup) -> list[Heard]:
    """Every case alone, nothing guessed, nothing cached."""
    return reference(setup, CASES)


@pytest.fixture(scope="module")
def plain_truth(plain: Setup) -> list[Heard]:
    """The same for the plain setup."""
    return reference(plain, CASES)
