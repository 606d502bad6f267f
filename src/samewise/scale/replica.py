"""A replica: the actor with an engine.

Imports are light, so that a replica pins its environment before torch is loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from samewise.engine import Engine
    from samewise.scale.channel import Address
    from samewise.scale.records import EngineFacts, Job, JobKey, Progress
    from samewise.types import Guide

log = logging.getLogger("samewise.scale")

REPORT_SECONDS = 1.0
"""Between two reports of a replica's statistics. Set by hand: well below a scrape's period."""


class Listening(NamedTuple):
    """The one item of the stream that answers a job: the job is queued, and its tokens come from there."""

    replica: str
    address: Address
    contract_id: str


class JobDropped(RuntimeError):
    """A job ended without its answer: the router disconnected, or the engine has stopped."""


class Replica:
    """One engine in a process of its own."""

    async def __init__(self, make_engine: Callable[[], Engine]) -> None:  # type: ignore[misc]  # awaited
        from samewise import machine

        machine.pin_environment()
        import ray
        from ray import serve

        from samewise.llm.intake import Intake
        from samewise.scale.channel import ReplicaServer, every
        from samewise.scale.engine_host import EngineHost, facts_of
        from samewise.scale.roster import RosterLink
        from samewise.text.grammar import Pace

        context = serve.get_replica_context()
        self.name: str = context.replica_tag
        engine = await asyncio.to_thread(make_engine)
        self._contract = engine.contract
        self._roster = RosterLink(context.app_name)
        await self._roster.call("join", self.name, self._contract)
        self._facts = facts_of(engine)
        self._intake = Intake(engine.loaded, engine.limits, seed=engine.config.seed, date=engine.config.date)
        self._intake.bound_grammars(Pace())
        self._loop = asyncio.get_running_loop()
        self._open: dict[JobKey, asyncio.Future[None]] = {}
        self._server = ReplicaServer(self._on_end, self._on_router_gone)
        self._address = await self._server.start(ray.util.get_node_ip_address())
        self._host = EngineHost(engine, self._deliver)
        self._reporting = asyncio.ensure_future(every(REPORT_SECONDS, self._report))
        log.info("replica %s is ready: %s, contract %s", self.name, engine.config.model, self._contract.id)

    async def describe(self) -> EngineFacts:
        """What a router must know of the engine."""
        return self._facts

    async def generate(self, job: Job) -> AsyncGenerator[Listening]:
        """Answer a job: says where its tokens come from, and ends when it has."""
        key = job.key
        guide = await self._guide(job)
        ended = self._open[key] = self._loop.create_future()
        self._host.add(job, guide)
        try:
            yield Listening(self.name, self._address, self._contract.id)
            await ended
        finally:
            if self._open.pop(key, None) is not None and not ended.done():
                self._host.end(key)

    async def check_health(self) -> None:
        """Raise once the engine has stopped: Ray Serve then replaces this replica."""
        if self._host.failure is not None:
            raise RuntimeError(f"the engine has stopped: {self._host.failure}")

    async def _guide(self, job: Job) -> Guide | None:
        grammar = job.request.sampling.grammar
        if grammar is None:
            return None
        owner = job.request.owner or None
        compiling = await asyncio.to_thread(self._intake.start_compiling, grammar, owner=owner)
        compiled = await asyncio.wrap_future(compiling)
        return compiled.guide(job.request.sampling.stop_ids)

    async def _report(self) -> None:
        if self._host.failure is not None:
            for key in list(self._open):
                self._end(key, JobDropped(f"the engine has stopped: {self._host.failure}"))
            return
        await self._roster.call("report", self.name, self._contract, self._host.stats())

    # ---- news of the engine, from its thread

    def _deliver(self, progress: list[Progress]) -> None:
        self._loop.call_soon_threadsafe(partial(self._send, progress))

    def _send(self, progress: list[Progress]) -> None:
        self._server.send(progress)
        for key, delta in progress:
            if delta.finish is not None:
                self._end(key)

    # ---- news of routers

    def _on_end(self, key: JobKey) -> None:
        self._host.end(key)
        self._end(key)

    def _on_router_gone(self, router: bytes) -> None:
        for key in [key for key in self._open if key.router == router]:
            self._host.end(key)
            self._end(key, JobDropped("the router disconnected"))

    def _end(self, key: JobKey, error: Exception | None = None) -> None:
        ended = self._open.get(key)
        if ended is None or ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)


__all__ = ["JobDropped", "Listening", "Replica"]
