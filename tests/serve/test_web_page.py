"""The web page and its feed as routes. Tests in a browser are in tests/page."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from samewise import AsyncLLM, SamplingParams
from samewise.serve import web_page
from samewise.serve.app import make_app
from samewise.serve.settings import Keys, ServeSettings
from samewise.serve.worker import Worker
from samewise.testing import tiny_engine

FILES = sorted(path.name for path in web_page.PAGE_FOLDER.iterdir())


def run(work: Coroutine[Any, Any, None]) -> None:
    async def timed() -> None:
        await asyncio.wait_for(work, 60)

    asyncio.run(timed())


def no_model() -> AsyncLLM:
    raise AssertionError("the model must not be loaded")


@asynccontextmanager
async def client(worker: Worker | AsyncLLM, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(worker, ServeSettings(**settings)))
    async with httpx.AsyncClient(transport=transport, base_url="http://served") as http:
        yield http


def test_every_file_is_served_with_its_type_and_tag() -> None:
    async def work() -> None:
        async with client(Worker(no_model)) as http:
            for name in FILES:
                response = await http.get(f"/samewise/page/{name}")
                assert response.status_code == 200
                assert response.content == (web_page.PAGE_FOLDER / name).read_bytes()
                assert (
                    response.headers["content-type"].split(";")[0]
                    == web_page.MEDIA_TYPES[name[name.rindex(".") :]]
                )
                assert response.headers["x-content-type-options"] == "nosniff"
                again = await http.get(
                    f"/samewise/page/{name}", headers={"If-None-Match": response.headers["etag"]}
                )
                assert (again.status_code, again.content) == (304, b"")
            page = await http.get("/")
            assert page.text == (web_page.PAGE_FOLDER / "index.html").read_text(encoding="utf-8")
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy

    run(work())


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2e%2e/app.py", "__init__.py", ".", ""])
def test_other_files_are_not_served(name: str) -> None:
    async def work() -> None:
        async with client(Worker(no_model)) as http:
            response = await http.get(f"/samewise/page/{name}")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "not_found"

    run(work())


def test_the_page_loads_nothing_from_other_servers_and_has_no_inline_script() -> None:
    for name in FILES:
        text = (web_page.PAGE_FOLDER / name).read_text(encoding="utf-8")
        external = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text))
        assert {url for url in external if "www.w3.org/2000/svg" not in url} == set(), name
        assert len(text.splitlines()) < 400, name
    page = (web_page.PAGE_FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|\sstyle=|javascript:|<style", page)
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    for link in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert link.removeprefix("samewise/page/") in FILES, link
    for name in (name for name in FILES if name.endswith(".js")):
        for module in re.findall(
            r'from "\./([^"]+)"', (web_page.PAGE_FOLDER / name).read_text(encoding="utf-8")
        ):
            assert module in FILES, f"{name} imports {module}"


def test_every_id_used_by_a_script_is_on_the_page() -> None:
    page = (web_page.PAGE_FOLDER / "index.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    wanted = {
        element_id
        for name in FILES
        if name.endswith(".js")
        for element_id in re.findall(
            r'(?:\$|numberIn)\("([\w-]+)"\)', (web_page.PAGE_FOLDER / name).read_text(encoding="utf-8")
        )
    }
    assert wanted <= set(ids)
    for reference in re.findall(r'(?:for|aria-labelledby|aria-describedby)="([^"]+)"', page):
        assert reference in ids


def test_the_page_is_public_and_its_feed_needs_a_key() -> None:
    async def work() -> None:
        async with (
            AsyncLLM.over(tiny_engine()) as llm,
            client(llm, keys=Keys.of(["a-key"])) as http,
        ):
            assert (await http.get("/")).status_code == 200
            assert (await http.get("/samewise/page/app.js")).status_code == 200
            for headers in ({}, {"Authorization": "Bearer another"}):
                refused = await http.get("/samewise/live", headers=headers)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"

    run(work())


def test_the_feed_is_refused_while_loading() -> None:
    async def work() -> None:
        async with client(Worker(no_model)) as http:
            response = await http.get("/samewise/live")
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "loading"

    run(work())


def test_the_feed_follows_the_engine_and_ends_when_the_server_drains() -> None:
    async def work() -> None:
        async with AsyncLLM.over(tiny_engine(proposer="none")) as llm:
            worker = Worker.over(llm)
            app = make_app(worker)
            sent: list[dict[str, Any]] = []
            scope = {
                "type": "http",
                "method": "GET",
                "path": "/samewise/live",
                "headers": [],
                "query_string": b"",
            }
            never = asyncio.Event()

            async def receive() -> dict[str, Any]:
                await never.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            listening = asyncio.create_task(app(scope | {"asgi": {"version": "3.0"}}, receive, send))
            await llm.generate("hello", SamplingParams(max_tokens=20, ignore_eos=True))
            await asyncio.sleep(0.6)
            await worker.drain(5)
            await asyncio.wait_for(listening, 5)
            assert dict(sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
            events = b"".join(one.get("body", b"") for one in sent[1:]).decode().strip().split("\n\n")
            snapshots = [json.loads(one.removeprefix("data: ")) for one in events if one.startswith("data: ")]
            assert snapshots[0]["facts"] == dict(llm.contract.facts)
            assert snapshots[0]["contract"] == llm.contract.id
            frames = [frame for one in snapshots[:-1] for frame in one["frames"]]
            assert sum(frame["committed"] for frame in frames) == 20
            assert sum(frame["prompt"] for frame in frames) == 5
            assert snapshots[-1] == {"over": "the server is shutting down"}

    run(work())
