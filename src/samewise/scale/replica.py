"""A replica: the actor with an engine.

Imports are light, so that a replica pins its environment before torch is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samewise.engine import Engine
    from samewise.scale.records import EngineFacts, Job, Listening, Refusal

log = logging.getLogger("samewise.scale")

REPORT_SECONDS = 1.0
"""Between two reports of a replica's statistics. Set by hand: well below a scrape's period."""


class Replica:
    """One engine in a process of its own."""

    async def __init__(self, make_engine: Callable[[], Engine]) -> None:  # type: ignore[misc]  # awaited
        from samewise import machine

        machine.pin_environment()
        import ray
        from ray import serve

        from samewise.scale.channel import every
        from samewise.scale.engine_host import facts_of
        from samewise.scale.job_server import JobServer
        from samewise.scale.roster import RosterLink

        context = serve.get_replica_context()
        self.name: str = context.replica_tag
        engine = await asyncio.to_thread(make_engine)
        self._contract = engine.contract
        self._roster = RosterLink(context.app_name)
        await self._roster.call("join", self.name, self._contract)
        self._facts = facts_of(engine)
        self._jobs = JobServer(self.name, engine, on_failure=end_process)
        await self._jobs.start(ray.util.get_node_ip_address())
        self._reporting = asyncio.ensure_future(every(REPORT_SECONDS, self._report))
        log.info("replica %s is ready: %s, contract %s", self.name, engine.config.model, self._contract.id)

    async def describe(self) -> EngineFacts:
        """What a router must know of the engine."""
        return self._facts

    async def generate(self, job: Job) -> AsyncGenerator[Listening | Refusal]:
        """Answer a job; see JobServer.generate."""
        async with aclosing(self._jobs.generate(job)) as answer:
            async for said in answer:
                yield said

    async def check_health(self) -> None:
        """Raise where the engine hangs: Ray Serve then replaces this replica."""
        if self._jobs.failure is not None:
            raise self._jobs.failure

    async def _report(self) -> None:
        await self._roster.call("report", self.name, self._contract, self._jobs.stats())


def end_process(what: str = "replica") -> None:
    """End this process at once: its engine cannot go on. `what` it is, for the log.

    Connections close with it, so the other sides notice at once, and Ray starts another one.
    """
    log.critical("this %s ends: its engine has stopped, and another one will be started", what)
    logging.shutdown()  # what was logged is written
    os._exit(1)


__all__ = ["REPORT_SECONDS", "Replica", "end_process"]
