"""Scheduler: owners that share the engine."""

import pytest
from fake_engine import FakeEngine, make_limits

from samewise.schedule.owners import CROWD, LEAST_ROWS, RECENT, SHORT, short_frame
from samewise.types import Span

CROWDED = make_limits(max_rows=64, num_pages=400, max_num_seqs=32, max_model_len=90)


def seconds(rows: int) -> float:
    """Of a frame: rows are what takes time."""
    return 1.0 + rows


def engine_with_crowd(num: int = 20) -> FakeEngine:
    """One owner's sequences generate; none of another owner was there yet."""
    engine = FakeEngine(CROWDED)
    engine.scheduler.frame_seconds = seconds
    for i in range(num):
        engine.add([i % 5, 1], 60, owner=b"crowd")
    for _ in range(4):
        engine.step()
    return engine


def owners_of(engine: FakeEngine) -> list[bytes]:
    """The owners of the rows of the frame in flight."""
    return [engine.outputs[span.seq_id].request.owner for span in engine.flight]


def num_rows(spans: list[Span]) -> int:
    return sum(len(span.inputs) for span in spans)


def test_a_newcomers_frame_has_no_rows_of_a_crowd() -> None:
    engine = engine_with_crowd()
    engine.add([1, 2, 3, 4], 2, owner=b"one")
    engine.step()
    assert owners_of(engine) == [b"one"]
    engine.drain()


def test_a_crowd_has_rows_in_one_frame_of_three_while_newcomers_keep_coming() -> None:
    engine = engine_with_crowd()
    frames = []
    for _ in range(12):
        engine.add([1, 2], 1, owner=b"one")
        engine.step()
        frames.append(b"crowd" in owners_of(engine))
    assert all(any(frames[i : i + 3]) for i in range(10))
    assert not all(frames)
    engine.drain()


def test_a_crowds_frames_are_short_while_another_owner_was_there_lately() -> None:
    engine = engine_with_crowd()
    assert num_rows(engine.flight) == 16
    one = engine.add([1, 2], 1, owner=b"one")
    while engine.outputs[one].finish is None:
        engine.step()
    short = short_frame(16, seconds)
    for _ in range(4):
        engine.step()
        assert num_rows(engine.flight) == short
        assert seconds(short) <= SHORT * seconds(1)
    for _ in range(RECENT):
        engine.step()
    assert not engine.scheduler.idle
    assert num_rows(engine.flight) == 16
    engine.drain()


def test_frames_are_as_wide_as_ever_without_a_crowd() -> None:
    engine = FakeEngine(CROWDED)
    engine.scheduler.frame_seconds = seconds
    for i in range(2 * CROWD):
        engine.add([i % 5, 1], 20, owner=bytes([i % 2 + 1]))
    for _ in range(4):
        engine.step()
    assert num_rows(engine.flight) == 2 * CROWD
    engine.drain()


@pytest.mark.parametrize("rows", [1, LEAST_ROWS, 16])
def test_a_frame_is_not_shortened_where_nothing_was_measured(rows: int) -> None:
    assert short_frame(rows, lambda _: 0.0) == rows
    assert short_frame(rows, float) == min(rows, max(LEAST_ROWS, SHORT))


@pytest.mark.parametrize("owner", [b"", b"one"])
def test_a_frame_that_has_not_begun_is_planned_again_for_an_owners_request(owner: bytes) -> None:
    engine = engine_with_crowd()
    counters = engine.scheduler.counters
    before, frames, rows = engine.flight, counters.frames, counters.rows
    newcomer = engine.add([1, 2, 3, 4], 2, owner=owner)
    spans = engine.scheduler.plan_again(before)
    if not owner:
        assert spans is None
    else:
        assert [span.seq_id for span in spans] == [newcomer]
        assert (counters.frames, counters.rows) == (frames, rows - num_rows(before) + 4)
        engine.flight = spans
        first = engine.scheduler._running[before[0].seq_id]
        assert first.last_served < engine.scheduler._step  # its turn is not lost
    engine.drain()
