"""Scheduler: alternative drafts of a sequence are verified beside the draft, in free rows and pages."""

from collections.abc import Callable

import pytest
from fake_engine import PAGE, VOCAB, FakeEngine, draft_with, make_limits, next_frame

from samewise.types import Ask, Branch, Proposal


def engine_with_read_prompt(prompt_len: int, **limits: int) -> FakeEngine:
    """An engine with one sequence that has read its prompt and generated one token."""
    engine = FakeEngine(make_limits(**{"max_rows": 16} | limits))
    engine.add([1, 2, 3, 4, 0, 1][:prompt_len], 12)
    engine.step()
    engine.land()
    return engine


def propose_branches(*branches: list[bool], at: int = 0) -> Callable[[Ask], Proposal]:
    """A wrong draft of two guesses, and branches that are right where `branches` say so."""

    def propose(ask: Ask) -> Proposal:
        draft = draft_with([True] * at + [False] * (2 - at))(ask)
        others = [Branch(at, tuple(draft_with([True] * at + right)(ask)[at:])) for right in branches]
        return Proposal(ask.seq_id, tuple(draft), drafter="d", branches=tuple(others))

    return propose


@pytest.mark.parametrize("prompt_len", [3, 4, 6])
@pytest.mark.parametrize("at", [0, 1])
def test_the_longest_accepted_branch_is_committed_and_keeps_its_pages(prompt_len: int, at: int) -> None:
    engine = engine_with_read_prompt(prompt_len)
    spans = next_frame(engine, propose_branches([True, False], [True, True, True], at=at))
    engine.check_frame(spans)
    assert [span.branch for span in spans] == [0, 1, 2]
    shared, partial = divmod(prompt_len, PAGE)
    for span in spans[1:]:
        assert span.pages[:shared] == spans[0].pages[:shared]
        assert set(span.pages[shared:]).isdisjoint(spans[0].pages[shared:])
        assert span.copy == ((spans[0].pages[shared], span.pages[shared]) if partial else None)
    (delta,) = engine.land()
    assert len(delta.tokens) == at + 3 + 1
    assert (delta.accepted, delta.guessed) == (at + 3, 2 + (at + 2) + (at + 3))
    assert engine.scheduler.counters.drafters["d"].branches == 1
    assert engine.scheduler._running[0].pages == spans[2].pages
    engine.scheduler.check()
    engine.drain()


def test_pages_of_branches_are_freed_when_the_draft_wins() -> None:
    engine = engine_with_read_prompt(3)
    available = engine.scheduler.index.num_available
    assert len(next_frame(engine, propose_branches([False], [False, True]))) == 3
    assert engine.scheduler.index.num_available < available
    (delta,) = engine.land()
    assert (len(delta.tokens), delta.accepted) == (1, 0)
    assert engine.scheduler.counters.drafters["d"].branches == 0
    assert not engine.scheduler._running[0].branch_pages
    engine.drain()


@pytest.mark.parametrize("how", ["abort", "preempt", "end"])
def test_a_sequence_that_stops_running_frees_the_pages_of_its_branches(how: str) -> None:
    engine = engine_with_read_prompt(3)
    next_frame(engine, propose_branches([True, True]))
    getattr(engine.scheduler, how)(0)
    assert engine.scheduler.index.num_available == engine.limits.num_pages - 1
    engine.scheduler.check()


@pytest.mark.parametrize(
    ("limit", "num_spans"),
    [({"max_rows": 6}, 2), ({"num_pages": 4}, 1), ({"num_pages": 6}, 2), ({}, 3)],
)
def test_branches_use_only_free_rows_and_free_pages(limit: dict[str, int], num_spans: int) -> None:
    engine = engine_with_read_prompt(3, **{"max_model_len": 12} | limit)
    spans = next_frame(engine, propose_branches([True, True], [True, False]))
    assert len(spans) == num_spans
    engine.check_frame(spans)
    engine.scheduler.check()
    engine.drain()


@pytest.mark.parametrize(
    "branch",
    [
        Branch(0, ()),
        Branch(-1, (1,)),
        Branch(3, (1,)),  # beyond the draft's two guesses
        Branch(0, (VOCAB,)),
        Branch(0, (-1,)),
        Branch(0, (1,) * 6),  # longer than max_draft
    ],
)
def test_invalid_branches_are_dropped(branch: Branch) -> None:
    engine = engine_with_read_prompt(3, vocab=VOCAB, max_draft=5)
    spans = next_frame(engine, lambda ask: Proposal(ask.seq_id, (1, 2), branches=(branch, Branch(2, (1,)))))
    assert [span.inputs[span.given :] for span in spans] == [(1, 2), (1, 2, 1)]
    engine.drain()
