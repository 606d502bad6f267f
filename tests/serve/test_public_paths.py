"""Paths that need no key: what a flood of requests for them costs."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from served_app import run, served_app
from starlette.applications import Starlette
from starlette.routing import Mount

from samewise.serve import app, metrics
from samewise.serve.limits import ServeLimits
from samewise.serve.settings import Keys, ServeSettings
from samewise.serve.shared_result import SharedResult


def test_documents_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            rendered.append(name)
            return function(*given, **options)

        return call

    for name in ("docs_page", "openapi_document"):
        monkeypatch.setattr(app, name, counted(name, getattr(app, name)))

    async def work() -> None:
        async with served_app() as served:
            pages = [(await served.client.get("/docs")).content for _ in range(3)]
            assert len(set(pages)) == 1
            for _ in range(3):
                assert (await served.client.get("/openapi.json")).json()["paths"]
            assert sorted(rendered) == ["docs_page", "openapi_document"]

    run(work())


def test_the_document_of_a_mounted_application_names_its_prefix() -> None:
    async def work() -> None:
        async with served_app() as served:
            plain = (await served.client.get("/openapi.json")).json()
            inner = served.client._transport.app  # type: ignore[attr-defined]
            served.client._transport.app = Starlette(  # type: ignore[attr-defined]
                routes=[Mount('/a"b', inner)]
            )
            mounted = (await served.client.get('/a"b/openapi.json')).content
            assert json.loads(mounted) == plain | {"servers": [{"url": '/a"b'}]}

    run(work())


def test_a_shared_result_is_never_older_than_its_request() -> None:
    async def work() -> None:
        begun, gates = 0, [asyncio.Event() for _ in range(3)]

        async def count() -> int:
            nonlocal begun
            begun += 1
            number = begun
            await gates[number - 1].wait()
            return number

        shared = SharedResult(count)
        first = [asyncio.ensure_future(shared.get()) for _ in range(5)]
        while not begun:
            await asyncio.sleep(0)
        second = [asyncio.ensure_future(shared.get()) for _ in range(5)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert begun == 1
        second.pop().cancel()
        gates[0].set()
        assert await asyncio.gather(*first) == [1] * 5
        gates[1].set()
        assert await asyncio.gather(*second) == [2] * 4
        gates[2].set()
        assert await shared.get() == 3

    run(work())


def test_requests_for_public_paths_are_bounded_and_health_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "STATS_TIMEOUT", 300.0)

    async def work() -> None:
        settings = ServeSettings(keys=Keys.of(["secret"]), limits=ServeLimits(max_connections=32))
        async with served_app(settings) as served:
            gate = asyncio.Event()
            stats = served.llm.stats

            async def later() -> Any:
                await gate.wait()
                return await stats()

            served.llm.stats = later  # type: ignore[method-assign]
            asking = [asyncio.create_task(served.client.get("/metrics")) for _ in range(5)]
            await asyncio.wait(asking[2:], timeout=60)
            refused = [one.result() for one in asking if one.done()]
            assert [one.status_code for one in refused] == [429] * 3
            for path in ("/health", "/live", "/ready"):
                assert (await served.client.get(path)).status_code == 200
            assert (await served.client.get("/docs")).status_code == 429
            headers = {"Authorization": "Bearer secret"}
            assert (await served.client.get("/v1/models", headers=headers)).status_code == 200
            gate.set()
            assert [(await one).status_code for one in asking[:2]] == [200] * 2
            assert (await served.client.get("/docs")).status_code == 200

    run(work())
