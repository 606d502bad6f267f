"""Scheduler: guesses are limited, dropped, kept and verified without changing a token."""

from fake_engine import (
    FakeEngine,
    draft_with,
    make_limits,
    next_frame,
    next_token,
    one_guess_each,
    read_prompts,
)

from samewise.types import Ask, Proposal, Request, Sampling


def test_right_guesses_save_frames_and_wrong_ones_cost_none() -> None:
    frames = []
    for right in ([], [False] * 5, [True] * 5):
        engine = FakeEngine(make_limits(prefix_caching=False))
        engine.add([1, 2, 3], 24)
        engine.drain(draft_with(right))
        frames.append(engine.scheduler.counters.frames)
    assert frames[1] == frames[0] == 24
    assert frames[2] <= 5


def test_room_for_guesses_is_limited_by_the_frame_and_by_max_tokens() -> None:
    engine = FakeEngine(make_limits(max_rows=4, max_draft=16))
    engine.add([1, 2], 6)
    rooms = []

    def propose(ask: Ask) -> list[int]:
        rooms.append((ask.room, len(ask.tokens)))
        return []

    engine.drain(propose)
    assert rooms[0] == (3, 3)  # a frame holds the known token and three guesses
    assert all(room <= 8 - known - 1 for room, known in rooms)
    assert rooms[-1][1] == 6  # the last of two tokens left need not be guessed


def test_guesses_for_unverified_or_unknown_requests_are_dropped() -> None:
    engine = FakeEngine(make_limits())
    one = engine.add([1, 2, 3], 8, verify=False)
    while engine.scheduler.num_running or engine.scheduler.num_waiting or engine.flight:
        engine.step()
        engine.scheduler.extend([Proposal(one, (0,)), Proposal(999, (1, 2))])
    engine.check_outputs()


def test_guesses_beyond_the_room_change_no_token() -> None:
    engine = FakeEngine(make_limits(num_pages=9, max_model_len=30))
    engine.add([1, 2, 3], 12)
    engine.add([2, 2, 3], 12)

    def propose_too_many(ask: Ask) -> list[int]:
        return draft_with([True, True, False] * 9)(ask._replace(room=27))

    engine.drain(propose_too_many)


def test_preemption_drops_the_draft() -> None:
    engine = FakeEngine(make_limits(prefix_caching=False))
    one = engine.add([1, 2, 3], 9)
    for _ in range(3):
        engine.step()
    engine.land()
    engine.draft(draft_with([False, False]))
    engine.scheduler.preempt(one)
    engine.scheduler.admit()
    engine.scheduler.check()
    assert [len(span.inputs) for span in engine.scheduler.spans()] == [3 + len(engine.outputs[one].tokens)]
    engine.scheduler.preempt(one)
    engine.drain()


def test_a_draft_is_kept_until_a_frame_has_rows_for_it() -> None:
    engine = FakeEngine(make_limits(max_rows=3, max_num_seqs=4))
    for i in range(4):
        engine.add([i], 9)
    engine.drain(draft_with([True, True]))


def test_guesses_after_a_stop_token_are_dropped() -> None:
    engine = FakeEngine(make_limits(max_rows=16, deadline=100))
    read_prompts(engine, 1)
    seq = engine.scheduler._running[0]
    seq.request = Request(0, seq.request.prompt, Sampling(stop_ids=frozenset({3})), 20)
    next_frame(engine, lambda ask: Proposal(ask.seq_id, (1, 3, 2, 2), more=True))
    assert seq.draft == [1, 3]
    assert not seq.drafting


def test_a_draft_is_never_longer_than_a_frame_can_verify() -> None:
    engine = FakeEngine(make_limits(max_rows=4, deadline=100, max_draft=16))
    read_prompts(engine, 1)
    for _ in range(6):
        next_frame(engine, one_guess_each({0}))
        assert all(len(s.draft) <= 3 for s in engine.scheduler._running.values())


def test_a_draft_that_does_not_fit_the_frame_is_not_cut() -> None:
    engine = FakeEngine(make_limits(max_rows=6, deadline=0, max_num_seqs=3))
    read_prompts(engine, 3)

    def propose(ask: Ask) -> Proposal:
        return Proposal(ask.seq_id, (next_token(ask.tokens), 1, 1))

    first = next_frame(engine, propose)
    assert [(s.seq_id, len(s.inputs)) for s in first] == [(0, 4)]
    assert next_frame(engine, propose)[0].seq_id != 0
