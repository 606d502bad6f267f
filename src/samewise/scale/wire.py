"""The form of what goes over a connection between a router and a replica, and when the system closes one.

A message with tokens is a length and msgpack, which carries floats exactly and runs no code.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import Any

from samewise.scale.records import JobKey, Progress
from samewise.types import Delta, Finish, Received

LENGTH = struct.Struct("!I")
WANTED = struct.Struct("!?QI")  # whether a job's tokens are wanted from now on; its number and attempt
ROUTER_BYTES = 16
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Seconds. Set by hand."""

    connect: float = 10.0
    """For a connection to be there, secrets included: within one network milliseconds."""
    unheard: float = 30.0
    """For a router to ask for a job's tokens, after which the job ends: it may have to connect first."""
    idle: int = 10
    """Without traffic, after which the system asks whether the other side is there. Devices that forget idle
    connections do so after a minute or more."""
    silent: int = 20
    """Without an answer, after which the system closes a connection. Longer than a network's usual pauses."""


LIMITS = ChannelLimits()


def watch_connection(writer: asyncio.StreamWriter, limits: ChannelLimits) -> None:
    """Have the system close a connection whose other side is silent: a lost machine says nothing.

    Probes find out on an idle connection, the time limit where something was sent. Systems differ in which of
    the options they have.
    """
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    num_probes = 2
    options = {
        "TCP_KEEPIDLE": limits.idle,
        "TCP_KEEPALIVE": limits.idle,  # the same on macOS
        "TCP_KEEPINTVL": max(1, (limits.silent - limits.idle) // num_probes),
        "TCP_KEEPCNT": num_probes,
        "TCP_USER_TIMEOUT": limits.silent * 1000,  # milliseconds
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def encode(news: list[Progress]) -> bytes:
    """A message: for each job its number, its attempt, where it begins and the fields of its delta."""
    import msgpack

    content: bytes = msgpack.packb(
        [
            (key.number, key.attempt, begin, delta[1:4], delta.finish and delta.finish.value, delta[5:])
            for key, begin, delta in news
        ]
    )
    return LENGTH.pack(len(content)) + content


def decode(router: bytes, content: bytes) -> list[Progress]:
    """The inverse of `encode`, without the length."""
    import msgpack

    rows: Any = msgpack.unpackb(content, use_list=False)
    return [
        Progress(
            JobKey(router, number, attempt),
            Received(*begin),
            Delta._make((number, *said, None if finish is None else Finish(finish), *rest)),
        )
        for number, attempt, begin, said, finish, rest in rows
    ]


__all__ = [
    "LENGTH",
    "LIMITS",
    "ROUTER_BYTES",
    "SECRET_BYTES",
    "WANTED",
    "ChannelLimits",
    "decode",
    "encode",
    "watch_connection",
]
