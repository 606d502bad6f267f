"""Choices that a configuration leaves open: defaults by device, and values that are refused."""

import pytest
import torch

from samewise.config import EngineConfig
from samewise.errors import BadParameter
from samewise.execute.budget import count_pages
from samewise.execute.choices import (
    candidate_frame_sizes,
    pick_draft_quantizer,
    pick_dtype,
    pick_kernel,
    pick_linear,
    pick_max_model_len,
)
from samewise.testing import tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_dtype_is_float32_on_cpu_and_the_checkpoints_on_cuda():
    assert pick_dtype("auto", CPU, torch.bfloat16) is torch.float32
    assert pick_dtype("auto", CUDA, torch.bfloat16) is torch.bfloat16
    assert pick_dtype("float16", CPU, torch.bfloat16) is torch.float16


def test_native_frames_have_every_size_and_others_a_few():
    sizes = candidate_frame_sizes(64, linears="native", compiled=False, device="cpu")
    assert sizes == tuple(range(1, 65))
    assert candidate_frame_sizes(64, linears="native", compiled=True, device="cpu") == (
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    )
    assert candidate_frame_sizes(16, linears="torch", compiled=True, device="cpu") == (16,)
    assert candidate_frame_sizes(16, linears="torch", compiled=False, device="cpu") == (1, 2, 8, 16, 64)
    assert candidate_frame_sizes(128, linears="torch", compiled=True, device="cuda")[-1] == 2048


def test_asked_frame_sizes_always_include_the_canonical_one():
    sizes = candidate_frame_sizes(16, linears="torch", compiled=False, device="cpu", asked=[4, 32])
    assert sizes == (4, 16, 32)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda: pick_kernel("triton", CPU), "attention"),
        (lambda: pick_linear("native", CUDA), "linear"),
        (lambda: pick_linear("triton", CPU), "linear"),
        (lambda: pick_max_model_len(EngineConfig(max_model_len=10**6), tiny().arch), "max_model_len"),
        (lambda: pick_draft_quantizer("fp8", tiny().model, CPU), "draft_weights"),
        (lambda: count_pages(EngineConfig(kv_memory=1), tiny().arch, 64, CPU), "kv_memory"),
        (
            lambda: candidate_frame_sizes(16, linears="torch", compiled=False, device="cpu", asked=[40]),
            "frame_sizes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_cannot_run_is_refused_and_named(call, param):
    with pytest.raises(BadParameter, match=param) as caught:
        call()
    assert caught.value.param == param
