"""Scheduler: which pages requests share through the prefix cache."""

from itertools import product

import pytest
from fake_engine import PAGE, STOP, VOCAB, FakeEngine, draft_with, expected_tokens, make_limits, next_token

from samewise.types import Delta, Request, Sampling


def test_of_a_cached_prompt_of_full_pages_only_the_last_page_is_computed() -> None:
    engine = FakeEngine(make_limits())
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    engine.add(prompt, 1)
    engine.drain()
    engine.add(prompt, 1)
    engine.scheduler.admit()
    (span,) = engine.scheduler.spans()
    assert (span.start, span.inputs) == (4, (0, 1, 2, 3))
    assert engine.scheduler.counters.cached_tokens == 4


def test_pages_of_answers_are_shared_too() -> None:
    engine = FakeEngine(make_limits())
    one = engine.add([1, 2, 3], 14)
    engine.drain()
    engine.add([1, 2, 3, *engine.outputs[one].tokens, 1], 1)
    engine.drain()
    assert engine.scheduler.counters.cached_tokens == 16


def test_requests_with_different_salts_share_no_page() -> None:
    engine = FakeEngine(make_limits())
    engine.add([1] * 12, 1, salt=b"one")
    engine.drain()
    engine.add([1] * 12, 1, salt=b"two")
    engine.drain()
    assert engine.scheduler.counters.cached_tokens == 0


def test_pages_the_fast_path_wrote_to_are_not_shared() -> None:
    engine = FakeEngine(make_limits())
    one = engine.add([1, 2, 3, 4], 14, verify=False)
    engine.drain()
    assert engine.scheduler.index.num_indexed <= 1  # the prompt's page, read in a frame
    engine.add([1, 2, 3, 4, *engine.outputs[one].tokens], 2)
    engine.drain()


def test_a_page_that_reaches_past_the_end_of_the_text_is_not_shared() -> None:
    """A guessed stop token ends the text; guesses after it belong to no text."""
    for candidate in product(range(VOCAB), repeat=3):
        prompt = list(candidate)
        third = next_token([*prompt, next_token(prompt), next_token([*prompt, next_token(prompt)])])
        if third == STOP and STOP not in expected_tokens(Request(0, candidate, Sampling(), 2), 60)[0]:
            break
    engine = FakeEngine(make_limits(max_rows=16))
    one = engine.add(prompt, 30, sampling=Sampling(stop_ids=frozenset({STOP})))
    engine.drain(draft_with([True] * 12))
    assert len(engine.outputs[one].tokens) == 3
    assert engine.scheduler.counters.guessed == 2  # guesses after the stop token are not verified
    assert engine.scheduler.index.num_indexed == (3 + 3 - 1) // PAGE


def test_a_request_waits_until_its_leader_has_read_the_prompt() -> None:
    engine = FakeEngine(make_limits(max_rows=4))
    prompt = [1, 2, 3, 4] * 3
    leader = engine.add(prompt, 4)
    engine.add(prompt, 4, leader=leader)
    engine.step()
    assert engine.scheduler.running_ids() == [leader]
    engine.drain()
    assert engine.scheduler.counters.cached_tokens == 8


@pytest.mark.parametrize("how", ["abort", "preempt", "end"])
def test_a_request_does_not_wait_for_a_leader_that_no_longer_runs(how: str) -> None:
    engine = FakeEngine(make_limits(max_rows=2))
    prompt = [1, 2, 3, 4] * 3
    leader = engine.add(prompt, 4)
    engine.add(prompt, 4, leader=leader)
    engine.step()
    getattr(engine.scheduler, how)(leader)
    if how != "preempt":
        engine.dropped.add(leader)
    engine.drain()


def drain_deltas(engine: FakeEngine) -> list[Delta]:
    deltas: list[Delta] = []
    while not engine.scheduler.idle or engine.flight:
        deltas += engine.step()
    return deltas


def test_own_pages_found_after_a_preemption_do_not_count_as_cached() -> None:
    engine = FakeEngine(make_limits(max_rows=4))
    engine.add([1, 2, 3, 4] * 4, 2)
    engine.step()
    engine.step()
    engine.land()
    engine.scheduler.preempt(0)
    (last,) = [delta for delta in drain_deltas(engine) if delta.finish]
    assert last.num_cached == 0
    assert engine.scheduler.counters.cached_tokens == 0
