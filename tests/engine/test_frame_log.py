"""The frame log: what the rows of each frame were used for."""

from array import array
from typing import Any

import pytest

from samewise.engine.frame_log import FrameLog, FrameRecord
from samewise.testing import Scripted, submit, tiny_engine
from samewise.types import Sampling, Span


def span(start: int, inputs: int, given: int, prompt_len: int) -> Span:
    return Span(0, start, (7,) * inputs, given, array("i"), Sampling(), [], prompt_len)


@pytest.mark.parametrize(
    ("spans", "size", "wanted"),
    [
        ([span(0, 5, 9, 9)], 16, (5, 0, 0, 11)),  # a part of a prompt
        ([span(5, 4, 4, 9)], 4, (4, 0, 0, 0)),  # its last part
        ([span(9, 1, 1, 9)], 16, (0, 1, 0, 15)),  # a token of the answer
        ([span(9, 6, 1, 9)], 16, (0, 1, 5, 10)),  # and a draft after it
        ([span(0, 12, 12, 9)], 16, (9, 3, 0, 4)),  # preempted: its answer is recomputed
        ([span(8, 3, 1, 9), span(0, 2, 2, 2), span(4, 1, 1, 2)], 8, (3, 1, 2, 2)),
        ([], 16, (0, 0, 0, 16)),
    ],
)
def test_every_row_of_a_frame_is_accounted_for(spans: list[Span], size: int, wanted: tuple[int, ...]) -> None:
    frame_log = FrameLog()
    frame_log.landed(spans, size, 3, 1.5, [(5, 2)])
    (record,) = frame_log.since(0)
    assert record == FrameRecord(1, *wanted, 3, 1.5, ((5, 2),))
    assert sum(wanted) == size


def test_the_log_is_bounded_and_returns_the_frames_after_a_number() -> None:
    frame_log = FrameLog(kept=4)
    for i in range(10):
        frame_log.landed([span(i, 1, 1, 0)], 1, 1, float(i))
    assert frame_log.number == 10
    assert [record.number for record in frame_log.since(0)] == [7, 8, 9, 10]
    assert [record.number for record in frame_log.since(8)] == [9, 10]
    assert frame_log.since(10) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_the_log_of_an_engine_adds_up_to_its_counters(ahead: bool) -> None:
    def twice(ask: Any) -> list[int]:
        return [ask.tokens[-1]] * 2

    make = (lambda _: Scripted(twice)) if not ahead else None
    engine = tiny_engine(ahead=ahead, make_proposer=make, proposer="none")
    for i in range(3):
        submit(engine, [40 + i] * (9 * i + 1), Sampling(), max_tokens=12)
    while not engine.idle:
        engine.step()
    live = engine.live()
    stats, frames = live["stats"], live["frames"]
    assert len(frames) == stats["frames"]
    assert sum(record.prompt for record in frames) == stats["prompt_tokens"]
    assert sum(record.guess for record in frames) == stats["guessed"] == (0 if ahead else stats["guessed"])
    drafts = [draft for record in frames for draft in record.drafts]
    assert sum(nodes for nodes, _ in drafts) == stats["guessed"]
    assert sum(depth for _, depth in drafts) == stats["accepted"]
    assert len(drafts) == stats["drafts"]
    assert sum(record.committed for record in frames) == stats["output_tokens"] == 36
    assert sum(record.padding for record in frames) == stats["padded_rows"]
    assert sum(record.prompt + record.known + record.guess for record in frames) == stats["rows"]
    assert [record.when for record in frames] == sorted(record.when for record in frames)
    assert engine.live(frames[-2].number)["frames"] == frames[-1:]
