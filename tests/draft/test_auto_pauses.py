"""Pauses of `auto` where the device runs beside the host: when asking stops, and what ends a pause."""

import pytest
from auto_cases import (
    NEW_TOKENS,
    NO_MATCH,
    REPEATING,
    Clock,
    TimedDrafter,
    ask,
    auto_of,
    frame_costs,
    verdict,
)

from samewise.draft.auto.auto import Auto
from samewise.draft.ngram import Match, Ngram, TrackedMatch
from samewise.draft.tuning import DEFAULTS
from samewise.types import Verdict


class SimulatedDevice:
    """Sequences that say a known text: a frame takes 1 ms, and 0.4 ms more where `auto` was asked before it.

    `right`: whether drafts that agree with the text are accepted.
    """

    FRAME, ASKING, ROW = 1e-3, 0.4e-3, 1e-6
    PROMPT_LEN = 8

    def __init__(self, text, *, right=True, live=1, ngram=None, explain=False):
        self.clock, self.right, self.live = Clock(), right, live
        frames = frame_costs(self.FRAME, self.ROW)
        self.auto = Auto(ngram or Ngram(), [], frames, self.clock, ahead=True, explain=explain)
        self.text, self.num_committed = text, self.PROMPT_LEN
        self.num_asked = self.num_frames = 0

    def run(self, until):
        """Commit the text up to this length."""
        draft = ()  # in the frame in flight
        while self.num_committed < until:
            self.num_frames += 1
            self.clock.now += self.FRAME + self.ROW * len(draft)
            agreed = [a == b for a, b in zip(draft, self.text[self.num_committed :], strict=False)]
            accepted = [*agreed, False].index(False) if self.right else 0
            tokens = self.text[self.num_committed : self.num_committed + 1 + accepted]
            kv_len = self.num_committed + accepted
            committed = Verdict(
                0, tuple(tokens), (0.0,) * len(tokens), (), kv_len, len(draft), accepted, drafter="ngram"
            )
            self.num_committed += len(tokens)
            was_quiet = self.auto.quiet
            self.auto.observe([committed._replace(seq_id=i) for i in range(self.live)])
            draft = ()
            if was_quiet:
                continue  # the next frame was launched ahead
            self.clock.now += self.ASKING
            self.num_asked += 1
            proposals = self.auto.propose([ask(i, self.text[: self.num_committed]) for i in range(self.live)])
            draft = proposals[0].tokens if proposals else ()

    @property
    def tokens_per_frame_time(self):
        return (self.num_committed - self.PROMPT_LEN) / (self.clock.now / self.FRAME)


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
    assert auto.propose([ask(1, NO_MATCH)]) == []
    assert not auto.quiet
    auto.observe([verdict(0, 2, 1, "ngram")])
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


class FalseMatches(Ngram):
    """Finds a long match everywhere."""

    def find(self, ask):
        return Match((1,) * 8, 8, shared=False)

    def track(self, seq_id, tokens, length):
        return TrackedMatch(8, None)


def test_matches_that_are_never_right_are_soon_not_asked_about():
    device = SimulatedDevice(NEW_TOKENS, right=False, ngram=FalseMatches())
    device.run(1500)
    assert device.num_asked < 200
    assert device.tokens_per_frame_time > 0.93


def test_acceptance_is_learned_from_tracked_text_during_pauses():
    """Two tokens that occurred before are always followed by a new one."""
    device = SimulatedDevice([n for i in range(300) for n in (5, 6, 1000 + i)], right=False)
    device.run(800)
    asked_before = device.num_asked
    assert device.auto.stats()["auto"]["match_acceptance"][2] < 0.1
    device.run(850)
    assert device.num_asked - asked_before <= 1


def test_a_match_that_is_right_only_for_the_next_token_ends_no_pause():
    """That token is committed before a draft could be made."""
    device = SimulatedDevice([n for i in range(300) for n in (5, 6, 7, 1000 + i)])
    device.run(400)
    asked_before = device.num_asked
    device.run(1100)
    assert device.num_asked - asked_before < 20
    assert device.tokens_per_frame_time > 0.97


def test_short_matches_that_are_wrong_cost_little():
    text = [n for i in range(300) for n in (5, 6, 1000 + i)]
    device = SimulatedDevice(text, right=False)
    device.run(800)
    assert device.tokens_per_frame_time > 0.9


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
    auto = Auto(Ngram(), [drafter], frame_costs(0.001, 1e-6), clock, ahead=True)
    num_asked, tokens = 0, list(NO_MATCH)
    for token in range(1000, 1400):
        clock.now += 0.001
        was_quiet = auto.quiet
        tokens.append(token)
        auto.observe([verdict(0, 0, 0, "")._replace(tokens=(token,))])
        if not was_quiet:
            num_asked += 1
            auto.propose([ask(0, tokens)])
    assert (drafter.num_passes > 0) is reached
    assert reached or num_asked < 60


def test_pauses_and_their_price_are_reported(caplog):
    with caplog.at_level("INFO", "samewise.auto"):
        device = SimulatedDevice(NEW_TOKENS[:60] + [7, 8, 9] * 30, explain=True)
        device.run(140)
    for text in ("nothing to propose; pausing", "asking again; "):
        assert text in caplog.text
    report = device.auto.stats()["auto"]["rest"]
    assert report["rests"] > 0
    assert report["calls"] > 0
    assert report["price_seconds"] == pytest.approx(SimulatedDevice.ASKING, rel=0.2)
