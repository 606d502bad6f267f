"""Prices of passes, and how far drafts go by them: numbers in, numbers out, nothing is timed."""

import random

import pytest

from samewise.draft.cost_model import FrameCosts, expected
from samewise.draft.skip.pricing import Pricing
from samewise.types import LayerSet

LAYERS = 12
SET = LayerSet(frozenset(range(1, 11)), frozenset(range(2, 11)))
MOST = 16


def priced(base=0.018, row=0.0015, a_pass=(0.003, 0.0002), sizes=tuple(range(1, 65))):
    """FrameCosts of `base` + `row` seconds a row, passes of the set by their two numbers likewise."""
    frames = FrameCosts(sizes)
    for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        frames.observe(size, base + row * size)
    pricing = Pricing([(1.0, 3.0)] * LAYERS, 2.0, 0.0, frames, MOST)
    for live in (1, 64):
        pricing.drafted(live, SET, a_pass[0] + a_pass[1] * live)
    return pricing, frames


def played(pricing, frames, live, chance, *, rounds=60, seed=0):
    """Tokens per second of drafts that go on as it says; every guess is right with that chance."""
    rng, tokens, seconds = random.Random(seed), 0, 0.0
    pace = pricing.pace(SET, live, chance)
    for _ in range(rounds):
        right, lens, reaches = [True] * live, [0] * live, [1.0] * live
        going = list(range(live))
        while going:
            seconds += pricing.seconds(SET, len(going))
            for i in going:
                lens[i] += 1
                reaches[i] *= chance
                right[i] = right[i] and rng.random() < chance
                tokens += right[i]
            going = [i for i in going if lens[i] < MOST]
            rows = live + sum(lens)
            going = going[: pricing.going_on(SET, [reaches[i] for i in going], chance, rows, pace, 1)]
        seconds += frames.cost(live + sum(lens))
        tokens += live
    return tokens / seconds


def best_of(pricing, frames, live, chance):
    """The best that drafts of one length for all could do."""
    return max(
        live * expected(chance, k) / (k * pricing.seconds(SET, live) + frames.cost(live * (k + 1)))
        for k in range(1, MOST + 1)
    )


@pytest.mark.parametrize("live", [1, 2, 5, 8, 16, 24])
@pytest.mark.parametrize("chance", [0.85, 0.95, 0.99])
@pytest.mark.parametrize(
    "costs",
    [{}, {"row": 0.0}, {"row": 0.0, "sizes": (16,)}, {"a_pass": (0.0005, 0.0)}, {"a_pass": (0.008, 0.001)},
     {"base": 0.005, "row": 0.0001, "sizes": (1, 2, 4, 8, 16, 32, 64, 128)}],
)  # fmt: skip
def test_drafts_go_as_far_as_the_best_length_would(live, chance, costs):
    pricing, frames = priced(**costs)
    best = best_of(pricing, frames, live, chance)
    assert played(pricing, frames, live, chance) > 0.95 * best


def test_one_straggler_does_not_keep_everybody_waiting():
    """A pass is nearly as dear for one as for eight: what eight pay for together, one does not pay for."""
    pricing, _ = priced()
    pace = pricing.pace(SET, 8, 0.97)
    assert pricing.going_on(SET, [0.97] * 8, 0.97, 24, pace, 1) == 8
    assert pricing.going_on(SET, [0.97], 0.97, 24, pace, 1) == 0


def test_those_who_would_begin_another_frame_stay():
    pricing, _ = priced(a_pass=(0.0005, 0.0))
    pace = pricing.pace(SET, 8, 0.99)
    assert pricing.going_on(SET, [0.95] * 8, 0.99, 59, pace, 1) == 5
    assert pricing.going_on(SET, [0.95] * 8, 0.99, 64, pace, 1) == 0


def test_the_unlikely_stay_behind():
    pricing, _ = priced()
    pace = pricing.pace(SET, 8, 0.98)
    assert pricing.going_on(SET, [0.98] * 6 + [0.2, 0.1], 0.98, 24, pace, 1) == 6


def test_what_was_drafted_with_is_priced_as_measured_and_the_rest_reckoned():
    pricing, _ = priced()
    assert pricing.seconds(SET, 1) == pytest.approx(0.0032)
    pricing.observe_whole(8, 0.040)
    other = LayerSet(mlp=frozenset({3}))
    assert 0.03 < pricing.seconds(other, 8) < 0.04
    pricing.drafted(8, other, 0.020)
    assert pricing.seconds(other, 8) == pytest.approx(0.020)
    assert pricing.seconds(SET, 8) > 0.004  # its passes are of the past


def test_copying_a_page_has_its_price():
    _, frames = priced()
    pricing = Pricing([(1.0, 3.0)] * LAYERS, 2.0, 0.5, frames, MOST)
    assert pricing.copying(16) == 0.0
    pricing.observe_whole(1, 0.010)
    assert pricing.copying(16) == pytest.approx(0.010 * 2 * 16 * 0.5 * LAYERS / (4.0 * LAYERS + 2.0))
