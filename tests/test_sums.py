"""Sums whose order does not matter: the same bits for any order of a row, and close to what they replace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samewise.run.sums import SUMS, total


def rows(num, width, dtype=torch.float32):
    """Of many magnitudes, so that float sums feel their order."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(1, num, width, generator=generator)
    return (x * torch.exp2(torch.randint(-12, 13, x.shape, generator=generator).float())).to(dtype)


@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(-60, 60))
def test_no_order_gives_another_sum(seed, width, power):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, width, generator=generator) * 2.0**power
    shuffled = x[:, torch.randperm(width, generator=generator)]
    assert torch.equal(total(x), total(shuffled))
    scale = x.abs().double().sum(-1, keepdim=True)
    assert ((total(x) - x.double().sum(-1, keepdim=True)).abs() <= 2.0**-23 * scale).all()


def test_floats_do_feel_their_order():
    """Otherwise nothing here would be shown."""
    x = rows(64, 512)
    assert not torch.equal(x.sum(-1), x.flip(-1).sum(-1))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad):
    x = rows(4, 32)[0]
    x[1, 3] = bad
    assert torch.isfinite(total(x)).flatten().tolist() == [True, False, True, True]


def test_the_ends_of_the_range():
    assert total(torch.zeros(1, 8)).item() == 0.0
    assert total(torch.full((1, 8), 1e-30)).item() == pytest.approx(8e-30)
    assert total(torch.full((1, 8), 1e-40)).item() == 0.0  # as good as
    assert total(torch.full((1, 4), 2.0**124)).item() == 2.0**126
    assert total(torch.tensor([[3.0e38, -3.0e38, 1.0]])).item() == pytest.approx(0.0, abs=2.0**88)


class ByHand(nn.Module):
    """As transformers writes it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        given = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(given)


class Reductions(nn.Module):
    """Whatever else a norm may be made of."""

    def forward(self, x):
        return x.sum(-1), x.mean(-1, keepdim=True), x.var(-1, unbiased=False), x.var(-1, keepdim=True)


def compiled(module):
    return torch.compile(module, fullgraph=True, dynamic=False, options={"post_grad_custom_post_pass": SUMS})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [ByHand, nn.LayerNorm, nn.RMSNorm], ids=lambda make: make.__name__)
def test_compiled_norms_do_not_feel_the_order_of_a_row(make, dtype):
    torch._dynamo.reset()
    norm = make(96).to(dtype)
    with torch.inference_mode():
        nn.init.ones_(norm.weight)
        x, order = rows(40, 96, dtype), torch.randperm(96, generator=torch.Generator().manual_seed(1))
        ours = compiled(norm)
        found = ours(x)
        assert found.dtype == dtype
        assert torch.equal(ours(x[..., order]), found[..., order])
        torch.testing.assert_close(found, norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_reduction_keeps_its_shape_and_meaning(dtype):
    torch._dynamo.reset()
    module, x = Reductions(), rows(8, 48, dtype)
    with torch.inference_mode():
        for found, expected in zip(compiled(module)(x), module(x), strict=True):
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected)


def test_the_pass_says_when_it_changed():
    assert SUMS.uuid() == SUMS.uuid()
    assert len(SUMS.uuid()) == 32
