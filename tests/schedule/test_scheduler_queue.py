"""Scheduler: admission, order, preemption, ends of requests."""

import pytest
from fake_engine import STOP, VOCAB, FakeEngine, expected_tokens, make_limits

from samewise.errors import InvariantBroken, QueueFull
from samewise.schedule.order import PATIENCE
from samewise.schedule.scheduler import Scheduler
from samewise.types import Finish, Sampling


@pytest.mark.parametrize("how", ["lazy", "chained"])
def test_a_small_page_pool_preempts_and_every_request_finishes(how: str) -> None:
    engine = FakeEngine(make_limits(num_pages=8, max_model_len=26, max_num_seqs=4))
    for i in range(6):
        engine.add([i % VOCAB, 1, 2, 3, 4], 16)
    engine.drain(how=how)
    assert engine.scheduler.counters.preempted > 0


def test_every_frame_after_the_first_is_planned_ahead() -> None:
    engine = FakeEngine(make_limits())
    one = engine.add([1, 2, 3], 20, sampling=Sampling(stop_ids=frozenset({STOP})))
    engine.step(how="chained")
    sources = []
    while not engine.scheduler.idle or engine.flight:
        engine.step(how="chained")
        sources += [span.source for span in engine.flight]
    tokens, finish = expected_tokens(engine.outputs[one].request, 60)
    assert (engine.outputs[one].tokens, engine.outputs[one].finish) == (tokens, finish)
    assert sources[0] == 2  # the last row of the prompt
    assert set(sources[1:]) <= {0}


def test_the_youngest_sequence_is_preempted_first() -> None:
    engine = FakeEngine(make_limits(num_pages=6, max_model_len=20))
    first, second = engine.add([1] * 7, 12), engine.add([2] * 7, 12)
    while engine.scheduler.counters.preempted == 0:
        engine.step()
    assert engine.scheduler.running_ids() == [first]
    assert engine.outputs[second].finish is None
    engine.drain()


def test_a_generating_sequence_gets_a_row_of_every_frame_while_a_prompt_is_read() -> None:
    engine = FakeEngine(make_limits(max_rows=4))
    generating = engine.add([1], 10)
    engine.step()
    engine.step()
    engine.add([2] * 30, 2)
    before = len(engine.outputs[generating].tokens)
    for _ in range(5):
        engine.step()
    assert len(engine.outputs[generating].tokens) == before + 5
    engine.drain()


def test_generating_sequences_get_a_token_per_step_while_many_prompts_are_read() -> None:
    engine = FakeEngine(make_limits(max_rows=12, num_pages=200, max_num_seqs=16))
    generating = [engine.add([i], 50) for i in range(4)]
    engine.step()
    engine.step()
    for i in range(8):
        engine.add([i % VOCAB] * 30, 2)
    for _ in range(20):
        before = [len(engine.outputs[i].tokens) for i in generating]
        engine.step()
        assert [len(engine.outputs[i].tokens) for i in generating] == [n + 1 for n in before]
    engine.drain()


def test_a_prompt_is_read_while_generating_sequences_could_use_every_row() -> None:
    engine = FakeEngine(make_limits(max_rows=4, num_pages=200, max_num_seqs=9))
    for i in range(8):  # twice the rows of a frame
        engine.add([i % VOCAB], 50)
    for _ in range(6):
        engine.step()
    late = engine.add([5] * 8, 2)
    steps = 0
    while not engine.outputs[late].tokens:
        engine.step()
        steps += 1
    assert steps <= 2 * (PATIENCE + 2)  # two frames of four rows, each after PATIENCE steps
    engine.drain()


def test_sequences_take_turns_where_a_frame_has_fewer_rows() -> None:
    engine = FakeEngine(make_limits(max_rows=2, max_num_seqs=8))
    ids = [engine.add([i % VOCAB], 12) for i in range(6)]
    for _ in range(3 * 6):
        engine.step()
    lengths = [len(engine.outputs[i].tokens) for i in ids]
    assert max(lengths) - min(lengths) <= 1
    engine.drain()


def test_a_full_queue_refuses_and_names_the_limit() -> None:
    engine = FakeEngine(make_limits(max_queued=2))
    engine.add([1], 2)
    engine.add([2], 2)
    with pytest.raises(QueueFull, match=r"max_queued is 2.*raise max_queued"):
        engine.add([3], 2)
    engine.step()
    engine.add([3], 2)
    engine.drain()


def test_requests_that_each_need_the_whole_page_pool_all_finish() -> None:
    engine = FakeEngine(make_limits(num_pages=6, max_model_len=20))
    for i in range(4):
        engine.add([i] * 8, 12)
    engine.drain()
    assert [len(engine.outputs[i].tokens) for i in range(4)] == [12] * 4


def test_a_full_context_ends_the_answer() -> None:
    engine = FakeEngine(make_limits(max_model_len=10))
    one = engine.add([1] * 7, 500)
    engine.drain()
    assert (len(engine.outputs[one].tokens), engine.outputs[one].finish) == (3, Finish.LENGTH)


def test_a_preempted_request_can_be_ended() -> None:
    """A stop string may be found in a delta whose sequence was preempted in the same step."""
    engine = FakeEngine(make_limits())
    one = engine.add([1, 2, 3], 20)
    for _ in range(3):
        engine.step()
    engine.land()
    engine.scheduler.preempt(one)
    engine.scheduler.end(one)
    engine.dropped.add(one)
    assert engine.scheduler.idle
    assert engine.scheduler.counters.finished == 1


def test_unknown_ids_can_be_aborted_preempted_or_ended_without_effect() -> None:
    scheduler = Scheduler(make_limits())
    assert scheduler.abort(3) is None
    assert scheduler.preempt(3) is False
    scheduler.end(3)
    scheduler.check()


def test_check_detects_a_sequence_with_too_few_pages() -> None:
    engine = FakeEngine(make_limits())
    engine.add([1] * 9, 4)
    engine.step()
    engine.land()
    seq = next(iter(engine.scheduler._running.values()))
    engine.scheduler.index.release([seq.pages.pop()])
    with pytest.raises(InvariantBroken, match="too few pages"):
        engine.scheduler.check()


@pytest.mark.parametrize("rows", [1, 3, 8, 32])
@pytest.mark.parametrize("how", ["lazy", "eager", "chained"])
def test_every_prompt_score_comes_once_for_any_frame_size(rows: int, how: str) -> None:
    engine = FakeEngine(make_limits(max_rows=rows))
    engine.add([1, 2, 3, 4, 5] * 4, 3, prompt_logprobs=0)
    engine.add([1, 2, 3, 4, 5] * 4, 0, score_from=11)
    engine.add([2, 2], 4, prompt_logprobs=0)
    engine.drain(how=how)  # compares every score
    engine.add([1, 2, 3, 4, 5] * 4, 0, score_from=17)
    engine.drain(how=how)
    assert engine.scheduler.counters.cached_tokens > 0


def order_of_first_tokens(engine: FakeEngine, how: str = "lazy") -> list[int]:
    """Request ids in the order in which each got its first token, to the end of all requests."""
    order: list[int] = []
    while not engine.scheduler.idle or engine.flight:
        engine.step(how=how)
        order += [i for i, output in engine.outputs.items() if output.tokens and i not in order]
    return order


@pytest.mark.parametrize("how", ["lazy", "chained"])
def test_requests_are_admitted_by_priority_then_by_arrival(how: str) -> None:
    engine = FakeEngine(make_limits(max_num_seqs=1))
    for priority in (0, 3, -2, 3, 0):
        engine.add([1, 2], 3, priority=priority)
    assert order_of_first_tokens(engine, how) == [2, 0, 4, 1, 3]


def test_prompts_are_read_by_priority() -> None:
    engine = FakeEngine(make_limits(max_rows=4, num_pages=200, max_num_seqs=8))
    for i, priority in enumerate((1, 1, 0, -1)):
        engine.add([i] * 12, 2, priority=priority)
    assert order_of_first_tokens(engine) == [3, 2, 0, 1]


def test_a_request_of_low_priority_still_generates_while_others_fill_every_frame() -> None:
    engine = FakeEngine(make_limits(max_rows=2, max_num_seqs=8))
    low = engine.add([1], 12, priority=9)
    for _ in range(4):
        engine.add([2], 50)
    for _ in range(60):
        engine.step()
    assert len(engine.outputs[low].tokens) > 5
    engine.drain()


def test_the_lowest_priority_is_preempted_first_however_old() -> None:
    engine = FakeEngine(make_limits(num_pages=6, max_model_len=20))
    first, second = engine.add([1] * 7, 12, priority=1), engine.add([2] * 7, 12)
    while engine.scheduler.counters.preempted == 0:
        engine.step()
    assert engine.scheduler.running_ids() == [second]
    assert engine.outputs[first].finish is None
    engine.drain()


def test_priority_orders_the_requests_of_an_owner_and_not_those_of_others() -> None:
    """Each owner keeps the places that its requests have by arrival, whatever it claims for them."""
    engine = FakeEngine(make_limits(max_num_seqs=1))
    for owner, priority in ((b"a", 5), (b"b", -100), (b"a", 0), (b"b", -200), (b"a", -1)):
        engine.add([1, 2], 3, owner=owner, priority=priority)
    assert order_of_first_tokens(engine) == [4, 3, 2, 1, 0]


def test_an_old_request_of_low_priority_opens_no_way_past_another_owner() -> None:
    engine = FakeEngine(make_limits(max_num_seqs=1))
    engine.add([1, 2], 3, owner=b"a", priority=5)
    for i in range(3):
        engine.add([1, 2], 3, owner=b"b" if i else b"a")
    engine.step()
    engine.add([1, 2], 3, owner=b"a", priority=-1)
    engine.add([1, 2], 3, owner=b"a", priority=-2)
    assert order_of_first_tokens(engine)[:3] == [1, 5, 2]
    engine.drain()
