"""What keeps the event loop free where many requests arrive at once: turns, accepted sockets, threads."""

import asyncio
import socket
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from served_app import run, served_app

from samewise.serve import process
from samewise.serve.connections import ACCEPTED_AT_ONCE, GuardedServer
from samewise.serve.limits import ServeLimits
from samewise.serve.listen import Listen
from samewise.serve.settings import Keys, ServeSettings
from samewise.serve.threads import FairThreads
from samewise.serve.turns import STATE_PATHS, Turns


def test_requests_begin_one_a_turn_and_keys_in_rotation() -> None:
    async def work() -> None:
        turns, begun = Turns(), []

        async def request(key: bytes) -> None:
            await turns.wait(key)
            begun.append(key)

        waiting = [asyncio.ensure_future(request(key)) for key in (b"a",) * 50 + (b"b",) * 2]
        await asyncio.sleep(0)
        cancelled = waiting.pop(10)
        cancelled.cancel()
        counts = [len(begun)]
        while turns.num_waiting:
            await asyncio.sleep(0)
            counts.append(len(begun))
        await asyncio.gather(*waiting)
        assert len(begun) == 51
        assert max(after - before for before, after in pairwise(counts)) <= 1
        assert [i for i, key in enumerate(begun) if key == b"b"][-1] <= 5
        await asyncio.wait_for(turns.wait(b"c"), 60)  # the first of a turn does not wait

    run(work())


def test_the_state_of_the_server_is_told_before_requests_that_wait() -> None:
    async def work() -> None:
        async with served_app(ServeSettings(keys=Keys.of(["a", "b"]))) as served:
            waiting: list[asyncio.Future[None]] = []

            async def wait(_: Turns, __: object) -> None:  # no turn comes
                waiting.append(asyncio.get_running_loop().create_future())
                await waiting[-1]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Turns, "wait", wait)
                headers = {"Authorization": "Bearer a"}
                asking = [
                    asyncio.ensure_future(served.client.get("/v1/models", headers=headers)) for _ in range(3)
                ]
                for path in STATE_PATHS:
                    assert (await served.client.get(path)).status_code == 200
                while len(waiting) < 3:
                    await asyncio.sleep(0)
            for one in waiting:
                one.set_result(None)
            assert [one.status_code for one in await asyncio.gather(*asking)] == [200] * 3

    run(work())


class Arrived:
    """A listening socket at which connections have arrived."""

    def __init__(self, number: int) -> None:
        self.left = number

    def accept(self) -> tuple[str, None]:
        if not self.left:
            raise BlockingIOError
        self.left -= 1
        return "a socket", None


def test_sockets_that_have_arrived_are_accepted_without_a_turn_for_each() -> None:
    async def work() -> None:
        loop, begun, arrived = asyncio.get_running_loop(), [], Arrived(ACCEPTED_AT_ONCE + 3)

        class Server(GuardedServer):
            def _begin(self, connection: Any, protocol: Any) -> None:
                begun.append(connection)

        async def sock_accept(listening: Arrived) -> tuple[str, None]:
            await asyncio.sleep(0)  # as uvloop's, which waits for its next turn
            while not listening.left:
                await asyncio.sleep(0.001)
            return listening.accept()

        cast("Any", loop).sock_accept = sock_accept
        server = Server(uvicorn.Config("", log_config=None), ServeLimits())
        accepting = asyncio.ensure_future(
            server._accept_all(cast("socket.socket", arrived), cast("Any", None))
        )
        counts = []
        while len(begun) < ACCEPTED_AT_ONCE + 3:
            await asyncio.sleep(0)
            counts.append(len(begun))
        assert set(counts) == {0, ACCEPTED_AT_ONCE, ACCEPTED_AT_ONCE + 3}
        accepting.cancel()

    run(work())


def test_work_finds_a_thread_that_was_started_before() -> None:
    async def work() -> None:
        threads, started = FairThreads(2), 0
        start = threading.Thread.start

        def counted(thread: threading.Thread) -> None:
            nonlocal started
            started += 1
            start(thread)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", counted)
            for _ in range(3):
                await asyncio.gather(*(threads.run(lambda: None, owner=b"%d" % i) for i in range(5)))
            with pytest.raises(ZeroDivisionError):
                await threads.run(lambda: 1 // 0)
            assert await threads.run(lambda: 7) == 7
        assert started == 2

    run(work())


def test_the_threads_end_with_their_owner() -> None:
    async def work() -> None:
        threads = FairThreads(1)
        thread = await threads.run(threading.current_thread)
        del threads
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()

    run(work())


def test_a_server_has_threads_take_turns_on_the_interpreter_often(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else the event loop waits 5 ms for each thread that computes, at every system call."""
    before, during = sys.getswitchinterval(), []

    class Process:
        def __init__(self, *_: object) -> None: ...

        async def serve(self) -> int:
            during.append(sys.getswitchinterval())
            return 0

    monkeypatch.setattr(process, "_Process", Process)
    listen = Listen(unix_socket=tmp_path / "socket")
    assert process.run(lambda: pytest.fail("not loaded"), ServeSettings(), listen, version="0") == 0
    assert during == [pytest.approx(process.TIMES.switch)]
    assert sys.getswitchinterval() == before


def test_a_place_is_given_back_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def work() -> None:
        threads = FairThreads(1)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="new thread"):
                    await threads.run(lambda: 1)
        assert await threads.run(lambda: 2) == 2

    asyncio.run(asyncio.wait_for(work(), 20))
