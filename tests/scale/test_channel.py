"""The connection between replicas and a router: exact values, secrets, and what closes it."""

import asyncio
import math
import socket
import struct
import sys
from typing import Any

import pytest

from samewise.scale.channel import JobDropped, ReplicaServer, RouterConnection
from samewise.scale.records import Address, JobKey, Progress
from samewise.scale.wire import ChannelLimits, decode, encode
from samewise.types import Delta, Finish, Received

pytest.importorskip("msgpack", reason="msgpack comes with ray")

ROUTER = b"r" * 16
KEY = JobKey(ROUTER, 7, 2)
BEGIN = Received(300, 2)
DELTA = Delta(
    7, (5, 300), (-0.1, float.fromhex("-0x1.fffffffffffffp-1000")), (((5, -0.1), (9, -math.inf)), ()),
    Finish.STOP, 300, (-2.5,), (((1, -1.0),),), 16, 3, 4, "ngram", 1,
)  # fmt: skip


def test_a_message_carries_a_delta_exactly() -> None:
    second_delta = Delta(7, (), (), (), None)
    message = encode([Progress(KEY, BEGIN, DELTA), Progress(KEY, Received(), second_delta)])
    (length,) = struct.unpack("!I", message[:4])
    assert len(message) == 4 + length
    first, second = decode(ROUTER, message[4:])
    assert first == Progress(KEY, BEGIN, DELTA)
    assert first.delta.finish is Finish.STOP
    assert second == Progress(KEY, Received(), second_delta)


class Ends:
    """Both ends in one event loop, and what the router was told."""

    def __init__(self, **limits: float) -> None:
        self.progress: list[Progress] = []
        self.closed: list[str] = []
        self.limits = ChannelLimits(**limits)
        self.server = ReplicaServer(self.limits)

    async def connected(self, **changes: Any) -> RouterConnection:
        if not hasattr(self, "address"):
            self.address: Address = await self.server.start("127.0.0.1")
        connection = RouterConnection(ROUTER, self.progress.extend, self.limits)
        await connection.open(self.address._replace(**changes), self.closed.append)
        return connection

    def send(self, *tokens: int, finish: Finish | None = None, key: JobKey = KEY) -> None:
        delta = Delta(key.number, tokens, (0.0,) * len(tokens), ((),) * len(tokens), finish)
        self.server.send([Progress(key, Received(), delta)])

    async def close(self) -> None:
        for key in list(self.server._jobs):
            self.server.forget(key)
        await self.server.close()

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [one.delta.tokens for one in self.progress]


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def until(done: Any) -> None:
    while not done():
        await asyncio.sleep(0.001)


def test_tokens_are_kept_until_they_are_asked_for_and_arrive_in_order() -> None:
    async def main() -> None:
        ends = Ends()
        ended = ends.server.open(KEY)
        ends.send(1)
        connection = await ends.connected()
        ends.send(2)
        other = KEY._replace(number=8)
        other_ended = ends.server.open(other)
        connection.want(other)
        ends.send(9, finish=Finish.STOP, key=other)
        await other_ended
        assert not ended.done()
        connection.want(KEY)
        await until(lambda: len(ends.progress) == 3)
        ends.send(3, finish=Finish.LENGTH)
        await ended  # the replica is done with it
        await until(lambda: len(ends.progress) == 4)
        assert ends.tokens == [(9,), (1,), (2,), (3,)]
        connection.close()
        await until(lambda: ends.closed)
        await ends.close()

    run(main())


def test_a_job_ends_when_its_rest_is_not_wanted() -> None:
    async def main() -> None:
        ends = Ends()
        ended = ends.server.open(KEY)
        connection = await ends.connected()
        connection.want(KEY)
        connection.want(KEY, wanted=False)
        await ended
        ends.send(1)
        ends.server.forget(KEY)
        await asyncio.sleep(0.01)
        assert not ends.progress
        connection.close()
        await ends.close()

    run(main())


def test_a_job_whose_tokens_are_not_asked_for_fails() -> None:
    async def main() -> None:
        ends = Ends(unheard=0.05)
        connection = await ends.connected()
        ended = ends.server.open(KEY)
        with pytest.raises(JobDropped, match="asked for the tokens"):
            await ended
        connection.close()
        await ends.close()

    run(main())


def test_a_connection_that_closes_ends_its_jobs_and_no_others() -> None:
    async def main() -> None:
        ends = Ends()
        heard, unheard = ends.server.open(KEY), ends.server.open(KEY._replace(number=8))
        connection = await ends.connected()
        connection.want(KEY)
        ends.send(1)
        await until(lambda: ends.progress)
        connection.close()
        with pytest.raises(JobDropped, match="disconnected"):
            await heard
        assert not unheard.done()  # its tokens may be asked for over the next connection
        await ends.close()

    run(main())


def test_a_second_connection_of_a_router_ends_the_first() -> None:
    """The first one is closed on the router's side, and the replica has not heard of that."""

    async def main() -> None:
        ends = Ends()
        ended = ends.server.open(KEY)
        first = await ends.connected()
        first.want(KEY)
        ends.send(1)
        await until(lambda: ends.progress)
        second = await ends.connected()
        with pytest.raises(JobDropped):
            await ended
        again = KEY._replace(attempt=3)
        ends.server.open(again)
        second.want(again)
        ends.send(2, key=again)
        await until(lambda: len(ends.progress) == 2)
        assert ends.closed  # the first
        second.close()
        await ends.close()

    run(main())


def test_a_silent_connection_is_closed_by_the_system() -> None:
    """Both sides have the system ask after seconds without traffic: the options read back as set."""

    async def main() -> None:
        ends = Ends(idle=7, silent=17)
        connection = await ends.connected()
        writers = [connection._writer, ends.server._writers[ROUTER]]
        for writer in writers:
            end = writer.get_extra_info("socket")
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            if sys.platform == "linux":
                options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                assert [end.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [7, 5, 2]
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 17_000
        connection.close()
        await ends.close()

    run(main())


def test_a_replica_that_accepts_and_says_nothing_is_given_up() -> None:
    async def main() -> None:
        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()  # until the other side closes
            writer.close()

        silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        connection = RouterConnection(ROUTER, lambda news: None, ChannelLimits(connect=0.05))
        with pytest.raises(ConnectionError, match=r"no connection in 0\.05 s"):
            await connection.open(Address("127.0.0.1", port, b"x" * 32, b"y" * 32), lambda error: None)
        silent.close()
        await silent.wait_closed()
        await asyncio.sleep(0.01)  # for the handler to end

    run(main())


@pytest.mark.parametrize("secret", ["router_secret", "replica_secret"])
def test_an_end_that_does_not_know_the_secret_is_refused(secret: str) -> None:
    async def main() -> None:
        ends = Ends()
        ends.server.open(KEY)
        ends.send(1)
        with pytest.raises(ConnectionError):
            await ends.connected(**{secret: b"x" * 32})
        assert not ends.progress
        await ends.close()

    run(main())
