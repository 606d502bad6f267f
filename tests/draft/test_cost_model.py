"""Measured costs and acceptance: interpolation, disturbed measurements, expected tokens of a draft."""

import pytest

from samewise.draft.cost_model import (
    AcceptanceRate,
    BroughtRatio,
    Calibration,
    CostCurve,
    FrameCosts,
    expected_tokens,
)


def frames_of(*sizes, base, per_row):
    """FrameCosts that have measured frames of these sizes, each once."""
    frames = FrameCosts(tuple(range(1, 65)))
    for rows in sizes:
        frames.observe(rows, base + per_row * rows)
    return frames


def test_a_cost_curve_interpolates_between_measured_sizes():
    curve = CostCurve()
    assert (curve.known, curve.at(3)) == (False, 0.0)
    curve.observe(4, 1.0)
    assert [curve.at(n) for n in (1, 4, 9)] == [1.0, 1.0, 1.0]
    curve.observe(8, 2.0)
    assert [curve.at(n) for n in (1, 4, 6, 8, 12)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    assert curve.table() == {4: 1.0, 8: 2.0}


def test_a_slow_first_measurement_is_replaced_by_lower_ones():
    curve = CostCurve()
    for seconds in (3.0, 0.01, 0.011, 0.009):
        curve.observe(1, seconds)
    assert curve.at(1) < 0.02


def test_an_outlier_has_little_weight_but_a_lasting_change_is_followed():
    curve = CostCurve()
    for _ in range(20):
        curve.observe(1, 1.0)
    curve.observe(1, 50.0)
    assert curve.at(1) < 1.6
    for _ in range(60):
        curve.observe(1, 2.0)
    assert curve.at(1) == pytest.approx(2.0, abs=0.05)


def test_frame_costs_are_a_line_over_rows():
    assert FrameCosts(tuple(range(1, 65))).cost(5) == 0.0
    frames = frames_of(1, 3, 8, 17, 64, base=0.03, per_row=0.002)
    assert frames.cost(30) == pytest.approx(0.09)
    assert frames.cost(31) - frames.cost(30) == pytest.approx(0.002)
    assert frames.cost(70) == pytest.approx(frames.cost(64) + frames.cost(6))


def test_one_disturbed_frame_size_does_not_raise_the_cost_of_a_row():
    frames = frames_of(1, 4, 16, 64, base=0.03, per_row=0.002)
    frames.observe(2, 0.2)
    assert frames.cost(2) - frames.cost(1) < 0.004


def test_rows_that_pad_to_the_same_size_cost_the_same():
    frames = FrameCosts((128,))
    frames.observe(1, 0.006)
    assert frames.cost(1) == frames.cost(128) == pytest.approx(0.006)
    assert frames.cost(129) == pytest.approx(0.012)
    steps = FrameCosts((1, 2, 4, 8))
    for size in (1, 2, 4, 8):
        steps.observe(size, 0.01 + 0.001 * size)
    assert steps.cost(5) == steps.cost(8)


def test_padding_is_the_unused_rows_of_a_frame():
    frames = FrameCosts((1, 2, 4, 8))
    assert [frames.padding(rows) for rows in (1, 3, 5, 8, 9, 11)] == [0, 1, 3, 0, 0, 1]


def test_frames_that_read_prompts_count_until_enough_others_were_measured():
    frames = FrameCosts(tuple(range(1, 65)))
    assert not frames.known
    frames.observe(64, 0.030 + 64 * 0.001, prefill=True)
    assert frames.known
    frames.observe(1, 0.032)
    assert frames.cost(11) - frames.cost(1) == pytest.approx(0.010, rel=0.02)
    for rows in (1, 3, 8):
        frames.observe(rows, 0.030 + rows * 0.002)
    assert frames.cost(11) - frames.cost(1) == pytest.approx(0.020, rel=0.02)


def test_tokens_after_the_first_rejected_one_are_no_trials():
    rate = AcceptanceRate(0.0, 0.0)
    rate.observe(5, 5)
    assert rate.value == 1.0
    rate.observe(5, 0)
    assert rate.value == pytest.approx(5 / 6)
    for _ in range(500):
        rate.observe(4, 0)
    assert rate.value < 0.05


def test_a_smoothed_rate_stays_below_one():
    assert AcceptanceRate(24.0, 24.0).value == 1.0
    assert AcceptanceRate(24.0, 24.0).smoothed == pytest.approx(0.98)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_expected_tokens_are_the_sum_of_reach_chances(rate):
    assert expected_tokens(rate, 5) == pytest.approx(sum(rate**k for k in range(6)))


def test_a_calibration_believes_confidence_until_it_has_trials():
    calibration = Calibration()
    assert calibration.chance(0.1) < 0.2 < 0.8 < calibration.chance(0.9)
    for _ in range(60):
        calibration.observe(0.1, right=True)
    assert calibration.chance(0.1) > 0.97  # many trials outweigh the confidence
    assert calibration.chance(0.3) > 0.5  # and raise the chance of other confidences
    for _ in range(40):
        calibration.observe(0.3, right=False)
    assert calibration.chance(0.3) < 0.05
    assert 0.3 < calibration.min_confidence(0.9) <= 1.0


def test_a_rate_known_beforehand_raises_the_chance_of_every_confidence():
    assert Calibration(0.95).chance(0.3) > Calibration().chance(0.3)


def test_a_brought_ratio_follows_what_trees_bring():
    ratio = BroughtRatio()
    assert ratio.value == 1.0
    for _ in range(400):
        ratio.observe(2.0, 1)
    assert ratio.value == pytest.approx(0.5, abs=0.05)
    for _ in range(4000):
        ratio.observe(2.0, 0)
    assert 0.0 < ratio.value < 0.05


def test_a_size_measured_often_counts_more_than_the_line():
    frames = frames_of(1, 8, 64, base=0.002, per_row=0.000_01)
    assert frames.cost(32) == pytest.approx(0.002_32, rel=0.01)
    for _ in range(200):
        frames.observe(32, 0.003)
    assert frames.cost(32) == pytest.approx(0.003, rel=0.02)
    assert frames.last_seconds == 0.003


def test_steps_are_the_costs_of_frames_of_rising_size():
    frames = FrameCosts((4, 8, 16))
    for rows in frames.sizes:
        frames.observe(rows, 0.001 * rows)
    steps = frames.steps(3, 12)
    assert [num for _, num in steps] == [2, 4, 4]
    costs = [cost for cost, num in steps for _ in range(num)]
    assert costs == [frames.cost(rows) for rows in range(3, 13)]
