"""Lack of memory inside the C++ kernels: every allocation may fail, and is answered with a MachineError."""

import ctypes
import signal
import sys
from pathlib import Path

import pytest
import torch

from cpp_reference import bits, random_tensor
from native_variants import PORTABLE, built, needs_compiler
from samewise.errors import MachineError
from samewise.kernels import cpu_sampling
from samewise.kernels.linear import packed as linear
from samewise.kernels.native import build as native_build
from samewise.kernels.native.expected import EXPECTED

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interposes symbols of ELF"),
]

SOURCES = (*native_build.SOURCES, Path(__file__).with_name("failing_new.cpp"))
FLAGS = (PORTABLE, "-O1", "-Wl,-Bsymbolic")


@pytest.fixture
def library(monkeypatch, tmp_path):
    """The kernels with an operator new that fails, without workers yet; two threads."""
    copy = tmp_path / "failing.so"  # the loader gives every path its own variables
    copy.write_bytes(built(SOURCES, FLAGS).read_bytes())
    library = native_build.load_library(copy)
    library.fail_after.argtypes, library.has_failed.restype = [ctypes.c_long], ctypes.c_bool
    monkeypatch.setattr(native_build, "library", lambda: library)
    for module in (linear, cpu_sampling):
        module._entries.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield library
    torch.set_num_threads(before)
    for module in (linear, cpu_sampling):
        module._entries.cache_clear()


def run_with_failures(library, call):
    """The result of a call that was made with its first allocation failing, its second, until none does."""
    num_failed = 0
    while True:
        library.fail_after(num_failed)
        result = call_or_none(call)
        if not library.has_failed():
            library.fail_after(-1)
            return result, num_failed
        num_failed += 1


def call_or_none(call):
    """What a call returns; None where it lacks memory."""
    try:
        return call()
    except MachineError as error:
        if "Out of memory" not in str(error):
            raise
        return None


def test_every_allocation_of_packing_and_multiplying_may_fail(library):
    weight, x = random_tensor(1000, 320).half().float(), random_tensor(9, 320, seed=1)
    grid = torch.randint(0, 16, (1000, 320)).float()
    for weights, form in ((weight, "float16"), (grid, "int4")):
        packed, num_failed = run_with_failures(library, lambda w=weights: linear.pack(w))
        assert packed.form == form
        assert num_failed > 0
        product, num_failed = run_with_failures(library, lambda p=packed: linear.multiply(x, p, None))
        assert torch.equal(bits(product), bits(linear.multiply(x, linear.pack_as_is(weights), None)))
        assert num_failed > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda rows, logits: rows.stats(logits).log_sum.tolist(),
        lambda rows, logits: rows.scores(logits[0], 0.8, (1, 2), 9.0).tolist(),
        lambda rows, logits: rows.top_ids(logits, 8).tolist(),
    ],
    ids=["stats", "scores", "top_ids"],
)
def test_every_allocation_of_the_sampler_may_fail(library, call):
    rows, logits = cpu_sampling.NativeRows(), random_tensor(6, 50_000)
    found, num_failed = run_with_failures(library, lambda: call(rows, logits))
    assert found == call(rows, logits)
    assert num_failed > 0


def test_every_allocation_of_the_self_test_may_fail(library):
    """Sampled: there are thousands."""
    num_failed = 0
    for allocation in (0, 1, 2, 3, 7, 50, 173, 400, 801):
        library.fail_after(allocation)
        digests = call_or_none(lambda: native_build.selftest(library, threads=2))
        num_failed += digests is None
        assert digests in (None, EXPECTED)  # a thread that could not be made is done without
    library.fail_after(-1)
    assert num_failed > 5
    assert native_build.selftest(library, threads=2) == EXPECTED


def test_signals_are_let_through_again_where_a_thread_could_not_be_made(library):
    packed, x = linear.pack_as_is(random_tensor(1000, 320)), random_tensor(9, 320)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    library.fail_after(-1)
    run_with_failures(library, lambda: linear.multiply(x, packed, None))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
