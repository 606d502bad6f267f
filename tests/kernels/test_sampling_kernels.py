"""The sampler's Triton kernels, under Triton's interpreter where there is no CUDA device.

A row's bits depend on no other row and on no number of rows; they agree with float64 up to rounding.
"""

import math
import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

from samewise.kernels import noise  # noqa: E402
from samewise.kernels.sampling import CHUNK, row_stats, sample_tokens, top_candidates  # noqa: E402
from samewise.types import NUM_CANDIDATES  # noqa: E402

DEVICES = ["cpu"] if not CUDA else []
DEVICES += [pytest.param("cuda", marks=pytest.mark.gpu)]
FRACTION_BITS = 40


def random_logits(rows: int, vocab: int, device: str, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [5, 300, CHUNK, CHUNK + 1, 3 * CHUNK - 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_stats_agree_with_float64(device, vocab, dtype):
    logits = random_logits(6, vocab, device).to(dtype)
    stats, exact = row_stats(logits, FRACTION_BITS), logits.double()
    top = exact.max(-1).values
    assert stats.tokens.tolist() == exact.argmax(-1).tolist()
    assert stats.top.tolist() == top.tolist()
    expected = (exact.logsumexp(-1) - top).float()
    torch.testing.assert_close(stats.log_sum, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_logits_the_lowest_token_id_is_the_argmax(device):
    logits = random_logits(4, 2 * CHUNK + 9, device)
    for row, tokens in enumerate([(7, 8), (3, CHUNK + 1), (CHUNK - 1, CHUNK), (50, 2 * CHUNK)]):
        logits[row, list(tokens)] = logits[row].max() + 1
        assert row_stats(logits, FRACTION_BITS).tokens[row] == tokens[0]


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_minus_infinity_have_no_weight(device):
    logits = torch.full((2, CHUNK + 40), -math.inf, device=device)
    logits[0, 9] = 3.0
    logits[1, [CHUNK + 2, CHUNK + 30]] = torch.tensor([1.0, 1.0], device=device)
    stats = row_stats(logits, FRACTION_BITS)
    assert stats.tokens.tolist() == [9, CHUNK + 2]
    assert stats.log_sum.tolist() == [0.0, pytest.approx(math.log(2), abs=1e-7)]


@pytest.mark.parametrize("device", DEVICES)
def test_bits_do_not_depend_on_row_index_other_rows_or_number_of_rows(device):
    logits = random_logits(12, CHUNK + 333, device)
    temperatures = torch.tensor([[0.0], [1.0], [0.3]] * 4, device=device)
    keys = torch.tensor([noise.key(i, 0, 5) for i in range(12)], device=device)
    stats, sampled = row_stats(logits, FRACTION_BITS), sample_tokens(logits, temperatures, keys)
    for rows in ([3], [11, 0], [5, 4, 3, 2, 1, 0], list(range(12))[::-1]):
        subset = row_stats(logits[rows], FRACTION_BITS)
        assert all(torch.equal(a, b[rows]) for a, b in zip(subset, stats, strict=True))
        assert torch.equal(sample_tokens(logits[rows], temperatures[rows], keys[rows]), sampled[rows])
    doubled = torch.cat([logits, logits])[:, : logits.shape[1]]
    assert torch.equal(row_stats(doubled, FRACTION_BITS).log_sum[12:], stats.log_sum)


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_tokens_maximize_logit_plus_noise(device):
    """Logarithms differ from the CPU's in the last bits, so tokens may differ where two scores nearly tie."""
    logits = random_logits(40, CHUNK + 77, device)
    temperatures = torch.linspace(0.0, 2.0, 40)[:, None].to(device)
    keys = torch.tensor([noise.key(3, i, 9) for i in range(40)])
    tokens = sample_tokens(logits, temperatures, keys.to(device)).cpu()
    gap = (logits.amax(-1, keepdim=True) - logits).cpu() / temperatures.cpu().clamp(min=1e-9)
    scores = noise.gumbel(keys, logits.shape[1]) - gap
    scores[0] = logits[0].cpu()
    best = scores.amax(-1)
    torch.testing.assert_close(scores[torch.arange(40), tokens], best, atol=2e-5, rtol=1e-6)
    assert (tokens == scores.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("device", DEVICES)
def test_equal_logits_are_sampled_equally_often(device):
    num_rows, vocab = 400, 50
    keys = torch.tensor([noise.key(i, 1, 2) for i in range(num_rows)], device=device)
    logits, temperatures = torch.zeros(num_rows, vocab, device=device), torch.ones(num_rows, 1, device=device)
    counts = torch.bincount(sample_tokens(logits, temperatures, keys).cpu(), minlength=vocab).double()
    assert ((counts - num_rows / vocab) ** 2 / (num_rows / vocab)).sum() < 2 * vocab


@pytest.mark.parametrize("device", DEVICES)
def test_strided_logits_give_the_bits_of_contiguous_ones(device):
    part = random_logits(8, 900, device)[:, :517]
    strided, contiguous = row_stats(part, FRACTION_BITS), row_stats(part.contiguous(), FRACTION_BITS)
    assert torch.equal(strided.log_sum, contiguous.log_sum)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_certain_token_has_log_probability_plus_zero_by_every_way(device, dtype):
    from samewise.execute.sampling import Sampler
    from samewise.execute.sampling_rows import SamplingRow
    from samewise.types import Sampling

    vocab = CHUNK + 40
    logits = torch.zeros(3, vocab, device=device, dtype=dtype)
    logits[0, 7] = logits[1, CHUNK + 3] = 300.0
    sampler = Sampler(vocab, torch.device(device), by_row=False)
    drawn = SamplingRow(2, Sampling(temperature=1.0, seed=3), (), (), 1)
    alone = [sampler.sample(logits[i : i + 1], []).logprobs for i in range(2)]
    together = sampler.sample(logits, []).logprobs[:2]
    in_company = sampler.sample(logits.float(), [drawn]).logprobs[:2]
    scores = sampler.score(logits.float(), [0, 1], [7, CHUNK + 3])
    tops = [top[0][1] for top in sampler.top(logits.float(), [0, 1], [1, 1])]
    for values in (torch.cat(alone), together, in_company, scores, torch.tensor(tops)):
        assert values.cpu().view(torch.int32).tolist() == [0, 0]  # not -0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [8, 300, 1024, 1025, 5 * 1024 - 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_candidates_are_the_largest_logits_in_order(device, vocab, dtype):
    """Logits that agree in all but their last 10 bits count as equal."""
    logits = random_logits(6, vocab, device).to(dtype)
    logits[0] = -logits[0].abs() - 1.0
    ids = top_candidates(logits[:, : vocab - 1] if vocab == 300 else logits)
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == NUM_CANDIDATES for row in ids.tolist())
    seen = logits[:, : vocab - 1] if vocab == 300 else logits
    expected = seen.float().topk(NUM_CANDIDATES).values
    torch.testing.assert_close(seen.float().gather(1, ids.long()), expected, atol=0.0, rtol=2**-12)


@pytest.mark.parametrize("device", DEVICES)
def test_candidates_are_missing_where_there_are_fewer_logits_than_that(device):
    logits = torch.tensor([[0.5, -3e38, 2.0, -math.inf, 1.0]], device=device)
    assert top_candidates(logits).tolist() == [[2, 4, 0, 1, -1, -1, -1, -1]]


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_logits_the_lowest_ids_are_the_first_candidates(device):
    logits = torch.zeros(2, 3000, device=device)
    logits[1, 2999] = 1.0
    assert top_candidates(logits).tolist() == [list(range(8)), [2999, *range(7)]]


@pytest.mark.parametrize("device", DEVICES)
def test_candidates_of_a_row_depend_on_no_other_row(device):
    logits = random_logits(9, 2500, device)
    ids = top_candidates(logits)
    for rows in ([3], [8, 0], list(range(9))[::-1]):
        assert torch.equal(top_candidates(logits[rows]), ids[rows])
