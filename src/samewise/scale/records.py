"""What travels between a router and its replicas. Host only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from samewise.config import EngineConfig
from samewise.contract import Contract
from samewise.errors import CallerError, GuaranteeLost, SamewiseError
from samewise.execute.load import Loaded
from samewise.schedule.limits import Limits
from samewise.types import Delta, Received, Request
from samewise.verify.probe import ProbeReport


class JobKey(NamedTuple):
    """One attempt at a request. A request that goes on elsewhere is another attempt under the same number."""

    router: bytes  # the process that asks
    number: int  # the request's id there
    attempt: int


@dataclass(frozen=True, slots=True)
class Job:
    """A request for a replica. Its ids are the router's."""

    key: JobKey
    request: Request
    pages: tuple[bytes, ...]  # digests of the prompt's full pages, for routing
    avoid: tuple[str, ...] = ()  # replicas to which it goes only where there is no other
    loads: Mapping[str, int] = field(default_factory=dict)  # its router's requests under way, by replica


class Address(NamedTuple):
    """Where a replica is reached, and what proves it. Travels over Ray."""

    host: str
    port: int
    router_secret: bytes  # of the router, sent to the replica
    replica_secret: bytes  # of the replica, sent to the router


class Listening(NamedTuple):
    """What a replica says of a job that it has queued: the job's tokens come from there."""

    replica: str
    address: Address
    contract_id: str


class Refusal(NamedTuple):
    """What a replica says of a job that it does not take: a mistake of the caller, or of its own engine."""

    replica: str
    error: SamewiseError


class Started(NamedTuple):
    """A replica has queued a job."""

    key: JobKey
    replica: str
    contract_id: str


class Progress(NamedTuple):
    """A replica has committed something for a job. The delta's request id is the router's."""

    key: JobKey
    begin: Received  # what was committed for the request before, by any replica
    delta: Delta


class Lost(NamedTuple):
    """An attempt has failed; `started`: after a replica had queued it."""

    key: JobKey
    error: str
    started: bool
    replica: str | None = None  # which has failed, where it is known and to be avoided


class Refused(NamedTuple):
    """A replica found a mistake of the caller in a job, or reached a limit of its own machine."""

    key: JobKey
    error: CallerError
    replica: str


class ReplicaGone(NamedTuple):
    """Nothing more will come from a replica."""

    replica: str
    error: str


News = Started | Progress | Lost | Refused | ReplicaGone


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a router must know of the engines behind it. All replicas of one contract have the same."""

    config: EngineConfig
    loaded: Loaded  # without weights
    limits: Limits
    contract: Contract
    report: ProbeReport
    settings: dict[str, str | int | bool | None]
    stats: dict[str, Any]  # counters of an engine that has not begun


def refuse_other(first: Contract, other: Contract, replica: str) -> None:
    """Raise GuaranteeLost, which names the differing facts, unless two contracts are one."""
    if first.id == other.id:
        return
    differing = first.differences(other)
    facts = "; ".join(f"{name} is {there}, not {here}" for name, here, there in differing)
    raise GuaranteeLost(
        f"replica {replica} has the contract {other.id}, the first one has {first.id}: {facts}. "
        "All replicas must give the same bits: give them the same model, settings, libraries and hardware"
    )


__all__ = [
    "Address",
    "EngineFacts",
    "Job",
    "JobKey",
    "Listening",
    "Lost",
    "News",
    "Progress",
    "Refusal",
    "Refused",
    "ReplicaGone",
    "Started",
    "refuse_other",
]
