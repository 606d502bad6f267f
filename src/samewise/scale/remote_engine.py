"""An engine whose frames run in other processes: what `llm` needs of an engine, over replicas.

A router keeps what the caller has of every request: its output tokens, and how many of the prompt's
log-probabilities. When a replica dies or is stopped, its requests are given to other replicas with exactly
that (`Request.output`), as `schedule/registry.py` does after a failed step inside one engine. Sampling,
penalties, grammars and limits are functions of the request and these tokens, so the rest of the answer is the
same bits. Text, stop strings and log-probabilities are made here, above the engine, and notice nothing.

All that arrives says where in the answer it begins. Where that is not what the caller has, the rest is asked
for again: an answer has no hole, whatever a network loses.
"""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from samewise.contract import Contract
from samewise.engine.weights import CheckedUpdate, WeightUpdate
from samewise.errors import CallerError, EngineLost, MachineError, QueueFull
from samewise.kv.prefix import extend_digests
from samewise.llm.step_loop import num_shared
from samewise.scale.merge_stats import merge_stats
from samewise.scale.records import (
    EngineFacts,
    Job,
    JobKey,
    Lost,
    News,
    Progress,
    Refused,
    ReplicaGone,
    Started,
)
from samewise.shares import FairQueue
from samewise.types import Delta, Finish, Guide, Received, Request

log = logging.getLogger("samewise.scale")


@dataclass(frozen=True, slots=True)
class FailOverLimits:
    """When a request is given up, and which replicas are avoided. Set by hand."""

    started: int = 8  # replicas lost in a row without a token between: the request may be what ends them
    unstarted: int = 60  # failed attempts in a row before any replica had begun: a minute
    delay: float = 1.0  # seconds before such an attempt is repeated, at most; the first takes 10 ms
    avoided: float = 30.0  # seconds for which a replica that failed comes last: Ray forgets dead ones sooner


LIMITS = FailOverLimits()


class Replicas(Protocol):
    """The engines of other processes. Every method returns at once; news arrive through the inbox."""

    def connect(self, inbox: Callable[[News | None], None]) -> None:
        """Have news put there, by any thread. Called once, first."""
        ...

    def start(self, job: Job, delay: float) -> None:
        """Give a job to a replica, after so many seconds."""
        ...

    def end(self, key: JobKey, replica: str | None) -> None:
        """Nothing more is wanted of a job; `replica`: where it began."""
        ...

    def stats(self) -> dict[str, dict[str, Any]]:
        """What each replica last reported of its engine, by its name."""
        ...

    def close(self) -> None:
        """Let go of the replicas."""
        ...


@dataclass(slots=True, eq=False)
class _Asked:
    """A request, and what its caller has of it. Owned by the RemoteEngine."""

    request: Request
    pages: tuple[bytes, ...]
    tokens: list[int] = field(default_factory=list)
    num_scores: int = 0
    has_failed: bool = False  # whether a replica's engine has ended it with an error
    refused_by: str | None = None  # the replica that has refused it since the last progress
    avoid: tuple[str, ...] = ()  # those replicas
    attempt: int = 0
    replica: str | None = None  # where this attempt began
    num_cached: int | None = None  # prompt tokens that the first replica found in its cache
    num_started: int = 0  # replicas lost since the last progress
    num_unstarted: int = 0
    lost_at: float | None = None

    @property
    def received(self) -> Received:
        """How much of it the caller has."""
        return Received(len(self.tokens), self.num_scores)


class RemoteEngine:
    """Has the interface of an Engine. Not thread-safe: one thread owns it; any may call `wake`.

    `num_replicas`: that may run at once. `num_places`: requests that one of them holds at once; None: twice
    what it runs. Other requests wait here, by owner and priority: Ray Serve knows of neither.
    """

    def __init__(
        self,
        facts: EngineFacts,
        replicas: Replicas,
        *,
        num_replicas: int = 1,
        num_places: int | None = None,
        max_queued: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        most = facts.config.max_num_seqs * num_replicas
        self.config = replace(facts.config, max_num_seqs=most, max_queued=max_queued)
        self.limits = replace(
            facts.limits, max_num_seqs=most, max_queued=max_queued,
            max_rows=facts.limits.max_rows * num_replicas,
        )  # fmt: skip
        self.loaded, self.contract, self.report = facts.loaded, facts.contract, facts.report
        self.weights_version, self.contracts = 0, {facts.contract.id: facts.contract}
        self._facts, self._replicas, self._clock = facts, replicas, clock
        self._router = secrets.token_bytes(16)
        self._asked: dict[int, _Asked] = {}  # by request id
        self._num_replicas, self._num_places = num_replicas, num_places or 2 * facts.config.max_num_seqs
        self._queue: FairQueue[_Asked] = FairQueue(0)  # which of them wait for a replica
        self._failed: dict[str, float] = {}  # by replica, when it failed last
        self._next_id = 0
        self._inbox: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self.num_failovers = 0
        self.failover_seconds = 0.0  # from a loss to the next token, over all requests
        replicas.connect(self._inbox.put)

    # ---- requests

    def new_id(self) -> int:
        """An id for the next request. Ids order requests by arrival and are never reused."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, request: Request, guide: Guide | None = None) -> None:  # noqa: ARG002 - replicas make their own
        """Queue a request for a replica. Raises QueueFull where too many wait for one."""
        most = self.limits.max_queued
        if most is not None and len(self._asked) >= self.limits.max_num_seqs + most:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting and max_queued is {most}; try again later or raise "
                "max_queued"
            )
        pages: list[bytes] = []
        page = self.limits.page
        extend_digests(pages, request.prompt, request.salt, page, len(request.prompt) // page)
        asked = self._asked[request.id] = _Asked(request, tuple(pages))
        self._queue.push(request.owner, request.id, asked, priority=request.priority)
        self._start_waiting()

    def abort(self, request_id: int) -> Delta | None:
        """Drop a request at any moment. None if it has ended already."""
        asked = self._asked.get(request_id)
        if asked is None:
            return None
        self._drop(asked)
        self._start_waiting()
        return Delta(request_id, (), (), (), Finish.ABORT)

    def end(self, request_id: int) -> None:
        """End a request whose text is complete: no further delta comes of it."""
        self.abort(request_id)

    def _drop(self, asked: _Asked) -> None:
        """Nothing more is wanted of a request."""
        if not self._forget(asked):
            self._replicas.end(self._key(asked), asked.replica)

    def _forget(self, asked: _Asked) -> bool:
        """A request has ended, or is not wanted any more; returns whether it was still waiting."""
        del self._asked[asked.request.id]
        return self._queue.forget(asked.request.id)

    def _start_waiting(self) -> None:
        """Give requests that wait to replicas, as many as those that run have places for."""
        if not self._queue.num_waiting:
            return
        running = min(self._num_replicas, len(self._replicas.stats()) or self._num_replicas)
        shared = min(num_shared(self._facts.limits), self._num_places)
        self._queue.resize(running * shared, running * self._num_places)
        while (asked := self._queue.pop()) is not None:
            self._start(asked)

    def _start(self, asked: _Asked, delay: float = 0.0) -> None:
        request = replace(asked.request, output=tuple(asked.tokens), num_scores=asked.num_scores)
        asked.replica = None
        loads = Counter(other.replica for other in self._asked.values() if other.replica is not None)
        job = Job(self._key(asked), request, asked.pages, self._avoided(asked), loads)
        self._replicas.start(job, delay)

    def _start_again(self, asked: _Asked, delay: float = 0.0) -> None:
        """Go on from what the caller has, in another attempt; nothing more is wanted of the last one."""
        self._replicas.end(self._key(asked), asked.replica)
        asked.attempt += 1
        self._start(asked, delay)

    def _avoided(self, asked: _Asked) -> tuple[str, ...]:
        """Replicas that failed a short while ago, and those where this request has failed."""
        since = self._clock() - LIMITS.avoided
        self._failed = {name: at for name, at in self._failed.items() if at > since}
        return (*self._failed, *asked.avoid)

    def _key(self, asked: _Asked) -> JobKey:
        return JobKey(self._router, asked.request.id, asked.attempt)

    # ---- results

    def step(self) -> list[Delta]:
        """What replicas have committed since the last call. Waits for some, or for `wake`."""
        if self.idle:
            return []
        deltas: list[Delta] = []
        news = self._inbox.get()
        while True:
            deltas += self._take(news)
            try:
                news = self._inbox.get_nowait()
            except queue.Empty:
                break
        self._start_waiting()
        return deltas

    def wake(self) -> None:
        """End a wait inside `step`. Any thread may call it."""
        self._inbox.put(None)

    def _take(self, news: News | None) -> list[Delta]:
        if news is None:
            return []
        if isinstance(news, ReplicaGone):
            self._avoid(news.replica)
            lost = [asked for asked in self._asked.values() if asked.replica == news.replica]
            return [delta for asked in lost for delta in self._lost(asked, news.error, started=True)]
        asked = self._asked.get(news.key.number)
        if asked is None or news.key != self._key(asked):
            return []  # of a request that has ended, or of an attempt that was given up
        if isinstance(news, Progress):
            return self._progress(asked, news)
        if isinstance(news, Refused):
            return self._refused(asked, news)
        if isinstance(news, Lost):
            self._avoid(news.replica)
            return self._lost(asked, news.error, started=news.started)
        return self._started(asked, news)

    def _started(self, asked: _Asked, news: Started) -> list[Delta]:
        asked.replica = news.replica
        if news.contract_id != self.contract.id:
            self._avoid(news.replica)
            error = f"replica {news.replica} has the contract {news.contract_id}, not {self.contract.id}"
            return self._lost(asked, error, started=False)
        return []

    def _refused(self, asked: _Asked, news: Refused) -> list[Delta]:
        """Two replicas are believed, not one: the router has checked the request, so a machine may be slow.

        Where nothing was received of the answer yet, a second refusal by the same replica is believed too.
        """
        reason = f"replica {news.replica} refuses it: {news.error}"
        if asked.refused_by is None:
            asked.refused_by, asked.avoid = news.replica, (*asked.avoid, news.replica)
            self._try_elsewhere(asked, reason)
            return []
        if asked.refused_by == news.replica and asked.received != Received():
            return self._lost(asked, reason, started=False)
        return [self._fail(asked, str(news.error), news.error)]

    def _progress(self, asked: _Asked, news: Progress) -> list[Delta]:
        if news.begin != asked.received:
            error = f"{news.begin} arrived after {asked.received}"
            return self._lost(asked, error, started=True)
        delta = self._committed(asked, news.delta)
        if delta.finish is None:
            return [delta]
        if delta.finish is Finish.ERROR and not asked.has_failed:
            # One replica may lack memory, or time for a grammar, that another has.
            asked.has_failed = True
            asked.avoid += () if asked.replica is None else (asked.replica,)
            self._try_elsewhere(asked, f"it failed on replica {asked.replica}")
            return [delta._replace(finish=None)]
        self._forget(asked)
        return [delta]

    def _committed(self, asked: _Asked, delta: Delta) -> Delta:
        """The delta for the caller, who has it from now on."""
        if asked.lost_at is not None:
            self.failover_seconds += self._clock() - asked.lost_at
            asked.lost_at = None
        asked.num_started, asked.num_unstarted, asked.refused_by = 0, 0, None
        asked.tokens += delta.tokens
        asked.num_scores += len(delta.scores)
        if asked.num_cached is None:
            asked.num_cached = delta.num_cached
        return delta._replace(num_cached=asked.num_cached)

    def _lost(self, asked: _Asked, error: str, *, started: bool) -> list[Delta]:
        """Go on elsewhere, or end the request with an error where that failed too often."""
        asked.num_started += started
        asked.num_unstarted += not started
        if asked.num_started >= LIMITS.started or asked.num_unstarted >= LIMITS.unstarted:
            return [self._fail(asked, f"no replica can answer it: {error}")]
        if started:
            self._avoid(asked.replica)
            self._try_elsewhere(asked, error)
        else:
            asked.lost_at = self._clock() if asked.lost_at is None else asked.lost_at
            self._start_again(asked, min(LIMITS.delay, 0.01 * 2**asked.num_unstarted))
        return []

    def _try_elsewhere(self, asked: _Asked, reason: str) -> None:
        """Give a request that a replica had begun, or refused, to another one."""
        asked.lost_at = self._clock() if asked.lost_at is None else asked.lost_at
        log.warning(
            "request %d goes on elsewhere after %d tokens: %s", asked.request.id, len(asked.tokens), reason
        )
        self.num_failovers += 1
        self._start_again(asked)

    def _fail(self, asked: _Asked, reason: str, error: CallerError | None = None) -> Delta:
        """End a request with an error; `error`: for its caller."""
        number = asked.request.id
        log.log(
            logging.ERROR if error is None else logging.INFO, "request %d is given up, %s", number, reason
        )
        self._drop(asked)
        return Delta(number, (), (), (), Finish.ERROR, error=error)

    def _avoid(self, replica: str | None) -> None:
        """Give nothing to a replica for a while where there is another one. None: it is not known."""
        if replica is not None:
            self._failed[replica] = self._clock()

    # ---- failures of this process

    @property
    def lost(self) -> EngineLost | None:
        """Always None: replicas are replaced."""
        return None

    def recover(self, received: Mapping[int, Received | None] | None = None, *, blame: bool = False) -> None:  # noqa: ARG002
        """Start every request again from what its caller has. No step runs here, so none is blamed."""
        for number, asked in list(self._asked.items()):
            has = (received or {}).get(number, asked.received)
            if has is None:
                self._drop(asked)
                continue
            if self._queue.waits(number):
                continue
            del asked.tokens[has.tokens :]
            asked.num_scores = min(asked.num_scores, has.scores)
            self._start_again(asked)
        self._start_waiting()

    # ---- what replicas do not do

    @property
    def certified(self) -> bool:
        """Always: weights are not replaced."""
        return True

    def read_update(self, update: WeightUpdate) -> CheckedUpdate:
        """Refused as `update_weights` is."""
        self.update_weights(update)
        raise AssertionError

    def update_weights(
        self,
        update: WeightUpdate,  # noqa: ARG002 - refused
        *,
        received: Mapping[int, Received | None] | None = None,  # noqa: ARG002
    ) -> Contract:
        """Refused: replicas that replaced their weights at different moments would have two contracts."""
        raise MachineError(
            "the weights of replicas cannot be replaced while they serve; serve a folder of the new weights, "
            "or train with an engine in one process (no --replicas)"
        )

    def forget_prefixes(
        self,
        received: Mapping[int, Received | None] | None = None,  # noqa: ARG002 - refused
    ) -> None:
        """Refused: every replica has a prefix cache of its own."""
        raise MachineError("the prefix caches of replicas cannot be emptied from here; restart the replicas")

    # ---- what it is

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._asked and self._inbox.empty()

    @property
    def num_waiting(self) -> int:
        """Requests beyond what all replicas run at once. Which of them has places, the replicas know."""
        return max(0, len(self._asked) - self.limits.max_num_seqs)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest context."""
        return self.limits.max_model_len

    @property
    def settings(self) -> dict[str, str | int | bool | None]:
        """What another engine must be given to reach this contract, beside the model's name."""
        return self._facts.settings

    def stats(self) -> dict[str, Any]:
        """The counters of all replicas, added; those of each under "replicas"."""
        by_name = self._replicas.stats()
        merged = merge_stats(list(by_name.values()) or [self._facts.stats])
        return merged | {
            "contract": self.contract.id,
            "waiting": merged["waiting"] + sum(asked.replica is None for asked in self._asked.values()),
            "replicas": by_name,
            "failovers": self.num_failovers,
            "failover_seconds": self.failover_seconds,
        }

    def live(self, since: int = 0) -> dict[str, Any]:  # noqa: ARG002 - frames are not sent
        """For a monitor: the statistics. What the replicas' frames hold is not sent to the router."""
        return {"stats": self.stats(), "frames": []}

    def close(self) -> None:
        """Let go of the replicas."""
        self._replicas.close()


__all__ = ["LIMITS", "FailOverLimits", "RemoteEngine", "Replicas"]
