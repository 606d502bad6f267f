"""Fixtures of the laws: setups (model, device, dtype), trials (a setup under a proposer), and their truth."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lawbook import Heard, Setup, Trial, truth_of

LLAMA = Setup("llama", "cpu", "float32", 16)
MISTRAL = Setup("mistral", "cpu", "float32", 16)  # a window of 24: shorter than the prompts
QWEN = Setup("qwen3", "cpu", "bfloat16", 16)
ELASTIC = Setup("qwen3", "cpu", "float32", 16, linear="torch")  # a library's linears, sizes from 1 to 64
CUDA = Setup("llama", "cuda", "float32", 16, sizes=(1, 8, 16, 64))
CUDA_BF16 = Setup("mistral", "cuda", "bfloat16", 128, compile=True, sizes=(1, 32, 128, 512))
CUDA_QWEN = Setup("qwen3", "cuda", "bfloat16", 64, compile=True, sizes=(1, 16, 64, 256))  # norms over heads

SETUPS = [LLAMA, MISTRAL, QWEN, ELASTIC, CUDA, CUDA_BF16, CUDA_QWEN]
TRIALS = [
    Trial(LLAMA, "none"),
    Trial(LLAMA, "none", chained=True),
    Trial(LLAMA, "jitter"),
    Trial(LLAMA, "adversary"),
    Trial(LLAMA, "decode"),
    Trial(LLAMA, "cheap"),
    Trial(LLAMA, "eight"),
    Trial(LLAMA, "ngram"),
    Trial(LLAMA, "model"),
    Trial(LLAMA, "ngram+model"),
    Trial(LLAMA, "skip"),
    Trial(LLAMA, "skip", chained=True),
    Trial(LLAMA, "barren", chained=True),
    Trial(LLAMA, "skip-4"),
    Trial(LLAMA, "forked"),
    Trial(LLAMA, "auto"),
    Trial(LLAMA, "auto", chained=True),
    Trial(MISTRAL, "jitter"),
    Trial(MISTRAL, "decode"),
    Trial(MISTRAL, "forked"),
    Trial(MISTRAL, "skip"),
    Trial(QWEN, "jitter"),
    Trial(QWEN, "auto"),
    Trial(ELASTIC, "none", chained=True),
    Trial(ELASTIC, "jitter"),
    Trial(ELASTIC, "forked"),
    Trial(ELASTIC, "skip"),
    Trial(CUDA, "none"),
    Trial(CUDA, "jitter"),
    Trial(CUDA, "decode"),
    Trial(CUDA, "ngram"),
    Trial(CUDA, "model"),
    Trial(CUDA, "skip"),
    Trial(CUDA, "forked"),
    Trial(CUDA, "auto"),
    Trial(CUDA_BF16, "none"),
    Trial(CUDA_BF16, "jitter"),
    Trial(CUDA_BF16, "adversary"),
    Trial(CUDA_BF16, "decode"),
    Trial(CUDA_BF16, "eight"),
    Trial(CUDA_BF16, "skip"),
    Trial(CUDA_BF16, "forked"),
    Trial(CUDA_BF16, "auto"),
    Trial(CUDA_QWEN, "jitter"),
    Trial(CUDA_QWEN, "auto"),
]


def marked(found: list[Any]) -> list[Any]:
    """What needs a CUDA device, marked so."""
    return [pytest.param(one, marks=pytest.mark.gpu) if "cuda" in str(one) else one for one in found]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models run fastest on one thread, above all where others use the machine too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=marked(SETUPS), ids=str)
def setup(request: pytest.FixtureRequest, one_thread: None) -> Setup:
    """Every kind of machine and model."""
    return request.param


@pytest.fixture(scope="module")
def truth(setup: Setup) -> list[Heard]:
    """Every case alone, nothing guessed, nothing cached."""
    return truth_of(setup)


@pytest.fixture(scope="module", params=marked(TRIALS), ids=str)
def trial(request: pytest.FixtureRequest, one_thread: None) -> Trial:
    """Every setup under some proposer, and some setup under every proposer."""
    return request.param


@pytest.fixture(scope="module", params=marked([LLAMA, CUDA]), ids=str)
def plain(request: pytest.FixtureRequest, one_thread: None) -> Setup:
    """The plainest model, once a device: for the corners of a law."""
    return request.param


@pytest.fixture(scope="module")
def plain_truth(plain: Setup) -> list[Heard]:
    """Its truth."""
    return truth_of(plain)
