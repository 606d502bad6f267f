"""Runs one engine in a thread of its own for routers in other processes.

Only the engine is here: a router detokenises, looks for stop strings and keeps what its client has received.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from samewise.engine import Engine
from samewise.errors import CallerError, EngineLost, GuaranteeLost, MachineError
from samewise.scale.records import EngineFacts, Job, JobKey, Progress
from samewise.types import Delta, Finish, Guide, Received

log = logging.getLogger("samewise.scale")

Deliver = Callable[[list[Progress]], None]


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Set by hand."""

    hanging: float = 60.0
    """Seconds that one step may take, after which the engine hangs. Steps take milliseconds; the first of a
    size may compile kernels, which takes some seconds."""


LIMITS = HostLimits()


@dataclass(slots=True, eq=False)
class _RunningJob:
    """A job in the engine, and what was committed for its request so far. Owned by the EngineHost."""

    job: Job
    committed: Received


class EngineHost:
    """Owns an engine's thread. `deliver` is called in it with what every step has committed.

    `on_failure` is called in it last, where the engine cannot go on.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Deliver,
        *,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._deliver, self._on_failure, self._clock = engine, deliver, on_failure, clock
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None  # by the clock; None: it waits for calls
        self._jobs: dict[int, _RunningJob] = {}  # by the engine's id
        self._ids: dict[JobKey, int] = {}
        self._newest: dict[tuple[bytes, int], int] = {}  # the engine's id of a router's request
        self._stats = engine.stats()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="samewise-engine", daemon=True)
        self._thread.start()

    def add(self, job: Job, guide: Guide | None) -> None:
        """Queue a job. Any thread may call this and the methods below."""
        self._calls.put(lambda: self._add(job, guide))

    def end(self, key: JobKey) -> None:
        """Nothing more is wanted of a job."""
        self._calls.put(lambda: self._end(key))

    def stats(self) -> dict[str, Any]:
        """The engine's counters as of its last step, at most."""
        self._calls.put(self._read_stats)
        return self._stats

    @property
    def failure(self) -> MachineError | None:
        """Why the engine cannot go on, or is in one step for too long; None where neither is so."""
        if self._failure is not None:
            return EngineLost(f"the engine has stopped: {self._failure}")
        since = self._busy_since
        if since is not None and self._clock() - since > LIMITS.hanging:
            return MachineError(f"the engine hangs: one step takes more than {LIMITS.hanging:g} s")
        return None

    def close(self) -> None:
        """Stop the thread."""
        self._calls.put(None)
        self._thread.join()

    # ---- in the engine's thread

    def _run(self) -> None:
        try:
            while self._take_calls():
                self._step()
        except BaseException as error:
            self._failure = error
            log.exception("the engine has stopped")
            self._on_failure()

    def _take_calls(self) -> bool:
        """Run the calls that wait; block while the engine is idle. False when it is time to stop."""
        while True:
            self._busy_since = None
            try:
                call = self._calls.get(block=self._engine.idle)
            except queue.Empty:
                self._busy_since = self._clock()
                return True
            if call is None:
                return False
            self._busy_since = self._clock()
            call()

    def _step(self) -> None:
        """One step; after a failure its requests are computed again. Raises if the engine is lost."""
        try:
            deltas = self._engine.step()
        except Exception as error:
            if self._engine.lost is not None or isinstance(error, GuaranteeLost):
                raise
            log.exception("a step failed; its requests are computed again, one at a time")
            self._engine.recover(blame=True)
            return
        progress: list[Progress] = []
        for delta in deltas:
            running = self._jobs.get(delta.request_id)
            if running is None:
                continue
            key, begin = running.job.key, running.committed
            progress.append(Progress(key, begin, delta._replace(request_id=key.number)))
            running.committed = begin.after(delta)
            if delta.finish is not None:
                self._forget(key)
        if progress:
            self._deliver(progress)

    def _add(self, job: Job, guide: Guide | None) -> None:
        engine, request = self._engine, job.request
        number = engine.new_id()
        leader = None if request.leader is None else self._newest.get((job.key.router, request.leader))
        begin = Received(len(request.output), request.num_scores)
        self._jobs[number], self._ids[job.key] = _RunningJob(job, begin), number
        self._newest[job.key.router, job.key.number] = number
        try:
            engine.add(replace(request, id=number, leader=leader), guide)
        except CallerError as error:  # a full queue, where the engine has a limit of its own
            log.warning("a request is refused: %s", error)
            self._forget(job.key)
            self._deliver([Progress(job.key, begin, Delta(job.key.number, (), (), (), Finish.ERROR))])

    def _end(self, key: JobKey) -> None:
        number = self._forget(key)
        if number is not None:
            self._engine.abort(number)

    def _forget(self, key: JobKey) -> int | None:
        number = self._ids.pop(key, None)
        if number is not None:
            del self._jobs[number]
            if self._newest.get((key.router, key.number)) == number:
                del self._newest[key.router, key.number]
        return number

    def _read_stats(self) -> None:
        self._stats = self._engine.stats()


def facts_of(engine: Engine) -> EngineFacts:
    """What a router must know of this engine."""
    from torch import nn

    loaded = replace(engine.loaded, model=nn.Module())
    return EngineFacts(
        engine.config, loaded, engine.limits, engine.contract, engine.report, engine.settings, engine.stats()
    )


__all__ = ["LIMITS", "Deliver", "EngineHost", "HostLimits", "facts_of"]
