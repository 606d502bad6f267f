"""Sums whose order does not matter: the same bits for any order of a row, and close to what they replace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samewise.execute.passes.row_sums import SAME, SUMS, Sums, total


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
    assert total(torch.tensor([[2.0**127, -(2.0**127), 2.0**100]])).item() == 2.0**100
    assert total(torch.full((1, 2), 3.0e38)).item() == float("inf")


class ByHand(nn.Module):
    """As transformers writes it, but for the last cast: what would be rounded away is seen."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x.float()
        return self.weight.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Centred(nn.Module):
    """A norm that takes the mean off first, whose result is not rounded either."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x.float())


class Reductions(nn.Module):
    """Whatever else a norm may be made of."""

    def forward(self, x):
        grid = x.unflatten(-1, (6, 8))
        return (
            x.sum(-1), x.sum(-1, dtype=torch.float32), x.mean(-1, keepdim=True), grid.mean((-2, -1)),
            x.var(-1, unbiased=False), x.var(-1, keepdim=True), x.std(-1), *torch.var_mean(x, -1),
            *torch.var_mean(grid, (-2, -1), correction=0, keepdim=True),
        )  # fmt: skip


class Watched(Sums):
    """The pass, and what it has left of float reductions."""

    def __init__(self):
        self.left, self.replaced = [], 0

    def __call__(self, graph):
        def found():
            calls = [node for node in graph.nodes if node.op == "call_function" and node.target in SAME]
            return [node for node in calls if node.args[0].meta["val"].is_floating_point()]

        before = len(found())
        super().__call__(graph)
        self.left, self.replaced = found(), before - len(found())
        graph.lint()

    def uuid(self):
        return None  # compiled anew every time


def compiled(module, watched=None):
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": watched or Watched()}
    return torch.compile(module, fullgraph=True, dynamic=False, options=options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [ByHand, Centred], ids=lambda make: make.__name__)
def test_compiled_norms_do_not_feel_the_order_of_a_row(make, dtype):
    norm, x = make(96), rows(40, 96, dtype)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = compiled(norm)
        found = ours(x)
        assert torch.equal(ours(x[..., order]), found[..., order])
        torch.testing.assert_close(found, norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_reduction_of_a_row_is_left_and_each_means_what_it_did(dtype):
    module, x, watched = Reductions(), rows(8, 48, dtype), Watched()
    with torch.inference_mode():
        answers = compiled(module, watched)(x)
        assert (watched.left, watched.replaced) == ([], 9)
        for found, expected in zip(answers, module(x), strict=True):
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected)


def test_sums_of_other_dimensions_and_of_integers_are_left_alone():
    class Others(nn.Module):
        def forward(self, x):
            return x.sum(1), x.int().sum(-1), x.double().sum(-1)

    watched, x = Watched(), rows(8, 48)
    with torch.inference_mode():
        for found, expected in zip(compiled(Others(), watched)(x), Others()(x), strict=True):
            torch.testing.assert_close(found, expected)
    assert watched.replaced == 0


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 96, 576, 4096])
@pytest.mark.parametrize("make", [ByHand, Centred], ids=lambda make: make.__name__)
def test_on_a_card_norms_have_the_same_bits_at_any_number_of_rows(make, width):
    """Alone, and behind a sum: every layout a compiler may choose."""

    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = make(width)

        def forward(self, x, y):
            x = x + y
            return x, self.norm(x)

    x, y = rows(512, width).cuda(), rows(512, width).cuda().flip(1)
    alone, behind = compiled(make(width).cuda()), compiled(Behind().cuda())
    with torch.inference_mode():
        truth, sums = alone(x), behind(x, y)
        for num in (1, 2, 8, 32, 128):
            for start in range(0, 512 if num > 2 else 16, num):
                part = slice(start, start + num)
                assert torch.equal(alone(x[:, part]), truth[:, part])
                for found, expected in zip(behind(x[:, part], y[:, part]), sums, strict=True):
                    assert torch.equal(found, expected[:, part])


def test_the_pass_says_when_it_changed():
    assert SUMS.uuid() == SUMS.uuid()
    assert len(SUMS.uuid()) == 32
