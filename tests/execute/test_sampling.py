"""Sampler: the rule of choice, against slow and obvious references; and the frame rule, bit for bit."""

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
from samewise.execute.sampling import Sampler, SamplerOutput
from samewise.execute.sampling_rows import SamplingRow
from samewise.kernels import noise
from samewise.types import Sampling

CPU = torch.device("cpu")


def block_sampler(vocab: int) -> Sampler:
    """The block path, run on CPU: what other devices do."""
    return Sampler(vocab, CPU, by_row=False)


def draw(
    row: int = 0, *, prompt: Sequence[int] = (), output: Sequence[int] = (), position: int = 9, **how: Any
) -> SamplingRow:
    return SamplingRow(row, Sampling(**how), prompt, output, position)


def logits_of(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def pick_one(logits: torch.Tensor, one: SamplingRow) -> int:
    """Both paths must agree wherever their last bits do not matter; returns the CPU's answer."""
    by_row = Sampler(logits.shape[1], CPU).sample(logits, [one]).tokens
    by_block = block_sampler(logits.shape[1]).sample(logits, [one]).tokens
    assert torch.equal(by_row, by_block)
    return int(by_row[one.row])


# ── the rule of choice ───────────────────────────────────────────────────────────────────────────


def frequencies(sampling: dict[str, Any], logits: torch.Tensor, num: int = 2000) -> list[int]:
    """How often each token is chosen, over positions, seeds and indices."""
    sampler, vocab = Sampler(logits.shape[-1], CPU), logits.shape[-1]
    rows = logits.expand(num, vocab).contiguous()
    draws = [
        SamplingRow(row, Sampling(seed=row % 5 * 1000 - 7, index=row % 3, **sampling), (), (), row)
        for row in range(num)
    ]
    chosen = Counter(sampler.sample(rows, draws).tokens.tolist())
    return [chosen[token] for token in range(vocab)]


PROBABILITIES = torch.tensor([0.4, 0.05, 0.25, 0.15, 0.1, 0.05])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 3.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 1.0, "top_k": 3}, [0, 2, 3]),
        ({"temperature": 1.0, "top_k": 5}, [0, 1, 2, 3, 4, 5]),  # two share the fifth place
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
def test_tokens_follow_the_distribution_asked_for(sampling: dict[str, Any], kept: list[int]) -> None:
    """Chi-square below its 0.01% point for five degrees of freedom or fewer."""
    counts = frequencies(sampling, PROBABILITIES.log())
    wanted = np.array([float(PROBABILITIES[t]) ** (1 / sampling["temperature"]) for t in kept])
    wanted *= sum(counts) / wanted.sum()
    assert sum(counts) == sum(counts[token] for token in kept)
    assert sum((counts[t] - w) ** 2 / w for t, w in zip(kept, wanted, strict=True)) < 25.7


def test_choices_at_neighbouring_positions_are_independent() -> None:
    logits = torch.zeros(4000, 4)
    draws = [draw(p, temperature=1.0, position=p) for p in range(4000)]
    tokens = Sampler(4, CPU).sample(logits, draws).tokens.tolist()
    pairs = Counter(pairwise(tokens))
    assert sum((pairs[a, b] - 250) ** 2 / 250 for a in range(4) for b in range(4)) < 15 + 5 * math.sqrt(30)


def test_the_rule_is_argmax_of_scaled_logits_plus_noise() -> None:
    logits = logits_of(1, 1003)
    for position in range(20):
        gumbel = noise.gumbel(torch.tensor([noise.key(5, 2, position)]), 1003)[0].double()
        wanted = int((logits[0].double() / 0.8 + gumbel).argmax())
        assert pick_one(logits, draw(temperature=0.8, seed=5, index=2, position=position)) == wanted


def test_noise_follows_the_token_not_its_rank() -> None:
    """Logits of other tokens changing places do not move a token's noise: the winner stays the winner."""
    logits = torch.zeros(1, 50)
    winner = pick_one(logits, draw(temperature=1.0))
    others = [token for token in range(50) if token != winner]
    for k in range(10):
        lower = logits.clone()
        lower[0, random.Random(k).sample(others, 30)] -= 5.0
        assert pick_one(lower, draw(temperature=1.0)) == winner


def test_choices_of_one_request_differ() -> None:
    logits = torch.zeros(1, 1000)
    assert len({pick_one(logits, draw(temperature=1.0, index=index)) for index in range(8)}) == 8


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-30, 1e30])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_no_temperature_overflows(temperature: float, scale: float) -> None:
    logits = logits_of(1, 100) * scale
    token = pick_one(logits, draw(temperature=temperature, top_p=0.9, top_k=7, min_p=0.01))
    assert token in logits[0].topk(7).indices
    if temperature < 1e-4:
        assert token == int(logits.argmax())


@pytest.mark.parametrize("vocab", [5, 64, 1003, 50257])
def test_ties_go_to_the_lowest_id(vocab: int) -> None:
    spread = [vocab - 1, vocab // 2, vocab // 3 + 1]
    logits = torch.full((3, vocab), -1.0)
    logits[:, spread] = 2.0
    for sampler in (Sampler(vocab, CPU), block_sampler(vocab)):
        assert sampler.sample(logits, []).tokens.tolist() == [min(spread)] * 3
        assert sampler.sample(torch.zeros(2, vocab), []).tokens.tolist() == [0, 0]
        biased = draw(1, logit_bias=((0, -1.0),))
        assert sampler.sample(torch.zeros(2, vocab), [biased]).tokens.tolist() == [0, 1]


# ── filters ──────────────────────────────────────────────────────────────────────────────────────


def kept_by_reference(logits: list[float], sampling: Sampling) -> set[int]:
    """Filters in double precision, token by token."""
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
def test_filters_keep_what_the_reference_keeps(
    raw: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Both ways, ties included: half-integer logits tie often, and no mass lands on a boundary."""
    logits = [x / 2 for x in raw]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    wanted = kept_by_reference(logits, sampling)
    row = torch.tensor(logits)
    gap = (row.amax() - row) / temperature
    by_row = set((gap <= filters.max_gap(gap, sampling)).nonzero()[:, 0].tolist())
    rows = torch.stack([torch.full_like(row, 3.0), row])
    barred = block_sampler(len(raw))._filtered(rows, [SamplingRow(1, sampling, (), (), 0)])
    assert by_row == wanted
    assert set(barred[1].isfinite().nonzero()[:, 0].tolist()) == wanted
    assert torch.equal(barred[0], rows[0])


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.zeros(1, 300)
    gap = torch.zeros(300)
    assert filters.max_gap(gap, Sampling(temperature=1.0, top_k=1)) == 0.0
    assert filters.max_gap(gap, Sampling(temperature=1.0, top_p=0.01)) == 0.0
    sampled = {pick_one(logits, draw(temperature=1.0, top_k=2, position=p)) for p in range(100)}
    assert len(sampled) > 50


def test_masses_of_a_large_flat_vocabulary_do_not_overflow() -> None:
    total = filters.masses(torch.zeros(300_000)).sum()
    assert 0 < int(total) < 2**62
    assert int(total) / 2 ** filters.mass_bits(torch.zeros(300_000)) == 300_000


# ── processing ───────────────────────────────────────────────────────────────────────────────────


def processed_by_reference(logits: list[float], one: SamplingRow) -> list[float]:
    """Penalties, bias and bars, token by token."""
    how, past = one.sampling, [*one.prompt, *one.output]
    found = []
    for token, logit in enumerate(logits):
        x = logit
        if token in past:
            x = x / how.repetition_penalty if x > 0 else x * how.repetition_penalty
        x -= how.frequency_penalty * list(one.output).count(token)
        x -= how.presence_penalty * (token in one.output)
        x += dict(how.logit_bias).get(token, 0.0)
        if how.allowed_token_ids is not None and token not in how.allowed_token_ids:
            x = -math.inf
        for word in how.bad_words:
            if word[-1] == token and past[len(past) - len(word) + 1 :] == list(word[:-1]):
                x = -math.inf
        if len(one.output) < how.min_tokens and token in how.stop_ids:
            x = -math.inf
        found.append(x)
    return found


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
def test_processing_agrees_with_the_reference(
    logits: list[float], prompt: list[int], output: list[int], sampling: Sampling
) -> None:
    one = SamplingRow(1, sampling, prompt, output, 5)
    wanted = torch.tensor(processed_by_reference(logits, one))
    block = torch.tensor([[0.0] * 12, logits])
    found = Sampler(12, CPU)._editor.apply(block, [one])
    torch.testing.assert_close(found[1], wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0], block[0])


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    barred = {"bad_words": ((0, 1, 2),)}
    assert pick_one(logits, draw(prompt=[0], output=[1], **barred)) == 1
    assert pick_one(logits, draw(prompt=[1], output=[0], **barred)) == 2
    assert pick_one(logits, draw(prompt=[], output=[1], **barred)) == 2


def test_stops_are_barred_until_min_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    how = {"min_tokens": 2, "stop_ids": frozenset({2})}
    assert [pick_one(logits, draw(output=[0] * num, **how)) for num in range(4)] == [1, 1, 2, 2]


def test_when_everything_is_barred_the_last_bars_give_way() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    stops = {"min_tokens": 9, "stop_ids": frozenset({0, 1})}
    assert pick_one(logits, draw(allowed_token_ids=(1,), **stops)) == 1
    assert pick_one(logits, draw(allowed_token_ids=(1, 2), bad_words=((2,),), **stops)) == 1
    assert pick_one(logits, draw(allowed_token_ids=(2,), bad_words=((2,),))) == 2
    assert pick_one(logits, draw(bad_words=((0,), (1,), (2,)))) == 0
    assert pick_one(logits, draw(bad_words=((2,),), **stops)) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_ids_hold_even_where_the_model_says_never(temperature: float) -> None:
    logits = torch.tensor([[5.0, -math.inf, -math.inf, 4.0]])
    assert pick_one(logits, draw(temperature=temperature, allowed_token_ids=(1, 2))) in (1, 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter mentions what a card does not
@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_a_broken_model_crashes_nothing(value: float) -> None:
    logits = torch.full((1, 20), value)
    for sampler in (Sampler(20, CPU), block_sampler(20)):
        for how in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}):
            assert 0 <= int(sampler.sample(logits, [draw(**how)]).tokens[0]) < 20


def test_ids_beyond_the_vocabulary_are_passed_over() -> None:
    how = {
        "repetition_penalty": 2.0,
        "min_tokens": 3,
        "stop_ids": frozenset({99}),
        "logit_bias": ((50, 1.0),),
    }
    assert pick_one(torch.tensor([[1.0, 2.0]]), draw(prompt=[70, 1], output=[80], **how)) == 0


def test_the_logits_passed_in_are_left_alone() -> None:
    logits = logits_of(3, 200)
    before = logits.clone()
    every = draw(1, temperature=1.0, top_k=5, repetition_penalty=2.0, prompt=[1], allowed_token_ids=(1, 2, 3))
    for sampler in (Sampler(200, CPU), block_sampler(200)):
        sampler.sample(logits, [every])
        assert torch.equal(logits, before)


# ── log-probabilities ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vocab", [7, 1003, 50257])
def test_logprobs_are_the_models_own(vocab: int) -> None:
    logits = logits_of(4, vocab)
    wanted = logits.double().log_softmax(-1)
    for sampler in (Sampler(vocab, CPU), block_sampler(vocab)):
        picks = sampler.sample(logits, [draw(2, temperature=2.0, logit_bias=((1, 50.0),))])
        own = wanted.gather(1, picks.tokens[:, None])[:, 0].float()
        torch.testing.assert_close(picks.logprobs, own, rtol=1e-6, atol=2e-6)
        assert picks.tokens[2] == 1
        assert bool((picks.logprobs <= 0).all())


def test_scores_have_the_bits_of_picks() -> None:
    logits = logits_of(5, 1003)
    for sampler in (Sampler(1003, CPU), block_sampler(1003)):
        picks = sampler.sample(logits, [draw(3, temperature=3.0)])
        rows = [4, 0, 3, 3]
        scores = sampler.score(logits, rows, picks.tokens[rows].tolist())
        assert torch.equal(scores, picks.logprobs[rows])
        assert sampler.score(logits, [], []).shape == (0,)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=20, max_size=20), st.integers(-1, 25))
def test_top_is_ordered_by_value_then_id(raw: list[int], num: int) -> None:
    logits = torch.tensor([[0.0] * 20, [float(x) for x in raw]])
    for sampler in (Sampler(20, CPU), block_sampler(20)):
        (found, none) = sampler.top(logits, [1, 0], [num, 0])
        values = sampler.score(logits, [1] * 20, list(range(20))).tolist()
        wanted = sorted(enumerate(values), key=lambda pair: (-pair[1], pair[0]))
        assert list(found) == wanted[: 20 if num < 0 else num]
        assert none == ()


def test_top_holds_the_bits_of_picks() -> None:
    logits = logits_of(3, 1003)
    sampler = Sampler(1003, CPU)
    picks = sampler.sample(logits, [])
    tops = sampler.top(logits, [0, 1, 2], [1, 5, 2])
    assert [top[0] for top in tops] == list(zip(picks.tokens.tolist(), picks.logprobs.tolist(), strict=True))


# ── the frame rule ───────────────────────────────────────────────────────────────────────────────

KINDS: list[dict[str, Any]] = [
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


def asked(row: int, k: int) -> SamplingRow:
    prompt = [(k * 31 + i * 7) % 900 for i in range(40)]
    return draw(row, prompt=prompt[:25], output=prompt[25:], position=40 + k, seed=k, **KINDS[k % len(KINDS)])


def everything(sampler: Sampler, logits: torch.Tensor, draws: list[SamplingRow]) -> list[tuple[Any, ...]]:
    """All a row can be asked, by row, as bits."""
    picks: SamplerOutput = sampler.sample(logits, draws)
    rows = list(range(logits.shape[0]))
    scores = sampler.score(logits, rows, [1] * len(rows))
    bits = torch.stack([picks.logprobs, scores]).view(torch.int32).T.tolist()
    tops = sampler.top(logits, rows, [4] * len(rows))
    return list(zip(picks.tokens.tolist(), bits, tops, strict=True))


@pytest.mark.parametrize("vocab", [1003, 50257])
def test_a_row_depends_on_nothing_but_itself(vocab: int) -> None:
    logits, sampler = logits_of(len(KINDS) * 2, vocab), Sampler(vocab, CPU)
    alone = [everything(sampler, logits[k : k + 1], [asked(0, k)])[0] for k in range(len(logits))]
    for trial in range(3):
        chance = random.Random(trial)
        order = chance.sample(range(len(logits)), chance.randint(2, len(logits)))
        found = everything(sampler, logits[order], [asked(row, k) for row, k in enumerate(order)])
        assert found == [alone[k] for k in order]


def test_rows_of_a_wider_buffer_give_the_same_bits() -> None:
    """Logits may be a slice of something padded: neither strides nor offsets show."""
    wide = logits_of(4, 1100)
    draws = [asked(row, row) for row in range(4)]
    sampler = Sampler(1003, CPU)
    assert everything(sampler, wide[:, 5:1008], draws) == everything(
        sampler, wide[:, 5:1008].contiguous(), draws
    )


@pytest.mark.gpu
@torch.inference_mode()
def test_on_a_device_a_row_depends_on_nothing_but_itself() -> None:
    device, vocab, rows = torch.device("cuda"), 50257, 32
    sampler = Sampler(vocab, device)
    logits, junk = logits_of(12, vocab).to(device), logits_of(rows, vocab, seed=1).to(device)
    seen: dict[int, tuple[Any, ...]] = {}
    for trial in range(8):
        chance = random.Random(trial)
        places = chance.sample(range(rows), chance.randint(1, 12))
        who = chance.sample(range(12), len(places))
        frame = junk.clone()
        frame[places] = logits[who]
        draws = [asked(place, k) for place, k in zip(places, who, strict=True)]
        found = everything(sampler, frame, draws)
        for place, k in zip(places, who, strict=True):
            assert seen.setdefault(k, found[place]) == found[place]


@pytest.mark.gpu
@torch.inference_mode()
def test_on_a_device_the_choice_is_the_cpus() -> None:
    """Bits may differ; choices hardly can."""
    device, vocab, rows = torch.device("cuda"), 1003, 64
    sampler = Sampler(vocab, device)
    logits = logits_of(rows, vocab)
    draws = [asked(row, row) for row in range(rows)]
    there, here = sampler.sample(logits.to(device), draws), Sampler(vocab, CPU).sample(logits, draws)
    assert there.tokens.tolist() == here.tokens.tolist()
    torch.testing.assert_close(there.logprobs.cpu(), here.logprobs, rtol=1e-6, atol=1e-5)
    hashes = noise.bits(torch.tensor([noise.key(1, 2, 3)]).to(device), vocab)
    assert torch.equal(hashes.cpu(), noise.bits(torch.tensor([noise.key(1, 2, 3)]), vocab))
