"""`auto` drafts where measured costs and acceptance say that it pays."""

import subprocess
import sys

import pytest
from auto_cases import (
    NEW_TOKENS,
    NO_MATCH,
    REPEATING,
    SHORT_MATCH,
    Clock,
    TimedDrafter,
    ask,
    auto_of,
    frame_costs,
    verdict,
)

from samewise.draft.auto.explain import DecisionLog
from samewise.draft.cost_model import FrameCosts
from samewise.draft.tuning import DEFAULTS
from samewise.types import Proposal

RETRY_STEPS = DEFAULTS.auto.retry_steps


def draft_lengths(auto, num_steps, accepted, drafter="timed"):
    """Steps of one sequence, of whose drafts so many tokens are accepted; the length of each draft."""
    lengths, draft = [], []
    for _ in range(num_steps):
        proposals = auto.propose([ask(0, NO_MATCH, draft=draft)])
        for proposal in proposals:
            draft += proposal.tokens
        if not any(proposal.more for proposal in proposals):
            auto.observe([verdict(0, len(draft), min(accepted, len(draft)), drafter)])
            lengths.append(len(draft))
            draft = []
    return lengths


# ---- suffix matches


def test_repeating_text_is_drafted_and_other_text_is_not():
    proposals = auto_of().propose([ask(0, REPEATING), ask(1, NO_MATCH)])
    assert [p.seq_id for p in proposals] == [0]
    assert proposals[0].tokens == ((1, 2, 3, 4) * 4)[: len(proposals[0].tokens)]
    assert proposals[0].drafter == "ngram"


def test_fewer_tokens_are_drafted_the_more_a_row_costs():
    def num_drafted(per_row):
        auto = auto_of(frame_costs(per_row=per_row))
        (proposal,) = auto.propose([ask(0, SHORT_MATCH)]) or [Proposal(0, ())]
        return len(proposal.tokens)

    assert num_drafted(0.0) > num_drafted(0.004) > 0
    assert num_drafted(0.5) == 0


def test_matches_that_are_always_wrong_are_not_drafted_any_more():
    auto = auto_of(frame_costs(per_row=0.006))
    for _ in range(30):
        for proposal in auto.propose([ask(0, REPEATING)]):
            auto.observe([verdict(0, len(proposal.tokens), 0, "ngram")])
    assert auto.propose([ask(0, REPEATING)]) == []


def test_drafts_from_matches_that_are_right_grow():
    auto = auto_of(frame_costs(per_row=0.006))
    first = len(auto.propose([ask(0, SHORT_MATCH)])[0].tokens)
    for _ in range(10):
        (proposal,) = auto.propose([ask(0, SHORT_MATCH)])
        auto.observe([verdict(0, len(proposal.tokens), len(proposal.tokens), "ngram")])
    assert len(auto.propose([ask(0, SHORT_MATCH)])[0].tokens) > first


def test_a_long_match_is_drafted_further_than_a_short_one():
    auto = auto_of(frame_costs(per_row=0.006))
    (short,), (long,) = (auto.propose([ask(i, text)]) for i, text in enumerate((SHORT_MATCH, REPEATING)))
    assert len(long.tokens) > 2 * len(short.tokens)


def test_a_sequence_whose_matches_miss_is_drafted_less_than_others():
    auto = auto_of(frame_costs(per_row=0.002))
    for _ in range(4):
        (proposal,) = auto.propose([ask(0, SHORT_MATCH)]) or [Proposal(0, (1,))]
        auto.observe([verdict(0, len(proposal.tokens), 0, "ngram")])
    missed, fresh = (sum(len(p.tokens) for p in auto.propose([ask(i, SHORT_MATCH)])) for i in (0, 1))
    assert missed < fresh


def test_padding_rows_are_filled():
    frames = FrameCosts((128,))
    frames.observe(1, 0.006)
    proposals = auto_of(frames).propose([ask(i, REPEATING) for i in range(4)])
    assert all(len(proposal.tokens) >= 3 for proposal in proposals)


def test_a_larger_frame_is_filled_or_not_begun():
    """Eight sequences fill a frame of 8: the first drafted token costs a frame of 32, the next nothing."""
    frames = frame_costs(base=0.001, per_row=0.000_02, sizes=(8, 32))
    proposals = auto_of(frames).propose([ask(i, REPEATING) for i in range(8)])
    assert (8 + sum(len(proposal.tokens) for proposal in proposals)) % 32 == 0
    one_match = [ask(0, SHORT_MATCH), *(ask(i, NO_MATCH) for i in range(1, 8))]
    assert auto_of(frame_costs(base=0.001, per_row=0.000_02, sizes=(8, 32))).propose(one_match) == []


# ---- drafters


def test_a_cheap_drafter_that_is_right_is_used_for_long_drafts():
    clock = Clock()
    auto = auto_of(drafters=[TimedDrafter(clock, 0.004)], clock=clock)
    assert draft_lengths(auto, 400, accepted=16)[-1] >= 8
    assert auto.stats()["auto"]["decisions"]["timed"] > 10


@pytest.mark.parametrize(("seconds", "accepted"), [(0.2, 16), (0.02, 0)], ids=["slow", "wrong"])
def test_a_drafter_that_does_not_pay_is_not_tried_again_soon(seconds, accepted):
    clock = Clock()
    drafter = TimedDrafter(clock, seconds)
    auto = auto_of(drafters=[drafter], clock=clock)
    draft_lengths(auto, 60, accepted)
    before = drafter.num_passes
    lengths = draft_lengths(auto, RETRY_STEPS // 2, accepted)
    assert drafter.num_passes == before
    assert set(lengths) == {0}


def test_a_drafter_that_becomes_right_is_used_again():
    clock = Clock()
    drafter = TimedDrafter(clock, 0.004)
    auto = auto_of(drafters=[drafter], clock=clock)
    draft_lengths(auto, 100, accepted=0)
    before = drafter.num_passes
    draft_lengths(auto, 4 * RETRY_STEPS, accepted=16)
    assert drafter.num_passes > before + 50


def test_a_slow_first_pass_does_not_count():
    clock = Clock()
    drafter = TimedDrafter(clock, 0.001)
    auto = auto_of(drafters=[drafter], clock=clock)
    clock.now += 0.3
    propose, first = drafter.propose, [True]

    def slow_once(asks):
        clock.now += 0.3 if first else 0.0
        first.clear()
        return propose(asks)

    drafter.propose = slow_once
    draft_lengths(auto, 200, accepted=16)
    assert drafter.num_passes > 100


# ---- reports


def test_decisions_are_counted_and_explained(caplog):
    auto = auto_of(explain=True)
    with caplog.at_level("INFO", "samewise.auto"):
        auto.propose([ask(0, REPEATING)])
        auto.propose([ask(1, NO_MATCH)])
    assert "tokens drafted" in caplog.text
    assert "no suffix match in" in caplog.text
    report = auto.stats()["auto"]
    assert report["decisions"] == {"ngram": 1, "none": 1}
    assert len(report["match_acceptance"]) == 13
    assert report["rest"] is None


def test_trials_of_drafters_are_explained(caplog):
    clock = Clock()
    auto = auto_of(drafters=[TimedDrafter(clock, 0.001)], clock=clock, explain=True)
    with caplog.at_level("INFO", "samewise.auto"):
        draft_lengths(auto, 3, 0)
    assert "timed is tried for 1 sequences" in caplog.text


def test_nothing_is_explained_unless_asked(caplog):
    with caplog.at_level("INFO", "samewise.auto"):
        DecisionLog().explain("silent")
    assert not caplog.text


def test_without_a_log_handler_explanations_go_to_stderr():
    code = (
        "from samewise.draft.auto.explain import DecisionLog, log; "
        "DecisionLog(); assert not log.handlers; "
        "DecisionLog(explain=True).explain('a reason')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "step 0: a reason"


def test_forgetting_a_sequence_leaves_no_state():
    auto = auto_of(drafters=[TimedDrafter(Clock(), 0.001)])
    auto.propose([ask(5, REPEATING), ask(6, NEW_TOKENS[:9])])
    auto.observe([verdict(5, 2, 1, "ngram"), verdict(6, 2, 1, "timed")])
    auto.propose([ask(6, NEW_TOKENS[:9])])
    for seq_id in (5, 6):
        auto.forget(seq_id)
    owners = (auto, auto._matches, auto._drafters, auto._ngram)
    by_sequence = ("_match_lengths", "_unverified", "_live", "_by_sequence", "_own_rates", "_targets",
                   "_texts", "_requests", "_predicted")  # fmt: skip
    states = {name: vars(owner)[name] for owner in owners for name in by_sequence if name in vars(owner)}
    assert set(states) == set(by_sequence)
    assert not any(states.values()), states
