"""`auto` drafts where measured costs and acceptance say that it pays."""

import subprocess
import sys
from array import array

import pytest
from auto_cases import (
    NEW_TOKENS,
    NO_MATCH,
    REPEATING,
    SHORT_MATCH,
    VOCAB,
    Clock,
    SimulatedDevice,
    TimedDrafter,
    ask,
    auto_of,
    frame_costs,
    verdict,
)

from samewise.draft.auto.explain import DecisionLog
from samewise.draft.cost_model import FrameCosts
from samewise.draft.tree import DraftTree
from samewise.draft.tree_drafter import TreeDrafter
from samewise.draft.tree_proposer import TreeProposer
from samewise.draft.tuning import DEFAULTS
from samewise.follow_up import FollowedSequence, FrameToFollow
from samewise.types import ROOT

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


# ---- trees


def num_nodes(auto, *texts):
    proposals = auto.propose([ask(i, text) for i, text in enumerate(texts)])
    return sum(len(proposal.tokens) for proposal in proposals)


def test_repeating_text_is_drafted_and_other_text_is_not():
    proposals = auto_of().propose([ask(0, REPEATING), ask(1, NO_MATCH)])
    assert [p.seq_id for p in proposals] == [0]
    assert DraftTree(proposals[0].tokens, proposals[0].parents).path([1, 2, 3, 4] * 4)
    assert proposals[0].drafter == "tree"


def test_fewer_nodes_are_drafted_the_more_a_row_costs():
    nodes = [num_nodes(auto_of(frame_costs(per_row=per_row)), SHORT_MATCH) for per_row in (0.0, 0.003, 0.5)]
    assert nodes[0] > nodes[1] > nodes[2] == 0


def test_trees_that_are_always_wrong_are_not_drafted_any_more():
    device = SimulatedDevice([1, 2, 3, 4] * 200, right=False, row=1e-4)
    device.run(300)
    before = device.num_nodes
    device.run(400)
    assert device.num_nodes - before < 20


def test_estimates_that_promise_too_much_are_corrected():
    auto = auto_of(frame_costs(per_row=0.006))
    first = num_nodes(auto, REPEATING)
    for _ in range(30):
        auto.propose([ask(0, REPEATING)])
        auto.observe([verdict(0, 8, 0, "tree")])
    assert num_nodes(auto, REPEATING) < first
    assert auto.stats()["auto"]["brought"] < 0.5


def test_padding_rows_are_filled():
    frames = FrameCosts((128,))
    frames.observe(1, 0.006)
    proposals = auto_of(frames).propose([ask(i, REPEATING) for i in range(4)])
    assert all(len(proposal.tokens) >= 16 for proposal in proposals)


def test_a_larger_frame_is_filled_or_not_begun():
    """Eight sequences fill a frame of 8: the first node costs a frame of 32, the next ones nothing."""
    frames = frame_costs(base=0.001, per_row=0.000_02, sizes=(8, 32))
    assert num_nodes(auto_of(frames), *[REPEATING] * 8) == 24
    frames = frame_costs(base=0.001, per_row=0.000_2, sizes=(8, 32))
    assert num_nodes(auto_of(frames), SHORT_MATCH, *[NO_MATCH] * 7) == 0


def test_no_frame_is_made_larger_than_the_largest():
    assert num_nodes(auto_of(frame_costs(sizes=(4, 8))), *[REPEATING] * 8) == 0
    assert num_nodes(auto_of(frame_costs(sizes=(4, 8))), *[REPEATING] * 9) == 0


def test_before_a_frame_was_timed_few_nodes_are_drafted():
    untimed = DEFAULTS.auto.untimed_nodes
    assert num_nodes(auto_of(FrameCosts((64,))), REPEATING, REPEATING) == 2 * untimed


def test_a_prediction_is_drafted():
    (proposal,) = auto_of().propose([ask(0, NO_MATCH[:4], prediction=tuple(range(200, 230)))])
    assert proposal.tokens[:8] == tuple(range(200, 208))


# ---- drafters


class NoFollower(TreeDrafter):
    """Takes down the prices that follow-ups are planned with."""

    def __init__(self):
        super().__init__(VOCAB)
        self.prices = []

    def follower(self, frame, prices, max_nodes, min_prob=0.0):
        self.prices.append(prices)


def follow_frame(live, known=0, length=24):
    """A frame of plain rows of sequences 0 to `live`; the next one reads `known` rows of a prompt."""
    rows = [FollowedSequence(i, 1, 1, 0, length - 1, 0, 0, 1000, 9, 0) for i in range(live)]
    if known:
        rows.append(FollowedSequence(live, 0, 0, 0, 0, known + 5, known, 1000, 9, 0))
    return FrameToFollow(
        list(range(len(rows))), live, array("q", [field for row in rows for field in row]),
        array("i", [REPEATING[-1]] * live), array("i"), array("i", range(known)), b"", array("i"),
        16, 16, 16, 256,
    )  # fmt: skip


@pytest.mark.parametrize("known", [0, 20])
def test_rows_that_read_prompts_are_paid_for(known):
    frames, drafter = frame_costs(sizes=tuple(range(1, 129))), NoFollower()
    trees = TreeProposer(drafter, frames=frames)
    auto = auto_of(frames, trees=trees, ahead=True)
    for plan, factor in ((trees.plan_follow_up, 1.0), (auto.plan_follow_up, DEFAULTS.auto.price_factor)):
        auto.propose([ask(i, REPEATING) for i in range(2)])
        assert plan(follow_frame(2, known)) is None
        seconds, plain = drafter.prices.pop().seconds, frames.cost(2 + known)
        for num in (0, 1, 7):
            assert seconds[num] == pytest.approx(plain + factor * (frames.cost(2 + known + num) - plain))


def test_asking_pays_where_the_pace_of_all_gains_on_average():
    """In logarithms: one of two sequences gets twice its tokens, the other one waits for it."""
    auto = auto_of(frame_costs(base=0.03, per_row=0.0), ahead=True)
    trees = [DraftTree((1,), (ROOT,), (1.0,)), DraftTree()]
    brought = auto._brought_by(2, trees, expected=1.0)
    assert brought.tokens == pytest.approx(1.5)
    assert brought.fair == pytest.approx(2**0.5)
    alone = auto._brought_by(1, trees[:1], expected=1.0)
    assert alone.fair == pytest.approx(alone.tokens)


def test_the_price_of_asking_is_part_of_every_frame():
    device = SimulatedDevice(REPEATING * 10)
    device.run(100)
    prices = device.auto._prices(1, 8)
    assert prices.gap == pytest.approx(device.ASKING)
    assert auto_of()._prices(1, 8).gap == 0.0


def test_a_drafter_that_gets_no_sequence_seldom_keeps_frames_from_following():
    """It is cheap and half as good as the trees of this text, and better than trees were on average."""
    clock, drafter = Clock(), NoFollower()
    frames = frame_costs()
    auto = auto_of(frames, [TimedDrafter(clock, 0.001)], clock, TreeProposer(drafter), ahead=True)
    draft_lengths(auto, 100, accepted=2)
    retry, left = DEFAULTS.auto.retry_assign_steps, 0
    auto._drafters.forget(0)
    for _ in range(10 * retry):
        num = len(drafter.prices)
        auto._advantage = 1.0
        auto.plan_follow_up(follow_frame(1))
        if len(drafter.prices) == num:
            left += 1
            proposals = auto.propose([ask(0, REPEATING)])
            assert [proposal.drafter for proposal in proposals] == ["tree"]
            auto.observe([verdict(0, len(proposals[0].tokens), 16, "tree")])
        auto._log.step += 1
    assert 2 <= left <= 12


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


def test_a_trial_is_of_the_few_sequences_with_the_shortest_texts():
    clock = Clock()
    drafter = TimedDrafter(clock, 0.004)
    auto = auto_of(drafters=[drafter], clock=clock)
    proposals = auto.propose([ask(i, NEW_TOKENS[: 20 - i]) for i in range(8)])
    tried = sorted(p.seq_id for p in proposals if p.drafter == "timed")
    assert tried == [6, 7]


def test_a_drafter_is_timed_though_the_number_of_sequences_changes():
    clock = Clock()
    auto = auto_of(drafters=[TimedDrafter(clock, 0.2)], clock=clock)
    for step in range(4 * DEFAULTS.auto.retry_steps_untimed):
        live = 3 + step % 7
        for proposal in auto.propose([ask(i, NEW_TOKENS[:20]) for i in range(live)]):
            auto.observe([verdict(proposal.seq_id, len(proposal.tokens), 0, proposal.drafter)])
    assert list(auto.stats()["auto"]["drafters"]["timed"]["seconds"]) == [2]


def test_a_drafter_that_becomes_right_is_used_again():
    clock = Clock()
    drafter = TimedDrafter(clock, 0.004)
    auto = auto_of(drafters=[drafter], clock=clock)
    draft_lengths(auto, 100, accepted=0)
    before = drafter.num_passes
    draft_lengths(auto, 4 * RETRY_STEPS, accepted=16)
    assert drafter.num_passes > before + 50


def test_a_sequence_with_a_better_tree_is_not_given_to_a_drafter():
    clock = Clock()
    drafter = TimedDrafter(clock, 0.004)
    auto = auto_of(drafters=[drafter], clock=clock)
    draft_lengths(auto, 300, accepted=1)
    predicted = ask(5, NO_MATCH[:4], prediction=tuple(range(200, 240)))
    drafters = {p.seq_id: p.drafter for p in auto.propose([predicted])}
    assert drafters == {5: "tree"}


def test_a_drafter_that_is_worse_than_trees_is_not_used():
    clock = Clock()
    auto = auto_of(drafters=[TimedDrafter(clock, 0.02)], clock=clock)
    draft_lengths(auto, 300, accepted=2)
    for _ in range(30):
        proposals = auto.propose([ask(9, REPEATING)])
        assert [p.drafter for p in proposals] == ["tree"]


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
    assert "0 nodes for 1 sequences" in caplog.text
    stats = auto.stats()
    assert stats["auto"]["decisions"] == {"tree": 1, "none": 1}
    assert stats["auto"]["pauses"] is None
    assert stats["tree"]["trees"] == 1


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
    auto.observe([verdict(5, 2, 1, "tree"), verdict(6, 2, 1, "timed")])
    auto.propose([ask(6, NEW_TOKENS[:9])])
    for seq_id in (5, 6):
        auto.forget(seq_id)
    owners = (auto, auto._drafters, auto._trees, auto._trees._drafter)
    by_sequence = ("_expected", "_unverified", "_live", "_own_rates", "_targets", "_known", "_sequences")
    states = {name: vars(owner)[name] for owner in owners for name in by_sequence if name in vars(owner)}
    assert set(states) == set(by_sequence)
    assert not any(states.values()), states
