"""Runs one engine in a thread of its own for routers in other processes.

Only the engine is here: a router detokenises, looks for stop strings and keeps what its client has received.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from samewise.engine import Engine
from samewise.errors import CallerError, GuaranteeLost
from samewise.scale.records import EngineFacts, Job, JobKey, Progress
from samewise.types import Delta, Finish, Guide

log = logging.getLogger("samewise.scale")

Deliver = Callable[[list[Progress]], None]


class EngineHost:
    """Owns an engine's thread. `deliver` is called in it with what every step has committed."""

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        self._engine, self._deliver = engine, deliver
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # by the engine's id
        self._ids: dict[JobKey, int] = {}
        self._newest: dict[tuple[bytes, int], int] = {}  # the engine's id of a router's request
        self._stats = engine.stats()
        self.failure: BaseException | None = None
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
            log.exception("the engine has stopped")
            self.failure = error

    def _take_calls(self) -> bool:
        """Run the calls that wait; block while the engine is idle. False when it is time to stop."""
        while True:
            try:
                call = self._calls.get(block=self._engine.idle)
            except queue.Empty:
                return True
            if call is None:
                return False
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
            job = self._jobs.get(delta.request_id)
            if job is None:
                continue
            progress.append(Progress(job.key, delta._replace(request_id=job.key.number)))
            if delta.finish is not None:
                self._forget(job.key)
        if progress:
            self._deliver(progress)

    def _add(self, job: Job, guide: Guide | None) -> None:
        engine, request = self._engine, job.request
        number = engine.new_id()
        leader = None if request.leader is None else self._newest.get((job.key.router, request.leader))
        self._jobs[number], self._ids[job.key] = job, number
        self._newest[job.key.router, job.key.number] = number
        try:
            engine.add(replace(request, id=number, leader=leader), guide)
        except CallerError as error:  # a full queue, where the engine has a limit of its own
            log.warning("a request is refused: %s", error)
            self._forget(job.key)
            self._deliver([Progress(job.key, Delta(job.key.number, (), (), (), Finish.ERROR))])

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


__all__ = ["Deliver", "EngineHost", "facts_of"]
