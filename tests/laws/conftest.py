"""Fixtures of the laws: setups (model, device, dtype), variants (a setup with a proposer), their references.

`make test` runs each law on the variants and setups of CORE; the others are marked slow. Law 1 itself runs
on all variants.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from law_helpers import CASES, FullTranscript, Setup, Variant, run_references

LLAMA = Setup("llama", "cpu", "float32", 16)
MISTRAL = Setup("mistral", "cpu", "float32", 16)  # sliding window of 24 tokens, shorter than the prompts
QWEN = Setup("qwen3", "cpu", "bfloat16", 16)
MODULES = Setup("qwen3", "cpu", "bfloat16", 16, activation="relu")
ELASTIC = Setup("qwen3", "cpu", "float32", 16, linear="torch")  # torch's linears: frames of 1 to 64 rows
CUDA = Setup("llama", "cuda", "float32", 16, sizes=(1, 8, 16, 64))
CUDA_BF16 = Setup("mistral", "cuda", "bfloat16", 128, compile=True, sizes=(1, 32, 128, 512))
CUDA_QWEN = Setup("qwen3", "cuda", "bfloat16", 64, sizes=(1, 16, 64, 256))  # fused layers, norms over heads

SETUPS = [LLAMA, MISTRAL, QWEN, MODULES, ELASTIC, CUDA, CUDA_BF16, CUDA_QWEN]
CORE = [
    Variant(LLAMA, "none", chained=True),
    Variant(LLAMA, "jitter"),
    Variant(LLAMA, "skip"),
    Variant(LLAMA, "auto", chained=True),
    Variant(LLAMA, "trees", chained=True),
    Variant(MISTRAL, "bushy"),
    Variant(QWEN, "auto"),
    Variant(ELASTIC, "jitter"),
]
VARIANTS = [
    *CORE,
    Variant(LLAMA, "none"),
    Variant(LLAMA, "adversary"),
    Variant(LLAMA, "decode"),
    Variant(LLAMA, "decode-int4"),
    Variant(LLAMA, "decode-int8"),
    Variant(LLAMA, "ngram"),
    Variant(LLAMA, "model"),
    Variant(LLAMA, "model-ahead"),
    Variant(LLAMA, "model-pausing", chained=True),
    Variant(QWEN, "model-ahead"),
    Variant(LLAMA, "recycle"),
    Variant(LLAMA, "recycle", chained=True),
    Variant(LLAMA, "ngram+model"),
    Variant(LLAMA, "skip", chained=True),
    Variant(LLAMA, "skip-fruitless", chained=True),
    Variant(LLAMA, "skip-chain4"),
    Variant(LLAMA, "skip-gated"),
    Variant(LLAMA, "bushy"),
    Variant(LLAMA, "trees"),
    Variant(QWEN, "trees", chained=True),
    Variant(LLAMA, "auto"),
    Variant(MISTRAL, "jitter"),
    Variant(MISTRAL, "decode"),
    Variant(MISTRAL, "skip"),
    Variant(QWEN, "jitter"),
    Variant(MODULES, "jitter"),
    Variant(MODULES, "trees", chained=True),
    Variant(ELASTIC, "none", chained=True),
    Variant(ELASTIC, "bushy"),
    Variant(ELASTIC, "skip"),
    Variant(CUDA, "none"),
    Variant(CUDA, "jitter"),
    Variant(CUDA, "decode"),
    Variant(CUDA, "ngram"),
    Variant(CUDA, "recycle"),
    Variant(CUDA, "model"),
    Variant(CUDA, "skip"),
    Variant(CUDA, "bushy"),
    Variant(CUDA, "trees"),
    Variant(CUDA, "auto"),
    Variant(CUDA_BF16, "none"),
    Variant(CUDA_BF16, "jitter"),
    Variant(CUDA_BF16, "adversary"),
    Variant(CUDA_BF16, "decode"),
    Variant(CUDA_BF16, "decode-int8"),
    Variant(CUDA_BF16, "skip"),
    Variant(CUDA_BF16, "bushy"),
    Variant(CUDA_BF16, "trees"),
    Variant(CUDA_BF16, "auto"),
    Variant(CUDA_QWEN, "jitter"),
    Variant(CUDA_QWEN, "auto"),
]


def marked(params: list[Any], *, core: list[Any] | None = None) -> list[Any]:
    """Parameters on a CUDA device marked gpu; the others marked slow unless in `core` (None: all)."""

    def marks(param: Any) -> list[pytest.MarkDecorator]:
        if "cuda" in str(param):
            return [pytest.mark.gpu]
        return [] if core is None or param in core else [pytest.mark.slow]

    return [pytest.param(param, marks=marks(param)) for param in params]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models run fastest on one thread, above all beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_garbage() -> None:
    """Collect what earlier tests left: a fault in a finalizer of theirs would only be printed by Python."""
    gc.collect()


@pytest.fixture(scope="module", params=marked(SETUPS), ids=str)
def setup(request: pytest.FixtureRequest, one_thread: None) -> Setup:
    """Each setup."""
    return request.param


@pytest.fixture(scope="module")
def references(setup: Setup) -> list[FullTranscript]:
    """The reference output of each of CASES."""
    return run_references(setup, CASES)


@pytest.fixture(scope="module", params=marked(VARIANTS, core=CORE), ids=str)
def variant(request: pytest.FixtureRequest, one_thread: None) -> Variant:
    """Each variant; in `make test` those of CORE."""
    return request.param


@pytest.fixture(scope="module", params=marked(VARIANTS), ids=str)
def any_variant(request: pytest.FixtureRequest, one_thread: None) -> Variant:
    """Each variant, in `make test` too."""
    return request.param


@pytest.fixture(scope="module", params=marked([LLAMA, CUDA]), ids=str)
def basic(request: pytest.FixtureRequest, one_thread: None) -> Setup:
    """One setup per device, for special cases of a law."""
    return request.param


@pytest.fixture(scope="module")
def basic_references(basic: Setup) -> list[FullTranscript]:
    """The reference output of each of CASES."""
    return run_references(basic, CASES)
