"""Law 12 on a CUDA device: frames are captured graphs, and one runs while the host plans the next."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults import AtEvent, EveryPlace
from law_helpers import CASES, Case, Setup, Variant, all_pages_free, random_prompt, run_alone, run_cases
from test_faults import failing_frame, run_with_faults

from samewise.errors import EngineLost

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread", "no_garbage")]

SRC = Path(__file__).parents[2] / "src"
CUDA = Setup("llama", "cuda", "float32", 16, sizes=(1, 8, 16, 64))
CUDA_BF16 = Setup("mistral", "cuda", "bfloat16", 128, compile=True, sizes=(1, 32, 128, 512))
VARIANTS = [Variant(CUDA, "none"), Variant(CUDA, "decode"), Variant(CUDA_BF16, "none")]
REQUESTS = [replace(CASES[i], max_tokens=6) for i in (0, 3, 8, 11, 12, 13)]
REQUESTS.append(Case("scored", random_prompt(40), max_tokens=0, score_from=3))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_fault_in_any_function_while_a_frame_is_in_flight_changes_no_bit(variant):
    engine = variant.engine(num_pages=80)
    assert engine.verifier.ahead
    expected = run_alone(engine, REQUESTS)
    for error, stride in ((KeyboardInterrupt, 1), (MemoryError, 3)):
        faults = EveryPlace(error, "calls", stride=stride)
        while True:
            before = faults.num_raised
            assert run_with_faults(engine, REQUESTS, faults) == expected
            if faults.num_raised == before:
                break
        assert faults.num_raised > 40
    assert all_pages_free(engine)
    assert engine.lost is None


def test_a_device_without_memory_for_a_frame_is_survived(monkeypatch):
    """The allocator's own error."""
    engine = Variant(CUDA, "none").engine(num_pages=80)
    expected = run_alone(engine, REQUESTS)
    frame, num_frames = engine.runner.frame, 0

    def frame_or_fail(inputs):
        nonlocal num_frames
        num_frames += 1
        if num_frames % 4 == 0:
            torch.empty(2**50, dtype=torch.uint8, device=engine.device)
        return frame(inputs)

    monkeypatch.setattr(engine.runner, "frame", frame_or_fail)
    faults = AtEvent(None, torch.OutOfMemoryError)  # only expects the error
    assert run_with_faults(engine, REQUESTS, faults, message="out of memory") == expected
    assert num_frames >= 4
    assert engine.stats()["recoveries"] > 0
    assert engine.lost is None


def test_after_a_device_error_the_engine_says_that_it_is_lost(monkeypatch):
    engine = Variant(CUDA, "none").engine(num_pages=80)
    message = "CUDA error: an illegal memory access was encountered"
    failing_frame(monkeypatch, engine, RuntimeError(message))
    with pytest.raises(RuntimeError, match=message):
        run_cases(engine, REQUESTS)
    with pytest.raises(EngineLost, match=f"this engine is lost: .*{message}.*new process"):
        engine.step()


REAL_DEVICE_ERROR = """
import os, torch
from samewise.errors import EngineLost
from samewise.testing import submit, tiny_engine
from samewise.types import Sampling

engine = tiny_engine("llama", device="cuda", proposer="none", compile=False, frame_rows=16,
                     overrides={"num_hidden_layers": 1})
frame = engine.runner.frame

def failing(inputs):
    torch._assert_async(torch.zeros(1, device="cuda"))
    return frame(inputs)

submit(engine, (1, 2, 3), Sampling(), max_tokens=9)
engine.step()
engine.runner.frame = failing
for _ in range(20):
    try:
        engine.step()
    except RuntimeError:
        if engine.lost is not None:
            break
try:
    engine.step()
except EngineLost as error:
    print("says:", error, flush=True)
os._exit(0)  # the device cannot be used any more, for cleaning up neither
"""


def test_an_assertion_that_fails_on_the_device_ends_the_engine():
    """In a process of its own: the device is lost for the process."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REAL_DEVICE_ERROR],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "says: this engine is lost: " in process.stdout, process.stderr[-3000:]
