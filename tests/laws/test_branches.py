"""Branches: other ways a draft may go, replayed beside it. Whoever wins, the output is what it always is."""

from dataclasses import replace

import pytest
from lawbook import CASES, PAGE, Case, Script, company, play, reference, text, warm

from samewise.testing import Forked, preempting
from samewise.types import Branch, Proposal, Sampling


class Planned:
    """Drafts of `num` guesses, wrong from `wrong` on, with branches made from the truth by `fork`."""

    name = "planned"
    quiet = False

    def __init__(self, script, *, num, wrong, fork):
        self._script, self._num, self._wrong, self._fork = script, num, wrong, fork

    def propose(self, asks):
        proposals = []
        for ask in asks:
            truth = tuple(self._script.guesses(ask)[: min(self._num, ask.room)])
            if len(truth) <= self._wrong:
                continue
            trunk = truth[: self._wrong] + tuple((t + 1) % 256 for t in truth[self._wrong :])
            branches = tuple(self._fork(truth, self._wrong))
            proposals.append(Proposal(ask.seq_id, trunk, drafter=self.name, branches=branches))
        return proposals

    def observe(self, verdicts):
        pass

    def forget(self, seq_id):
        pass


def winning(truth, wrong):
    return [Branch(wrong, truth[wrong:])]


def common_start(truth, wrong):
    """Two branches that agree at first: the second is right for longer."""
    spoiled = (*truth[wrong:-1], (truth[-1] + 1) % 256)
    return [Branch(wrong, spoiled), Branch(wrong, truth[wrong:])]


def losing(truth, wrong):
    return [Branch(wrong, tuple((t + 2) % 256 for t in truth[wrong:])), Branch(0, ((truth[0] + 3) % 256,))]


def from_the_start(truth, wrong):
    return [Branch(0, truth)]


FORKS = [winning, common_start, losing, from_the_start]
LONG = [replace(case, most=40) for case in CASES if case.prompt_logprobs is None]


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("wrong", [0, 2])
def test_whoever_wins(setup, fork, wrong):
    cases = LONG[::3]
    truth = reference(setup, cases)
    script = Script.of(cases, truth)
    for together in (False, True):
        engine = setup.engine(lambda _: Planned(script, num=5, wrong=wrong, fork=fork))
        groups = [cases] if together else [[case] for case in cases]
        heard = [one for group in groups for one in play(engine, group)]
        assert heard == truth
    won = engine.scheduler.counters.drafters["planned"].branches
    assert (won > 0) == (fork is not losing)
    assert engine.scheduler.counters.rolled_back > 0


@pytest.mark.parametrize("length", range(PAGE - 6, PAGE + 3))
def test_a_branch_across_a_page_border(plain, length):
    case = Case("border", text(length, 9), warm(4), most=2 * PAGE)
    truth = reference(plain, [case])
    script = Script.of([case], truth)
    engine = plain.engine(lambda _: Planned(script, num=7, wrong=1, fork=winning))
    assert play(engine, [case]) == truth
    assert engine.scheduler.counters.drafters["planned"].branches > 2


def test_pages_kept_from_a_branch_are_canonical(plain):
    """What won is offered to the prefix index, and read again by others."""
    case = Case("first", text(20, 5), most=3 * PAGE)
    truth = reference(plain, [case])
    engine = plain.engine(lambda _: Planned(Script.of([case], truth), num=6, wrong=1, fork=winning))
    play(engine, [case])
    assert engine.scheduler.counters.drafters["planned"].branches > 3
    longer = Case("second", (*case.prompt, *truth[0].tokens), most=8)
    (heard,) = play(engine, [longer])
    assert heard.num_cached >= 4 * PAGE
    assert [heard] == reference(plain, [longer])


@pytest.mark.parametrize("num_pages", [6, 9, 12])
def test_when_pages_run_out_branches_go_without(plain, num_pages):
    cases = [Case(f"tight-{i}", text(9, i), warm(i), most=50) for i in range(3)]
    truth = reference(plain, cases)
    script = Script.of(cases, truth)
    engine = plain.engine(lambda _: Planned(script, num=6, wrong=1, fork=winning), num_pages=num_pages)
    assert play(engine, cases) == truth
    tally = engine.scheduler.counters.drafters["planned"]
    assert 0 < tally.branches < tally.drafts  # some got pages, some went without


@pytest.mark.parametrize("seed", range(3))
def test_preempted_and_aborted_between(plain, seed):
    cases = LONG[:6]
    truth = reference(plain, cases)
    engine = plain.engine(lambda parts: Forked(parts, scale=0.5, num=5, seed=seed), num_pages=60)
    strangers = [case.add(engine) for case in company(3)]

    def after(engine, clock):
        if clock % 7 == seed and strangers:
            engine.abort(strangers.pop())

    assert play(engine, cases, step=lambda e: preempting(e, seed), after=after) == truth


def test_branches_fill_frames_of_any_width(plain):
    cases = LONG[:4]
    truth = reference(plain, cases)
    engine = plain.engine(lambda parts: Forked(parts, scale=0.5, num=5), max_num_seqs=2)
    assert play(engine, cases) == truth
    assert engine.scheduler.counters.drafters["forked"].branches > 3


@pytest.mark.parametrize(
    "branch",
    [
        Branch(-1, (1,)),
        Branch(99, (1,)),
        Branch(0, ()),
        Branch(0, (10**9,)),
        Branch(0, (-4,)),
        Branch(0, tuple(range(200))),
    ],
)
def test_what_cannot_be_a_branch_is_dropped(plain, branch):
    case = Case("rude", text(9), Sampling(), most=12)
    truth = reference(plain, [case])
    engine = plain.engine(
        lambda _: Planned(Script.of([case], truth), num=4, wrong=1, fork=lambda *_: [branch])
    )
    assert play(engine, [case]) == truth
    assert engine.scheduler.counters.drafters["planned"].branches == 0
