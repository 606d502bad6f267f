"""Which errors end an engine: those after which nothing on the device can be trusted."""

import pytest
import torch

from samewise.engine.recovery import is_fatal
from samewise.errors import EngineLost, GuaranteeLost, InvariantBroken


@pytest.mark.parametrize(
    "error",
    [
        GuaranteeLost("a"),
        InvariantBroken("a"),
        EngineLost("a"),
        torch.AcceleratorError("an illegal memory access was encountered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA driver error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("call of cublasLtMatmul returned CUBLAS_STATUS_EXECUTION_FAILED"),
    ],
)
def test_a_device_error_or_a_broken_promise_ends_an_engine(error: Exception) -> None:
    assert is_fatal(error)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        KeyboardInterrupt(),
        ValueError("CUDA error"),
        RuntimeError("shapes do not match"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_a_lack_of_memory_or_a_failed_call_ends_no_engine(error: BaseException) -> None:
    assert not is_fatal(error)
