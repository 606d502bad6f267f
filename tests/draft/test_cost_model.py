"""Measured costs: sizes between, disturbed measurements, and what speculation is worth."""

import pytest

from samewise.draft.cost_model import Curve, FrameCosts, Luck, Rate, Trust, expected


def test_a_curve_is_straight_between_what_was_seen():
    curve = Curve()
    assert (curve.known, curve.at(3)) == (False, 0.0)
    curve.observe(4, 1.0)
    assert [curve.at(n) for n in (1, 4, 9)] == [1.0, 1.0, 1.0]
    curve.observe(8, 2.0)
    assert [curve.at(n) for n in (1, 4, 6, 8, 12)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    assert curve.table() == {4: 1.0, 8: 2.0}


def test_the_first_time_does_not_count_for_long():
    curve = Curve()
    for seconds in (3.0, 0.01, 0.011, 0.009):
        curve.observe(1, seconds)
    assert curve.at(1) < 0.02


def test_one_spike_is_hardly_believed():
    curve = Curve()
    for _ in range(20):
        curve.observe(1, 1.0)
    curve.observe(1, 50.0)
    assert curve.at(1) < 1.6
    for _ in range(60):
        curve.observe(1, 2.0)
    assert curve.at(1) == pytest.approx(2.0, abs=0.05)


def test_frames_are_a_line():
    frames = FrameCosts(tuple(range(1, 65)))
    assert frames.cost(5) == 0.0
    for rows in (1, 3, 8, 17, 64):
        frames.observe(rows, 0.03 + 0.002 * rows)
    assert frames.cost(30) == pytest.approx(0.09)
    assert frames.cost(31) - frames.cost(30) == pytest.approx(0.002)
    assert frames.cost(70) == pytest.approx(frames.cost(64) + frames.cost(6))


def test_one_disturbed_size_does_not_make_a_row_dear():
    frames = FrameCosts(tuple(range(1, 65)))
    for rows in (1, 4, 16, 64):
        frames.observe(rows, 0.03 + 0.002 * rows)
    frames.observe(2, 0.2)
    assert frames.cost(2) - frames.cost(1) < 0.004


def test_rows_up_to_a_size_are_free():
    frames = FrameCosts((128,))
    frames.observe(1, 0.006)
    assert frames.cost(1) == frames.cost(128) == pytest.approx(0.006)
    assert frames.cost(129) == pytest.approx(0.012)
    steps = FrameCosts((1, 2, 4, 8))
    for size in (1, 2, 4, 8):
        steps.observe(size, 0.01 + 0.001 * size)
    assert steps.cost(5) == steps.cost(8)


def test_acceptance_counts_what_was_reached():
    rate = Rate(0.0, 0.0)
    rate.observe(5, 5)
    assert rate.value == 1.0
    rate.observe(5, 0)
    assert rate.value == pytest.approx(5 / 6)
    for _ in range(500):
        rate.observe(4, 0)
    assert rate.value < 0.05


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_expected_tokens(rate):
    by_hand = sum(rate**k for k in range(6))
    assert expected(rate, 5) == pytest.approx(by_hand)


def test_rows_that_come_with_a_size():
    frames = FrameCosts((1, 2, 4, 8))
    assert [frames.padding(rows) for rows in (1, 3, 5, 8, 9, 11)] == [0, 1, 3, 0, 0, 1]


def test_a_claim_is_believed_until_more_is_seen():
    trust = Trust()
    assert trust.chance(0.1) < 0.2 < 0.8 < trust.chance(0.9)
    for _ in range(60):
        trust.observe(0.1, right=True)
    assert trust.chance(0.1) > 0.97  # many right ones are not held back by what was believed before
    assert trust.chance(0.3) > 0.5  # and say something of others
    for _ in range(40):
        trust.observe(0.3, right=False)
    assert trust.chance(0.3) < 0.05
    assert 0.3 < trust.least(0.9) <= 1.0


def test_a_rate_that_is_known_counts_before_any_guess():
    assert Trust.after(0.95).chance(0.3) > Trust().chance(0.3)
    assert Rate(24.0, 24.0).value == 1.0
    assert Rate(24.0, 24.0).careful == pytest.approx(0.98)


def test_luck_scales_how_often_one_misses():
    luck = Luck()
    assert luck.chance(0.7) == pytest.approx(0.7)
    for _ in range(20):
        luck.observe(0.5, right=True)
    assert 0.5 < luck.chance(0.5) < 1.0
    for _ in range(40):
        luck.observe(0.5, right=False)
    assert luck.chance(0.5) < 0.2
    assert luck.chance(0.0) == 0.0


def test_rows_that_read_count_until_enough_else_was_seen():
    """They are spared the head, so they look cheaper than guesses are."""
    frames = FrameCosts(tuple(range(1, 65)))
    assert not frames.known
    frames.observe(64, 0.030 + 64 * 0.001, reading=True)
    assert frames.known
    frames.observe(1, 0.032)
    assert frames.cost(11) - frames.cost(1) == pytest.approx(0.010, rel=0.02)
    for rows in (1, 3, 8):
        frames.observe(rows, 0.030 + rows * 0.002)
    assert frames.cost(11) - frames.cost(1) == pytest.approx(0.020, rel=0.02)
