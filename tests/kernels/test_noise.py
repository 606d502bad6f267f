"""Noise: the right distribution, nothing shared between draws, and the same bits everywhere."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samewise.kernels import noise

V = 4096
FULL = 2**32 - 1


def keys(*draws: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor([noise.key(*draw) for draw in draws])


def many(num: int = 64) -> torch.Tensor:
    """Hashes of `num` positions of one choice: [num, V]."""
    return noise.bits(keys(*((7, 0, p) for p in range(num))), V)


def chi_square(counts: torch.Tensor, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def within(chi: float, freedom: int) -> bool:
    """Within five standard deviations of what chance gives, on either side."""
    return abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


@given(st.integers(), st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_key_is_two_words_whatever_the_seed(seed: int, index: int, position: int) -> None:
    high, low = noise.key(seed, index, position)
    assert 0 <= high <= FULL
    assert 0 <= low <= FULL


def test_keys_tell_seed_index_and_position_apart() -> None:
    draws = [(s, i, p) for s in (-(2**63), -1, 0, 1, 2**62, 2**64 - 2) for i in range(8) for p in range(200)]
    assert len({noise.key(*draw) for draw in draws}) == len(draws)


def test_the_rule_does_not_change() -> None:
    """Receipts of old answers rest on these numbers."""
    assert noise.key(0, 0, 0) == (0x238275BC, 0x38FCBE91)
    assert noise.bits(keys((1, 2, 3)), 4).tolist() == [[2029925179, 1120076587, 242971855, 1430608482]]


def test_hashes_are_words_and_never_collide_within_a_row() -> None:
    row = noise.bits(keys((1, 2, 3)), 200_000)[0]
    assert int(row.min()) >= 0
    assert int(row.max()) <= FULL
    assert row.unique().numel() == row.numel()


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_of_the_hash_is_uniform(shift: int) -> None:
    found = many()
    counts = torch.bincount((found >> shift & 255).flatten(), minlength=256)
    assert within(chi_square(counts, found.numel() / 256), 255)


def test_a_token_is_uniform_over_positions_and_over_seeds() -> None:
    positions = noise.bits(keys(*((3, 0, p) for p in range(20_000))), 8)
    seeds = noise.bits(keys(*((s, 0, 11) for s in range(20_000))), 8)
    for found in (positions, seeds):
        for token in range(8):
            counts = torch.bincount(found[:, token] >> 26, minlength=64)
            assert within(chi_square(counts, 20_000 / 64), 63)


def uniforms(found: torch.Tensor) -> torch.Tensor:
    return (found.double() + 0.5) / 2**32 - 0.5


@pytest.mark.parametrize(
    "draws",
    [
        [(7, 0, p) for p in range(65)],
        [(s, 0, 7) for s in range(65)],
        [(7, i, 7) for i in range(65)],
        [(7 * 2**40 + p, 0, p) for p in range(65)],
    ],
    ids=["positions", "seeds", "indices", "seed and position"],
)
def test_neighbouring_draws_are_uncorrelated(draws: list[tuple[int, int, int]]) -> None:
    found = uniforms(noise.bits(keys(*draws), V))
    pairs = (found[1:] * found[:-1]).mean() * 12
    assert abs(float(pairs)) < 5 / math.sqrt(64 * V)


@pytest.mark.parametrize("lag", [1, 2, 16, 256])
def test_neighbouring_tokens_are_uncorrelated(lag: int) -> None:
    found = uniforms(many())
    pairs = (found[:, lag:] * found[:, :-lag]).mean() * 12
    assert abs(float(pairs)) < 5 / math.sqrt(64 * V)


def flips(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How often each of the 32 bits differs."""
    return torch.stack([((one ^ other) >> bit & 1).double().mean() for bit in range(32)])


@pytest.mark.parametrize("word", [0, 1])
@pytest.mark.parametrize("bit", range(0, 32, 5))
def test_a_flipped_key_bit_flips_every_hash_bit_half_the_time(word: int, bit: int) -> None:
    plain = keys(*((5, 0, p) for p in range(16)))
    turned = plain.clone()
    turned[:, word] ^= 1 << bit
    found = flips(noise.bits(plain, V), noise.bits(turned, V))
    assert float((found - 0.5).abs().max()) < 0.02


@pytest.mark.parametrize("bit", range(0, 12, 3))
def test_a_flipped_token_bit_flips_every_hash_bit_half_the_time(bit: int) -> None:
    found = many(16)
    tokens = torch.arange(V)
    assert float((flips(found, found[:, tokens ^ (1 << bit)]) - 0.5).abs().max()) < 0.02


def test_gumbel_follows_its_distribution() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)), at the 0.1% level."""
    found = noise.gumbel(keys(*((9, 0, p) for p in range(32))), V).double().flatten().sort().values
    wanted = torch.exp(-torch.exp(-found))
    steps = torch.arange(1, found.numel() + 1) / found.numel()
    assert float((wanted - steps).abs().max()) < 1.95 / math.sqrt(found.numel())


def test_extreme_hashes_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([[0, 1, 2, 2**24, 2**31, FULL - 256, FULL - 1, FULL]])
    monkeypatch.setattr(noise, "bits", lambda keys, vocab: words.clone())
    found = noise.gumbel(torch.zeros(1, 2, dtype=torch.int64), 8)[0]
    assert bool(found.isfinite().all())
    assert found.tolist() == sorted(found.tolist(), reverse=True)
    assert 22.8 < float(found[0]) < 22.9
    assert float(found[0]) > float(found[1]) > float(found[2])  # fine where it decides


def test_the_upper_tail_is_fine() -> None:
    """The largest of many tokens hardly ever ties: a coarse tail would pile them up."""
    tops = noise.gumbel(keys(*((2, 0, p) for p in range(500))), V).max(-1).values
    assert tops.unique().numel() >= 499


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_a_token_keeps_its_noise_whatever_the_vocabulary_and_the_company(vocab: int, seed: int) -> None:
    alone = noise.bits(keys((seed, 0, 1)), vocab)
    company = noise.bits(keys((1, 1, 1), (seed, 0, 1), (seed, 0, 2)), vocab + 7)
    assert torch.equal(alone[0], company[1, :vocab])
