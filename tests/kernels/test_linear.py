"""The native linear: one result per row, whatever its company, its threads or the form of its weights."""

import pytest
import torch

from samewise.errors import InvariantBroken
from samewise.kernels import native
from samewise.kernels.linear import packed as linear

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ compiler")

SHAPES = [(1, 32), (3, 64), (47, 96), (50, 576), (192, 576), (300, 1536), (5, 33), (7, 16), (13, 100)]


def bits(x):
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def random(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stated(x, weight, bias=None):
    """The order linear.cpp states, one float32 operation at a time (fused multiply-add by float64)."""
    rows, inputs = x.shape
    padded = -(-inputs // 16) * 16
    wide_x, wide_w = torch.zeros(rows, padded), torch.zeros(weight.shape[0], padded)
    wide_x[:, :inputs], wide_w[:, :inputs] = x.float(), weight.float()
    lanes = torch.zeros(rows, weight.shape[0], 16)
    for k in range(0, padded, 16):
        product = wide_x[:, None, k : k + 16].double() * wide_w[None, :, k : k + 16].double()
        lanes = (product + lanes.double()).float()
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    total = lanes[..., 0]
    return (total if bias is None else total + bias.float()).to(x.dtype)


def grid4(outputs, inputs, seed=0):
    """Weights as a file of 4-bit blocks with a scale and a least value gives them."""
    rng = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 16, (outputs, inputs // 32, 32), generator=rng)
    levels[..., 0], levels[..., 1] = 0, 15
    scale = (torch.rand(outputs, inputs // 32, 1, generator=rng) + 0.1).half().float()
    least = (-torch.rand(outputs, inputs // 32, 1, generator=rng)).half().float()
    return (levels * scale + least).view(outputs, inputs)


def grid8(outputs, inputs, seed=0):
    rng = torch.Generator().manual_seed(seed)
    levels = torch.randint(-127, 128, (outputs, inputs // 32, 32), generator=rng)
    levels[..., 3] = 127
    scale = (torch.rand(outputs, inputs // 32, 1, generator=rng) / 50 + 1e-3).half().float()
    return (levels * scale).view(outputs, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_its_bits_are_those_its_source_states(shape, dtype):
    weight, bias = random(*shape, dtype=dtype), random(shape[0], seed=2, dtype=dtype)
    packed = linear.plain(weight)
    for rows in (1, 2, 3, 5, 8, 17):
        x = random(rows, shape[1], seed=rows, dtype=dtype)
        assert torch.equal(bits(linear.multiply(x, packed, bias)), bits(stated(x, weight, bias)))
        assert torch.equal(bits(linear.multiply(x, packed, None)), bits(stated(x, weight)))


@pytest.mark.parametrize(
    "make", [grid4, grid8, lambda n, k: random(n, k, dtype=torch.bfloat16).float(), random]
)
@pytest.mark.parametrize("shape", [(50, 576), (9, 64), (192, 1536)], ids=str)
def test_rows_company_threads_and_form_do_not_matter(make, shape):
    weight = make(*shape)
    exact, packed = linear.plain(weight), linear.pack(weight)
    x = random(40, shape[1], seed=5) * 3
    want = bits(linear.multiply(x, exact, None))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 4, 7, 16, 40):
                for first in (0, 40 - rows):
                    got = linear.multiply(x[first : first + rows], packed, None)
                    assert torch.equal(bits(got), want[first : first + rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (grid4, "int4"),
        (grid8, "int8"),
        (lambda n, k: random(n, k, dtype=torch.bfloat16).float(), "bfloat16"),
        (lambda n, k: (random(n, k) / 3).half().float(), "float16"),
        (random, "float32"),
        (torch.zeros, "int4"),
        (lambda n, k: -torch.zeros(n, k), "bfloat16"),  # the sign of zero is kept
        (lambda n, k: grid4(n, k) + torch.where(torch.arange(k) == k - 1, 1e-6, 0.0), "float32"),
    ],
)
def test_the_smallest_exact_form_is_taken(make, form):
    packed = linear.pack(make(24, 64))
    assert packed.form == form
    smaller = {"int4": 0.75, "int8": 1.125, "bfloat16": 2, "float16": 2, "float32": 4}[form]
    assert packed.num_bytes == 24 * 64 * smaller


def test_a_width_without_whole_groups_has_no_grid():
    assert linear.pack(grid4(8, 64)[:, :48].contiguous()).form != "int4"
    assert linear.quantise(random(8, 48), "int8") is None


def test_signed_four_bit_grids_are_found_too():
    levels = torch.randint(0, 16, (6, 64), generator=torch.Generator().manual_seed(1))
    levels[:, ::32] = 0
    assert linear.pack((levels - 8) * torch.tensor(0.0123).half().float()).form == "int4"


@pytest.mark.parametrize(("form", "error"), [("int8", 0.01), ("int4", 0.15)])
def test_quantised_weights_are_near(form, error):
    weight, x = random(64, 256), random(3, 256, seed=1)
    packed = linear.quantise(weight, form)
    near = linear.multiply(x, packed, None)
    want = x @ weight.T
    assert (near - want).norm() / want.norm() < error


def test_shapes_and_strides():
    packed = linear.plain(random(8, 32))
    x = random(2, 3, 32)
    assert linear.multiply(x, packed, None).shape == (2, 3, 8)
    assert torch.equal(
        linear.multiply(x.transpose(0, 1), packed, None), linear.multiply(x, packed, None).transpose(0, 1)
    )
    assert linear.multiply(x[:0], packed, None).shape == (0, 3, 8)
    with pytest.raises(InvariantBroken, match="32 inputs was given"):
        linear.multiply(random(2, 31), packed, None)


def test_a_compiled_layer_may_contain_it():
    packed, bias = linear.pack(grid4(16, 64)), random(16)

    def layer(x):
        return torch.ops.samewise.linear(x * 2, list(packed.tensors), bias, packed.form, 16) + 1

    x = random(3, 64)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


@pytest.mark.parametrize("flags", [("-O1", "-DSAMEWISE_PORTABLE"), ("-O3", "-DSAMEWISE_PORTABLE")])
def test_vectors_and_optimisation_do_not_matter(tmp_path, monkeypatch, flags):
    weights = [grid4(50, 64), grid8(50, 64), random(50, 64), random(50, 70)]
    x = {width: random(5, width, seed=3) for width in (64, 70)}
    want = [linear.multiply(x[w.shape[1]], linear.pack(w), None) for w in weights]
    native.build(tmp_path / "other.so", flags)
    other = native.load(tmp_path / "other.so")
    monkeypatch.setattr(native, "library", lambda: other)
    linear._entries.cache_clear()
    try:
        got = [linear.multiply(x[w.shape[1]], linear.pack(w), None) for w in weights]
    finally:
        linear._entries.cache_clear()
    for a, b in zip(want, got, strict=True):
        assert torch.equal(bits(a), bits(b))
