"""A full queue, and an engine that loads, drains, stops or is busy."""

import asyncio
import threading
from typing import Any

import httpx
import pytest
from served_app import (
    CHAT,
    COMPLETIONS,
    ServedApp,
    error_of,
    events_of,
    listening,
    run,
    served_app,
    wait_until,
)

from samewise import AsyncLLM
from samewise.openai.errors import ApiError
from samewise.serve.app import make_app
from samewise.serve.worker import State, Worker
from samewise.testing import Scripted, tiny_engine

LONG = {"prompt": "hello", "temperature": 0, "max_tokens": 400, "ignore_eos": True}


async def wait_for_tokens(served: ServedApp, tokens: int = 3) -> None:
    """Wait until the engine has committed this many tokens."""
    await wait_until(lambda: served.llm._engine.scheduler.counters.output_tokens >= tokens)


def test_a_full_queue_answers_429_with_retry_after() -> None:
    async def work() -> None:
        async with served_app(max_queued=2, max_num_seqs=1) as served:

            async def ask(i: int) -> httpx.Response:
                return await served.client.post(COMPLETIONS, json=LONG | {"prompt": f"{i}", "max_tokens": 60})

            responses = await asyncio.gather(*(ask(i) for i in range(12)))
            refused = [one for one in responses if one.status_code == 429]
            assert refused
            assert {one.status_code for one in responses} == {200, 429}
            for one in refused:
                assert error_of(one)["code"] == "queue_full"
                assert int(one.headers["retry-after"]) >= 1
            await served.check_idle()
            status, error = await served.refusal(COMPLETIONS, LONG | {"n": 3})
            assert (status, error["param"]) == (400, "n")  # more than the queue holds

    run(work())


def test_requests_are_refused_while_loading() -> None:
    gate = threading.Event()

    def load() -> AsyncLLM:
        gate.wait(20)
        return AsyncLLM.over(tiny_engine())

    async def work() -> None:
        worker = Worker(load)
        app = make_app(worker)
        loading = asyncio.create_task(worker.load())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            for path, status in (("/health", 503), ("/ready", 503), ("/live", 200)):
                response = await client.get(path)
                assert (response.status_code, response.json()) == (status, {"status": "loading"})
            assert (await client.get("/load")).json() == {"server_load": 0}
            assert (await client.get("/version")).json()["contract"] is None
            assert b"samewise:up" in (await client.get("/metrics")).content
            for path in (COMPLETIONS, "/tokenize"):
                response = await client.post(path, json=LONG)
                assert (response.status_code, error_of(response)["code"]) == (503, "loading")
                assert response.headers["retry-after"]
            assert (await client.get("/v1/models")).status_code == 503
            gate.set()
            await loading
            for path in ("/health", "/ready", "/live"):
                assert (await client.get(path)).status_code == 200
            assert (await client.post(COMPLETIONS, json=LONG | {"max_tokens": 4})).status_code == 200
        await worker.close()

    run(work())


def test_an_error_of_loading_is_raised() -> None:
    def load() -> AsyncLLM:
        raise ZeroDivisionError("planted")

    async def work() -> None:
        worker = Worker(load)
        with pytest.raises(ZeroDivisionError):
            await worker.load()
        assert worker.state is State.LOADING

    run(work())


def test_draining_lets_active_requests_finish() -> None:
    async def work() -> None:
        async with served_app() as served:
            asking = asyncio.create_task(served.client.post(COMPLETIONS, json=LONG | {"max_tokens": 100}))
            streaming = asyncio.create_task(served.events(COMPLETIONS, LONG | {"max_tokens": 100}))
            await wait_for_tokens(served)
            draining = asyncio.create_task(served.worker.drain(30))
            await asyncio.sleep(0)
            status, error = await served.refusal(COMPLETIONS, LONG)
            assert (status, error["code"]) == (503, "draining")
            assert (await served.client.get("/ready")).status_code == 503
            assert (await served.client.get("/health")).status_code == 503
            assert (await served.client.get("/live")).status_code == 200
            assert (await served.client.get("/load")).json() == {"server_load": 2}
            assert await draining
            assert (await asking).status_code == 200
            assert (await streaming)[-1]["choices"][0]["finish_reason"] == "length"
            await served.check_idle()

    run(work())


def test_draining_aborts_after_its_timeout() -> None:
    async def work() -> None:
        async with served_app() as served:
            asking = asyncio.create_task(served.client.post(COMPLETIONS, json=LONG))
            streaming = asyncio.create_task(served.client.post(CHAT, json=long_chat(stream=True)))
            await wait_for_tokens(served)
            assert not await served.worker.drain(0.01)
            whole, stream = await asking, await streaming
            assert (whole.status_code, error_of(whole)["code"]) == (503, "draining")
            *_, last = events_of(stream.text)
            assert last["error"]["code"] == "draining"
            await served.check_idle()
            assert await served.worker.drain(0)

    run(work())


def long_chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True} | fields


class FailingProposer(Scripted):
    """A proposer that raises where it is asked for drafts once `now` is set."""

    def __init__(self, error: Exception) -> None:
        super().__init__(lambda _: [])
        self.now, self._error = threading.Event(), error

    def propose(self, asks: list[Any]) -> list[Any]:
        if asks and self.now.is_set():
            raise self._error
        return super().propose(asks)


def test_a_failing_request_ends_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    proposer = FailingProposer(ZeroDivisionError("a planted bug"))

    async def work() -> None:
        async with served_app(make_proposer=lambda _: proposer) as served:
            asking = asyncio.create_task(served.client.post(COMPLETIONS, json=LONG))
            streaming = asyncio.create_task(served.client.post(COMPLETIONS, json=LONG | {"stream": True}))
            await wait_until(lambda: served.llm._engine.scheduler.num_running == 2)
            await wait_for_tokens(served)
            proposer.now.set()
            whole, stream = await asking, await streaming
            assert (whole.status_code, error_of(whole)["code"]) == (500, "request_failed")
            *_, last = events_of(stream.text)
            assert last["error"]["code"] == "request_failed"
            assert "planted" not in whole.text + stream.text
            proposer.now.clear()
            assert (await served.client.get("/health")).status_code == 200
            assert (await served.complete())["choices"][0]["finish_reason"] == "length"
            assert served.worker.failure is None
            await served.check_idle()

    with caplog.at_level("ERROR"):
        run(work())
    assert "a planted bug" in caplog.text


def test_shutting_down_ends_a_request_that_is_still_being_parsed() -> None:
    async def work() -> None:
        async with served_app() as served:
            begun = served.worker.begin()
            aborting = asyncio.create_task(served.worker.abort_all())
            await asyncio.sleep(0)
            checked = served.llm.intake.check("hello", served.llm.default_params)
            begun.read_from(await served.llm.submit([checked]))
            with pytest.raises(ApiError, match="shutting down"):
                await begun.outputs()
            begun.close()
            await aborting
            await served.check_idle()

    run(work())


def test_a_stopped_engine_ends_requests_and_health() -> None:
    fatal = RuntimeError("CUDA error: an illegal memory access, planted")
    proposer = FailingProposer(fatal)

    async def work() -> None:
        async with served_app(make_proposer=lambda _: proposer) as served:
            asking = asyncio.create_task(served.client.post(COMPLETIONS, json=LONG))
            streaming = asyncio.create_task(served.client.post(COMPLETIONS, json=LONG | {"stream": True}))
            await wait_for_tokens(served)
            proposer.now.set()
            whole, stream = await asking, await streaming
            assert (whole.status_code, error_of(whole)["code"]) == (500, "engine_failed")
            *_, last = events_of(stream.text)
            assert last["error"]["type"] == "server_error"
            assert "planted" not in whole.text + stream.text  # the text of the exception is for the log
            for path in ("/health", "/ready", "/live"):
                assert (await served.client.get(path)).status_code == 503
            status, error = await served.refusal(COMPLETIONS, LONG)
            assert (status, error["code"]) == (503, "engine_stopped")
            assert b'samewise:up{model_name=""} 0.0' in (await served.client.get("/metrics")).content
            assert served.worker.failure is fatal
            assert not served.worker.num_active

    run(work())


def test_an_internal_error_is_logged_and_hidden_from_the_client(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with served_app() as served:
            served.app.state.service._requests.name = None  # calling it raises TypeError
            response = await served.client.post(COMPLETIONS, json=LONG)
            error = error_of(response)
            assert (response.status_code, error["code"]) == (500, "internal_error")
            assert "NoneType" not in error["message"]

    with caplog.at_level("ERROR"):
        run(work())
    assert "NoneType" in caplog.text


def test_the_event_loop_does_not_wait_for_the_engine() -> None:
    """Health and metrics are answered during a long step."""
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
            await wait_until(inside.is_set)
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200  # with the last known statistics
            assert not asking.done()
            gate.set()
            assert (await asking).status_code == 200

    run(work())
