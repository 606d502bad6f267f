"""The passes over blocks of logits on CUDA, under Triton's interpreter where there is no card.

Whatever the number of rows, a row gets the same bits; and it gets what the CPU's way gives, but for rounding.
"""

import math
import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

from samewise.kernels import noise  # noqa: E402
from samewise.kernels import sampling as scan  # noqa: E402

DEVICES = ["cpu"] if not CUDA else []
DEVICES += [pytest.param("cuda", marks=pytest.mark.gpu)]
BITS = 40


def block(rows: int, vocab: int, device: str, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [5, 300, scan.CHUNK, scan.CHUNK + 1, 3 * scan.CHUNK - 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_measures_as_float64_does(device, vocab, dtype):
    logits = block(6, vocab, device).to(dtype)
    found, wide = scan.measure(logits, BITS), logits.double()
    top = wide.max(-1).values
    assert found.tokens.tolist() == wide.argmax(-1).tolist()
    assert found.top.tolist() == top.tolist()
    expected = (wide.logsumexp(-1) - top).float()
    torch.testing.assert_close(found.log_sum, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equals_the_lowest(device):
    logits = block(4, 2 * scan.CHUNK + 9, device)
    for row, places in enumerate(
        [(7, 8), (3, scan.CHUNK + 1), (scan.CHUNK - 1, scan.CHUNK), (50, 2 * scan.CHUNK)]
    ):
        logits[row, list(places)] = logits[row].max() + 1
        assert scan.measure(logits, BITS).tokens[row] == places[0]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_ruled_out_weighs_nothing(device):
    logits = torch.full((2, scan.CHUNK + 40), -math.inf, device=device)
    logits[0, 9] = 3.0
    logits[1, [scan.CHUNK + 2, scan.CHUNK + 30]] = torch.tensor([1.0, 1.0], device=device)
    found = scan.measure(logits, BITS)
    assert found.tokens.tolist() == [9, scan.CHUNK + 2]
    assert found.log_sum.tolist() == [0.0, pytest.approx(math.log(2), abs=1e-7)]


@pytest.mark.parametrize("device", DEVICES)
def test_neither_place_nor_company_nor_number_of_rows_shows(device):
    logits = block(12, scan.CHUNK + 333, device)
    temperatures = torch.tensor([[0.0], [1.0], [0.3]] * 4, device=device)
    keys = torch.tensor([noise.key(i, 0, 5) for i in range(12)], device=device)
    whole, chosen = scan.measure(logits, BITS), scan.choose(logits, temperatures, keys)
    for rows in ([3], [11, 0], [5, 4, 3, 2, 1, 0], list(range(12))[::-1]):
        some = scan.measure(logits[rows], BITS)
        assert all(torch.equal(a, b[rows]) for a, b in zip(some, whole, strict=True))
        assert torch.equal(scan.choose(logits[rows], temperatures[rows], keys[rows]), chosen[rows])
    doubled = torch.cat([logits, logits])[:, : logits.shape[1]]
    assert torch.equal(scan.measure(doubled, BITS).log_sum[12:], whole.log_sum)


@pytest.mark.parametrize("device", DEVICES)
def test_chooses_as_the_noise_says(device):
    """Its logarithms are not the CPU's, so a choice may differ only where two scores are all but equal."""
    logits = block(40, scan.CHUNK + 77, device)
    temperatures = torch.linspace(0.0, 2.0, 40)[:, None].to(device)
    keys = torch.tensor([noise.key(3, i, 9) for i in range(40)])
    found = scan.choose(logits, temperatures, keys.to(device)).cpu()
    gap = (logits.amax(-1, keepdim=True) - logits).cpu() / temperatures.cpu().clamp(min=1e-9)
    scores = noise.gumbel(keys, logits.shape[1]) - gap
    scores[0] = logits[0].cpu()
    best = scores.amax(-1)
    torch.testing.assert_close(scores[torch.arange(40), found], best, atol=2e-5, rtol=1e-6)
    assert (found == scores.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("device", DEVICES)
def test_the_noise_is_gumbel(device):
    """Over a flat row every id is as likely as any other."""
    draws, vocab = 400, 50
    keys = torch.tensor([noise.key(i, 1, 2) for i in range(draws)], device=device)
    flat, warm = torch.zeros(draws, vocab, device=device), torch.ones(draws, 1, device=device)
    counts = torch.bincount(scan.choose(flat, warm, keys).cpu(), minlength=vocab).double()
    assert ((counts - draws / vocab) ** 2 / (draws / vocab)).sum() < 2 * vocab


@pytest.mark.parametrize("device", DEVICES)
def test_a_strided_block_is_read_as_it_lies(device):
    wide = block(8, 900, device)
    part = wide[:, :517]
    assert torch.equal(scan.measure(part, BITS).log_sum, scan.measure(part.contiguous(), BITS).log_sum)
