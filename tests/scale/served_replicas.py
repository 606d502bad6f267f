"""Ray Serve's part without Ray: calls of JobServers, which run in an event loop of their own.

Between a router and a replica is a relay, in which either side of the connections can be cut.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from samewise.engine import Engine
from samewise.scale.engine_host import facts_of
from samewise.scale.job_server import JobServer
from samewise.scale.ray_replicas import RayReplicas
from samewise.scale.records import EngineFacts, Job, Listening
from samewise.scale.remote_engine import RemoteEngine
from samewise.scale.wire import LIMITS, ChannelLimits


class Relay:
    """Passes bytes on between routers and one replica, until a side is cut."""

    def __init__(self, port: int) -> None:
        self._replica_port = port
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._open: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replica_reader, replica_writer = await asyncio.open_connection("127.0.0.1", self._replica_port)
        pair = writer, replica_writer
        self._pairs.append(pair)
        self._open += pair
        await asyncio.gather(
            self._pass_on(reader, replica_writer, pair), self._pass_on(replica_reader, writer, pair)
        )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: tuple[Any, Any]
    ) -> None:
        """Until the reader ends. What comes over a pair that was cut is swallowed."""
        try:
            while data := await reader.read(1 << 16):
                if pair in self._pairs:
                    writer.write(data)
        except OSError:
            pass
        if pair in self._pairs:
            writer.close()

    def cut(self, side: str) -> int:
        """Close one side of every connection; the other stays open and hears nothing. How many there were."""
        pairs, self._pairs = self._pairs, []
        for router_side, replica_side in pairs:
            (router_side if side == "router" else replica_side).close()
        return len(pairs)

    async def close(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.close()


class _Call:
    """The stream that answers a job, for another event loop."""

    DONE = object()

    def __init__(self, loop: asyncio.AbstractEventLoop, items: AsyncGenerator[Any]) -> None:
        self._loop, self._items = loop, items
        self._next: Any = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        async def advance() -> Any:
            return await anext(self._items, self.DONE)

        self._next = asyncio.run_coroutine_threadsafe(advance(), self._loop)
        item = await asyncio.wrap_future(self._next)
        if item is self.DONE:
            raise StopAsyncIteration
        return item

    def cancel(self) -> None:
        if self._next is None or not self._next.cancel():
            asyncio.run_coroutine_threadsafe(self._items.aclose(), self._loop)


class ServedReplicas:
    """A handle of replicas, and the roster. Jobs go to the one that got fewest of those not to be avoided."""

    def __init__(self, engines: list[Engine], limits: ChannelLimits = LIMITS) -> None:
        self._limits = limits
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.relays: dict[str, Relay] = {}
        self.servers: dict[str, JobServer] = {}
        self._gone: list[JobServer] = []
        self._ports: dict[str, int] = {}
        self.open: dict[str, int] = {}  # calls under way, by replica
        self.jobs: list[tuple[str, Job]] = []
        self._facts = facts_of(engines[0])
        for number, engine in enumerate(engines):
            self.run(self._add(f"r{number}", engine))
        self.generate = self

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the replicas' loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _add(self, name: str, engine: Engine) -> None:
        server = JobServer(name, engine, on_failure=partial(self._on_failure, name), limits=self._limits)
        await server.start("127.0.0.1")
        relay = Relay(server._address.port)
        self._ports[name] = await relay.start()
        self.servers[name], self.relays[name], self.open[name] = server, relay, 0

    def _on_failure(self, name: str) -> None:
        """The replica's process ends; Ray has not found out yet."""
        asyncio.run_coroutine_threadsafe(self.servers[name]._server.close(), self._loop)

    def cut(self, name: str, side: str) -> int:
        async def cut() -> int:
            return self.relays[name].cut(side)

        return int(self.run(cut()))

    def close(self) -> None:
        async def close() -> None:
            for relay in self.relays.values():
                await relay.close()
            for server in self.servers.values():
                await server.close()
            await asyncio.sleep(0.05)  # for the handlers of connections to end

        self.run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- a handle of Ray Serve

    def options(self, **_: Any) -> Self:
        return self

    def remote(self, job: Job) -> _Call:
        sent = [name for name, _ in self.jobs]
        name = min(self.servers, key=lambda name: (name in job.avoid, sent.count(name), name))
        self.jobs.append((name, job))
        return _Call(self._loop, self._answer(name, job))

    async def _answer(self, name: str, job: Job) -> AsyncGenerator[Any]:
        self.open[name] += 1
        items = self.servers[name].generate(job)
        try:
            async for said in items:
                yield self._through_relay(name, said) if isinstance(said, Listening) else said
        finally:
            self.open[name] -= 1
            await items.aclose()

    def _through_relay(self, name: str, listening: Listening) -> Listening:
        return listening._replace(address=listening.address._replace(port=self._ports[name]))

    # ---- a roster

    async def call(self, method: str, *_: Any) -> dict[str, Any]:
        return {name: server.stats() for name, server in self.servers.items()} if method == "stats" else {}


@contextmanager
def remote_over(
    engines: list[Engine], limits: ChannelLimits = LIMITS, clock: Callable[[], float] | None = None
) -> Iterator[tuple[RemoteEngine, ServedReplicas]]:
    """An engine over replicas, with all between them but Ray. The caller closes the engine."""
    served = ServedReplicas(engines, limits)
    replicas = RayReplicas(served, served, limits=limits)  # type: ignore[arg-type]  # stand-ins
    facts: EngineFacts = served._facts
    try:
        yield RemoteEngine(facts, replicas, **({} if clock is None else {"clock": clock})), served
    finally:
        replicas.close()
        served.close()
