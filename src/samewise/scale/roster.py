"""The roster: one actor for an application, which knows its contract and its replicas.

It outlives the deployments: an application that is deployed again keeps its contract as long as a replica of
it runs. It ends by itself when none has reported for a while, and deletes the application of a server that
was killed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samewise.errors import GuaranteeLost

if TYPE_CHECKING:
    from samewise.contract import Contract

log = logging.getLogger("samewise.scale")

NAMESPACE = "samewise"


@dataclass(frozen=True, slots=True)
class RosterLimits:
    """Set by hand."""

    silent: float = 15.0  # seconds without a report after which a replica is no longer listed
    alone: float = 60.0  # seconds without any report or question after which the roster ends
    orphaned: float = 300.0  # seconds of a server's silence after which its replicas are stopped
    refused: int = 16  # replicas whose refusal is remembered: Ray Serve starts another again and again


LIMITS = RosterLimits()


class Roster:
    """The contract of the replicas that run, what each last reported, and which were refused."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._contract: Contract | None = None
        self._joined = clock()  # the last one
        self._stats: dict[str, tuple[float, dict[str, Any]]] = {}
        self._refused: dict[str, str] = {}  # by replica
        self.asked = clock()
        self._kept: tuple[str, float] | None = None  # the application of a server, and when it last said so

    async def join(self, replica: str, contract: Contract) -> None:
        """Raise GuaranteeLost unless the contract is that of the first replica, which this one may be."""
        from samewise.scale.records import refuse_other

        now = self.asked = self._clock()
        if self._contract is None or not (self._running() or now - self._joined < LIMITS.silent):
            self._contract = contract
        try:
            refuse_other(self._contract, contract, replica)
        except GuaranteeLost as error:
            log.error("%s", error)  # noqa: TRY400 - the message is complete
            self._refused[replica] = str(error)
            while len(self._refused) > LIMITS.refused:
                del self._refused[next(iter(self._refused))]
            raise
        self._joined = now

    async def keep(self, app_name: str) -> None:
        """The server that started this application for itself runs. Called by it again and again."""
        self._kept = app_name, self._clock()

    @property
    def orphan(self) -> str | None:
        """The application, if its server has fallen silent; None for one that belongs to no server."""
        if self._kept is None or self._clock() - self._kept[1] < LIMITS.orphaned:
            return None
        return self._kept[0]

    async def report(self, replica: str, contract: Contract, stats: dict[str, Any]) -> None:
        """Note a replica's statistics, and its contract where this actor was restarted."""
        self._contract = self._contract or contract
        self.asked = self._clock()
        self._stats[replica] = self.asked, stats

    async def stats(self) -> dict[str, dict[str, Any]]:
        """What the replicas that run last reported, by name."""
        self.asked = self._clock()
        self._stats = {name: self._stats[name] for name in self._running()}
        return {name: stats for name, (_, stats) in self._stats.items()}

    async def refused(self) -> dict[str, str]:
        """The replicas that were refused, and why."""
        return self._refused

    def _running(self) -> list[str]:
        now = self._clock()
        return sorted(name for name, (at, _) in self._stats.items() if now - at < LIMITS.silent)


class RosterActor(Roster):
    """A roster that ends itself. Runs as a detached actor."""

    async def watch(self) -> None:
        """Begin to look at the time. Returns when the actor is about to end."""
        import ray
        from ray import serve

        while self._clock() - self.asked < LIMITS.alone:
            await asyncio.sleep(LIMITS.alone / 4)
            if self.orphan is not None:
                log.error("the server of %s is silent: its replicas are stopped", self.orphan)
                await asyncio.to_thread(serve.delete, self.orphan)
                break
        ray.kill(ray.get_runtime_context().current_actor)


def roster_of(app_name: str) -> Any:
    """The roster's actor of an application, which is started if there is none. Blocks for milliseconds."""
    import ray

    try:
        return ray.get_actor(app_name, NAMESPACE)
    except ValueError:
        made = ray.remote(RosterActor).options(
            name=app_name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
            max_concurrency=1000,
        )  # fmt: skip
        roster = made.remote()
        roster.watch.remote()
        return roster


class RosterLink:
    """Calls an application's roster from an event loop."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._actor: Any = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of the roster. After an error the roster is looked up again."""
        actor = self._actor or await asyncio.to_thread(roster_of, self._app_name)
        self._actor = None
        result = await getattr(actor, method).remote(*arguments)
        self._actor = actor
        return result


__all__ = ["LIMITS", "NAMESPACE", "Roster", "RosterActor", "RosterLimits", "RosterLink", "roster_of"]
