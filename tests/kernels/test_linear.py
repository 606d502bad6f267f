"""The native linear: a row's bits depend on no other row, on no number of threads and on no storage form."""

import pytest
import torch

from cpp_reference import bits, linear_reference, random_tensor
from native_variants import variant_library
from samewise.errors import InvariantBroken, UnsupportedModel
from samewise.kernels.linear import packed as linear
from samewise.kernels.native import build as native_build

pytestmark = pytest.mark.skipif(not native_build.compiler_available(), reason="no C++ compiler")

SHAPES = [(1, 32), (3, 64), (47, 96), (50, 576), (192, 576), (300, 1536), (5, 33), (7, 16), (13, 100)]


def int4_weights(outputs, inputs, seed=0):
    """Weights of a checkpoint in 4-bit blocks, each with a scale and a least value."""
    rng = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 16, (outputs, inputs // 32, 32), generator=rng)
    levels[..., 0], levels[..., 1] = 0, 15
    scale = (torch.rand(outputs, inputs // 32, 1, generator=rng) + 0.1).half().float()
    least = (-torch.rand(outputs, inputs // 32, 1, generator=rng)).half().float()
    return (levels * scale + least).view(outputs, inputs)


def int8_weights(outputs, inputs, seed=0):
    """Weights of a checkpoint in 8-bit blocks, each with a scale."""
    rng = torch.Generator().manual_seed(seed)
    levels = torch.randint(-127, 128, (outputs, inputs // 32, 32), generator=rng)
    levels[..., 3] = 127
    scale = (torch.rand(outputs, inputs // 32, 1, generator=rng) / 50 + 1e-3).half().float()
    return (levels * scale).view(outputs, inputs)


def five_bit_weights(outputs, inputs, far=0):
    """Weights as GGUF's Q5_0 stores them: levels -16 to 15, a scale of either sign, hence zeros of either."""
    rng = torch.Generator().manual_seed(1)
    levels = torch.randint(far, 32 - far, (outputs, inputs // 32, 32), generator=rng)
    levels[..., 7] = far
    scale = (torch.randn(outputs, inputs // 32, 1, generator=rng) / 100).half().float()
    return ((levels - 16).float() * scale).view(outputs, inputs)


def k_quant_weights(outputs, inputs):
    """Weights as GGUF's Q4_K stores them: scale and shift are products of a float16 and six bits."""
    rng = torch.Generator().manual_seed(2)
    levels = torch.randint(0, 16, (outputs, inputs // 32, 32), generator=rng).float()
    scale, shift = (torch.randint(20, 64, (outputs, inputs // 32, 1), generator=rng) for _ in range(2))
    coarse = (torch.rand(2, outputs, 1, 1, generator=rng) / 1000 + 1e-4).half().float()
    return (levels * (coarse[0] * scale) - 8 * coarse[1] * shift).view(outputs, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_the_source_states(shape, dtype):
    weight, bias = random_tensor(*shape, dtype=dtype), random_tensor(shape[0], seed=2, dtype=dtype)
    packed = linear.pack_as_is(weight)
    for rows in (1, 2, 3, 5, 8, 17):
        x = random_tensor(rows, shape[1], seed=rows, dtype=dtype)
        assert torch.equal(bits(linear.multiply(x, packed, bias)), bits(linear_reference(x, weight, bias)))
        assert torch.equal(bits(linear.multiply(x, packed, None)), bits(linear_reference(x, weight)))


@pytest.mark.parametrize(
    "make",
    [
        int4_weights,
        int8_weights,
        five_bit_weights,
        k_quant_weights,
        lambda n, k: random_tensor(n, k, dtype=torch.bfloat16).float(),
        random_tensor,
    ],
)
@pytest.mark.parametrize("shape", [(50, 576), (9, 64), (192, 1536)], ids=str)
def test_bits_do_not_depend_on_other_rows_threads_or_form(make, shape):
    weight = make(*shape)
    exact, packed = linear.pack_as_is(weight), linear.pack(weight)
    x = random_tensor(40, shape[1], seed=5) * 3
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
        (int4_weights, "int4"),
        (int8_weights, "int8"),
        (lambda n, k: random_tensor(n, k, dtype=torch.bfloat16).float(), "bfloat16"),
        (lambda n, k: (random_tensor(n, k) / 3).half().float(), "float16"),
        (random_tensor, "float32"),
        (torch.zeros, "int4"),
        (lambda n, k: -torch.zeros(n, k), "int8"),  # int4 would lose the sign of zero
        (five_bit_weights, "int8"),
        (lambda n, k: five_bit_weights(n, k, far=3), "int8"),
        (lambda n, k: int4_weights(n, k) + torch.where(torch.arange(k) == k - 1, 1e-6, 0.0), "float32"),
    ],
)
def test_the_smallest_exact_form_is_chosen(make, form):
    packed = linear.pack(make(24, 64))
    assert packed.form == form
    bytes_per_weight = {"int4": 0.625, "int8": 1.0625, "bfloat16": 2, "float16": 2, "float32": 4}[form]
    assert packed.num_bytes == 24 * 64 * bytes_per_weight


def test_inputs_that_are_no_multiple_of_the_group_are_not_put_on_a_grid():
    assert linear.pack(int4_weights(8, 64)[:, :48].contiguous()).form != "int4"
    assert linear.quantize(random_tensor(8, 48), "int8") is None


def test_k_quants_of_four_bits_are_stored_in_four_bits_with_scales_of_32():
    packed = linear.pack(k_quant_weights(24, 256))
    assert packed.form == "int4"
    assert packed.num_bytes == 24 * 256 * 0.75


def test_infinite_weights_are_not_put_on_a_grid():
    weight = torch.full((8, 64), torch.inf)
    assert linear.pack(weight).form == "bfloat16"


def test_a_signed_four_bit_grid_is_stored_in_four_bits():
    levels = torch.randint(0, 16, (6, 64), generator=torch.Generator().manual_seed(1))
    levels[:, ::32] = 0
    assert linear.pack((levels - 8) * torch.tensor(0.0123).half().float()).form == "int4"


@pytest.mark.parametrize(("form", "error"), [("int8", 0.01), ("int4", 0.15)])
def test_quantized_weights_give_close_results(form, error):
    weight, x = random_tensor(64, 256), random_tensor(3, 256, seed=1)
    packed = linear.quantize(weight, form)
    got = linear.multiply(x, packed, None)
    want = x @ weight.T
    assert (got - want).norm() / want.norm() < error


def test_any_leading_shape_and_stride_is_accepted_and_other_widths_refused():
    packed = linear.pack_as_is(random_tensor(8, 32))
    x = random_tensor(2, 3, 32)
    assert linear.multiply(x, packed, None).shape == (2, 3, 8)
    assert torch.equal(
        linear.multiply(x.transpose(0, 1), packed, None), linear.multiply(x, packed, None).transpose(0, 1)
    )
    assert linear.multiply(x[:0], packed, None).shape == (0, 3, 8)
    with pytest.raises(InvariantBroken, match="32 inputs was given"):
        linear.multiply(random_tensor(2, 31), packed, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_elements_of_a_bias_may_stand_apart(dtype):
    weight, x = random_tensor(20, 32, dtype=dtype), random_tensor(3, 32, seed=1, dtype=dtype)
    wide = random_tensor(40, seed=2, dtype=dtype)
    for bias in (wide[::2], wide[1::2], wide[:1].expand(20), wide.view(20, 2)[:, 1]):
        got = linear.multiply(x, linear.pack_as_is(weight), bias)
        assert torch.equal(bits(got), bits(linear_reference(x, weight, bias)))


@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_bias_of_another_dtype_is_refused_as_torch_refuses_it(x, bias):
    if x == bias:
        return
    weight, rows = random_tensor(20, 32, dtype=x), random_tensor(3, 32, seed=1, dtype=x)
    bias = random_tensor(20, seed=2, dtype=bias)
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(rows, weight, bias)
    with pytest.raises(UnsupportedModel, match=f"bias in {bias.dtype} and an input in {x}"):
        linear.multiply(rows, linear.pack_as_is(weight), bias)


def test_a_bias_of_another_length_breaks_an_invariant():
    packed, x = linear.pack_as_is(random_tensor(20, 32)), random_tensor(3, 32)
    for bias in (torch.zeros(19), torch.zeros(1), torch.zeros(20, 1)):
        with pytest.raises(InvariantBroken, match="20 outputs has a bias"):
            linear.multiply(x, packed, bias)


def test_a_compiled_layer_may_contain_the_linear():
    packed, bias = linear.pack(int4_weights(16, 64)), random_tensor(16)

    def layer(x):
        return torch.ops.samewise.linear(x * 2, list(packed.tensors), bias, packed.form, 16) + 1

    x = random_tensor(3, 64)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


@pytest.mark.parametrize("build", ["portable, -O1", pytest.param("portable", marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_vector_instructions_or_optimization(monkeypatch, build):
    weights = [int4_weights(50, 64), int8_weights(50, 64), random_tensor(50, 64), random_tensor(50, 70)]
    x = {width: random_tensor(5, width, seed=3) for width in (64, 70)}
    want = [linear.multiply(x[w.shape[1]], linear.pack(w), None) for w in weights]
    other = variant_library(build)
    monkeypatch.setattr(native_build, "library", lambda: other)
    linear._entries.cache_clear()
    try:
        got = [linear.multiply(x[w.shape[1]], linear.pack(w), None) for w in weights]
    finally:
        linear._entries.cache_clear()
    for a, b in zip(want, got, strict=True):
        assert torch.equal(bits(a), bits(b))
