"""A router of an application is up when it can answer, fails where it cannot, and ends with its engine."""

import asyncio
import threading
from typing import Any

from samewise import AsyncLLM
from samewise.errors import GuaranteeLost, MachineError
from samewise.scale.deploy import _lifespan
from samewise.serve.worker import State, Worker
from samewise.testing import tiny_engine


class Lifespan:
    """The two ends of a lifespan, as a server has them."""

    def __init__(self, worker: Worker) -> None:
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.task = asyncio.ensure_future(_lifespan(worker, self._asked.get, self.said.put, self.ended.set))

    def ask(self, what: str) -> None:
        self._asked.put_nowait({"type": f"lifespan.{what}"})

    async def answer(self) -> str:
        """The next thing that was said."""
        message = await asyncio.wait_for(self.said.get(), 60)
        return str(message["type"]).removeprefix("lifespan.")


def test_a_router_is_up_when_it_has_loaded() -> None:
    may_load = threading.Event()

    def load() -> AsyncLLM:
        assert may_load.wait(60)
        return AsyncLLM.over(tiny_engine())

    async def main() -> None:
        worker = Worker(load)
        lifespan = Lifespan(worker)
        lifespan.ask("startup")
        saying = asyncio.ensure_future(lifespan.answer())
        done, _ = await asyncio.wait((saying,), timeout=0.1)
        assert not done
        may_load.set()
        assert await saying == "startup.complete"
        assert worker.state is State.READY
        lifespan.ask("shutdown")
        assert await lifespan.answer() == "shutdown.complete"
        assert worker.state is State.STOPPED
        assert not lifespan.ended.is_set()

    asyncio.run(main())


def test_a_router_that_cannot_load_does_not_start() -> None:
    def load() -> AsyncLLM:
        raise MachineError("no replica can be reached")

    async def main() -> None:
        lifespan = Lifespan(Worker(load))
        lifespan.ask("startup")
        message = await asyncio.wait_for(lifespan.said.get(), 60)
        assert message["type"] == "lifespan.startup.failed"
        assert "no replica can be reached" in message["message"]
        await lifespan.task

    asyncio.run(main())


def test_a_router_whose_engine_has_stopped_ends() -> None:
    async def main() -> None:
        llm = AsyncLLM.over(tiny_engine())
        lifespan = Lifespan(Worker(lambda: llm))
        lifespan.ask("startup")
        assert await lifespan.answer() == "startup.complete"

        def stop() -> None:
            raise GuaranteeLost("the weights have changed")

        try:
            await llm._call(stop)
        except GuaranteeLost:
            await asyncio.wait_for(lifespan.ended.wait(), 60)
        lifespan.ask("shutdown")
        assert await lifespan.answer() == "shutdown.complete"

    asyncio.run(main())
