"""An engine that cannot go on, or hangs, is found; its replica's process ends."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from samewise.errors import EngineLost, GuaranteeLost, MachineError, QueueFull
from samewise.scale.engine_host import LIMITS, EngineHost
from samewise.scale.records import Job, JobKey, Progress
from samewise.types import Delta, Finish, Received, Request, Sampling

KEY = JobKey(b"r" * 16, 3, 0)


class StubEngine:
    """An engine with one request at a time, whose step is the test's."""

    lost = None

    def __init__(self, step: Callable[[], list[Delta]], *, is_full: bool = False) -> None:
        self._step, self._is_full = step, is_full
        self.idle = True

    def stats(self) -> dict[str, Any]:
        return {}

    def new_id(self) -> int:
        return 0

    def add(self, request: Request, guide: object) -> None:
        if self._is_full:
            raise QueueFull("it is full")
        self.idle = False

    def step(self) -> list[Delta]:
        deltas = self._step()
        self.idle = any(delta.finish is not None for delta in deltas)
        return deltas

    def abort(self, number: int) -> None:
        self.idle = True


def job(**changes: Any) -> Job:
    return Job(KEY, Request(3, (1, 2), Sampling(), 9, **changes), ())


def host_of(engine: StubEngine, **options: Any) -> tuple[EngineHost, list[Progress]]:
    delivered: list[Progress] = []
    return EngineHost(engine, delivered.extend, **options), delivered  # type: ignore[arg-type]


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_an_engine_that_stops_says_so() -> None:
    def fail() -> list[Delta]:
        raise GuaranteeLost("the weights have changed")

    stopped = threading.Event()
    host, delivered = host_of(StubEngine(fail), on_failure=stopped.set)
    assert host.failure is None
    host.add(job(), None)
    assert stopped.wait(20)
    assert isinstance(host.failure, EngineLost)
    assert "the weights have changed" in str(host.failure)
    assert not delivered


def test_a_step_that_takes_too_long_is_a_failure() -> None:
    seconds = [1000.0]
    began, goes_on = threading.Event(), threading.Event()

    def hang() -> list[Delta]:
        began.set()
        goes_on.wait(20)
        return [Delta(0, (), (), (), Finish.LENGTH)]

    host, delivered = host_of(StubEngine(hang), clock=lambda: seconds[0])
    seconds[0] += 2 * LIMITS.hanging  # an engine may be idle for as long as it likes
    assert host.failure is None
    host.add(job(), None)
    assert began.wait(20)
    seconds[0] += LIMITS.hanging - 1
    assert host.failure is None
    seconds[0] += 2
    assert isinstance(host.failure, MachineError)
    assert "hangs" in str(host.failure)
    goes_on.set()
    until(lambda: delivered)
    until(lambda: host.failure is None)
    host.close()


def test_what_is_delivered_says_where_it_begins() -> None:
    deltas = [
        Delta(0, (), (), (), None, scores=(-1.0, -2.0)),
        Delta(0, (7, 8), (0.0,) * 2, ((),) * 2, None, scores=(-3.0,)),
        Delta(0, (9,), (0.0,), ((),), Finish.LENGTH),
    ]
    host, delivered = host_of(StubEngine(lambda: [deltas.pop(0)]))
    host.add(job(output=(5, 6), num_scores=4), None)
    until(lambda: len(delivered) == 3)
    assert [one.begin for one in delivered] == [Received(2, 4), Received(2, 6), Received(4, 7)]
    assert {one.key for one in delivered} == {KEY}
    host.close()


def test_a_full_engine_ends_a_job_with_an_error() -> None:
    host, delivered = host_of(StubEngine(list, is_full=True))
    host.add(job(output=(5, 6)), None)
    until(lambda: delivered)
    assert [(one.begin, one.delta.finish) for one in delivered] == [(Received(2, 0), Finish.ERROR)]
    host.close()


def test_the_process_of_a_replica_ends_and_says_why() -> None:
    program = (
        "import logging, threading; from samewise.scale.replica import end_process\n"
        "logging.basicConfig()\n"
        "threading.Thread(target=end_process).start()\n"
        "threading.Event().wait(60)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 1
    assert "this replica ends: its engine has stopped" in ran.stderr
