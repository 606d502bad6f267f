"""Compiler switches: fused code rounds as unfused code does."""

import pytest
import torch

from samewise.execute.numerics import inductor_options


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_fused_operators_round_as_unfused_ones_do(device, dtype):
    def chain(x, y, z):
        return (x * y + z) * x + (x + z) * y

    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(64, 256, generator=generator).to(device, dtype) for _ in range(3)]
    fused = torch.compile(chain, fullgraph=True, dynamic=False, options=inductor_options())
    assert torch.equal(fused(*tensors), chain(*tensors))
