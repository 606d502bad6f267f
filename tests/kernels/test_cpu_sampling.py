"""The sampler's arithmetic on a CPU: the bits that sampling.cpp states, for any rows and threads."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpp_reference import masses_reference, noise_reference, row_stats_reference, scores_reference
from native_variants import needs_compiler
from samewise.errors import InvariantBroken
from samewise.kernels import noise
from samewise.kernels.cpu_sampling import NativeRows, RowScale, TorchRows, pick_row_math
from samewise.kernels.native import build as native_build

pytestmark = needs_compiler

KEY = (0x238275BC, 0x38FCBE91)
INF = math.inf


@pytest.fixture(scope="module")
def native():
    return NativeRows()


def random_logits(rows, vocab, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_normal((rows, vocab)) * scale).astype(np.float32))


def bits_of(stats):
    """Of every row: token, bits of its logit, bits of the log of the sum."""
    return list(
        zip(
            stats.tokens.tolist(),
            stats.top.view(np.int32).tolist(),
            stats.log_sum.view(np.int32).tolist(),
            strict=True,
        )
    )


@pytest.fixture
def threads():
    """Sets the number of threads; puts the old one back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# -- row statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1003, 4095, 4096, 4097, 9001])
def test_row_statistics_have_the_bits_of_the_stated_order(native, vocab):
    for scale in (0.01, 3.0, 40.0):
        logits = random_logits(3, vocab, seed=vocab, scale=scale)
        expected = [row_stats_reference(row) for row in logits.numpy()]
        tokens, tops, log_sums = (np.array(column) for column in zip(*expected, strict=True))
        stats = native.stats(logits)
        assert stats.tokens.tolist() == tokens.tolist()
        assert stats.top.tobytes() == tops.astype(np.float32).tobytes()
        assert stats.log_sum.tobytes() == log_sums.astype(np.float32).tobytes()


@pytest.mark.parametrize("vocab", [320, 50_257])
def test_row_statistics_are_close_to_the_true_values(native, vocab):
    logits = random_logits(4, vocab)
    stats, exact = native.stats(logits), logits.double()
    assert stats.tokens.tolist() == exact.argmax(-1).tolist()
    log_sums = (exact - exact.amax(-1, keepdim=True)).exp().sum(-1).log()
    np.testing.assert_allclose(stats.log_sum, log_sums.numpy(), rtol=2e-7)


@pytest.mark.parametrize(
    ("first", "second"), [(0, 1), (3, 19), (100, 4095), (4095, 4096), (5000, 9000), (1, 9000)]
)
def test_of_equal_logits_the_lowest_id_is_chosen(native, first, second):
    row = random_logits(1, 9001)
    row[0, [first, second]] = 77.0
    assert native.stats(row).tokens.tolist() == [first]


def test_the_largest_logit_may_be_zero_of_either_sign(native):
    row = torch.full((1, 40), -5.0)
    row[0, [7, 30]] = torch.tensor([-0.0, 0.0])
    stats = native.stats(row)
    assert stats.tokens.tolist() == [7]
    assert stats.top.tolist() == [0.0]


@pytest.mark.parametrize("vocab", [20, 5000])
def test_a_certain_token_has_a_log_sum_of_plus_zero(native, vocab):
    row = torch.full((1, vocab), -100.0)
    row[0, vocab - 1] = 100.0
    stats = native.stats(row)
    assert stats.tokens.tolist() == [vocab - 1]
    assert stats.log_sum.view(np.int32).tolist() == [0]
    row[0, : vocab - 1] = -INF
    assert native.stats(row).log_sum.view(np.int32).tolist() == [0]


@pytest.mark.parametrize("value", [math.nan, -math.nan, INF, -INF])
@pytest.mark.parametrize("vocab", [20, 5000])
def test_a_row_without_a_finite_logit_has_token_0_and_no_log_sum(native, vocab, value):
    """The sign of a NaN differs between CPUs: no number may be made of its bits."""
    stats = native.stats(torch.full((1, vocab), value))
    assert stats.tokens.tolist() == [0]
    assert math.isnan(stats.log_sum[0])


@pytest.mark.parametrize("at", [0, 17, 4999])
def test_nan_is_passed_over_by_the_argmax_and_makes_the_log_sum_nan(native, at):
    row = random_logits(1, 5000)
    row[0, at] = math.nan
    stats = native.stats(row)
    assert stats.tokens.tolist() == [int(np.nanargmax(row[0].numpy()))]
    assert math.isnan(stats.log_sum[0])


@pytest.mark.parametrize("vocab", [320, 12_007])
def test_row_statistics_depend_on_no_other_row_and_no_number_of_threads(native, threads, vocab):
    logits = random_logits(9, vocab)
    threads(1)
    alone = [bits_of(native.stats(logits[i : i + 1]))[0] for i in range(9)]
    for num_threads in (1, 2, 3, 4):
        threads(num_threads)
        for trial in range(4):
            order = random.Random(trial).choices(range(9), k=trial * 4 + 1)
            assert bits_of(native.stats(logits[order])) == [alone[i] for i in order]


def test_rows_of_a_wider_buffer_have_the_bits_of_rows_by_themselves(native):
    wide = random_logits(6, 5100)
    for view in (wide[:, 3:5003], wide[::2, 100:4197], wide[:, 1::2], wide.T[:, :5]):
        assert bits_of(native.stats(view)) == bits_of(native.stats(view.contiguous().clone()))


def test_no_rows_have_no_statistics(native):
    assert native.stats(torch.empty(0, 320)).tokens.shape == (0,)


# -- noisy scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "limit"), [(1.0, INF), (0.7, 5.0), (1e-5, INF), (3.0, 0.0), (100.0, 0.01)]
)
def test_scores_have_the_bits_of_the_stated_order(native, temperature, limit):
    for seed, vocab in enumerate((1, 17, 300)):
        row, key = random_logits(1, vocab, seed=seed)[0], noise.key(seed, 2, 5)
        expected = scores_reference(row.numpy(), temperature, key, limit)
        assert native.scores(row, temperature, key, limit).numpy().tobytes() == expected.tobytes()


def test_scores_of_a_wide_row_have_the_bits_of_the_stated_order(native, threads):
    """Wide enough for several blocks on several threads; compared at some ids."""
    row = random_logits(1, 50_257)[0]
    gaps = (row.max() - row) / 0.7
    for num_threads in (1, 2, 4):
        threads(num_threads)
        scores = native.scores(row, 0.7, KEY, 25.0)
        assert torch.equal(scores == -INF, gaps > 25.0)
        for token in [*range(0, 50_257, 611), 4095, 4096, 50_256]:
            if gaps[token] <= 25.0:
                assert scores[token].numpy() == noise_reference(token, KEY) - gaps[token].numpy()


def test_scores_of_a_strided_row_have_the_bits_of_a_contiguous_one(native):
    wide = random_logits(1, 900)[0]
    assert torch.equal(
        native.scores(wide[::3], 1.0, KEY, INF), native.scores(wide[::3].clone(), 1.0, KEY, INF)
    )


def test_a_logit_of_minus_infinity_has_a_score_of_minus_infinity(native):
    row = random_logits(1, 40)[0]
    row[5:9] = -INF
    scores = native.scores(row, 1.0, KEY, INF)
    assert (scores == -INF).nonzero().flatten().tolist() == [5, 6, 7, 8]


def gumbel(native, draws, vocab=4096):
    """Noise alone, [R, V]: the scores of logits that are all equal."""
    row = torch.zeros(vocab)
    return torch.stack([native.scores(row, 1.0, noise.key(*draw), INF) for draw in draws])


def test_noise_is_that_of_the_hash_of_the_token(native):
    values, key = gumbel(native, [(4, 1, 9)])[0], torch.tensor([noise.key(4, 1, 9)])
    w = (noise.token_hashes(key, 4096)[0].double() + 0.5) * 2.0**-32
    torch.testing.assert_close(values.double(), -torch.log(-torch.log1p(-w)), rtol=1e-7, atol=1e-7)


def test_noise_follows_the_gumbel_distribution(native):
    """Kolmogorov-Smirnov against exp(-exp(-x)), at the 0.1% level; mean and variance."""
    values = gumbel(native, [(9, 0, p) for p in range(32)]).double().flatten().sort().values
    expected = torch.exp(-torch.exp(-values))
    num = values.numel()
    observed = torch.arange(1, num + 1) / num
    assert float((expected - observed).abs().max()) < 1.95 / math.sqrt(num)
    variance = math.pi**2 / 6
    assert abs(float(values.mean()) - 0.5772156649) < 5 * math.sqrt(variance / num)
    assert abs(float(values.var()) - variance) < 5 * math.sqrt(4.4 * variance**2 / num)  # kurtosis 5.4


def test_the_largest_noise_of_a_row_hardly_ever_ties(native):
    """A coarse upper tail would give many rows the same maximum."""
    tops = gumbel(native, [(2, 0, p) for p in range(500)]).max(-1).values
    assert tops.unique().numel() >= 499


def key_of_hash(h):
    """A key under which token 0 has this hash: each step of the hash is a bijection."""

    def unscramble(h):
        h ^= h >> 15 ^ h >> 30
        h = h * pow(0x735A2D97, -1, 2**32) % 2**32
        h ^= h >> 15 ^ h >> 30
        h = h * pow(0x21F0AAAD, -1, 2**32) % 2**32
        return h ^ h >> 16

    return unscramble(unscramble(h)), 0


def test_noise_of_every_hash_is_finite_and_falls_as_the_hash_rises(native):
    hashes = [0, 1, 2, 3, 2**8, 2**24, 2**31, 2**32 - 257, 2**32 - 3, 2**32 - 2, 2**32 - 1]
    values = []
    for h in hashes:
        key = key_of_hash(h)
        assert noise.token_hashes(torch.tensor([key]), 1).item() == h
        values.append(native.scores(torch.zeros(1), 1.0, key, INF).item())
        assert values[-1] == noise_reference(0, key)
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)
    assert 22.8 < values[0] < 22.9
    assert -3.2 < values[-1] < -3.1


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_a_tokens_noise_does_not_depend_on_the_vocabulary(vocab, seed):
    native, key = NativeRows(), noise.key(seed, 0, 1)
    few, more = (native.scores(torch.zeros(size), 1.0, key, INF) for size in (vocab, vocab + 4097))
    assert torch.equal(few, more[:vocab])


# -- masses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bits", [30, 45, 61])
def test_masses_are_exact_integers_of_the_stated_exponential(native, num_bits):
    gaps = np.sort(np.abs(random_logits(1, 2000, scale=20.0)[0].numpy()))
    gaps[:3], gaps[-2:] = (0.0, 1e-30, 1e-7), (86.99, INF)
    assert native.masses(gaps, num_bits).tolist() == masses_reference(gaps, num_bits).tolist()
    assert native.masses(gaps, num_bits)[0] == 2**num_bits
    assert native.masses(gaps, num_bits)[-1] == 0
    assert native.masses(gaps[::2], num_bits).tolist() == masses_reference(gaps[::2], num_bits).tolist()


def test_a_gap_that_is_not_a_number_has_no_mass(native):
    """What a NaN becomes as an integer differs between CPUs."""
    assert native.masses(np.array([math.nan, -math.nan, 0.0], np.float32), 40).tolist() == [0, 0, 2**40]


# -- top ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 8, 63, 64, 65, 1003, 49152])
def test_top_ids_are_those_of_the_largest_logits(native, vocab, threads):
    logits = random_logits(9, 2 * vocab)[:, :vocab]
    num = min(8, vocab)
    for rows in (native, TorchRows()):
        for count in (1, 3):
            threads(count)
            ids = rows.top_ids(logits, 8)
            assert (ids.dtype, ids.shape) == (torch.int32, (9, 8))
            assert ids[:, :num].tolist() == logits.topk(num).indices.tolist()
            assert (ids[:, num:] == -1).all()


def test_top_ids_of_equal_logits_rise(native):
    logits = random_logits(2, 500).round()
    expected = logits.sort(descending=True, stable=True).indices[:, :8]
    assert native.top_ids(logits, 8).tolist() == expected.tolist()


def test_logits_of_minus_infinity_and_nan_have_no_place_among_the_top_ids(native):
    logits = torch.full((1, 200), -INF)
    logits[0, 150], logits[0, 3], logits[0, 70] = -5.0, INF, math.nan
    assert native.top_ids(logits, 8).tolist() == [[3, 150, *[-1] * 6]]


# -- dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [NativeRows, TorchRows])
def test_logits_of_another_dtype_break_an_invariant(rows, dtype):
    logits, math_ = random_logits(3, 100).to(dtype), rows()
    calls = [lambda: math_.stats(logits), lambda: math_.scores(logits[0], 0.8, KEY, INF)]
    if rows is NativeRows:
        calls.append(lambda: math_.top_ids(logits, 8))
    for call in calls:
        with pytest.raises(InvariantBroken, match=f"float32, not {dtype}"):
            call()


# -- which arithmetic ----------------------------------------------------------------------------------


def test_native_arithmetic_is_chosen_where_there_is_a_compiler(monkeypatch):
    assert pick_row_math().name == "native"
    assert pick_row_math(native=False).name == "torch"
    monkeypatch.setattr(native_build, "compiler_available", lambda: False)
    assert pick_row_math().name == "torch"


def test_torchs_arithmetic_agrees_up_to_rounding(native):
    """Machines without a compiler give other bits, under a contract that names the machine."""
    logits, other = random_logits(5, 1003), TorchRows()
    mine, theirs = native.stats(logits), other.stats(logits)
    assert mine.tokens.tolist() == theirs.tokens.tolist()
    assert mine.top.tobytes() == theirs.top.tobytes()
    np.testing.assert_allclose(mine.log_sum, theirs.log_sum, rtol=1e-6)
    torch.testing.assert_close(
        native.scores(logits[0], 0.8, KEY, 6.0), other.scores(logits[0], 0.8, KEY, 6.0), rtol=1e-5, atol=1e-5
    )
    gaps = np.sort((mine.top[0] - logits[0].numpy()) / np.float32(0.8))
    np.testing.assert_allclose(native.masses(gaps, 50), other.masses(gaps, 50), rtol=1e-6, atol=2**20)


def test_ranks_and_the_likeliest_ids_are_those_of_numpy_whatever_a_row_holds(native):
    logits = torch.randn(8, 9001, generator=torch.Generator().manual_seed(5)) * 3.0
    logits[1] = (torch.arange(9001) * 7 % 11).float()  # many of equal value
    logits[2] = 12.0 - 1e-6 * (torch.arange(9001) % 3)  # other logits of the same log-probability
    logits[3, 40:] = -math.inf  # fewer than are asked for
    logits[4] = -math.inf
    logits[5, 100] = math.nan
    logits[6, 8000] = math.inf
    logits[7, 9000] = 500.0
    at = np.array([7, 0, 1, 2, 3, 4, 5, 6, 0, 7])
    tokens = np.array([9000, 0, 4097, 8190, 39, 41, 99, 8000, 9000, 3])
    stats = native.stats(logits)
    rows = RowScale(at, stats.top[at], stats.log_sum[at])
    ranks = native.ranks(logits, rows, tokens)
    assert ranks.tolist() == TorchRows().ranks(logits, rows, tokens).tolist()
    strided = np.stack([tokens, tokens + 1], axis=1)[:, 0]
    assert native.ranks(logits, rows, strided).tolist() == ranks.tolist()
    for num in (1, 20, 64, 65, 9001):
        found = native.top(logits, rows, num)
        for (ids, values), (other_ids, other_values) in zip(
            found, TorchRows().top(logits, rows, num), strict=True
        ):
            assert ids.tolist() == other_ids.tolist()
            assert values.tobytes() == other_values.tobytes()
    for (ids, _), token, rank in zip(found, tokens, ranks, strict=True):
        assert not len(ids) or ids[rank - 1] == token
