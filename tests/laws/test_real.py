"""Laws 1 to 4 on the embedded model, at its real shapes.

`make test` runs four prompts on one thread; `make test-full` runs twelve, and twelve in bfloat16, on all
threads of the machine.
"""

from dataclasses import dataclass, replace

import pytest
from law_helpers import Case, FullTranscript, run_alone, run_cases, sampled
from law_proposers import PROPOSERS, jitter

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.execute.load import Loaded, load
from samewise.execute.runner import kv_page_bytes
from samewise.testing import preempting
from samewise.types import Sampling

pytestmark = pytest.mark.real

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
    """The loaded model with its cases. Its engines run one at a time: they share one attention binding."""

    loaded: Loaded
    config: EngineConfig
    cases: list[Case]
    references: list[FullTranscript]

    def engine(self, make=None, *, num_pages=400, **settings):
        return engine_over(self.loaded, self.config, make, num_pages, **settings)


def engine_over(loaded, config, make=None, num_pages=400, **settings):
    page_bytes = kv_page_bytes(loaded.arch, next(loaded.model.parameters()).dtype)
    config = replace(config, kv_memory=num_pages * page_bytes, **settings)
    return Engine(loaded, config, make_proposer=make)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", 4), id="float32-4"),
        pytest.param(("float32", 12), id="float32-12", marks=pytest.mark.slow),
        pytest.param(("bfloat16", 12), id="bfloat16-12", marks=pytest.mark.slow),
    ],
)
def real(request):
    dtype, num_prompts = request.param
    config = EngineConfig(
        device="cpu", dtype=dtype, frame_rows=ROWS, max_model_len=256, max_num_seqs=64, proposer="none"
    )
    loaded = load(config)
    prompts = [tuple(loaded.tokenizer.encode(prompt)) for prompt in PROMPTS[:num_prompts]]
    cases = [Case(f"greedy-{i}", prompt, Sampling(), 5) for i, prompt in enumerate(prompts)]
    cases += [Case(f"sampled-{i}", prompt, sampled(i), 5) for i, prompt in enumerate(prompts)]
    references = run_alone(engine_over(loaded, config, enable_prefix_caching=False), cases)
    return Model(loaded, config, cases, references)


def test_prompts_and_seeds_give_different_outputs(real):
    half = len(real.cases) // 2
    assert len({tuple(output.tokens) for output in real.references}) > half
    assert all(output.finish in ("length", "stop") for output in real.references)


# -- law 1 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", ["jitter", "adversary"])
def test_output_is_the_same_under_wrong_drafts(real, proposer):
    engine = real.engine(PROPOSERS[proposer])
    assert run_cases(engine, real.cases) == real.references
    assert engine.scheduler.counters.rolled_back > 0
    if proposer == "jitter":
        assert engine.scheduler.counters.accepted > 0


@pytest.mark.parametrize("proposer", ["auto", "decode", "ngram", "ngram+decode", "skip"])
def test_output_is_the_same_under_every_proposer(real, proposer):
    assert run_cases(real.engine(proposer=proposer), real.cases) == real.references


# -- law 2 --------------------------------------------------------------------------------------------


def test_output_is_the_same_alone_and_together(real):
    assert run_cases(real.engine(), real.cases) == real.references


def test_reversed_order_and_staggered_arrivals_change_nothing(real):
    cases = real.cases[::-1]
    outputs = run_cases(real.engine(), cases, arrivals=[(i * 5) % 13 for i in range(len(cases))])
    assert outputs[::-1] == real.references


def test_too_few_pages_preempt_and_change_nothing(real):
    """Each of three sequences starts with one of three pages and needs a second one."""
    chosen = [i for i, case in enumerate(real.cases) if len(case.prompt) + case.max_tokens <= 16][-3:]
    cases = [replace(real.cases[i], max_tokens=18 - len(real.cases[i].prompt)) for i in chosen]
    engine = real.engine(num_pages=4, enable_prefix_caching=False)
    for output, i in zip(run_cases(engine, cases), chosen, strict=True):
        expected = real.references[i]
        assert output.tokens[: len(expected.tokens)] == expected.tokens
        assert output.logprobs[: len(expected.tokens)] == expected.logprobs
    assert engine.scheduler.counters.preempted > 0


def test_random_preemption_during_drafts_changes_nothing(real):
    engine = real.engine(jitter)
    assert run_cases(engine, real.cases, step=lambda e: preempting(e, 1, 0.05)) == real.references
    assert engine.scheduler.counters.preempted > 0


# -- law 3 --------------------------------------------------------------------------------------------


def test_output_is_the_same_with_a_cold_warm_or_disabled_prefix_cache(real):
    assert run_cases(real.engine(enable_prefix_caching=False), real.cases) == real.references
    prompt = (5, *max((case.prompt for case in real.cases), key=len) * 2)
    cold, warm = run_alone(real.engine(), [Case("long", prompt, sampled(1), 3)] * 2)
    assert cold == warm
    assert (cold.num_cached, warm.num_cached) == (0, (len(prompt) - 1) // 16 * 16)


def test_chunks_of_five_tokens_change_nothing(real):
    """Other sequences take eleven of sixteen rows."""
    num = 11
    others = [Case(f"other-{i}", (100 + i,), sampled(i), len(real.cases)) for i in range(num)]
    outputs = run_cases(real.engine(), [*others, *real.cases], arrivals=[0] * num + [2] * len(real.cases))
    assert outputs[num:] == real.references


# -- law 4 --------------------------------------------------------------------------------------------


def test_memory_filled_with_nan_and_unverified_requests_change_nothing(real):
    engine = real.engine(jitter)
    engine.runner.store.fill(float("nan"))
    others = [Case(f"other-{i}", (100 + i,), sampled(i), 10, verify=False) for i in range(3)]
    outputs = run_cases(engine, [*others, *real.cases])
    assert outputs[3:] == real.references
    assert engine.scheduler.counters.unverified_tokens > 0
