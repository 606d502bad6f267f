"""The CUDA linear: a row's bits are the same in every tile, at every number of rows, beside any rows.

On a CUDA device, or in Triton's interpreter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_cases import CUDA, bits

from samewise.errors import InvariantBroken
from samewise.kernels.linear.triton import (
    HOPPER_SHARED_BYTES,
    PROCESSORS,
    WIDE_TILES,
    LinearTile,
    gate,
    linear,
    ordered_linear,
    pick_tile,
    stages_that_fit,
)

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if CUDA else "cpu"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(33, 50), (64, 48)]  # outputs, inputs: odd, and of whole tiles
if CUDA:
    SHAPES += [(4096, 4096), (1536, 8960), (2560, 9216), (151, 2049), (49155, 1032)]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


# Outputs of the linears of models with 1.5 (Qwen2.5) and 8 billion parameters (Llama 3): q, k and
# v in one, o and down, gate and up, head.
MODEL_OUTPUTS = (2048, 1536, 8960, 151_936, 6144, 4096, 14_336, 128_256)


def picked_tiles(dtype: torch.dtype, *, gated: bool) -> list[LinearTile]:
    """Every tile that the rule picks for these, at any number of rows.

    In the interpreter a step has MATRIX_STEP inputs, and tiles that differ in what it does not know are one.
    """
    tiles = dict.fromkeys(
        pick_tile(num_rows, outputs, dtype.itemsize, gated=gated)
        for num_rows, outputs in itertools.product(range(1, 2050), MODEL_OUTPUTS)
    )
    if CUDA:
        return list(tiles)
    return list(dict.fromkeys(replace(t, step=16, stages=1, warps=4, described=False) for t in tiles))


def all_tiles(dtype: torch.dtype, *, gated: bool = False) -> Iterator[LinearTile]:
    """Tiles of every kind that a program may take, and those that the rule picks."""
    yield from picked_tiles(dtype, gated=gated)
    if not CUDA:
        for rows, columns, swapped in itertools.product((16, 64), (16, 32), (False, True)):
            yield LinearTile(rows=rows, columns=columns, swapped=swapped, described=False, group=2)
        yield LinearTile(rows=128, columns=64, described=False)
        return
    if dtype == torch.float32:
        for rows, columns, step in itertools.product((16, 32), (16, 32), (16, 32)):
            yield LinearTile(rows, columns, step, 2, swapped=False, described=False)
        return
    for rows, step, described in itertools.product((16, 32, 64), (64, 128), (False, True)):
        yield LinearTile(rows, 64, step, 3, swapped=True, described=described)
        yield LinearTile(rows, 64, step, 3, swapped=False, described=described)
    for columns, step, stages in itertools.product((16, 32), (16, 256), (2, 4)):
        yield LinearTile(16, columns, step, stages, swapped=False, described=False)
    for warps, described in itertools.product((4, 8), (False, True)):
        yield LinearTile(128, 128, 64, 3, warps, swapped=False, described=described)
    yield from (replace(tile, stages=tile.stages // 2) for tile in WIDE_TILES)
    yield LinearTile(16, 64, 64, 3, ahead=512)


def cancelling(
    num_rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, a weight and a bias; the large terms of each product cancel, so another order shows."""
    generator = torch.Generator().manual_seed(outputs)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    half, weight = noise(num_rows, inputs // 2), noise(outputs, inputs)
    weight[:, inputs - inputs // 2 :] = weight[:, : inputs // 2]
    x = torch.cat([half, noise(num_rows, inputs % 2), -half], dim=1) + 1e-2 * noise(num_rows, inputs)
    return tuple(t.to(device, dtype) for t in (x, weight, noise(outputs)))  # type: ignore[return-value]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bits_do_not_depend_on_the_tile_or_the_rows(
    outputs: int, inputs: int, dtype: torch.dtype, device: str
) -> None:
    x, weight, bias = cancelling(300 if CUDA else 20, outputs, inputs, dtype, device)
    residual = torch.randn(len(x), outputs).to(device, dtype)
    expected = linear(x, weight, bias, residual=residual)
    for tile in all_tiles(dtype):
        for rows in (slice(None), slice(3, 4), slice(7, 16), slice(2, 19)):
            y = linear(x[rows], weight, bias, residual=residual[rows], tile=tile)
            assert torch.equal(bits(y), bits(expected[rows])), (tile, rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES[: 4 if CUDA else 2])
def test_a_gated_product_is_the_gate_of_both_products(
    outputs: int, inputs: int, dtype: torch.dtype, device: str
) -> None:
    x, weight, bias = cancelling(40 if CUDA else 18, 2 * outputs, inputs, dtype, device)
    for given in (None, bias):
        expected = gate(linear(x, weight, given))
        for tile in all_tiles(dtype, gated=True):
            for rows in (slice(None), slice(5, 6)):
                y = linear(x[rows], weight, given, gated=True, tile=tile)
                assert torch.equal(bits(y), bits(expected[rows])), (tile, rows)
    first, second = linear(x, weight).float().split(outputs, dim=1)
    modules = F.silu(first).to(dtype).float() * second
    assert torch.allclose(gate(linear(x, weight)).float(), modules, rtol=2 * TOLERANCE[dtype], atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_float64(dtype: torch.dtype, device: str) -> None:
    x, weight, bias = (
        t.to(device, dtype) for t in (torch.randn(9, 90), torch.randn(35, 90), torch.randn(35))
    )
    residual = torch.randn(9, 35).to(device, dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    y = ordered_linear(x.view(3, 3, 90), weight, bias)
    scale = float(exact.abs().max())
    assert y.shape == (3, 3, 35)
    assert float((y.view(9, 35).double() - exact).abs().max()) < TOLERANCE[dtype] * scale
    added, expected = linear(x, weight, bias, residual=residual), y.view(9, 35) + residual
    if CUDA or dtype != torch.bfloat16:  # which Triton's interpreter truncates
        assert torch.equal(added, expected)
    assert torch.allclose(added, expected, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_strided_or_absent(device: str) -> None:
    x, weight, _ = cancelling(12, 20, 40, torch.float32, device)
    wide = torch.cat([x, x], dim=1)
    expected = linear(x, weight)
    assert torch.equal(linear(wide[:, 40:], weight), expected)
    assert torch.equal(linear(x.t().contiguous().t(), weight), expected)
    assert linear(x[:0], weight).shape == (0, 20)
    with pytest.raises(InvariantBroken, match=r"\(20, 40\) was given \(12, 39\)"):
        linear(x[:, 1:], weight)


def test_tiles_that_the_rule_picks_are_among_those_compared() -> None:
    """Those of few outputs, and of gated products of 65 to 128 rows, too."""
    narrow, gated = pick_tile(64, 1536, 2, gated=False), pick_tile(65, 14_336, 2, gated=True)
    assert (narrow.rows, narrow.columns, gated.rows, gated.columns) == (64, 16, 128, 64)
    for tile, is_gated in ((narrow, False), (gated, True)):
        shapes = {(t.rows, t.columns, t.swapped) for t in all_tiles(torch.bfloat16, gated=is_gated)}
        assert (tile.rows, tile.columns, tile.swapped) in shapes
        assert not CUDA or tile in all_tiles(torch.bfloat16, gated=is_gated)


@pytest.mark.parametrize("outputs", [160, 1536, 4096, 6144, 152064])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_the_rule_names_a_tile_that_fits(outputs: int, element_bytes: int) -> None:
    """In the shared memory of a Hopper processor, and into one kind of its matrix instructions."""
    for num_rows, gated in itertools.product((1, 16, 17, 64, 65, 128, 129, 2048), (False, True)):
        tile = pick_tile(num_rows, outputs, element_bytes, gated=gated)
        fitting = stages_that_fit(tile, element_bytes, HOPPER_SHARED_BYTES, gated=gated)
        assert fitting == tile.stages, (num_rows, tile)
        assert stages_that_fit(tile, element_bytes, 99 * 1024, gated=gated) >= 2, (num_rows, tile)
        if element_bytes == 2:
            assert (tile.columns if tile.swapped else tile.rows) >= 64, (num_rows, tile)


@pytest.mark.parametrize("outputs", [1536, 2048, 4096, 6144, 152064])
def test_a_wide_pass_keeps_processors_busy(outputs: int) -> None:
    tile = pick_tile(128, outputs, 2, gated=False)
    programs = -(-128 // tile.rows) * -(-outputs // tile.columns)
    assert programs > 0.7 * PROCESSORS
    assert tile in WIDE_TILES if programs <= PROCESSORS else tile not in WIDE_TILES
