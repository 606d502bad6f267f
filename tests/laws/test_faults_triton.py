"""Law 12 with Triton's kernels: attention and sampler of CUDA, run by Triton's interpreter on a CPU."""

from dataclasses import replace

import pytest
import torch
from faults import EveryPlace
from law_helpers import Case, Setup, all_pages_free, random_prompt, run_alone, sampled
from test_faults import run_with_faults

from samewise.engine import assemble
from samewise.execute.sampling import Sampler

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_garbage"),
    # Memory never written may hold any number: Triton's interpreter warns of overflow, CUDA does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the CUDA device: test_faults_cuda"),
]

TINY = Setup("llama", "cpu", "float32", 8)
REQUESTS = [
    Case("filtered", random_prompt(3), sampled(3, top_k=20, top_p=0.9, min_p=0.01), 3),
    Case("edited", random_prompt(5), sampled(4, frequency_penalty=1.2, top_logprobs=2), 3),
    Case("scored", random_prompt(9), max_tokens=0, score_from=3),
]
LONG = Case("long", random_prompt(37), max_tokens=2)  # more than one split of the attention
ON_DEVICE = ("execute/", "kernels/", "verify/")
"""Rooms whose code differs between a CPU and a CUDA device."""


@pytest.fixture(scope="module")
def interpreted():
    """An engine whose attention and sampler are the Triton kernels, its frames chained as on CUDA."""
    from samewise.kernels.attention import triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "CONSTANTS", replace(triton.CONSTANTS, split=32, block=32))
        patch.setattr(assemble, "pick_kernel", lambda *_: triton.TritonKernel(2, 2))
        patch.setattr(
            assemble, "Sampler", lambda vocab, device, row_math: Sampler(vocab, device, by_row=False)
        )
        yield TINY.engine(ahead=True, num_pages=30, max_model_len=48, overrides={"num_hidden_layers": 1})


@pytest.mark.parametrize(
    ("requests", "stride", "at_least"),
    [(REQUESTS[:2], 30, 3), pytest.param([*REQUESTS, LONG], 1, 100, marks=pytest.mark.slow)],
)
def test_a_fault_where_any_function_of_a_frame_begins_changes_no_bit(interpreted, requests, stride, at_least):
    """Functions of the kernels too: a kernel may have written half of its results."""
    engine, expected = interpreted, run_alone(interpreted, requests)
    # Not an Exception: the interpreter would turn it into one of its own.
    faults = EveryPlace(KeyboardInterrupt, "calls", ON_DEVICE, stride=stride)
    while True:
        before = faults.num_raised
        assert run_with_faults(engine, requests, faults) == expected
        assert all_pages_free(engine)
        if faults.num_raised == before:
            break
    assert faults.num_raised >= at_least
