"""Law 1 with branches: alternatives verified beside a draft change no bit, whichever of them is accepted."""

from dataclasses import replace

import pytest
from law_helpers import (
    CASES,
    PAGE,
    Case,
    KnownAnswers,
    other_requests,
    random_prompt,
    run_alone,
    run_cases,
    run_one,
    run_reference,
    run_references,
    sampled,
)

from samewise.draft.base import Proposer
from samewise.testing import Forked, preempting
from samewise.types import Branch, Proposal


class BranchedAnswers(Proposer):
    """Drafts of `num` tokens, wrong from place `wrong` on, with branches `fork(right_tokens, wrong)`."""

    name = "branched"

    def __init__(self, known, *, num, wrong, fork):
        self._known, self._num, self._wrong, self._fork = known, num, wrong, fork

    def propose(self, asks):
        proposals = []
        for ask in asks:
            right = tuple(self._known.continuation(ask)[: min(self._num, ask.room)])
            if len(right) <= self._wrong:
                continue
            trunk = right[: self._wrong] + tuple((token + 1) % 256 for token in right[self._wrong :])
            branches = tuple(self._fork(right, self._wrong))
            proposals.append(Proposal(ask.seq_id, trunk, drafter=self.name, branches=branches))
        return proposals


def num_branches(engine, drafter="branched"):
    return engine.scheduler.counters.drafters[drafter].branches


def right_branch(right, wrong):
    return [Branch(wrong, right[wrong:])]


def two_branches_with_a_common_start(right, wrong):
    """The second branch is right for one token more."""
    shorter = (*right[wrong:-1], (right[-1] + 1) % 256)
    return [Branch(wrong, shorter), Branch(wrong, right[wrong:])]


def wrong_branches(right, wrong):
    return [
        Branch(wrong, tuple((token + 2) % 256 for token in right[wrong:])),
        Branch(0, ((right[0] + 3) % 256,)),
    ]


def branch_from_the_start(right, wrong):
    return [Branch(0, right)]


FORKS = [right_branch, two_branches_with_a_common_start, wrong_branches, branch_from_the_start]
LONG = [replace(case, max_tokens=40) for case in CASES if case.prompt_logprobs is None]


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("wrong", [0, 2])
def test_output_is_the_same_whichever_branch_is_accepted(setup, fork, wrong):
    cases = LONG[::3]
    expected = run_references(setup, cases)
    known = KnownAnswers.of(cases, expected)
    for run in (run_alone, run_cases):
        engine = setup.engine(lambda _: BranchedAnswers(known, num=5, wrong=wrong, fork=fork))
        assert run(engine, cases) == expected
    assert (num_branches(engine) > 0) == (fork is not wrong_branches)
    assert engine.scheduler.counters.rolled_back > 0


@pytest.mark.parametrize("length", range(PAGE - 6, PAGE + 3))
def test_a_branch_across_a_page_border_changes_nothing(basic, length):
    case = Case("border", random_prompt(length, 9), sampled(4), max_tokens=2 * PAGE)
    expected = run_reference(basic, case)
    known = KnownAnswers.of([case], [expected])
    engine = basic.engine(lambda _: BranchedAnswers(known, num=7, wrong=1, fork=right_branch))
    assert run_one(engine, case) == expected
    assert num_branches(engine) > 2


def test_pages_of_an_accepted_branch_are_canonical(basic):
    """They enter the prefix index and are read by later requests."""
    case = Case("first", random_prompt(20, 5), max_tokens=3 * PAGE)
    expected = run_reference(basic, case)
    known = KnownAnswers.of([case], [expected])
    engine = basic.engine(lambda _: BranchedAnswers(known, num=6, wrong=1, fork=right_branch))
    run_one(engine, case)
    assert num_branches(engine) > 3
    longer = Case("second", (*case.prompt, *expected.tokens), max_tokens=8)
    output = run_one(engine, longer)
    assert output.num_cached >= 4 * PAGE
    assert output == run_reference(basic, longer)


@pytest.mark.parametrize("num_pages", [6, 9, 12])
def test_a_draft_loses_its_branches_when_pages_run_out(basic, num_pages):
    cases = [Case(f"tight-{i}", random_prompt(9, i), sampled(i), max_tokens=50) for i in range(3)]
    expected = run_references(basic, cases)
    known = KnownAnswers.of(cases, expected)
    engine = basic.engine(
        lambda _: BranchedAnswers(known, num=6, wrong=1, fork=right_branch), num_pages=num_pages
    )
    assert run_cases(engine, cases) == expected
    drafter = engine.scheduler.counters.drafters["branched"]
    assert 0 < drafter.branches < drafter.drafts


@pytest.mark.parametrize("seed", range(3))
def test_preemption_and_aborts_beside_branches_change_nothing(basic, seed):
    cases = LONG[:6]
    expected = run_references(basic, cases)
    engine = basic.engine(lambda parts: Forked(parts, scale=0.5, num=5, seed=seed), num_pages=60)
    others = [case.add(engine) for case in other_requests(3)]

    def abort_one(engine, step_index):
        if step_index % 7 == seed and others:
            engine.abort(others.pop())

    assert run_cases(engine, cases, step=lambda e: preempting(e, seed), after=abort_one) == expected


def test_branches_fill_the_free_rows_of_a_frame(basic):
    cases = LONG[:4]
    engine = basic.engine(lambda parts: Forked(parts, scale=0.5, num=5), max_num_seqs=2)
    assert run_cases(engine, cases) == run_references(basic, cases)
    assert num_branches(engine, "forked") > 3


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
def test_an_invalid_branch_is_dropped(basic, branch):
    case = Case("invalid", random_prompt(9), max_tokens=12)
    expected = run_reference(basic, case)
    known = KnownAnswers.of([case], [expected])
    engine = basic.engine(lambda _: BranchedAnswers(known, num=4, wrong=1, fork=lambda *_: [branch]))
    assert run_one(engine, case) == expected
    assert num_branches(engine) == 0
