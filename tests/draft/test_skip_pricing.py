"""Prices of passes, and how far drafts go by them. Nothing is timed."""

import random

import pytest

from samewise.draft.cost_model import FrameCosts, expected_tokens
from samewise.draft.skip.pricing import PassPricing
from samewise.types import LayerSet

LAYERS = 12
SET = LayerSet(frozenset(range(1, 11)), frozenset(range(2, 11)))
MAX_TOKENS = 16


def pricing_of(base=0.018, row=0.0015, a_pass=(0.003, 0.0002), sizes=tuple(range(1, 65))):
    """Frames of `base` + `row` seconds a row; passes of SET of a_pass[0] + a_pass[1] seconds a sequence."""
    frames = FrameCosts(sizes)
    for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        frames.observe(size, base + row * size)
    pricing = PassPricing([(1.0, 3.0)] * LAYERS, 2.0, 0.0, frames, MAX_TOKENS)
    for live in (1, 64):
        pricing.observe_draft_pass(live, SET, a_pass[0] + a_pass[1] * live)
    return pricing, frames


def simulated_throughput(pricing, frames, live, chance, *, rounds=60, seed=0):
    """Tokens per second of drafts that go on as the pricing says; each token is right with this chance."""
    rng, tokens, seconds = random.Random(seed), 0, 0.0
    throughput = pricing.throughput(SET, live, chance)
    for _ in range(rounds):
        right, lens, reaches = [True] * live, [0] * live, [1.0] * live
        going_on = list(range(live))
        while going_on:
            seconds += pricing.pass_seconds(SET, len(going_on))
            for i in going_on:
                lens[i] += 1
                reaches[i] *= chance
                right[i] = right[i] and rng.random() < chance
                tokens += right[i]
            going_on = [i for i in going_on if lens[i] < MAX_TOKENS]
            reached = [reaches[i] for i in going_on]
            rows = live + sum(lens)
            num = pricing.num_worth_another_pass(SET, reached, chance, rows, throughput, 1)
            going_on = going_on[:num]
        seconds += frames.cost(live + sum(lens))
        tokens += live
    return tokens / seconds


def best_fixed_throughput(pricing, frames, live, chance):
    """The best that drafts of one length for all sequences could do."""
    return max(
        live
        * expected_tokens(chance, k)
        / (k * pricing.pass_seconds(SET, live) + frames.cost(live * (k + 1)))
        for k in range(1, MAX_TOKENS + 1)
    )


@pytest.mark.parametrize("live", [1, 2, 5, 8, 16, 24])
@pytest.mark.parametrize("chance", [0.85, 0.95, 0.99])
@pytest.mark.parametrize(
    "costs",
    [{}, {"row": 0.0}, {"row": 0.0, "sizes": (16,)}, {"a_pass": (0.0005, 0.0)}, {"a_pass": (0.008, 0.001)},
     {"base": 0.005, "row": 0.0001, "sizes": (1, 2, 4, 8, 16, 32, 64, 128)}],
)  # fmt: skip
def test_drafts_go_about_as_far_as_the_best_fixed_length(live, chance, costs):
    pricing, frames = pricing_of(**costs)
    best = best_fixed_throughput(pricing, frames, live, chance)
    assert simulated_throughput(pricing, frames, live, chance) > 0.95 * best


def test_a_pass_that_pays_for_eight_drafts_does_not_pay_for_one():
    pricing, _ = pricing_of()
    throughput = pricing.throughput(SET, 8, 0.97)
    assert pricing.num_worth_another_pass(SET, [0.97] * 8, 0.97, 24, throughput, 1) == 8
    assert pricing.num_worth_another_pass(SET, [0.97], 0.97, 24, throughput, 1) == 0


def test_drafts_that_would_begin_another_frame_do_not_go_on():
    pricing, _ = pricing_of(a_pass=(0.0005, 0.0))
    throughput = pricing.throughput(SET, 8, 0.99)
    assert pricing.num_worth_another_pass(SET, [0.95] * 8, 0.99, 59, throughput, 1) == 5
    assert pricing.num_worth_another_pass(SET, [0.95] * 8, 0.99, 64, throughput, 1) == 0


def test_unlikely_drafts_do_not_go_on():
    pricing, _ = pricing_of()
    throughput = pricing.throughput(SET, 8, 0.98)
    reaches = [0.98] * 6 + [0.2, 0.1]
    assert pricing.num_worth_another_pass(SET, reaches, 0.98, 24, throughput, 1) == 6


def test_the_set_in_use_has_measured_prices_and_other_sets_estimated_ones():
    pricing, _ = pricing_of()
    assert pricing.pass_seconds(SET, 1) == pytest.approx(0.0032)
    pricing.observe_full_pass(8, 0.040)
    other = LayerSet(mlp=frozenset({3}))
    assert 0.03 < pricing.pass_seconds(other, 8) < 0.04
    pricing.observe_draft_pass(8, other, 0.020)
    assert pricing.pass_seconds(other, 8) == pytest.approx(0.020)
    assert pricing.pass_seconds(SET, 8) > 0.004  # measurements of the set before are dropped
