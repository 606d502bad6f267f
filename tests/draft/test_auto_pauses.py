"""Pauses of `auto` where the device runs beside the host: when asking stops, and what ends a pause."""

import pytest
from auto_cases import (
    NEW_TOKENS,
    NO_MATCH,
    REPEATING,
    Clock,
    SimulatedDevice,
    TimedDrafter,
    ask,
    auto_of,
    frame_costs,
    verdict,
)

from samewise.draft.tuning import DEFAULTS


def test_auto_pauses_only_where_frames_are_launched_ahead():
    for ahead in (True, False):
        auto = auto_of(ahead=ahead)
        auto.propose([ask(0, NO_MATCH)])
        assert auto.quiet is ahead
        for _ in range(DEFAULTS.auto.pause_frames):
            auto.observe([])
        assert not auto.quiet


def test_auto_is_not_quiet_while_drafts_await_their_verdict():
    auto = auto_of(ahead=True)
    assert auto.propose([ask(0, REPEATING)])
    for _ in range(200):  # of which each adds to the average that asking brings nothing
        auto._idle.weigh(1.0, 1.1)
    assert auto.propose([ask(1, NO_MATCH)]) == []
    assert not auto.quiet
    auto.observe([verdict(0, 2, 1, "tree")])
    assert auto.quiet


def test_text_without_repetition_is_hardly_ever_asked_about():
    device = SimulatedDevice(NEW_TOKENS)
    device.run(1500)
    assert device.num_asked < 40
    assert device.tokens_per_frame_time > 0.98


def test_a_repetition_ends_the_pause_at_once():
    device = SimulatedDevice(NEW_TOKENS[:400] + NEW_TOKENS[100:300])
    device.run(400)
    asked_before, began = device.num_asked, device.clock.now
    device.run(600)
    assert device.num_asked > asked_before
    assert device.clock.now - began < 40 * device.FRAME  # for 200 tokens


def test_trees_that_are_never_right_are_soon_not_asked_about():
    device = SimulatedDevice([n for i in range(300) for n in (5, 6, 1000 + i)], right=False)
    device.run(800)
    asked_before, began = device.num_asked, device.clock.now
    device.run(900)
    assert device.num_asked - asked_before < 16
    assert device.clock.now - began < 1.08 * 100 * device.FRAME


def test_matches_that_bring_little_cost_little():
    """Two tokens that occurred before are always followed by a new one."""
    device = SimulatedDevice([n for i in range(600) for n in (5, 6, 1000 + i)])
    device.run(1500)
    assert device.tokens_per_frame_time > 0.97


def test_estimates_are_learned_during_pauses():
    """A token that occurs often is followed by another one each time, which is first believed to repeat."""
    device = SimulatedDevice([n for i in range(600) for n in (5, 1000 + i)])
    device.run(300)
    asked_before = device.num_asked
    device.run(1100)
    assert device.num_asked - asked_before < 20


def test_many_sequences_that_gain_nothing_are_left_alone():
    device = SimulatedDevice(NEW_TOKENS, live=128, row=1e-5)
    device.run(400)
    assert device.num_asked < 12
    device.run(408)
    device.auto.recover()
    assert not device.auto.quiet


def test_texts_that_were_not_followed_are_read_when_a_pause_ends():
    live = DEFAULTS.auto.max_followed + 1
    device = SimulatedDevice(NEW_TOKENS[:150] + NEW_TOKENS[20:140] * 4, live=live)
    device.run(600)
    assert device.num_committed > 1.5 * device.num_frames


def test_one_slow_frame_does_not_begin_a_pause():
    device = SimulatedDevice([1, 2, 3, 4, 5, 6, 7, 8] * 300)
    device.run(400)
    device.clock.now += 1.0
    asked, frames, committed = device.num_asked, device.num_frames, device.num_committed
    device.run(800)
    assert device.num_asked - asked > 0.8 * (device.num_frames - frames)
    assert device.num_committed - committed > 8 * (device.num_frames - frames)


class LateDrafter(TimedDrafter):
    """Drafts only after so many calls, as a draft model that reads a prompt first."""

    def __init__(self, clock, num_calls):
        super().__init__(clock, 0.000_1)
        self.num_calls = num_calls

    def propose(self, asks):
        self.num_calls -= 1
        return [] if self.num_calls >= 0 else super().propose(asks)


@pytest.mark.parametrize(("num_calls", "reached"), [(20, True), (10**6, False)])
def test_a_drafter_that_is_not_ready_is_waited_for_a_bounded_time(num_calls, reached):
    clock = Clock()
    drafter = LateDrafter(clock, num_calls)
    auto = auto_of(frame_costs(0.001, 1e-6), [drafter], clock, ahead=True)
    num_asked, tokens = 0, list(NO_MATCH)
    for token in range(1000, 1400):
        clock.now += 0.001
        was_quiet = auto.quiet
        tokens.append(token)
        auto.observe([verdict(0, 0, 0, "", len(tokens) - 1)._replace(tokens=(token,))])
        if not was_quiet:
            num_asked += 1
            auto.propose([ask(0, tokens)])
    assert (drafter.num_passes > 0) is reached
    assert reached or num_asked < 60


def test_pauses_and_their_price_are_reported(caplog):
    with caplog.at_level("INFO", "samewise.auto"):
        device = SimulatedDevice(NEW_TOKENS[:60] + [7, 8, 9] * 30, explain=True)
        device.run(140)
    for text in ("times the tokens per second; pausing", "asking again; "):
        assert text in caplog.text
    report = device.auto.stats()["auto"]["pauses"]
    assert report["begun"] > 0
    assert report["woken"] > 0
    assert report["price_seconds"] == pytest.approx(SimulatedDevice.ASKING, rel=0.2)
