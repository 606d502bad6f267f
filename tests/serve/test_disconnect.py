"""Clients that disconnect or read slowly."""

import asyncio
import json
import random
import socket
import threading
from typing import Any

import pytest
from served_app import (
    COMPLETIONS,
    ServedApp,
    run,
    served_app,
    wait_until,
)

from samewise.openai.errors import ApiError
from samewise.openai.parse import parse
from samewise.serve.worker import ActiveRequest

LONG = {"prompt": "hello", "temperature": 0, "max_tokens": 400, "ignore_eos": True}

JSON_TYPE = "Content-Type: application/json\r\n"


async def wait_for_tokens(served: ServedApp, tokens: int = 3) -> None:
    """Wait until the engine has committed this many tokens."""
    await wait_until(lambda: served.llm._engine.scheduler.counters.output_tokens >= tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_disconnect_aborts_the_request(stream: bool, prompts: int) -> None:
    async def work() -> None:
        async with served_app(on_port=True) as served:
            body = LONG | {"stream": stream, "prompt": ["hello"] * prompts, "n": 2}
            asking = asyncio.create_task(served.client.post(COMPLETIONS, json=body))
            await wait_for_tokens(served)
            asking.cancel()
            await wait_until(lambda: served.llm._engine.idle)
            await served.check_idle()
            counts = served.llm._engine.scheduler.counters
            assert counts.aborted == 2 * prompts
            assert counts.output_tokens < 2 * prompts * 400
            assert (await served.complete())["choices"]

    run(work())


def test_a_disconnect_before_submission_frees_everything() -> None:
    gate = threading.Event()

    async def work() -> None:
        async with served_app(on_port=True) as served:
            inner, entered = served.llm.intake.check, threading.Event()

            def slow(*what: Any, **options: Any) -> Any:
                entered.set()
                gate.wait(20)
                return inner(*what, **options)

            served.llm.intake.check = slow  # type: ignore[method-assign]
            asking = asyncio.create_task(served.client.post(COMPLETIONS, json=LONG))
            await wait_until(entered.is_set)
            asking.cancel()
            await wait_until(lambda: not served.worker.num_active)
            gate.set()
            served.llm.intake.check = inner  # type: ignore[method-assign]
            await served.check_idle()

    run(work())


def test_a_cancelled_submission_frees_everything() -> None:
    """The task is cancelled after every possible number of event-loop turns."""

    async def work() -> None:
        async with served_app() as served:
            checked = parse(COMPLETIONS, LONG | {"prompt": ["a", "b"]}).check(served.llm.intake)
            for turns in range(1, 9):
                active = served.worker.begin()

                async def submit(active: ActiveRequest = active) -> None:
                    active.readers = await served.llm.submit(checked)

                submitting = asyncio.ensure_future(submit())
                for _ in range(turns):
                    await asyncio.sleep(0)
                submitting.cancel()
                await asyncio.gather(submitting, return_exceptions=True)
                active.close()
            await served.check_idle()
            assert not served.llm._readers

    run(work())


def test_places_of_a_closed_request_are_not_taken() -> None:
    """A client may disconnect while a thread still parses its body."""

    async def work() -> None:
        async with served_app(max_queued=1, max_num_seqs=1) as served:
            closed = served.worker.begin()
            closed.close()
            with pytest.raises(ConnectionAbortedError):
                closed.reserve(1)
            active = [served.worker.begin() for _ in range(3)]
            active[0].reserve(1)
            active[1].reserve(1)
            with pytest.raises(ApiError, match="try again later"):
                active[2].reserve(1)
            for one in active:
                one.close()
                one.close()
            await served.check_idle()

    run(work())


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_disconnect_at_a_random_moment_frees_everything(prompts: int) -> None:
    """The task is cancelled while it parses, submits, waits or streams."""
    body = LONG | {"prompt": ["hello"] * prompts, "max_tokens": 2}

    async def work() -> None:
        async with served_app() as served:
            rng = random.Random(prompts)
            for i in range(150):
                asking = asyncio.create_task(
                    served.client.post(COMPLETIONS, json=body | {"stream": i % 2 == 0})
                )
                for _ in range(rng.randrange(60)):
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.02)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await served.check_idle()

    run(work())


def test_a_client_that_does_not_read_delays_no_other() -> None:
    async def work() -> None:
        async with served_app(on_port=True) as served:
            host, port = served.url.removeprefix("http://").split(":")
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect((host, int(port)))
            _, writer = await asyncio.open_connection(sock=slow, limit=256)
            body = json.dumps(
                LONG | {"stream": True, "logprobs": 20, "n": 2, "max_tokens": 200, "return_token_ids": True}
            ).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON_TYPE}Content-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            await wait_for_tokens(served)
            others = await asyncio.gather(*(served.complete(f"{i}") for i in range(8)))
            assert len(others) == 8
            await wait_until(lambda: served.llm._engine.idle)  # its answer is complete
            assert (await served.complete())["choices"]
            writer.close()
            await writer.wait_closed()
            await served.check_idle()

    run(work())
