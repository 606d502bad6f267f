"""The connection between replicas and a router: exact values, secrets, and what closes it."""

import asyncio
import math
import struct
from typing import Any

import pytest

from samewise.scale.channel import Address, ReplicaServer, RouterConnection, decode, encode
from samewise.scale.records import JobKey, Progress
from samewise.types import Delta, Finish

pytest.importorskip("msgpack", reason="msgpack comes with ray")

ROUTER = b"r" * 16
KEY = JobKey(ROUTER, 7, 2)
DELTA = Delta(
    7, (5, 300), (-0.1, float.fromhex("-0x1.fffffffffffffp-1000")), (((5, -0.1), (9, -math.inf)), ()),
    Finish.STOP, 300, (-2.5,), (((1, -1.0),),), 16, 3, 4, "ngram", 1,
)  # fmt: skip


def test_a_message_carries_a_delta_exactly() -> None:
    message = encode([Progress(KEY, DELTA), Progress(KEY, Delta(7, (), (), (), None))])
    (length,) = struct.unpack("!I", message[:4])
    assert len(message) == 4 + length
    first, second = decode(ROUTER, message[4:])
    assert first == Progress(KEY, DELTA)
    assert first.delta.finish is Finish.STOP
    assert second == Progress(KEY, Delta(7, (), (), (), None))


class Ends:
    """Both ends in one event loop, and what each was told."""

    def __init__(self) -> None:
        self.ended: list[JobKey] = []
        self.routers_gone: list[bytes] = []
        self.progress: list[Progress] = []
        self.closed: list[str] = []
        self.server = ReplicaServer(self.ended.append, self.routers_gone.append)

    async def connected(self, **changes: Any) -> RouterConnection:
        address: Address = await self.server.start("127.0.0.1")
        connection = RouterConnection(ROUTER, self.progress.extend)
        await connection.open(address._replace(**changes), self.closed.append)
        return connection


async def until(done: Any) -> None:
    while not done():
        await asyncio.sleep(0.001)


def test_what_was_sent_before_the_router_connected_arrives_first() -> None:
    async def main() -> None:
        ends = Ends()
        ends.server.send([Progress(KEY, DELTA)])
        connection = await ends.connected()
        await until(lambda: len(ends.progress) == 1)
        ends.server.send([Progress(KEY, DELTA._replace(tokens=(1,)))])
        await until(lambda: len(ends.progress) == 2)
        assert [one.delta.tokens for one in ends.progress] == [(5, 300), (1,)]
        connection.end(KEY)
        await until(lambda: ends.ended)
        assert ends.ended == [KEY]
        connection.close()
        await until(lambda: ends.routers_gone and ends.closed)
        assert ends.routers_gone == [ROUTER]
        await ends.server.close()

    asyncio.run(main())


@pytest.mark.parametrize("secret", ["router_secret", "replica_secret"])
def test_an_end_that_does_not_know_the_secret_is_refused(secret: str) -> None:
    async def main() -> None:
        ends = Ends()
        ends.server.send([Progress(KEY, DELTA)])
        with pytest.raises(ConnectionError):
            await ends.connected(**{secret: b"x" * 32})
        assert not ends.progress
        await ends.server.close()

    asyncio.run(main())
