"""Scheduler: when a frame is launched, and which drafts it verifies."""

from fake_engine import VOCAB, FakeEngine, make_limits, next_frame, one_guess_each, read_prompts

from samewise.types import Proposal, Request, Sampling


def test_a_growing_draft_is_not_verified_yet() -> None:
    engine = FakeEngine(make_limits(max_rows=16, deadline=100))
    read_prompts(engine, 2)
    for length in range(1, 4):
        assert next_frame(engine, one_guess_each({0, 1})) == []
        assert [len(s.draft) for s in engine.scheduler._running.values()] == [length, length]


def test_a_complete_draft_waits_for_growing_ones_until_its_deadline() -> None:
    engine = FakeEngine(make_limits(max_rows=16, deadline=3))
    read_prompts(engine, 2)
    frames = [[span.seq_id for span in next_frame(engine, one_guess_each({1}))] for _ in range(4)]
    assert frames == [[], [], [], [0]]
    assert len(engine.scheduler._running[1].draft) == 4  # it still grows


def test_a_full_frame_does_not_wait() -> None:
    engine = FakeEngine(make_limits(max_rows=4, deadline=100, max_num_seqs=4))
    read_prompts(engine, 3)
    assert [span.seq_id for span in next_frame(engine, one_guess_each({2}))] == [0, 1]


def test_a_frame_does_not_wait_when_no_draft_is_growing() -> None:
    engine = FakeEngine(make_limits(max_rows=16, deadline=100))
    read_prompts(engine, 2)
    spans = next_frame(engine, one_guess_each(set()))
    assert [(span.seq_id, len(span.inputs), span.drafter) for span in spans] == [(0, 2, "d"), (1, 2, "d")]
    engine.land()
    counts = engine.scheduler.counters.drafters["d"]
    assert (counts.drafts, counts.guessed, counts.accepted) == (2, 2, 2)


def test_a_prompt_does_not_wait_and_its_frame_includes_complete_drafts() -> None:
    engine = FakeEngine(make_limits(max_rows=16, deadline=100, max_num_seqs=4))
    read_prompts(engine, 2)
    assert next_frame(engine, one_guess_each({1})) == []
    engine.add([3, 3, 3, 3], 5)
    assert [span.seq_id for span in next_frame(engine, one_guess_each({1}))] == [0, 2]


def test_a_guessed_stop_token_completes_the_draft() -> None:
    engine = FakeEngine(make_limits(max_rows=16, deadline=100))
    read_prompts(engine, 1, sampling=Sampling(stop_ids=frozenset(range(VOCAB))))
    assert engine.scheduler.idle  # its first token ended it; below the stop tokens are set after that
    engine = FakeEngine(make_limits(max_rows=16, deadline=100))
    read_prompts(engine, 1)
    seq = engine.scheduler._running[0]
    seq.request = Request(0, seq.request.prompt, Sampling(stop_ids=frozenset(range(VOCAB))), 20)
    assert [span.seq_id for span in next_frame(engine, one_guess_each({0}))] == [0]


def test_a_draft_that_does_not_grow_is_complete() -> None:
    for tokens in ((), (VOCAB,), (-1,)):
        engine = FakeEngine(make_limits(max_rows=16, deadline=100, vocab=VOCAB))
        read_prompts(engine, 1)
        spans = next_frame(engine, lambda ask, tokens=tokens: Proposal(ask.seq_id, tokens, more=True))
        assert [span.seq_id for span in spans] == [0]


def test_unverified_requests_get_rows_only_where_there_are_rows_for_all() -> None:
    for rows, in_frame in ((16, {0, 1, 2}), (2, {0})):
        engine = FakeEngine(make_limits(max_rows=rows, deadline=0, max_num_seqs=4))
        engine.add([1, 2], 20)
        for n in range(2):
            engine.add([3, n], 20, verify=False)
        for _ in range(4):
            engine.step()
        engine.land()
        engine.scheduler.admit()
        assert {span.seq_id for span in engine.scheduler.spans()} == in_frame
