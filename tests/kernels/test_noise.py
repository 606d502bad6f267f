"""Noise: Gumbel-distributed, independent between keys and tokens, and a fixed function of its key."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samewise.kernels import noise

V = 4096
MAX_HASH = 2**32 - 1


def keys(*draws: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor([noise.key(*draw) for draw in draws])


def hashes_by_position(num: int = 64) -> torch.Tensor:
    """Hashes of `num` positions of one seed and index: [num, V]."""
    return noise.token_hashes(keys(*((7, 0, p) for p in range(num))), V)


def chi_square(counts: torch.Tensor, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def is_plausible(chi: float, freedom: int) -> bool:
    """Whether a chi-square value lies within five standard deviations of its mean."""
    return abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


@given(st.integers(), st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_key_is_two_32_bit_words_for_every_seed(seed: int, index: int, position: int) -> None:
    high, low = noise.key(seed, index, position)
    assert 0 <= high <= MAX_HASH
    assert 0 <= low <= MAX_HASH


def test_keys_differ_by_seed_index_and_position() -> None:
    draws = [(s, i, p) for s in (-(2**63), -1, 0, 1, 2**62, 2**64 - 2) for i in range(8) for p in range(200)]
    assert len({noise.key(*draw) for draw in draws}) == len(draws)


def test_keys_and_hashes_are_pinned() -> None:
    """Receipts of earlier answers can be checked only as long as these numbers stay."""
    assert noise.key(0, 0, 0) == (0x238275BC, 0x38FCBE91)
    assert noise.token_hashes(keys((1, 2, 3)), 4).tolist() == [
        [2029925179, 1120076587, 242971855, 1430608482]
    ]


def test_hashes_are_32_bit_words_and_never_collide_within_a_row() -> None:
    row = noise.token_hashes(keys((1, 2, 3)), 200_000)[0]
    assert int(row.min()) >= 0
    assert int(row.max()) <= MAX_HASH
    assert row.unique().numel() == row.numel()


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_of_the_hash_is_uniform(shift: int) -> None:
    hashes = hashes_by_position()
    counts = torch.bincount((hashes >> shift & 255).flatten(), minlength=256)
    assert is_plausible(chi_square(counts, hashes.numel() / 256), 255)


def test_the_hash_of_a_token_is_uniform_over_positions_and_over_seeds() -> None:
    positions = noise.token_hashes(keys(*((3, 0, p) for p in range(20_000))), 8)
    seeds = noise.token_hashes(keys(*((s, 0, 11) for s in range(20_000))), 8)
    for hashes in (positions, seeds):
        for token in range(8):
            counts = torch.bincount(hashes[:, token] >> 26, minlength=64)
            assert is_plausible(chi_square(counts, 20_000 / 64), 63)


def centred_uniforms(hashes: torch.Tensor) -> torch.Tensor:
    """Hashes as numbers in (-0.5, 0.5)."""
    return (hashes.double() + 0.5) / 2**32 - 0.5


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
def test_noise_of_neighbouring_keys_is_uncorrelated(draws: list[tuple[int, int, int]]) -> None:
    uniforms = centred_uniforms(noise.token_hashes(keys(*draws), V))
    correlation = (uniforms[1:] * uniforms[:-1]).mean() * 12
    assert abs(float(correlation)) < 5 / math.sqrt(64 * V)


@pytest.mark.parametrize("lag", [1, 2, 16, 256])
def test_noise_of_neighbouring_tokens_is_uncorrelated(lag: int) -> None:
    uniforms = centred_uniforms(hashes_by_position())
    correlation = (uniforms[:, lag:] * uniforms[:, :-lag]).mean() * 12
    assert abs(float(correlation)) < 5 / math.sqrt(64 * V)


def bit_flip_rates(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How often each of the 32 bits differs: [32], from 0 to 1."""
    return torch.stack([((a ^ b) >> bit & 1).double().mean() for bit in range(32)])


@pytest.mark.parametrize("word", [0, 1])
@pytest.mark.parametrize("bit", range(0, 32, 5))
def test_a_flipped_key_bit_flips_every_hash_bit_half_the_time(word: int, bit: int) -> None:
    original = keys(*((5, 0, p) for p in range(16)))
    flipped = original.clone()
    flipped[:, word] ^= 1 << bit
    rates = bit_flip_rates(noise.token_hashes(original, V), noise.token_hashes(flipped, V))
    assert float((rates - 0.5).abs().max()) < 0.02


@pytest.mark.parametrize("bit", range(0, 12, 3))
def test_a_flipped_token_bit_flips_every_hash_bit_half_the_time(bit: int) -> None:
    hashes = hashes_by_position(16)
    tokens = torch.arange(V)
    rates = bit_flip_rates(hashes, hashes[:, tokens ^ (1 << bit)])
    assert float((rates - 0.5).abs().max()) < 0.02


def test_noise_follows_the_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)), at the 0.1% level."""
    values = noise.gumbel(keys(*((9, 0, p) for p in range(32))), V).double().flatten().sort().values
    expected = torch.exp(-torch.exp(-values))
    observed = torch.arange(1, values.numel() + 1) / values.numel()
    assert float((expected - observed).abs().max()) < 1.95 / math.sqrt(values.numel())


def test_extreme_hashes_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = torch.tensor([[0, 1, 2, 2**24, 2**31, MAX_HASH - 256, MAX_HASH - 1, MAX_HASH]])
    monkeypatch.setattr(noise, "token_hashes", lambda keys, vocab: hashes.clone())
    values = noise.gumbel(torch.zeros(1, 2, dtype=torch.int64), 8)[0]
    assert bool(values.isfinite().all())
    assert values.tolist() == sorted(values.tolist(), reverse=True)
    assert 22.8 < float(values[0]) < 22.9
    assert float(values[0]) > float(values[1]) > float(values[2])  # neighbouring hashes differ at the top


def test_the_largest_noise_of_a_row_hardly_ever_ties() -> None:
    """A coarse upper tail would give many rows the same maximum."""
    tops = noise.gumbel(keys(*((2, 0, p) for p in range(500))), V).max(-1).values
    assert tops.unique().numel() >= 499


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_a_tokens_noise_depends_on_neither_vocabulary_nor_other_rows(vocab: int, seed: int) -> None:
    alone = noise.token_hashes(keys((seed, 0, 1)), vocab)
    together = noise.token_hashes(keys((1, 1, 1), (seed, 0, 1), (seed, 0, 2)), vocab + 7)
    assert torch.equal(alone[0], together[1, :vocab])
