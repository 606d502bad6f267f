"""Under way: clients that leave, are slow or come too many; an engine that loads, drains or dies."""

import asyncio
import json
import logging
import random
import socket
import threading
from typing import Any

import httpx
import pytest
from shop import CHAT, COMPLETIONS, Shop, error, events, go, listening, shop, until

from samewise import AsyncLLM
from samewise.llm.aio import Reading
from samewise.openai.parse import parse
from samewise.serve.app import make_app
from samewise.serve.logs import JsonLines, Lines
from samewise.serve.worker import Job, State, Worker, salt_of
from samewise.testing import Scripted, tiny_engine

LONG = {"prompt": "hello", "temperature": 0, "max_tokens": 400, "ignore_eos": True}


async def begun(here: Shop, tokens: int = 3) -> None:
    await until(lambda: here.llm._engine.scheduler.counters.output_tokens >= tokens)


# ---- clients that go away


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_is_aborted(stream: bool, prompts: int) -> None:
    async def work() -> None:
        async with shop(real=True) as here:
            body = LONG | {"stream": stream, "prompt": ["hello"] * prompts, "n": 2}
            asking = asyncio.create_task(here.client.post(COMPLETIONS, json=body))
            await begun(here)
            asking.cancel()
            await until(lambda: here.llm._engine.idle)
            await here.quiet()
            counts = here.llm._engine.scheduler.counters
            assert counts.aborted == 2 * prompts
            assert counts.output_tokens < 2 * prompts * 400
            assert (await here.complete())["choices"]

    go(work())


def test_a_client_that_leaves_before_it_is_admitted_leaves_nothing() -> None:
    gate = threading.Event()

    async def work() -> None:
        async with shop(real=True) as here:
            inner, entered = here.llm._desk.ask, threading.Event()

            def slow(*what: Any) -> Any:
                entered.set()
                gate.wait(20)
                return inner(*what)

            here.llm._desk.ask = slow  # type: ignore[method-assign]
            asking = asyncio.create_task(here.client.post(COMPLETIONS, json=LONG))
            await until(entered.is_set)
            asking.cancel()
            await until(lambda: not here.worker.num_jobs)
            gate.set()
            here.llm._desk.ask = inner  # type: ignore[method-assign]
            await here.quiet()

    go(work())


def test_a_client_that_leaves_at_any_moment_of_admission_leaves_nothing() -> None:
    async def work() -> None:
        async with shop() as here:
            parsed = parse(COMPLETIONS, LONG)
            for turns in range(1, 9):
                reading, handed = await here.llm.open("hello", parsed.params), []

                async def opening(reading: Reading = reading, handed: list[Reading] = handed) -> Reading:
                    handed.append(reading)
                    return reading

                job = Job(parsed, lambda _: None)
                asking = asyncio.ensure_future(job.open([opening()]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                assert job.readings == handed
                reading.leave()
                job.leave()
            await here.quiet()
            assert not here.llm._readers

    go(work())


@pytest.mark.parametrize("prompts", [1, 3])
def test_whenever_a_client_leaves_nothing_is_left_behind(prompts: int) -> None:
    """Cancelled at any moment of being admitted, answered or streamed."""
    body = LONG | {"prompt": ["hello"] * prompts, "max_tokens": 2}

    async def work() -> None:
        async with shop() as here:
            rng = random.Random(prompts)
            for i in range(150):
                asking = asyncio.create_task(
                    here.client.post(COMPLETIONS, json=body | {"stream": i % 2 == 0})
                )
                for _ in range(rng.randrange(60)):
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.02)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await here.quiet()

    go(work())


def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    async def work() -> None:
        async with shop(real=True) as here:
            host, port = here.url.removeprefix("http://").split(":")
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect((host, int(port)))
            _, writer = await asyncio.open_connection(sock=deaf, limit=256)
            body = json.dumps(
                LONG | {"stream": True, "logprobs": 20, "n": 2, "max_tokens": 200, "return_token_ids": True}
            ).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            await begun(here)
            others = await asyncio.gather(*(here.complete(f"{i}") for i in range(8)))
            assert len(others) == 8
            await until(lambda: here.llm._engine.idle)  # its answer is complete, whether it is read or not
            assert (await here.complete())["choices"]
            writer.close()
            await writer.wait_closed()
            await here.quiet()

    go(work())


# ---- too many


def test_a_full_queue_says_when_to_come_back() -> None:
    async def work() -> None:
        async with shop(max_queued=2, max_num_seqs=1) as here:

            async def ask(i: int) -> httpx.Response:
                return await here.client.post(COMPLETIONS, json=LONG | {"prompt": f"{i}", "max_tokens": 60})

            found = await asyncio.gather(*(ask(i) for i in range(12)))
            refused = [one for one in found if one.status_code == 429]
            assert refused
            assert {one.status_code for one in found} == {200, 429}
            for one in refused:
                assert error(one)["code"] == "queue_full"
                assert int(one.headers["retry-after"]) >= 1
            await here.quiet()
            status, told = await here.refusal(COMPLETIONS, LONG | {"n": 3})
            assert (status, told["param"]) == (400, "n")  # it would never fit

    go(work())


def test_several_prompts_are_taken_whole_or_not_at_all() -> None:
    async def work() -> None:
        async with shop() as here:
            status, told = await here.refusal(COMPLETIONS, LONG | {"prompt": ["a", "b", "", "d"]})
            assert (status, told["param"]) == (400, "prompt")
            await here.quiet()
            frames = here.llm._engine.scheduler.counters.frames
            await here.complete([f"{i}" for i in range(16)], max_tokens=8, proposer="none")
            # Together from the first frame on, or nearly: alone each would take eight.
            assert here.llm._engine.scheduler.counters.frames - frames < 32

    go(work())


# ---- loading, draining, dying


def test_while_loading() -> None:
    gate = threading.Event()

    def load() -> AsyncLLM:
        gate.wait(20)
        return AsyncLLM.over(tiny_engine())

    async def work() -> None:
        worker = Worker(load)
        app = make_app(worker)
        loading = asyncio.create_task(worker.load())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/version")).json()["contract"] is None
            assert b"samewise:up" in (await client.get("/metrics")).content
            for path in (COMPLETIONS, "/tokenize"):
                response = await client.post(path, json=LONG)
                assert (response.status_code, error(response)["code"]) == (503, "loading")
                assert response.headers["retry-after"]
            assert (await client.get("/v1/models")).status_code == 503
            gate.set()
            await loading
            assert (await client.get("/ready")).status_code == 200
            assert (await client.post(COMPLETIONS, json=LONG | {"max_tokens": 4})).status_code == 200
        await worker.close()

    go(work())


def test_loading_that_fails_says_so() -> None:
    def load() -> AsyncLLM:
        raise ZeroDivisionError("planted")

    async def work() -> None:
        worker = Worker(load)
        with pytest.raises(ZeroDivisionError):
            await worker.load()
        assert worker.state is State.LOADING

    go(work())


def test_draining_lets_them_finish() -> None:
    async def work() -> None:
        async with shop() as here:
            asking = asyncio.create_task(here.client.post(COMPLETIONS, json=LONG | {"max_tokens": 100}))
            streaming = asyncio.create_task(here.events(COMPLETIONS, LONG | {"max_tokens": 100}))
            await begun(here)
            draining = asyncio.create_task(here.worker.drain(30))
            await asyncio.sleep(0)
            status, told = await here.refusal(COMPLETIONS, LONG)
            assert (status, told["code"]) == (503, "draining")
            assert (await here.client.get("/ready")).status_code == 503
            assert (await here.client.get("/health")).status_code == 200
            assert await draining
            assert (await asking).status_code == 200
            assert (await streaming)[-1]["choices"][0]["finish_reason"] == "length"
            await here.quiet()

    go(work())


def test_draining_does_not_wait_for_ever() -> None:
    async def work() -> None:
        async with shop() as here:
            asking = asyncio.create_task(here.client.post(COMPLETIONS, json=LONG))
            streaming = asyncio.create_task(here.client.post(CHAT, json=_chat(stream=True)))
            await begun(here)
            assert not await here.worker.drain(0.01)
            whole, stream = await asking, await streaming
            assert (whole.status_code, error(whole)["code"]) == (503, "draining")
            *_, last = events(stream.text)
            assert last["error"]["code"] == "draining"
            await here.quiet()
            assert await here.worker.drain(0)

    go(work())


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True} | fields


class Breaks(Scripted):
    """A proposer with a bug, that shows when told."""

    def __init__(self) -> None:
        super().__init__(lambda _: [])
        self.now = threading.Event()

    def propose(self, asks: list[Any]) -> list[Any]:
        if self.now.is_set():
            raise ZeroDivisionError("a planted bug")
        return super().propose(asks)


def test_an_engine_that_dies_is_seen_by_everybody() -> None:
    breaks = Breaks()

    async def work() -> None:
        async with shop(make_proposer=lambda _: breaks) as here:
            asking = asyncio.create_task(here.client.post(COMPLETIONS, json=LONG))
            streaming = asyncio.create_task(here.client.post(COMPLETIONS, json=LONG | {"stream": True}))
            await begun(here)
            breaks.now.set()
            whole, stream = await asking, await streaming
            assert (whole.status_code, error(whole)["code"]) == (500, "engine_failed")
            *_, last = events(stream.text)
            assert last["error"]["type"] == "server_error"
            assert "planted" in last["error"]["message"]
            assert (await here.client.get("/health")).status_code == 503
            assert (await here.client.get("/ready")).status_code == 503
            status, told = await here.refusal(COMPLETIONS, LONG)
            assert (status, told["code"]) == (503, "engine_stopped")
            assert b'samewise:up{model_name=""} 0.0' in (await here.client.get("/metrics")).content
            assert isinstance(here.worker.failure, ZeroDivisionError)
            assert not here.worker.num_jobs

    go(work())


def test_a_bug_of_ours_is_logged_and_told_without_its_insides(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with shop() as here:
            here.app.state.service.model = None  # anything that is not there
            response = await here.client.post(COMPLETIONS, json=LONG)
            told = error(response)
            assert (response.status_code, told["code"]) == (500, "internal_error")
            assert "NoneType" not in told["message"]

    with caplog.at_level("ERROR"):
        go(work())
    assert "NoneType" in caplog.text


# ---- many at once


def test_a_crowd_gets_the_bits_of_one_alone() -> None:
    """Streaming or not, verified beside unverified, over a KV cache that is too small for all."""

    async def work() -> None:
        async with shop(real=True, kv_memory=2**18, max_num_seqs=16) as here:
            asked = [
                {"prompt": f"question {i}", "max_tokens": 40, "seed": i, "logprobs": 1} for i in range(6)
            ]
            alone = [await here.post(COMPLETIONS, body) for body in asked]

            async def again(i: int, stream: bool) -> None:
                wanted = alone[i]["choices"][0]
                if not stream:
                    found = (await here.post(COMPLETIONS, asked[i]))["choices"][0]
                    assert found == wanted
                    return
                parts = [event["choices"][0] for event in await here.events(COMPLETIONS, asked[i])]
                assert "".join(part["text"] for part in parts) == wanted["text"]
                bits = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
                assert bits == wanted["logprobs"]["token_logprobs"]

            noise = [here.complete("noise", verify=False, max_tokens=30) for _ in range(6)]
            await asyncio.gather(*(again(i, stream) for i in range(6) for stream in (False, True)), *noise)
            assert here.llm._engine.scheduler.counters.preempted > 0
            await here.quiet()

    go(work())


# ---- small things


def test_salts_tell_customers_apart() -> None:
    salts = [salt_of(who, what) for who in (b"", b"a", b"b") for what in (None, "", "x", "a")]
    assert salts[0] == b""
    assert len(set(salts)) == len(salts)


def test_a_path_reaches_the_log_as_plain_characters(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with shop() as here:
            await here.client.get("/v1/models/%1b%5b31m%0d%0aé%07%7f")

    with caplog.at_level("INFO", "samewise.serve"):
        go(work())
    (line,) = [record.getMessage() for record in caplog.records if "/v1/models" in record.getMessage()]
    assert line == r"GET /v1/models/\x1b[31m\r\n\xe9\x07\x7f 404"


def test_log_lines() -> None:
    record = logging.LogRecord("samewise.serve", logging.INFO, "", 0, "GET %s", ("/x",), None)
    record.facts = {"status": 200, "seconds": 0.5, "request_id": "r"}
    assert Lines().format(record).endswith("info    GET /x seconds=0.5 request_id=r")
    entry = json.loads(JsonLines().format(record))
    assert (entry["message"], entry["status"], entry["level"]) == ("GET /x", 200, "info")
    try:
        raise ZeroDivisionError("x")
    except ZeroDivisionError as caught:
        record.exc_info = (type(caught), caught, caught.__traceback__)
    assert "ZeroDivisionError" in json.loads(JsonLines().format(record))["exception"]
    assert "Traceback" in Lines().format(record)


def test_the_event_loop_never_waits_for_the_engine() -> None:
    """While a step takes its time, health is answered."""
    inside, gate = threading.Event(), threading.Event()

    def slow(_: Any) -> list[int]:
        inside.set()
        gate.wait(60)
        return []

    async def work() -> None:
        engine = tiny_engine(make_proposer=lambda _: Scripted(slow))
        async with (
            AsyncLLM.over(engine) as llm,
            listening(make_app(llm)) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            asking = asyncio.create_task(client.post(COMPLETIONS, json=LONG | {"max_tokens": 4}))
            await until(inside.is_set)
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200  # with what was known before
            assert not asking.done()
            gate.set()
            assert (await asking).status_code == 200

    go(work())
