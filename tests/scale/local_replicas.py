"""Replicas in threads of this process, which can be killed at any moment."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from samewise.engine import Engine
from samewise.llm.intake import Intake
from samewise.scale.engine_host import EngineHost
from samewise.scale.records import Job, JobKey, News, Progress, ReplicaGone, Started


class LocalReplicas:
    """Jobs go to the replicas in turn. `kill_after`: a replica dies when it has sent so many deltas.

    A replica that has died comes back under another name, over the same engine. `lose_every`: of so many
    deltas one is lost on its way.
    """

    def __init__(
        self, engines: list[Engine], kill_after: int | None = None, lose_every: int | None = None
    ) -> None:
        self._kill_after, self._lose_every = kill_after, lose_every
        self.num_lost = 0
        self._lock = threading.RLock()  # of the router's thread and those of the hosts
        self._hosts = [EngineHost(engine, partial(self._send, i)) for i, engine in enumerate(engines)]
        self._intakes = [Intake(engine.loaded, engine.limits, seed=0, date=None) for engine in engines]
        self._lives = [0] * len(engines)
        self._sent = [0] * len(engines)
        self._jobs: dict[JobKey, str] = {}
        self.contract_id = engines[0].contract.id
        self._turn = 0
        self.num_killed = 0
        self.resumed: list[Job] = []

    def _name(self, i: int) -> str:
        return f"{i}.{self._lives[i]}"

    def connect(self, inbox: Callable[[News | None], None]) -> None:
        self._inbox = inbox

    def start(self, job: Job, delay: float) -> None:
        i = self._turn % len(self._hosts)
        self._turn += 1
        if job.request.output:
            self.resumed.append(job)
        grammar = job.request.sampling.grammar
        guide = None
        if grammar is not None:
            compiled = self._intakes[i].start_compiling(grammar).result()
            guide = compiled.guide(job.request.sampling.stop_ids)
        with self._lock:
            name = self._jobs[job.key] = self._name(i)
            self._inbox(Started(job.key, name, self.contract_id))
            self._hosts[i].add(job, guide)

    def end(self, key: JobKey, replica: str | None) -> None:
        for host in self._hosts:
            host.end(key)

    def _send(self, i: int, progress: list[Progress]) -> None:
        with self._lock:
            for one in progress:
                if self._jobs[one.key] != self._name(i):
                    continue  # it was lost with the replica
                self._sent[i] += 1
                if self._loses(i, one):
                    self.num_lost += 1
                else:
                    self._inbox(one)
                if self._kill_after is not None and self._sent[i] % self._kill_after == 0:
                    self._kill(i)

    def _loses(self, i: int, one: Progress) -> bool:
        """Whether a delta is lost. The last one of an answer is not: only a closed connection loses that."""
        is_last = one.delta.finish is not None
        return self._lose_every is not None and self._sent[i] % self._lose_every == 0 and not is_last

    def _kill(self, i: int) -> None:
        name = self._name(i)
        self._lives[i] += 1
        self.num_killed += 1
        for key, where in self._jobs.items():
            if where == name:
                self._hosts[i].end(key)
        self._inbox(ReplicaGone(name, "killed"))

    def stats(self) -> dict[str, dict[str, Any]]:
        return {self._name(i): host.stats() for i, host in enumerate(self._hosts)}

    def close(self) -> None:
        for host in self._hosts:
            host.close()
