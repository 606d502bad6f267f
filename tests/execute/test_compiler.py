"""Compiled layers: they round as eager ones do, and are cached per instruction set."""

import pytest
import torch
from torch import nn

from samewise.execute.compiler import LayerCompiler
from samewise.execute.passes.dedupe import DEDUPE
from samewise.execute.passes.row_sums import ROW_SUMS


class SumsOfProducts(nn.Module):
    """Elementwise operators that a compiler fuses, and could contract to fused multiply-adds."""

    def forward(self, x, y, z):
        return (x * y + z) * x + (x + z) * y


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_fused_operators_round_as_unfused_ones_do(device, dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(64, 256, generator=generator).to(device, dtype) for _ in range(3)]
    compiled = LayerCompiler(torch.device(device)).compile(SumsOfProducts())
    assert torch.equal(compiled(*tensors), SumsOfProducts()(*tensors))


@pytest.mark.parametrize("graph_pass", [DEDUPE, ROW_SUMS], ids=["dedupe", "row_sums"])
def test_a_pass_has_another_cache_key_for_another_instruction_set(graph_pass, monkeypatch):
    key = graph_pass.uuid()
    assert graph_pass.uuid() == key
    assert len(key) == 32
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert graph_pass.uuid() != key
