"""Law 12 for lack of memory inside the C++ kernels: each call of a step may report it."""

import pytest
from faults import AtEvent
from law_helpers import Setup, Variant, run_references
from test_faults import REQUESTS, run_with_faults

from samewise.errors import MachineError
from samewise.kernels import cpu_sampling
from samewise.kernels.attention import native as attention
from samewise.kernels.linear import packed as linear
from samewise.kernels.native import build as native_build
from samewise.model import fused_layer, fused_stack

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_garbage"),
    pytest.mark.skipif(not native_build.compiler_available(), reason="needs a C++ compiler"),
]

FUSED = Setup("llama", "cpu", "float32", 16)  # layers, linear, row_stats
MODULES = Setup("qwen3", "cpu", "bfloat16", 16, activation="relu")  # linear, attention, row_stats
NO_MEMORY, NO_MEMORY_IN_ATTENTION = 1, 16 + 1  # what the kernels return; the second only `layers`
STRIDE = 11
"""In a run each eleventh step fails, in its first kernel call, in the next run in its second, and so on."""


class FailingKernels:
    """Counts calls of kernels; the one of number `failing` reports that there was no memory."""

    def __init__(self) -> None:
        self.num_calls, self.failing = 0, None
        self.failed: list[str] = []  # kernels that reported it

    def wrapped(self, entry, *statuses):
        def call(*args):
            self.num_calls += 1
            if self.num_calls != self.failing:
                return entry(*args)
            if len(self.failed) % 2:  # before it reported, it had written results
                entry(*args)
            self.failed.append(entry.__name__)
            return statuses[len(self.failed) % len(statuses)]

        return call


@pytest.fixture
def kernels(monkeypatch):
    """The kernels of engines that are built from here on."""
    kernels = FailingKernels()
    products = linear._entries()
    stats, *others = cpu_sampling._entries()
    attend, layer, layers = attention._entry(), fused_layer._entry(), fused_stack._entry()
    entries = [
        (linear, "_entries", products._replace(linear=kernels.wrapped(products.linear, NO_MEMORY))),
        (cpu_sampling, "_entries", (kernels.wrapped(stats, NO_MEMORY), *others)),
        (attention, "_entry", kernels.wrapped(attend, NO_MEMORY)),
        (fused_layer, "_entry", kernels.wrapped(layer, NO_MEMORY, NO_MEMORY_IN_ATTENTION)),
        (fused_stack, "_entry", kernels.wrapped(layers, NO_MEMORY, NO_MEMORY_IN_ATTENTION)),
    ]
    for module, name, entry in entries:
        monkeypatch.setattr(module, name, lambda entry=entry: entry)
    return kernels


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        (Variant(FUSED, "skip"), {"samewise_layers", "samewise_linear", "samewise_row_stats"}),
        (Variant(FUSED, "none", chained=True), {"samewise_layers", "samewise_linear", "samewise_row_stats"}),
        (Variant(MODULES, "none"), {"samewise_attend", "samewise_linear", "samewise_row_stats"}),
    ],
    ids=lambda value: str(value) if isinstance(value, Variant) else "",
)
def test_every_kernel_call_of_a_step_may_lack_memory(kernels, variant, names):
    expected = run_references(variant.setup, REQUESTS)
    engine, num_steps, max_calls, number = variant.engine(num_pages=60), 0, 1, 0

    def step(engine):
        nonlocal num_steps, max_calls
        num_steps += 1
        kernels.num_calls, kernels.failing = 0, number if num_steps % STRIDE == 0 else None
        deltas = engine.step()
        max_calls = max(max_calls, kernels.num_calls)
        return deltas

    while number < max_calls:
        number += 1
        faults = AtEvent(None, MachineError)  # only expects the error
        outputs = run_with_faults(engine, REQUESTS, faults, step=step, message="Out of memory")
        assert outputs == expected
    assert set(kernels.failed) == names
    assert len(kernels.failed) > max_calls
    assert engine.lost is None
