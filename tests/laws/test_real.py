"""Laws 1 to 4 on the embedded model, at its real shapes, on all of this machine's threads.

SAMEWISE_FULL=1 runs the whole matrix in bfloat16 too, which takes minutes where the CPU has no bfloat16.
"""

import os
from dataclasses import dataclass, replace

import pytest
from lawbook import PROPOSERS, Case, Heard, alone, jitter, play, warm

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.execute.load import load
from samewise.execute.runner import kv_page_bytes
from samewise.testing import preempting
from samewise.types import Sampling

pytestmark = pytest.mark.real

FULL = os.environ.get("SAMEWISE_FULL") == "1"
ROWS = 16
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "1, 1, 2, 3, 5, 8,",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at",
    "Dear Sir or Madam, I am writing to",
    "The opposite of hot is",
    "In 1969 the first people walked on the",
    "Roses are red, violets are",
    "import numpy as np\n\nx = np.",
    "Q: What is two plus two?\nA:",
    "Es war einmal ein König, der hatte",
)


@dataclass(frozen=True)
class Model:
    """The loaded model. Engines over it are used one at a time: its attention has one seat."""

    dtype: str
    loaded: object
    config: EngineConfig
    cases: list[Case]
    truth: list[Heard]

    def engine(self, make=None, *, num_pages=400, **settings):
        return _engine(self.loaded, self.config, make, num_pages, settings)


def _engine(loaded, config, make, num_pages, settings):
    size = kv_page_bytes(loaded.arch, next(loaded.model.parameters()).dtype)
    return Engine(loaded, replace(config, kv_memory=num_pages * size, **settings), make_proposer=make)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def real(request):
    dtype = request.param
    config = EngineConfig(
        device="cpu", dtype=dtype, frame_rows=ROWS, max_model_len=256, max_num_seqs=64, proposer="none"
    )
    loaded = load(config)
    small = dtype == "bfloat16" and not FULL
    prompts, most = (PROMPTS[:4], 4) if small else (PROMPTS, 5)
    ids = [tuple(loaded.tokenizer.encode(prompt)) for prompt in prompts]
    cases = [Case(f"greedy-{i}", one, Sampling(), most) for i, one in enumerate(ids)]
    cases += [Case(f"warm-{i}", one, warm(i), most) for i, one in enumerate(ids)]
    truth = alone(_engine(loaded, config, None, 400, {"enable_prefix_caching": False}), cases)
    return Model(dtype, loaded, config, cases, truth)


def full_matrix(real):
    """In bfloat16 a frame takes a third of a second here; a few cases stand for the rest."""
    if real.dtype == "bfloat16" and not FULL:
        pytest.skip("set SAMEWISE_FULL=1 for the whole matrix")


def test_the_truth_is_worth_comparing(real):
    """Sampled text is not greedy text, and prompts differ."""
    half = len(real.cases) // 2
    assert len({tuple(one.tokens) for one in real.truth}) > half
    assert all(one.finish in ("length", "stop") for one in real.truth)


# ---- law 1


@pytest.mark.parametrize("proposer", ["jitter", "adversary"])
def test_proposers(real, proposer):
    engine = real.engine(PROPOSERS[proposer])
    assert play(engine, real.cases) == real.truth
    assert engine.scheduler.counters.rolled_back > 0
    if proposer == "jitter":
        assert engine.scheduler.counters.accepted > 0


@pytest.mark.parametrize("proposer", ["auto", "decode", "ngram", "ngram+decode", "skip"])
def test_real_proposers(real, proposer):
    assert play(real.engine(proposer=proposer), real.cases) == real.truth


# ---- law 2


def test_together(real):
    assert play(real.engine(), real.cases) == real.truth


def test_reversed_and_staggered(real):
    full_matrix(real)
    cases = real.cases[::-1]
    heard = play(real.engine(), cases, arrivals=[(i * 5) % 13 for i in range(len(cases))])
    assert heard[::-1] == real.truth


def test_a_cache_so_small_that_it_preempts(real):
    """Each of three begins with one of three pages, and grows into a second."""
    fit = [i for i, case in enumerate(real.cases) if len(case.prompt) + real.cases[i].most <= 16][-3:]
    cases = [replace(real.cases[i], most=18 - len(real.cases[i].prompt)) for i in fit]
    engine = real.engine(num_pages=4, enable_prefix_caching=False)
    for one, i in zip(play(engine, cases), fit, strict=True):
        num = len(real.truth[i].tokens)
        assert one.tokens[:num] == real.truth[i].tokens
        assert one.logprobs[:num] == real.truth[i].logprobs
    assert engine.scheduler.counters.preempted > 0


def test_preempted_at_random_while_drafting(real):
    full_matrix(real)
    engine = real.engine(jitter)
    assert play(engine, real.cases, step=lambda e: preempting(e, 1, 0.05)) == real.truth
    assert engine.scheduler.counters.preempted > 0


# ---- law 3


def test_prefix_cache_off_cold_and_warm(real):
    full_matrix(real)
    assert play(real.engine(enable_prefix_caching=False), real.cases) == real.truth
    engine = real.engine()
    stem = (5, *max((case.prompt for case in real.cases), key=len) * 2)
    first, second = alone(engine, [Case("stem", stem, warm(1), 3)] * 2)
    assert first == second
    assert (first.num_cached, second.num_cached) == (0, (len(stem) - 1) // 16 * 16)


def test_odd_chunks(real):
    """Strangers take eleven of sixteen rows, so prompts are read in chunks of five."""
    num, most = 11, 24 if len(real.cases) > 8 else 9
    others = [Case(f"other-{i}", (100 + i,), warm(i), most) for i in range(num)]
    heard = play(real.engine(), [*others, *real.cases], arrivals=[0] * num + [2] * len(real.cases))
    assert heard[num:] == real.truth


# ---- law 4


def test_memory_full_of_nan_and_unverified_company(real):
    full_matrix(real)
    engine = real.engine(jitter)
    engine.runner.store.fill(float("nan"))
    others = [Case(f"other-{i}", (100 + i,), warm(i), 10, verify=False) for i in range(3)]
    heard = play(engine, [*others, *real.cases])
    assert heard[3:] == real.truth
    assert engine.scheduler.counters.unverified_tokens > 0
