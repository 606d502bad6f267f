"""Rotary positions and the last norm as native calls: their bits, and the models that keep their modules."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from cpp_reference import bits, norm_reference, random_tensor, rotary_reference
from native_variants import needs_compiler
from samewise.errors import InvariantBroken
from samewise.model.layer_parts import adds_one
from samewise.model.native_modules import NativeNorm, NativeRotary, NativeRotaryByLayer
from samewise.model.rope import exact_frequencies
from samewise.testing import tiny_engine, tiny_model

pytestmark = needs_compiler

POSITIONS = [0, 1, 2, 3, 17, 511, 4095, 65_535, 131_071, 999_999, 1_000_000]


def native_rotary(frequencies, scale=1.0):
    return NativeRotary(SimpleNamespace(attention_scaling=scale, inv_freq=torch.tensor(frequencies)))


def tables(rotary, positions):
    cos, sin = rotary(torch.zeros(1), position_ids=torch.tensor([positions]))
    return cos[0].numpy(), sin[0].numpy()


@pytest.mark.parametrize("scale", [1.0, 1.190238])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_rotary_tables_have_the_bits_of_the_stated_order(scale, count):
    frequencies = exact_frequencies("default", {"rope_theta": 500_000.0}, count)
    expected = rotary_reference(POSITIONS, frequencies, scale)
    for got, want in zip(tables(native_rotary(frequencies, scale), POSITIONS), expected, strict=True):
        assert got.tobytes() == want.tobytes()


def test_rotary_tables_are_the_nearest_float32_of_the_angle():
    frequencies = exact_frequencies("default", {"rope_theta": 10_000.0}, 8)
    cos, sin = tables(native_rotary(frequencies), POSITIONS)
    angles = np.array(POSITIONS, np.float32)[:, None] * np.array(frequencies, np.float32)
    for row, (c, s) in enumerate(zip(cos, sin, strict=True)):
        for d, angle in enumerate(angles[row]):
            assert abs(float(c[d]) - math.cos(float(angle))) <= 2.0**-24
            assert abs(float(s[d]) - math.sin(float(angle))) <= 2.0**-24


def test_a_positions_tables_do_not_depend_on_other_positions():
    rotary = native_rotary(exact_frequencies("default", {"rope_theta": 10_000.0}, 8))
    together = tables(rotary, POSITIONS)
    for row, position in enumerate(POSITIONS):
        for got, want in zip(tables(rotary, [position]), together, strict=True):
            assert got[0].tobytes() == want[row].tobytes()


def test_rotary_positions_of_another_shape_or_dtype_break_an_invariant():
    rotary = native_rotary([1.0, 0.1])
    with pytest.raises(InvariantBroken, match="rotary positions"):
        rotary(torch.zeros(1), position_ids=torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(InvariantBroken, match="bfloat16"):
        rotary(torch.zeros(1, dtype=torch.bfloat16), position_ids=torch.zeros(1, 3, dtype=torch.int64))


def make_norm(width, epsilon=1e-5):
    return SimpleNamespace(weight=nn.Parameter(random_tensor(width, seed=1) + 1), variance_epsilon=epsilon)


@pytest.mark.parametrize("width", [1, 16, 40, 96, 577])
def test_the_last_norm_has_the_bits_of_the_stated_order(width):
    original = make_norm(width)
    x = random_tensor(1, 7, width, seed=2) * 5
    with torch.inference_mode():
        got, expected = NativeNorm(original)(x), norm_reference(original, x)
        assert torch.equal(bits(got), bits(expected))
        for row in range(7):
            assert torch.equal(bits(NativeNorm(original)(x[:, row])), bits(expected[:, row]))
        strided = x.transpose(0, 1).expand(7, 3, width)
        assert torch.equal(bits(NativeNorm(original)(strided)), bits(norm_reference(original, strided)))


def test_a_norms_weight_may_be_strided_or_of_fewer_bits():
    x, wide = random_tensor(1, 5, 40, seed=3), random_tensor(80, seed=4)
    for weight in (wide[::2], wide[:40].bfloat16(), wide.view(40, 2).half()[:, 1]):
        original = SimpleNamespace(weight=nn.Parameter(weight), variance_epsilon=1e-5)
        with torch.inference_mode():
            expected = norm_reference(SimpleNamespace(weight=weight.float(), variance_epsilon=1e-5), x)
            assert torch.equal(bits(NativeNorm(original)(x)), bits(expected))


def test_a_norm_of_another_width_or_dtype_breaks_an_invariant():
    norm = NativeNorm(make_norm(40))
    with pytest.raises(InvariantBroken, match="width 40"):
        norm(torch.zeros(1, 2, 39))
    with pytest.raises(InvariantBroken, match="float64"):
        norm(torch.zeros(1, 2, 40, dtype=torch.float64))


def test_a_norm_that_adds_one_to_its_weights_has_the_bits_of_the_stated_order():
    model = tiny_model("gemma3_text")
    original, x = model.model.norm, random_tensor(1, 5, 64, seed=4)
    with torch.inference_mode():
        assert adds_one(original)
        original.weight[:] = 1e9  # where 1 is lost in the rounding of the sum
        assert adds_one(original)
        original.weight.copy_(random_tensor(64, seed=5))
        got = NativeNorm(original, plus_one=True)(x)
        assert torch.equal(bits(got), bits(norm_reference(original, x)))
        assert not adds_one(tiny_model("llama").model.norm)


def test_layers_with_rotary_positions_of_their_own_kind_keep_them():
    engine = tiny_engine("gemma3_text")
    rotary, own = engine.runner.model.model.rotary_emb, engine.loaded.model.model.rotary_emb
    assert type(rotary) is NativeRotaryByLayer
    positions = torch.tensor([[0, 1, 17, 400]])
    for kind in ("sliding_attention", "full_attention"):
        expected = own(torch.zeros(1), position_ids=positions, layer_type=kind)
        got = rotary(torch.zeros(1), position_ids=positions, layer_type=kind)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    base, local = (rotary.kinds[kind].inv_freq for kind in ("full_attention", "sliding_attention"))
    assert not torch.equal(base, local)


def test_an_engine_of_fused_layers_runs_them_and_the_users_model_keeps_its_own():
    engine = tiny_engine("llama")
    assert engine.runner.portable
    running, own = engine.runner.model.model, engine.loaded.model.model
    assert (type(running.norm), type(running.rotary_emb)) == (NativeNorm, NativeRotary)
    assert type(own.norm) is not NativeNorm
    assert type(own.rotary_emb) is not NativeRotary
