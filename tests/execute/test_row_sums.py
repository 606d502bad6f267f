"""Order-free sums: the same bits for any order of a row, and close to the sums they replace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samewise.execute.passes.row_sums import REPLACEMENTS, RowSums, total


def make_rows(num, width, dtype=torch.float32):
    """[1, num, width] of many magnitudes, so that float sums depend on their order."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(1, num, width, generator=generator)
    return (x * torch.exp2(torch.randint(-12, 13, x.shape, generator=generator).float())).to(dtype)


@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(-60, 60))
def test_every_order_gives_the_same_sum(seed, width, power):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, width, generator=generator) * 2.0**power
    shuffled = x[:, torch.randperm(width, generator=generator)]
    assert torch.equal(total(x), total(shuffled))
    scale = x.abs().double().sum(-1, keepdim=True)
    assert ((total(x) - x.double().sum(-1, keepdim=True)).abs() <= 2.0**-23 * scale).all()


def test_float_sums_do_depend_on_their_order():
    """Otherwise the other tests would pass without the pass."""
    x = make_rows(64, 512)
    assert not torch.equal(x.sum(-1), x.flip(-1).sum(-1))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_row_with_an_element_that_is_not_finite_has_such_a_sum(value):
    x = make_rows(4, 32)[0]
    x[1, 3] = value
    assert torch.isfinite(total(x)).flatten().tolist() == [True, False, True, True]


def test_sums_at_the_ends_of_the_float_range():
    assert total(torch.zeros(1, 8)).item() == 0.0
    assert total(torch.full((1, 8), 1e-30)).item() == pytest.approx(8e-30)
    assert total(torch.full((1, 8), 1e-40)).item() == 0.0  # below the smallest scale
    assert total(torch.full((1, 4), 2.0**124)).item() == 2.0**126
    assert total(torch.tensor([[2.0**127, -(2.0**127), 2.0**100]])).item() == 2.0**100
    assert total(torch.full((1, 2), 3.0e38)).item() == float("inf")


class RMSNorm(nn.Module):
    """As in transformers, but without the last cast to the input's dtype, which would hide differing bits."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x.float()
        return self.weight.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class FloatLayerNorm(nn.Module):
    """A norm that subtracts the mean first, with a float32 result."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x.float())


class Reductions(nn.Module):
    """The other reductions a norm may be made of."""

    def forward(self, x):
        grid = x.unflatten(-1, (6, 8))
        return (
            x.sum(-1), x.sum(-1, dtype=torch.float32), x.mean(-1, keepdim=True), grid.mean((-2, -1)),
            x.var(-1, unbiased=False), x.var(-1, keepdim=True), x.std(-1), *torch.var_mean(x, -1),
            *torch.var_mean(grid, (-2, -1), correction=0, keepdim=True),
        )  # fmt: skip


class RecordingRowSums(RowSums):
    """The pass, with a record of the float reductions it left and replaced."""

    def __init__(self):
        self.left, self.replaced = [], 0

    def __call__(self, graph):
        def float_reductions():
            calls = [
                node for node in graph.nodes if node.op == "call_function" and node.target in REPLACEMENTS
            ]
            return [node for node in calls if node.args[0].meta["val"].is_floating_point()]

        before = len(float_reductions())
        super().__call__(graph)
        self.left = float_reductions()
        self.replaced = before - len(self.left)
        graph.lint()

    def uuid(self):
        return None  # never cached


def compile_with(module, row_sums=None):
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": row_sums or RecordingRowSums()}
    return torch.compile(module, fullgraph=True, dynamic=False, options=options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [RMSNorm, FloatLayerNorm], ids=lambda make: make.__name__)
def test_compiled_norms_have_the_same_bits_for_any_order_of_a_row(make, dtype):
    norm, x = make(96), make_rows(40, 96, dtype)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        compiled = compile_with(norm)
        result = compiled(x)
        assert torch.equal(compiled(x[..., order]), result[..., order])
        torch.testing.assert_close(result, norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_reduction_of_a_row_is_replaced_and_keeps_its_value(dtype):
    module, x, row_sums = Reductions(), make_rows(8, 48, dtype), RecordingRowSums()
    with torch.inference_mode():
        results = compile_with(module, row_sums)(x)
        assert (row_sums.left, row_sums.replaced) == ([], 9)
        for result, expected in zip(results, module(x), strict=True):
            assert result.dtype == expected.dtype
            torch.testing.assert_close(result, expected)


def test_sums_of_other_dimensions_integers_and_doubles_are_not_replaced():
    class Others(nn.Module):
        def forward(self, x):
            return x.sum(1), x.int().sum(-1), x.double().sum(-1)

    row_sums, x = RecordingRowSums(), make_rows(8, 48)
    with torch.inference_mode():
        for result, expected in zip(compile_with(Others(), row_sums)(x), Others()(x), strict=True):
            torch.testing.assert_close(result, expected)
    assert row_sums.replaced == 0


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 96, 576, 4096])
@pytest.mark.parametrize("make", [RMSNorm, FloatLayerNorm], ids=lambda make: make.__name__)
def test_on_cuda_norms_have_the_same_bits_at_any_number_of_rows(make, width):
    """A norm by itself, and one fused with the addition before it."""

    class AddThenNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = make(width)

        def forward(self, x, y):
            x = x + y
            return x, self.norm(x)

    x, y = make_rows(512, width).cuda(), make_rows(512, width).cuda().flip(1)
    norm, add_norm = compile_with(make(width).cuda()), compile_with(AddThenNorm().cuda())
    with torch.inference_mode():
        expected_norm, expected_sums = norm(x), add_norm(x, y)
        for num in (1, 2, 8, 32, 128):
            for start in range(0, 512 if num > 2 else 16, num):
                part = slice(start, start + num)
                assert torch.equal(norm(x[:, part]), expected_norm[:, part])
                for result, expected in zip(add_norm(x[:, part], y[:, part]), expected_sums, strict=True):
                    assert torch.equal(result, expected[:, part])
