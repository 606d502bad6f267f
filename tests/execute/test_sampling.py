"""Sampler: the sampling rule against slow references, and the frame rule bit for bit."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samewise.execute import filters
from samewise.execute.logit_edits import LogitEditor
from samewise.execute.sampling import Sampler, SamplerOutput
from samewise.execute.sampling_rows import SamplingRow
from samewise.kernels import noise
from samewise.kernels.cpu_sampling import pick_row_math
from samewise.types import NUM_CANDIDATES, Sampling

CPU = torch.device("cpu")


def block_sampler(vocab: int) -> Sampler:
    """The sampler as on CUDA, which samples a block of rows at once, run on CPU."""
    return Sampler(vocab, CPU, by_row=False)


def make_row(
    row: int = 0,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    position: int = 9,
    **sampling: Any,
) -> SamplingRow:
    return SamplingRow(row, Sampling(**sampling), prompt, output, position)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_one(logits: torch.Tensor, row: SamplingRow) -> int:
    """The row's token, after checking that sampling by row and by block agree."""
    by_row = Sampler(logits.shape[1], CPU).sample(logits, [row]).tokens
    by_block = block_sampler(logits.shape[1]).sample(logits, [row]).tokens
    assert torch.equal(by_row, by_block)
    return int(by_row[row.row])


# ── the sampling rule ────────────────────────────────────────────────────────────────────────────


def count_tokens(sampling: dict[str, Any], logits: torch.Tensor, num: int = 2000) -> list[int]:
    """How often each token is sampled, over positions, seeds and indices."""
    sampler, vocab = Sampler(logits.shape[-1], CPU), logits.shape[-1]
    block = logits.expand(num, vocab).contiguous()
    rows = [
        SamplingRow(row, Sampling(seed=row % 5 * 1000 - 7, index=row % 3, **sampling), (), (), row)
        for row in range(num)
    ]
    counts = Counter(sampler.sample(block, rows).tokens.tolist())
    return [counts[token] for token in range(vocab)]


PROBABILITIES = torch.tensor([0.4, 0.05, 0.25, 0.15, 0.1, 0.05])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 3.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 1.0, "top_k": 3}, [0, 2, 3]),
        ({"temperature": 1.0, "top_k": 5}, [0, 1, 2, 3, 4, 5]),  # ids 1 and 5 tie for the fifth place
        ({"temperature": 1.0, "top_p": 0.64}, [0, 2]),
        ({"temperature": 1.0, "top_p": 0.7}, [0, 2, 3]),
        ({"temperature": 1.0, "top_p": 0.92}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 1.0, "top_p": 1e-9}, [0]),
        ({"temperature": 1.0, "min_p": 0.3}, [0, 2, 3]),
        ({"temperature": 1.0, "min_p": 1.0}, [0]),
        ({"temperature": 2.0, "top_k": 4, "top_p": 0.6}, [0, 2]),
        ({"temperature": 1.0, "logit_bias": ((0, -100.0),)}, [1, 2, 3, 4, 5]),
        ({"temperature": 1.0, "allowed_token_ids": (1, 4, 5)}, [1, 4, 5]),
    ],
    ids=str,
)
def test_tokens_follow_the_requested_distribution(sampling: dict[str, Any], kept: list[int]) -> None:
    """Chi-square below its 0.01% point for five degrees of freedom or fewer."""
    counts = count_tokens(sampling, PROBABILITIES.log())
    expected = np.array([float(PROBABILITIES[t]) ** (1 / sampling["temperature"]) for t in kept])
    expected *= sum(counts) / expected.sum()
    assert sum(counts) == sum(counts[token] for token in kept)
    assert sum((counts[t] - e) ** 2 / e for t, e in zip(kept, expected, strict=True)) < 25.7


def test_tokens_at_neighbouring_positions_are_independent() -> None:
    logits = torch.zeros(4000, 4)
    rows = [make_row(p, temperature=1.0, position=p) for p in range(4000)]
    tokens = Sampler(4, CPU).sample(logits, rows).tokens.tolist()
    pairs = Counter(pairwise(tokens))
    assert sum((pairs[a, b] - 250) ** 2 / 250 for a in range(4) for b in range(4)) < 15 + 5 * math.sqrt(30)


def test_the_token_is_the_argmax_of_scaled_logits_plus_noise() -> None:
    logits = random_logits(1, 1003)
    for position in range(20):
        gumbel = noise.gumbel(torch.tensor([noise.key(5, 2, position)]), 1003)[0].double()
        expected = int((logits[0].double() / 0.8 + gumbel).argmax())
        assert sample_one(logits, make_row(temperature=0.8, seed=5, index=2, position=position)) == expected


def test_noise_is_keyed_by_token_id_not_by_rank() -> None:
    """Lowering other tokens changes their ranks, but no token's noise: the same token wins."""
    logits = torch.zeros(1, 50)
    winner = sample_one(logits, make_row(temperature=1.0))
    others = [token for token in range(50) if token != winner]
    for k in range(10):
        lower = logits.clone()
        lower[0, random.Random(k).sample(others, 30)] -= 5.0
        assert sample_one(lower, make_row(temperature=1.0)) == winner


def test_the_n_choices_of_one_request_differ() -> None:
    logits = torch.zeros(1, 1000)
    assert len({sample_one(logits, make_row(temperature=1.0, index=index)) for index in range(8)}) == 8


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-30, 1e30])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_no_temperature_overflows_or_underflows(temperature: float, scale: float) -> None:
    logits = random_logits(1, 100) * scale
    token = sample_one(logits, make_row(temperature=temperature, top_p=0.9, top_k=7, min_p=0.01))
    assert token in logits[0].topk(7).indices
    if temperature < 1e-4:
        assert token == int(logits.argmax())


@pytest.mark.parametrize("vocab", [5, 64, 1003, 50257])
def test_ties_go_to_the_lowest_id(vocab: int) -> None:
    tied = [vocab - 1, vocab // 2, vocab // 3 + 1]
    logits = torch.full((3, vocab), -1.0)
    logits[:, tied] = 2.0
    for sampler in (Sampler(vocab, CPU), block_sampler(vocab)):
        assert sampler.sample(logits, []).tokens.tolist() == [min(tied)] * 3
        assert sampler.sample(torch.zeros(2, vocab), []).tokens.tolist() == [0, 0]
        biased = make_row(1, logit_bias=((0, -1.0),))
        assert sampler.sample(torch.zeros(2, vocab), [biased]).tokens.tolist() == [0, 1]


# ── filters ──────────────────────────────────────────────────────────────────────────────────────


def kept_by_reference(logits: list[float], sampling: Sampling) -> set[int]:
    """The filters, computed in double precision token by token."""
    top = max(logits)
    scaled = {t: (x - top) / sampling.temperature for t, x in enumerate(logits)}
    if sampling.min_p > 0:
        scaled = {t: x for t, x in scaled.items() if x >= math.log(sampling.min_p)}
    if sampling.top_k > 0:
        scaled = {t: x for t, x in scaled.items() if sum(y > x for y in scaled.values()) < sampling.top_k}
    total = sum(map(math.exp, scaled.values()))
    if sampling.top_p < 1:
        scaled = {
            t: x
            for t, x in scaled.items()
            if sum(math.exp(y) for y in scaled.values() if y > x) < sampling.top_p * total
        }
    return set(scaled)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 8),
    st.sampled_from([1.0, 0.99, 0.873, 0.5, 0.1]),
    st.sampled_from([0.0, 0.0, 0.013, 0.3]),
)
def test_filters_keep_the_tokens_that_the_reference_keeps(
    raw: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """By row and by block. Half-integer logits tie often, and no mass lands on a boundary of top_p."""
    logits = [x / 2 for x in raw]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = kept_by_reference(logits, sampling)
    row = torch.tensor(logits)
    gap = (row.amax() - row) / temperature
    by_row = set((gap <= filters.max_gap(gap.numpy(), sampling, pick_row_math())).nonzero()[:, 0].tolist())
    rows = torch.stack([torch.full_like(row, 3.0), row])
    filtered = block_sampler(len(raw))._filtered(rows, [SamplingRow(1, sampling, (), (), 0)])
    assert by_row == expected
    assert set(filtered[1].isfinite().nonzero()[:, 0].tolist()) == expected
    assert torch.equal(filtered[0], rows[0])


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.zeros(1, 300)
    gap = np.zeros(300, dtype=np.float32)
    assert filters.max_gap(gap, Sampling(temperature=1.0, top_k=1), pick_row_math()) == 0.0
    assert filters.max_gap(gap, Sampling(temperature=1.0, top_p=0.01), pick_row_math()) == 0.0
    sampled = {sample_one(logits, make_row(temperature=1.0, top_k=2, position=p)) for p in range(100)}
    assert len(sampled) > 50


def test_masses_of_a_large_flat_vocabulary_do_not_overflow() -> None:
    total = filters.masses(torch.zeros(300_000)).sum()
    assert 0 < int(total) < 2**62
    assert int(total) / 2 ** filters.mass_bits(torch.zeros(300_000)) == 300_000


def test_ranks_are_places_by_falling_log_probability_then_by_rising_id() -> None:
    """By row and by block, alone and beside others; of `top`'s tokens their places there."""
    logits = random_logits(70, 300, scale=2.0)
    logits[3] = 0.5  # all equal
    logits[4, 10:20] = logits[4].max() + 1.0
    logits[5, ::2] = -math.inf
    rows = [row for row in range(70) for _ in range(2)]
    tokens = torch.tensor([(31 * i + 7) % 300 for i in range(len(rows))])
    samplers = Sampler(300, CPU), block_sampler(300)
    for sampler in samplers:
        ranks = sampler.ranks(logits, rows, tokens)
        for row, token, rank in zip(rows, tokens.tolist(), ranks, strict=True):
            (everything,) = sampler.top(logits, [row], [-1])
            assert everything[rank - 1][0] == token
            assert sampler.ranks(logits[row : row + 1], [0], torch.tensor([token])) == [rank]
        assert sampler.ranks(logits, [], torch.tensor([])) == []
    assert samplers[0].ranks(logits, rows, tokens) == samplers[1].ranks(logits, rows, tokens)


def test_alternatives_are_the_likeliest_tokens_or_those_that_are_named() -> None:
    logits = random_logits(4, 50)
    sampler = Sampler(50, CPU)
    named = Sampling(top_logprobs=3, logprob_token_ids=(9, 4, 30))
    samplings = [Sampling(top_logprobs=2), named, Sampling(top_logprobs=0), named]
    best, first, nothing, second = sampler.alternatives(logits, [2, 0, 1, 3], samplings)
    assert (best, nothing) == (sampler.top(logits, [2], [2])[0], ())
    for row, shown in ((0, first), (3, second)):
        (everything,) = sampler.top(logits, [row], [-1])
        assert shown == tuple(pair for pair in everything if pair[0] in (9, 4, 30))


# ── logit edits ──────────────────────────────────────────────────────────────────────────────────


def edited_by_reference(logits: list[float], row: SamplingRow) -> list[float]:
    """Penalties, bias and bans, token by token."""
    how, past = row.sampling, [*row.prompt, *row.output]
    edited = []
    for token, logit in enumerate(logits):
        x = logit
        if token in past:
            x = x / how.repetition_penalty if x > 0 else x * how.repetition_penalty
        x -= how.frequency_penalty * list(row.output).count(token)
        x -= how.presence_penalty * (token in row.output)
        x += dict(how.logit_bias).get(token, 0.0)
        if how.allowed_token_ids is not None and token not in how.allowed_token_ids:
            x = -math.inf
        for word in how.bad_words:
            if word[-1] == token and past[len(past) - len(word) + 1 :] == list(word[:-1]):
                x = -math.inf
        if len(row.output) < how.min_tokens and token in how.stop_ids:
            x = -math.inf
        edited.append(x)
    return edited


tokens = st.integers(0, 11)
penalties = st.sampled_from([0.0, 0.0, 0.5, -1.5, 2.0])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=12, max_size=12),
    st.lists(tokens, max_size=12),
    st.lists(tokens, max_size=12),
    st.builds(
        Sampling,
        presence_penalty=penalties,
        frequency_penalty=penalties,
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        logit_bias=st.dictionaries(tokens, st.floats(-9, 9, width=32), max_size=3).map(
            lambda d: tuple(d.items())
        ),
        allowed_token_ids=st.none() | st.sets(tokens, min_size=6).map(tuple),
        bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
        min_tokens=st.integers(0, 5),
        stop_ids=st.frozensets(tokens, max_size=2),
    ),
)
def test_edits_agree_with_the_reference(
    logits: list[float], prompt: list[int], output: list[int], sampling: Sampling
) -> None:
    row = SamplingRow(1, sampling, prompt, output, 5)
    expected = torch.tensor(edited_by_reference(logits, row))
    block = torch.tensor([[0.0] * 12, logits])
    edited = LogitEditor(12, CPU, unpack_on_host=True).apply(block, [row])
    torch.testing.assert_close(edited[1], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(edited[0], block[0])


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    banned = {"bad_words": ((0, 1, 2),)}
    assert sample_one(logits, make_row(prompt=[0], output=[1], **banned)) == 1
    assert sample_one(logits, make_row(prompt=[1], output=[0], **banned)) == 2
    assert sample_one(logits, make_row(prompt=[], output=[1], **banned)) == 2


def test_stop_ids_are_banned_until_min_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    how = {"min_tokens": 2, "stop_ids": frozenset({2})}
    assert [sample_one(logits, make_row(output=[0] * num, **how)) for num in range(4)] == [1, 1, 2, 2]


def test_when_every_token_is_banned_the_last_bans_are_dropped() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    stops = {"min_tokens": 9, "stop_ids": frozenset({0, 1})}
    assert sample_one(logits, make_row(allowed_token_ids=(1,), **stops)) == 1
    assert sample_one(logits, make_row(allowed_token_ids=(1, 2), bad_words=((2,),), **stops)) == 1
    assert sample_one(logits, make_row(allowed_token_ids=(2,), bad_words=((2,),))) == 2
    assert sample_one(logits, make_row(bad_words=((0,), (1,), (2,)))) == 0
    assert sample_one(logits, make_row(bad_words=((2,),), **stops)) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_ids_hold_even_where_their_logits_are_minus_infinity(temperature: float) -> None:
    logits = torch.tensor([[5.0, -math.inf, -math.inf, 4.0]])
    assert sample_one(logits, make_row(temperature=temperature, allowed_token_ids=(1, 2))) in (1, 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Triton's interpreter warns of overflow, CUDA does not
@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_logits_that_are_not_finite_still_give_a_token(value: float) -> None:
    logits = torch.full((1, 20), value)
    for sampler in (Sampler(20, CPU), block_sampler(20)):
        for how in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}):
            assert 0 <= int(sampler.sample(logits, [make_row(**how)]).tokens[0]) < 20


def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    how = {
        "repetition_penalty": 2.0,
        "min_tokens": 3,
        "stop_ids": frozenset({99}),
        "logit_bias": ((50, 1.0),),
    }
    assert sample_one(torch.tensor([[1.0, 2.0]]), make_row(prompt=[70, 1], output=[80], **how)) == 0


def test_the_logits_passed_in_are_not_changed() -> None:
    logits = random_logits(3, 200)
    before = logits.clone()
    row = make_row(
        1, temperature=1.0, top_k=5, repetition_penalty=2.0, prompt=[1], allowed_token_ids=(1, 2, 3)
    )
    for sampler in (Sampler(200, CPU), block_sampler(200)):
        sampler.sample(logits, [row])
        assert torch.equal(logits, before)


# ── log-probabilities ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vocab", [7, 1003, 50257])
def test_logprobs_are_the_models_own_before_edits(vocab: int) -> None:
    logits = random_logits(4, vocab)
    expected = logits.double().log_softmax(-1)
    for sampler in (Sampler(vocab, CPU), block_sampler(vocab)):
        output = sampler.sample(logits, [make_row(2, temperature=2.0, logit_bias=((1, 50.0),))])
        own = expected.gather(1, output.tokens[:, None])[:, 0].float()
        torch.testing.assert_close(output.logprobs, own, rtol=1e-6, atol=2e-6)
        assert output.tokens[2] == 1
        assert bool((output.logprobs <= 0).all())


def test_scores_have_the_bits_of_sampled_logprobs() -> None:
    logits = random_logits(5, 1003)
    for sampler in (Sampler(1003, CPU), block_sampler(1003)):
        output = sampler.sample(logits, [make_row(3, temperature=3.0)])
        rows = [4, 0, 3, 3]
        scores = sampler.score(logits, rows, output.tokens[rows].tolist())
        assert torch.equal(scores, output.logprobs[rows])
        assert sampler.score(logits, [], []).shape == (0,)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=20, max_size=20), st.integers(-1, 25))
def test_top_is_ordered_by_value_then_id(raw: list[int], num: int) -> None:
    logits = torch.tensor([[0.0] * 20, [float(x) for x in raw]])
    for sampler in (Sampler(20, CPU), block_sampler(20)):
        (top, none) = sampler.top(logits, [1, 0], [num, 0])
        values = sampler.score(logits, [1] * 20, list(range(20))).tolist()
        expected = sorted(enumerate(values), key=lambda pair: (-pair[1], pair[0]))
        assert list(top) == expected[: 20 if num < 0 else num]
        assert none == ()


def test_candidates_are_the_most_probable_ids() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    ids = Sampler(300, torch.device("cpu")).candidates(logits)
    assert ids.tolist() == logits.topk(NUM_CANDIDATES).indices.tolist()
    few = Sampler(3, torch.device("cpu")).candidates(logits[:, :3])
    assert few.tolist() == [
        [*row, *[-1] * (NUM_CANDIDATES - 3)] for row in logits[:, :3].topk(3).indices.tolist()
    ]


def test_top_has_the_bits_of_sampled_logprobs() -> None:
    logits = random_logits(3, 1003)
    sampler = Sampler(1003, CPU)
    output = sampler.sample(logits, [])
    tops = sampler.top(logits, [0, 1, 2], [1, 5, 2])
    assert [top[0] for top in tops] == list(
        zip(output.tokens.tolist(), output.logprobs.tolist(), strict=True)
    )


# ── the frame rule ───────────────────────────────────────────────────────────────────────────────

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.8},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {
        "temperature": 1.0,
        "allowed_token_ids": tuple(range(0, 1000, 3)),
        "bad_words": ((3,),),
        "min_tokens": 50,
    },
]


def make_kth_row(row: int, k: int) -> SamplingRow:
    """The k-th request's row, at this index of the block."""
    tokens = [(k * 31 + i * 7) % 900 for i in range(40)]
    return make_row(
        row, prompt=tokens[:25], output=tokens[25:], position=40 + k, seed=k, **SAMPLINGS[k % len(SAMPLINGS)]
    )


def results_by_row(sampler: Sampler, logits: torch.Tensor, rows: list[SamplingRow]) -> list[tuple[Any, ...]]:
    """By row: its token, the bits of its log-probability and of a score, and its top log-probabilities."""
    output: SamplerOutput = sampler.sample(logits, rows)
    indices = list(range(logits.shape[0]))
    scores = sampler.score(logits, indices, [1] * len(indices))
    bits = torch.stack([output.logprobs, scores]).view(torch.int32).T.tolist()
    tops = sampler.top(logits, indices, [4] * len(indices))
    return list(zip(output.tokens.tolist(), bits, tops, strict=True))


@pytest.mark.parametrize("vocab", [1003, 50257])
def test_a_rows_result_does_not_depend_on_other_rows_or_its_index(vocab: int) -> None:
    logits, sampler = random_logits(len(SAMPLINGS) * 2, vocab), Sampler(vocab, CPU)
    alone = [results_by_row(sampler, logits[k : k + 1], [make_kth_row(0, k)])[0] for k in range(len(logits))]
    for trial in range(3):
        rng = random.Random(trial)
        order = rng.sample(range(len(logits)), rng.randint(2, len(logits)))
        results = results_by_row(
            sampler, logits[order], [make_kth_row(row, k) for row, k in enumerate(order)]
        )
        assert results == [alone[k] for k in order]


def test_rows_of_a_wider_buffer_give_the_same_bits() -> None:
    """Logits may be a slice of a padded buffer: strides and offsets do not change bits."""
    wide = random_logits(4, 1100)
    rows = [make_kth_row(row, row) for row in range(4)]
    sampler = Sampler(1003, CPU)
    assert results_by_row(sampler, wide[:, 5:1008], rows) == results_by_row(
        sampler, wide[:, 5:1008].contiguous(), rows
    )


@pytest.mark.gpu
@torch.inference_mode()
def test_on_cuda_a_rows_result_does_not_depend_on_other_rows_or_its_index() -> None:
    device, vocab, num_rows = torch.device("cuda"), 50257, 32
    sampler = Sampler(vocab, device)
    logits, other = random_logits(12, vocab).to(device), random_logits(num_rows, vocab, seed=1).to(device)
    seen: dict[int, tuple[Any, ...]] = {}
    for trial in range(8):
        rng = random.Random(trial)
        indices = rng.sample(range(num_rows), rng.randint(1, 12))
        requests = rng.sample(range(12), len(indices))
        block = other.clone()
        block[indices] = logits[requests]
        rows = [make_kth_row(i, k) for i, k in zip(indices, requests, strict=True)]
        results = results_by_row(sampler, block, rows)
        for i, k in zip(indices, requests, strict=True):
            assert seen.setdefault(k, results[i]) == results[i]


@pytest.mark.gpu
@torch.inference_mode()
def test_on_cuda_tokens_are_those_of_the_cpu() -> None:
    """Last bits may differ between devices; tokens only where two scores are that close."""
    device, vocab, num_rows = torch.device("cuda"), 1003, 64
    sampler = Sampler(vocab, device)
    logits = random_logits(num_rows, vocab)
    rows = [make_kth_row(row, row) for row in range(num_rows)]
    on_cuda, on_cpu = sampler.sample(logits.to(device), rows), Sampler(vocab, CPU).sample(logits, rows)
    assert on_cuda.tokens.tolist() == on_cpu.tokens.tolist()
    torch.testing.assert_close(on_cuda.logprobs.cpu(), on_cpu.logprobs, rtol=1e-6, atol=1e-5)
    hashes = noise.token_hashes(torch.tensor([noise.key(1, 2, 3)]).to(device), vocab)
    assert torch.equal(hashes.cpu(), noise.token_hashes(torch.tensor([noise.key(1, 2, 3)]), vocab))
