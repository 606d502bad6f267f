"""The queue of grammars to be compiled: a lane for quick ones, and a lane for those that take longer.

Every grammar begins in the quick lane. One that reaches the quick lane's limit of processor time is tried
again in the slow lane, so a grammar of ordinary size waits for short trials only. Each lane has a thread, a
child process (see `compile_process`) and a bounded number of waiting grammars; the thread and the child start
with the first grammar and end when none came for a while.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from samewise.errors import BadParameter, MachineError, QueueFull
from samewise.text.compile_process import ChildLost, CompileProcess, OverLimit, Refused, Trial
from samewise.types import Grammar

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What compiling one grammar may take, and how many may wait. Set by hand.

    A JSON schema of 2,000 properties takes 0.3 seconds and 10 MB on a processor of 2023, `multipleOf: 99991`
    0.5 seconds and 50 MB, `multipleOf: 999961` 10 seconds and 450 MB.
    """

    quick_seconds: float = 0.1  # of processor time, in the quick lane; ordinary grammars take 0.001 to 0.02
    slow_seconds: float = 2.0  # of processor time, in the slow lane
    num_bytes: int = 256 << 20  # of memory, while compiling
    quick_waiting: int = 32  # grammars waiting for the quick lane, at most: about 3 seconds of trials
    slow_waiting: int = 4  # and for the slow lane: about 8 seconds
    owner_share: float = 0.25  # of the waiting grammars may be one owner's; at least one may
    idle_seconds: float = 120.0  # after which a lane's thread and child end


@dataclass(frozen=True, slots=True, eq=False)
class _Job(Generic[C]):
    """A grammar to compile, and where its result goes. `make` compiles it in this process."""

    grammar: Grammar
    make: Callable[[Grammar, Trial], C]
    owner: bytes | None
    result: Future[C] = field(default_factory=Future)


class CompileQueue(Generic[C]):
    """Compiles grammars that a child has compiled within limits. Safe to call from any thread."""

    def __init__(self, tokenizer: Mapping[str, Any], limits: CompileLimits | None = None) -> None:
        self._tokenizer, self._limits = tokenizer, limits or CompileLimits()
        self._begin()

    def _begin(self) -> None:
        limits = self._limits
        self._pid = os.getpid()
        slow: _Lane[C] = _Lane(
            self._tokenizer, limits, limits.slow_seconds, limits.slow_waiting, overflow=None
        )
        quick: _Lane[C] = _Lane(
            self._tokenizer, limits, limits.quick_seconds, limits.quick_waiting, overflow=slow
        )
        self._lanes = (quick, slow)

    def submit(
        self, grammar: Grammar, make: Callable[[Grammar, Trial], C], *, owner: bytes | None = None
    ) -> Future[C]:
        """A future of `make(grammar, trial)`, which runs in a lane's thread after the trial.

        An `owner` has a share of the places; without one, all of them may be taken. Raises QueueFull. The
        future fails with BadParameter for a grammar that is refused or needs too much, with QueueFull where
        too many slow ones wait, and with MachineError after `close`.
        """
        if os.getpid() != self._pid:
            self._begin()  # a fork has the lanes' state but not their threads
        job = _Job(grammar, make, owner)
        job.result.set_running_or_notify_cancel()  # callers share it, so that none may cancel it
        self._lanes[0].put(job)
        return job.result

    def close(self) -> None:
        """Fail what waits and kill the children. Returns at once; nothing can be submitted after it."""
        if os.getpid() == self._pid:
            for lane in self._lanes:
                lane.close()


class _Lane(Generic[C]):
    """Grammars that wait for one child, tried one after the other by one thread."""

    def __init__(
        self,
        tokenizer: Mapping[str, Any],
        limits: CompileLimits,
        seconds: float,
        max_waiting: int,
        overflow: _Lane[C] | None,
    ) -> None:
        self._limits, self._seconds, self._max_waiting = limits, seconds, max_waiting
        self._overflow = overflow
        self._process = CompileProcess(tokenizer)
        self._changed = threading.Condition()
        self._waiting: deque[_Job[C]] = deque()
        self._running = False  # whether the thread is there to take the next job
        self._closed = False

    def put(self, job: _Job[C]) -> None:
        """Add a job. Raises QueueFull."""
        with self._changed:
            if self._closed:
                raise _closed()
            self._refuse_full(job.owner)
            self._waiting.append(job)
            self._changed.notify()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="samewise-grammars", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            failed, self._waiting = self._waiting, deque()
            self._changed.notify()
        self._process.kill()
        for job in failed:
            job.result.set_exception(_closed())

    def _refuse_full(self, owner: bytes | None) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull("too many grammars wait to be compiled; try again later", param="grammar")
        if owner is not None:
            share = max(1, int(self._limits.owner_share * self._max_waiting))
            if sum(job.owner == owner for job in self._waiting) >= share:
                raise QueueFull(
                    f"{share} of your grammars wait to be compiled; try again later", param="grammar"
                )

    def _run(self) -> None:
        """The thread: jobs until none came for a while."""
        while (job := self._take()) is not None:
            try:
                job.result.set_result(job.make(job.grammar, self._try(job.grammar)))
            except _TryLater:
                self._pass_on(job)
            except BaseException as error:
                job.result.set_exception(_closed() if self._closed else error)
            del job  # what was compiled must not live until the next job

    def _take(self) -> _Job[C] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, self._limits.idle_seconds)
            if self._closed or not self._waiting:
                self._process.stop()  # before another thread may start to use it
                self._running = False
                return None
            return self._waiting.popleft()

    def _try(self, grammar: Grammar) -> Trial:
        limits = self._limits
        for is_last in (False, True):
            try:
                return self._process.trial(grammar, seconds=self._seconds, num_bytes=limits.num_bytes)
            except Refused as error:
                raise BadParameter(str(error), param="grammar") from None
            except OverLimit as error:
                if error.limit == "time" and self._overflow is not None:
                    raise _TryLater from None
                raise _too_much(grammar, error.limit, limits) from None
            except ChildLost:
                if is_last or self._closed:
                    raise
        raise AssertionError

    def _pass_on(self, job: _Job[C]) -> None:
        assert self._overflow is not None
        try:
            self._overflow.put(job)
        except (QueueFull, MachineError) as error:
            job.result.set_exception(error)


class _TryLater(Exception):
    """A trial took longer than its lane allows."""


def _too_much(grammar: Grammar, limit: str, limits: CompileLimits) -> BadParameter:
    allowed = (
        f"{limits.slow_seconds:g} seconds to compile"
        if limit == "time"
        else f"{limits.num_bytes >> 20} MB of memory to compile, or nests too deeply"
    )
    return BadParameter(
        f"grammar={grammar.kind}: it takes more than {allowed}; make it smaller "
        "(a large multipleOf, or a pattern with large counts, is usually the reason)",
        param="grammar",
    )


def _closed() -> MachineError:
    return MachineError("no grammar is compiled any more: the engine was closed")


__all__ = ["CompileLimits", "CompileQueue"]
