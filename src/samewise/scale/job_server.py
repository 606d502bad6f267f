"""Answers the jobs of routers with one engine: grammars, the engine's thread, the connections.

Knows nothing of Ray, which carries the calls of `generate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from samewise.engine import Engine
from samewise.errors import CallerError, MachineError, QueueFull, SamewiseError
from samewise.llm.intake import Intake
from samewise.scale.channel import ReplicaServer
from samewise.scale.engine_host import EngineHost
from samewise.scale.records import Job, Listening, Progress, Refusal
from samewise.scale.wire import LIMITS, ChannelLimits
from samewise.serve.threads import FairThreads
from samewise.text.grammar import Pace
from samewise.types import Guide

GRAMMAR_THREADS = 4
"""Grammars that are looked at in this process at once. Set by hand, as a server's `INTAKE_THREADS`."""


class JobServer:
    """Owns an engine, through its host, and the connections of routers. Used in one event loop.

    `on_failure` is called where the engine cannot go on, in the engine's thread.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        on_failure: Callable[[], None],
        limits: ChannelLimits = LIMITS,
    ) -> None:
        self.name, self._contract_id = name, engine.contract.id
        self._intake = Intake(engine.loaded, engine.limits, seed=engine.config.seed, date=engine.config.date)
        self._intake.bound_grammars(Pace())
        self._threads = FairThreads(GRAMMAR_THREADS)
        self._server = ReplicaServer(limits)
        self._engine, self._on_failure = engine, on_failure

    async def start(self, host: str) -> None:
        """Listen for routers on this address, and begin to step."""
        self._loop = asyncio.get_running_loop()
        self._address = await self._server.start(host)
        self._host = EngineHost(self._engine, self._deliver, on_failure=self._on_failure)

    async def generate(self, job: Job) -> AsyncGenerator[Listening | Refusal]:
        """Answer a job: says where its tokens come from, or why it is refused; ends when they were sent."""
        guide: Guide | None = None
        refusal: SamewiseError | None = self.failure
        if refusal is None:
            try:
                guide = await self._guide(job)
            except QueueFull:
                raise  # there may be room elsewhere, or later
            except CallerError as error:
                refusal = error
        if refusal is not None:
            yield Refusal(self.name, refusal)
            return
        ended = self._server.open(job.key)
        self._host.add(job, guide)
        try:
            yield Listening(self.name, self._address, self._contract_id)
            await ended
        finally:
            self._server.forget(job.key)
            self._host.end(job.key)

    @property
    def failure(self) -> MachineError | None:
        """Why the engine cannot go on, or is in one step for too long; None where neither is so."""
        return self._host.failure

    def stats(self) -> dict[str, Any]:
        """The engine's counters as of its last step, at most."""
        return self._host.stats()

    async def close(self) -> None:
        """Disconnect, and end the engine's thread."""
        await self._server.close()
        await asyncio.to_thread(self._host.close)
        self._intake.stop_compiling()

    async def _guide(self, job: Job) -> Guide | None:
        grammar = job.request.sampling.grammar
        if grammar is None:
            return None
        owner = job.request.owner or None
        compiling = self._intake.find_compiled(grammar, owner=owner)
        if compiling is None:
            start = partial(self._intake.start_compiling, grammar, owner=owner)
            compiling = await self._threads.run(start, owner=owner)
        compiled = await asyncio.wrap_future(compiling)
        return compiled.guide(job.request.sampling.stop_ids)

    def _deliver(self, progress: list[Progress]) -> None:
        """Called by the engine's thread."""
        self._loop.call_soon_threadsafe(partial(self._server.send, progress))


__all__ = ["JobServer"]
