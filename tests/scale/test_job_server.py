"""A replica's part: whose grammars wait for whose."""

import asyncio
import threading
from typing import Any

from samewise.scale.job_server import JobServer
from samewise.scale.records import Job, JobKey
from samewise.testing import tiny_engine
from samewise.types import Grammar, Request, Sampling


def job(number: int, owner: bytes, regex: str) -> Job:
    sampling = Sampling(grammar=Grammar.regex(regex))
    return Job(JobKey(b"r" * 16, number, 0), Request(number, (1, 2), sampling, 9, owner=owner), ())


def test_grammars_of_one_owner_do_not_delay_those_of_another() -> None:
    """One owner's compiling stands still until the other one's guides are there."""

    async def main() -> None:
        server = JobServer("r", tiny_engine(eos=True), on_failure=lambda: None)
        start, gate = server._intake.start_compiling, threading.Event()

        def held(grammar: Any, *, owner: bytes | None = None) -> Any:
            if owner == b"greedy":
                gate.wait(240)
            return start(grammar, owner=owner)

        assert await server._guide(job(0, b"modest", "[ab]{2}"))
        server._intake.start_compiling = held  # type: ignore[method-assign]
        greedy = [asyncio.ensure_future(server._guide(job(i, b"greedy", "[ab]"))) for i in range(1, 41)]
        try:
            async with asyncio.timeout(60):
                assert await server._guide(job(50, b"modest", "[ab]{2}"))  # compiled before
                assert await server._guide(job(51, b"modest", "[ab]{3}"))
        finally:
            gate.set()
        assert all(await asyncio.gather(*greedy))
        server._intake.stop_compiling()

    asyncio.run(main())
