"""Pacing of a draft model: how long chains are, which nodes are verified, when drafting pauses."""

from array import array

import pytest

from samewise.draft.cost_model import FrameCosts
from samewise.draft.model_pacing import Choice, Draft, ModelPacing, Pauses
from samewise.draft.tuning import ModelTuning, Tuning
from samewise.types import ROOT, Ask, Sampling, Verdict


class Clock:
    """Moved by hand."""

    now = 0.0

    def __call__(self):
        return self.now


def frames_of(base=2.0, per_row=0.0, sizes=tuple(range(1, 129))):
    frames = FrameCosts(sizes)
    for rows in sizes:
        frames.observe(rows, base + per_row * rows)
    return frames


def ask(seq_id=0, num_tokens=5, max_nodes=32, **sampling):
    tokens = list(range(num_tokens))
    return Ask(
        seq_id, tokens, 4, [], num_tokens - 1, array("i"), Sampling(**sampling), 16, max_nodes=max_nodes
    )


def draft_of(an_ask=None, max_tokens=16):
    return Draft(an_ask or ask(), array("i"), max_tokens)


def verdict(tokens, seq_id=0, before=5):
    return Verdict(seq_id, tuple(tokens), (), (), before + len(tokens) - 1, 1, len(tokens) - 1)


def chain(pacing, clock, pass_seconds, choices, drafts=None):
    """One draft of these choices, its passes taking so long; the proposals."""
    drafts = drafts or [draft_of()]
    pacing.begin(len(drafts))
    for choice in choices:
        clock.now += pass_seconds
        pacing.add(drafts, [choice] * len(drafts))
    return pacing.proposals(drafts, "model")


def taught(rate, pass_seconds, frames=None, steps=40):
    """A pacing that saw tokens of confidence 0.5 accepted at this rate, and its clock."""
    clock = Clock()
    pacing = ModelPacing(frames or frames_of(), clock)
    for i in range(steps):
        chain(pacing, clock, pass_seconds, [Choice(7, 0.5)] * 2)
        clock.now += 2.0
        right = (i * rate) % 1.0 + rate >= 1.0
        pacing.observe(verdict((7, 7, 7) if right else (8,)))
    return pacing, clock


def length(pacing, clock, pass_seconds, max_tokens=16):
    """How long a chain of middling confidence becomes, where each pass ends before the next is decided."""
    draft = draft_of(max_tokens=max_tokens)
    pacing.begin(1)
    while True:
        clock.now += pass_seconds
        pacing.add([draft], [Choice(7, 0.5)])
        if len(draft.choices) == max_tokens or not pacing.worth_another([draft], [draft], 0):
            return len(draft.choices)


def test_chains_grow_with_acceptance_and_shrink_with_the_seconds_of_a_pass():
    lengths = {
        (rate, seconds): length(*taught(rate, seconds), seconds)
        for rate in (0.2, 0.9)
        for seconds in (0.1, 1.0)
    }
    assert lengths[0.9, 0.1] > lengths[0.9, 1.0]
    assert lengths[0.9, 0.1] > lengths[0.2, 0.1]
    assert lengths[0.2, 1.0] == 1


def test_a_token_of_low_confidence_ends_a_chain():
    pacing, clock = taught(0.9, 0.2)
    draft = draft_of()
    pacing.begin(1)
    pacing.add([draft], [Choice(7, 0.5)])
    clock.now += 0.2
    assert pacing.worth_another([draft], [draft], 0)
    for _ in range(60):  # tokens of low confidence were always wrong
        pacing.proposals([draft_with(pacing, Choice(7, 0.05))], "model")
        pacing.observe(verdict((8,)))
    unsure = draft_with(pacing, Choice(7, 0.05))
    assert not pacing.worth_another([unsure], [unsure], 0)


def draft_with(pacing, *choices):
    draft = draft_of()
    pacing.begin(1)
    for choice in choices:
        pacing.add([draft], [choice])
    return draft


def test_before_a_pass_was_timed_a_chain_has_a_fixed_length():
    pacing, draft = ModelPacing(frames_of(), Clock()), draft_of()
    tuning = ModelTuning()
    assert pacing.worth_another([draft], [draft], tuning.untimed_passes - 1)
    assert not pacing.worth_another([draft], [draft], tuning.untimed_passes)


def test_alternatives_to_unsure_tokens_are_leaves_after_the_chain():
    pacing, clock = ModelPacing(frames_of(), Clock()), Clock()
    choices = [Choice(10, 0.5, (11, 12)), Choice(20, 0.5, (21,)), Choice(30, 1.0)]
    (proposal,) = chain(pacing, clock, 0.1, choices)
    assert proposal.tokens[:3] == (10, 20, 30)
    assert proposal.parents[:3] == (ROOT, 0, 1)
    leaves = dict(zip(proposal.tokens[3:], proposal.parents[3:], strict=True))
    assert leaves[11] == ROOT
    assert leaves[21] == 0
    assert proposal.tokens.index(21) < proposal.tokens.index(11)  # the deepest first


def test_no_more_nodes_than_the_ask_allows():
    choices = [Choice(10, 0.5, (11, 12, 13)), Choice(20, 0.5, (21, 22, 23))]
    for limit in (1, 2, 4):
        pacing = ModelPacing(frames_of(), Clock())
        (proposal,) = chain(pacing, Clock(), 0.1, choices, [draft_of(ask(max_nodes=limit))])
        assert 1 <= len(proposal.tokens) <= limit


def test_without_a_limit_of_nodes_a_draft_is_a_chain():
    (proposal,) = chain(
        ModelPacing(frames_of(), Clock()),
        Clock(),
        0.1,
        [Choice(10, 0.5, (11,))],
        [draft_of(ask(max_nodes=0))],
    )
    assert (proposal.tokens, proposal.parents) == ((10,), ())


def test_leaves_are_left_out_where_rows_cost_more_than_they_bring():
    choices = [Choice(10, 0.5, (11, 12, 13))]
    (free,) = chain(ModelPacing(frames_of(), Clock()), Clock(), 0.1, choices)
    (dear,) = chain(ModelPacing(frames_of(0.1, 5.0), Clock()), Clock(), 0.1, choices)
    assert len(free.tokens) > 1
    assert dear.tokens == (10,)


def test_alternatives_are_believed_by_how_often_their_rank_was_right():
    pacing = ModelPacing(frames_of(), Clock())
    for _ in range(30):
        chain(pacing, Clock(), 0.1, [Choice(10, 0.5, (11, 12, 13))])
        pacing.observe(verdict((12,)))
    first, second, third = pacing.report()["alternative_acceptance"]
    assert second > 0.9
    assert max(first, third) < 0.1


def test_acceptance_is_learned_by_position_from_what_was_committed():
    pacing = ModelPacing(frames_of(), Clock())
    chain(pacing, Clock(), 0.1, [Choice(10, 0.9), Choice(20, 0.9), Choice(30, 0.9)])
    pacing.observe(verdict(()))  # a frame that only read: nothing is learned, the draft waits
    pacing.observe(verdict((10, 21)))
    assert pacing.report()["acceptance_by_position"] == [1.0, 0.0]
    chain(pacing, Clock(), 0.1, [Choice(10, 0.9)])
    pacing.observe(verdict((10,), before=9))  # another place: not this draft
    assert pacing.report()["acceptance_by_position"] == [1.0, 0.0]
    assert not pacing.has_drafts


def test_the_end_of_the_text_ends_a_draft():
    pacing, draft = ModelPacing(frames_of(), Clock()), draft_of(ask(stop_ids=frozenset({3})))
    pacing.begin(1)
    pacing.add([draft], [Choice(3, 0.9)])
    pacing.add([draft], [Choice(4, 0.9)])
    assert draft.ended


# -- pauses


def steps(pauses, clock, num, tokens, seconds):
    for _ in range(num):
        pauses.begin([0])
        pauses.observe([verdict((1,) * tokens)])
        clock.now += seconds


@pytest.fixture
def pauses():
    tuning = Tuning(model=ModelTuning(min_steps=8, pause_frames=4, max_pause_frames=16))
    return Pauses(frames_of(2.0), Clock(), tuning)


def test_drafting_goes_on_where_it_pays(pauses):
    steps(pauses, pauses._clock, 100, tokens=3, seconds=4.0)
    assert not pauses.pausing
    assert pauses.speedup == pytest.approx(1.5)


def test_drafting_pauses_where_it_does_not_pay_and_is_tried_again(pauses):
    for num_frames in (4, 8, 16, 16):
        steps(pauses, pauses._clock, 8, tokens=1, seconds=3.0)
        assert not pauses.pausing
        pauses.begin([0])
        assert pauses.pausing
        for _ in range(num_frames):
            assert pauses.pausing
            pauses.begin([0])  # as where another proposer is asked too
            pauses.observe([verdict((1,))])
        assert not pauses.pausing


def test_another_load_ends_a_pause(pauses):
    steps(pauses, pauses._clock, 9, tokens=1, seconds=3.0)
    assert pauses.pausing
    pauses.observe([verdict((1,), seq_id) for seq_id in range(4)])
    assert not pauses.pausing


def test_steps_in_which_sequences_came_or_went_are_not_measured(pauses):
    for _ in range(50):
        steps(pauses, pauses._clock, 1, tokens=1, seconds=3.0)
        pauses.interrupt()
    assert pauses.speedup is None
    assert not pauses.pausing
