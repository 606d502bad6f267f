"""Scheduler: owners that share the engine."""

from dataclasses import dataclass

import pytest
from fake_engine import FakeEngine, make_limits

from samewise.schedule.owners import CROWD, LEAST_ROWS, RECENT, SHORT, SLOW, SLOW_SECONDS, short_frame
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


@dataclass
class Slow:
    """A grammar that allows everything, and says how long a token takes."""

    pace: float

    def fits(self, draft: list[int], guesses: tuple[int, ...]) -> int:
        return len(guesses)

    def masks(self, guesses: tuple[int, ...]) -> list[bytes | None]:
        return [None] * (1 + len(guesses))

    def mask(self, guesses: tuple[int, ...]) -> bytes | None:
        return None

    def take(self, token: int) -> None:
        pass

    def restore(self, tokens: tuple[int, ...]) -> None:
        pass


def slow_frames(*, other: bool, pace: float = SLOW_SECONDS / 2) -> tuple[list[list[int]], list[list[int]]]:
    """Frames with six sequences of slow grammars: those of them that have rows, and all texts."""
    engine, frames = FakeEngine(CROWDED), []
    slow = [engine.add([i, 1], 12, owner=b"slow", guide=Slow(pace)) for i in range(6)]
    quick = [engine.add([7, 7], 30, owner=b"other")] if other else []
    for _ in range(30):
        engine.step()
        frames.append([span.seq_id for span in engine.flight if span.seq_id in slow])
    engine.drain()
    return frames, [list(engine.outputs[one].tokens) for one in [*slow, *quick]]


def test_masks_of_slow_grammars_are_shared_out_over_frames() -> None:
    frames, texts = slow_frames(other=True)
    generating = frames[2:]
    assert all(1 <= len(frame) <= 2 for frame in generating)
    assert all(set(one).isdisjoint(two) for one, two in zip(generating[0::3], generating[1::3], strict=False))
    assert {seq_id for frame in generating[:3] for seq_id in frame} == set(range(6))
    alone, same = slow_frames(other=False)
    assert max(map(len, alone)) == 6
    assert texts[:6] == same


def test_unverified_answers_of_slow_grammars_do_not_hold_up_verified_ones() -> None:
    engine = FakeEngine(CROWDED)
    for i in range(4):
        engine.add([i, 1], 200, owner=b"fast", guide=Slow(SLOW_SECONDS), verify=False)
    for _ in range(4):
        engine.step()
    one = engine.add([1, 2], 6, owner=b"one", guide=Slow(SLOW_SECONDS))
    for _ in range(20):
        engine.step()
    assert len(engine.outputs[one].tokens) == 6


def test_one_slow_grammar_has_a_row_in_every_frame_however_slow() -> None:
    frames, _ = slow_frames(other=True, pace=10 * SLOW_SECONDS)
    assert all(len(frame) == 1 for frame in frames[2:30])


def test_ordinary_grammars_do_not_wait_for_each_other() -> None:
    frames, _ = slow_frames(other=True, pace=SLOW / 2)
    assert max(map(len, frames)) == 6


def test_a_crowd_with_slow_grammars_stands_back_for_a_first_token() -> None:
    engine = FakeEngine(CROWDED)
    for i in range(20):
        engine.add([i % 5, 1], 60, owner=b"crowd", guide=Slow(SLOW_SECONDS / 2))
    for _ in range(4):
        engine.step()
    engine.add([1, 2, 3, 4], 2, owner=b"one")
    engine.step()
    assert owners_of(engine) == [b"one"]
    engine.drain()
