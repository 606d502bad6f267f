"""A server over a tiny model, in memory or on a port, in the event loop of the test."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.applications import Starlette

from samewise import AsyncLLM
from samewise.serve.app import make_app
from samewise.serve.connections import GuardedServer
from samewise.serve.limits import ServeLimits
from samewise.serve.settings import ServeSettings
from samewise.testing import paced, tiny_engine

T = TypeVar("T")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def run(work: Coroutine[Any, Any, T], seconds: float = 240) -> T:
    """Run a coroutine; a test that hangs fails."""

    async def timed() -> T:
        return await asyncio.wait_for(work, seconds)

    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        return runner.run(timed())


@dataclass
class ServedApp:
    """A client and the application behind it."""

    client: httpx.AsyncClient
    llm: AsyncLLM
    app: Starlette
    url: str = "http://served"

    @property
    def worker(self) -> Any:
        return self.app.state.service.worker

    async def complete(self, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
        return await self.post(COMPLETIONS, {"prompt": prompt, "temperature": 0, "max_tokens": 6} | body)

    async def chat(self, text: str = "hello", **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return await self.post(CHAT, {"messages": messages, "temperature": 0, "max_tokens": 6} | body)

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """A stream's events; checks how it ends."""
        response = await self.client.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)

    async def refusal(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        """(status, error); checks the error's form."""
        response = await self.client.post(path, json=body, **options)
        return response.status_code, error_of(response)

    async def check_idle(self) -> None:
        """Wait until no request is active, and check that all pages are free."""
        await wait_until(lambda: self.llm._engine.idle and not self.worker.num_active)
        stats = await self.llm.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert stats["pages_available"] == stats["pages"]
        await self.llm._call(self.llm._engine.check)
        assert not await self.llm._call(lambda: dict(self.llm._readers))


def events_of(text: str) -> list[dict[str, Any]]:
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code >= 400, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert response.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


async def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was never met"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def served_app(
    settings: ServeSettings | None = None, *, on_port: bool = False, headers: Any = None, **engine: Any
) -> AsyncIterator[ServedApp]:
    """Serve a tiny model; `on_port`: on a port instead of in memory. Keywords are tiny_engine's."""
    async with AsyncLLM.over(paced(tiny_engine(**engine))) as llm:
        app = make_app(llm, settings)
        if not on_port:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://served", headers=headers
            ) as client:
                yield ServedApp(client, llm, app)
            return
        async with (
            listening(app) as url,
            httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client,
        ):
            yield ServedApp(client, llm, app, url)


@asynccontextmanager
async def listening(
    app: Starlette, limits: ServeLimits | None = None, *, http: Any = "auto"
) -> AsyncIterator[str]:
    """The application on a free port, with limits on connections. `http`: which of uvicorn's protocols."""
    server = GuardedServer(
        uvicorn.Config(
            app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=2, http=http
        ),
        limits or app.state.service.settings.limits,
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
