"""Keys, names, request ids, origins, and the log of requests."""

import json
import logging
from typing import Any

import httpx
import pytest
from served_app import (
    CHAT,
    COMPLETIONS,
    run,
    served_app,
)
from starlette.applications import Starlette
from starlette.routing import Mount

from samewise.serve.logs import JsonLines, Lines
from samewise.serve.settings import Keys, ServeSettings
from samewise.serve.worker import salt_of
from samewise.types import Ask


def watched_salts(proposer: Any) -> set[bytes | None]:
    """The salts of all texts that the proposer is told of from now on."""
    salts: set[bytes | None] = set()
    meet = proposer.meet

    def watched(asks: list[Ask]) -> None:
        salts.update(ask.share_salt for ask in asks)
        meet(asks)

    proposer.meet = watched
    return salts


def test_keys_give_access_and_separate_their_caches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")

    async def work() -> None:
        async with served_app(
            ServeSettings(keys=Keys.of(["alpha-key", "beta-key"])), proposer="ngram"
        ) as served:

            async def ask(key: str, **body: Any) -> Any:
                return await served.client.post(
                    COMPLETIONS,
                    json={"prompt": "ab" * 40, "temperature": 0, "max_tokens": 4} | body,
                    headers={"Authorization": f"Bearer {key}"},
                )

            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic alpha-key"}):
                for path in (COMPLETIONS, CHAT, "/tokenize"):
                    status, error = await served.refusal(path, {}, headers=headers)
                    assert (status, error["code"]) == (401, "invalid_api_key")
            for path in ("/health", "/ready", "/version", "/metrics", "/docs"):
                assert (await served.client.get(path)).status_code == 200
            salts = watched_salts(served.llm._engine.proposer)
            cached = []
            for key in ("alpha-key", "beta-key", "alpha-key", "beta-key"):
                response = await ask(key)
                cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
            assert cached == [False, False, True, True]
            salted = (await ask("alpha-key", cache_salt="mine")).json()
            assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert len(salts) == 3
            assert not salts & {b"", None}

    run(work())
    assert "alpha-key" not in caplog.text
    assert "abab" not in caplog.text


def test_a_mounted_application_still_asks_for_keys() -> None:
    async def work() -> None:
        async with served_app(ServeSettings(keys=Keys.of(["k"]))) as served:
            outer = httpx.ASGITransport(Starlette(routes=[Mount("/api", served.app)]))
            async with httpx.AsyncClient(transport=outer, base_url="http://x") as client:
                for path in ("v1/models", "v1/nothing", "samewise/live", "nothing"):
                    assert (await client.get(f"/api/{path}")).status_code == 401
                for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
                    assert (await client.post(f"/api{path}", json={})).status_code == 401
                for path in ("/", "/health", "/docs", "/samewise/page/icon.svg"):
                    assert (await client.get(f"/api{path}")).status_code == 200
                client.headers["Authorization"] = "Bearer k"
                messages = [{"role": "user", "content": "a"}]
                completion = await client.post(f"/api{COMPLETIONS}", json={"prompt": "a", "max_tokens": 1})
                assert completion.json()["object"] == "text_completion"
                chat = await client.post(f"/api{CHAT}", json={"messages": messages, "max_tokens": 1})
                assert chat.json()["object"] == "chat.completion"

    run(work())


def test_served_names_are_listed_and_accepted() -> None:
    async def work() -> None:
        async with served_app(ServeSettings(model_names=("org/good", "other"))) as served:
            listed = (await served.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["org/good", "other"]
            assert (await served.client.get("/v1/models/org/good")).json()["max_model_len"] == 512
            assert (await served.complete())["model"] == "org/good"
            assert (await served.complete(model="other"))["model"] == "other"
            status, _ = await served.refusal(COMPLETIONS, {"prompt": "a", "model": "tiny-llama"})
            assert status == 404

    run(work())


def test_request_ids_are_kept_if_they_are_plain_words() -> None:
    async def work() -> None:
        async with served_app() as served:
            body = {"prompt": "a", "max_tokens": 1}
            response = await served.client.post(COMPLETIONS, json=body, headers={"X-Request-Id": "mine-7"})
            assert response.headers["x-request-id"] == "mine-7"
            assert response.json()["id"] == "cmpl-mine-7"
            for bad in ("a b", "x" * 300, "é"):
                response = await served.client.post(
                    COMPLETIONS, json=body, headers={"X-Request-Id": bad.encode("latin-1")}
                )
                assert response.headers["x-request-id"].isalnum()

    run(work())


def test_cors_headers_are_sent_to_allowed_origins_only() -> None:
    async def work() -> None:
        origin = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        async with served_app() as served:
            response = await served.client.options(COMPLETIONS, headers=origin)
            assert "access-control-allow-origin" not in response.headers
        settings = ServeSettings(allowed_origins=("https://a.example",), keys=Keys.of(["k"]))
        async with served_app(settings) as served:
            response = await served.client.options(COMPLETIONS, headers=origin)
            assert response.headers["access-control-allow-origin"] == "https://a.example"
            other = await served.client.options(COMPLETIONS, headers=origin | {"Origin": "https://b.example"})
            assert "access-control-allow-origin" not in other.headers

    run(work())


def test_salts_differ_by_key_and_cache_salt() -> None:
    salts = [salt_of(digest, salt) for digest in (b"", b"a", b"b") for salt in (None, "", "x", "a")]
    assert salts[0] == b""
    assert len(set(salts)) == len(salts)


def test_paths_are_escaped_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with served_app() as served:
            await served.client.get("/v1/models/%1b%5b31m%0d%0aé%07%7f")

    with caplog.at_level("INFO", "samewise.serve"):
        run(work())
    (line,) = [record.getMessage() for record in caplog.records if "/v1/models" in record.getMessage()]
    assert line == r"GET /v1/models/\x1b[31m\r\n\xe9\x07\x7f 404"


def test_log_lines_are_plain_or_json() -> None:
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
