"""The OpenAPI document, the page that shows it, and HEAD."""

import dataclasses
import json
import re
from typing import Any

import httpx
from pydantic import TypeAdapter
from served_app import (
    CHAT,
    COMPLETIONS,
    events_of,
    run,
    served_app,
)
from starlette.applications import Starlette
from starlette.routing import Mount

from samewise.anthropic.bodies import CountTokensReply, MessageReply
from samewise.anthropic.errors import MessageErrorBody
from samewise.openai.bodies import (
    CompletionReply,
    DetokenizeReply,
    LoadReply,
    ModelCard,
    ModelList,
    StatusReply,
    TokenizeReply,
    TokenizerInfo,
    VersionReply,
)
from samewise.openai.responses.bodies import DeletedReply, ResponseReply
from samewise.params import SamplingParams, json_schema_of
from samewise.serve.settings import Keys, ServeSettings

AGENTS_REPLIES = (ResponseReply, DeletedReply, MessageReply, CountTokensReply)


def test_the_openapi_document_describes_every_route() -> None:
    async def work() -> None:
        async with served_app() as served:
            document = (await served.client.get("/openapi.json")).json()
            assert {COMPLETIONS, CHAT, "/v1/models", "/tokenize", "/metrics"} <= set(document["paths"])
            assert "$defs" not in json.dumps(document)
            fields = document["components"]["schemas"]["ChatBody"]["properties"]
            assert {"messages", "verify", "proposer", "tools", "response_format"} <= set(fields)
            for name in {*fields} & {entry.name for entry in dataclasses.fields(SamplingParams)}:
                if "logprobs" not in name:  # a flag, or OpenAI's limit
                    assert json_schema_of(name).items() <= fields[name].items()
            assert (fields["n"]["minimum"], fields["n"]["maximum"]) == (1, 128)
            assert (fields["top_p"]["exclusiveMinimum"], fields["top_p"]["maximum"]) == (0, 1)
            assert fields["stop_token_ids"]["items"] == {"minimum": 0}
            for path in ("/health", "/ready", "/live", "/load", "/tokenizer_info", "/version"):
                assert (await served.client.get(path)).status_code == 200

    run(work())


def test_parameters_in_paths_are_described() -> None:
    async def work() -> None:
        async with served_app() as served:
            document = (await served.client.get("/openapi.json")).json()
            named = {path: re.findall(r"{(\w+)}", path) for path in document["paths"]}
            assert named["/v1/responses/{response_id}"] == ["response_id"]
            for path, methods in document["paths"].items():
                for operation in methods.values():
                    assert [one["name"] for one in operation.get("parameters", ())] == named[path]

    run(work())


def test_agents_replies_and_errors_have_the_types_of_the_document() -> None:
    async def work() -> None:
        async with served_app() as served:
            message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            response = await served.post("/v1/responses", {"input": "hello", "max_output_tokens": 4})
            address = f"/v1/responses/{response['id']}"
            replies: dict[Any, list[Any]] = {
                ResponseReply: [response, (await served.client.get(address)).json()],
                DeletedReply: [(await served.client.delete(address)).json()],
                MessageReply: [await served.post("/v1/messages", message | {"logprobs": True})],
                CountTokensReply: [await served.post("/v1/messages/count_tokens", message)],
                MessageErrorBody: [(await served.client.post("/v1/messages", json={})).json()],
            }
            assert {*replies} == {*AGENTS_REPLIES, MessageErrorBody}
            for kind, bodies in replies.items():
                for body in bodies:
                    assert TypeAdapter(kind).validate_python(body) == body
            document = (await served.client.get("/openapi.json")).json()
            refusal = document["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]
            assert refusal["application/json"]["schema"]["$ref"].endswith("/MessageErrorBody")

    run(work())


def test_replies_have_the_types_of_the_document() -> None:
    async def work() -> None:
        async with served_app() as served:
            tokens = await served.post("/tokenize", {"prompt": "hello", "return_token_strs": True})
            replies: dict[Any, list[Any]] = {
                CompletionReply: [
                    await served.complete(logprobs=1, prompt_logprobs=1, return_token_ids=True, receipt=True),
                    await served.chat(logprobs=True, prompt_logprobs=1, return_token_ids=True),
                ],
                TokenizeReply: [tokens],
                DetokenizeReply: [await served.post("/detokenize", {"tokens": tokens["tokens"]})],
            }
            for kind, path in (
                (ModelList, "/v1/models"),
                (ModelCard, "/v1/models/tiny-llama"),
                (StatusReply, "/health"),
                (StatusReply, "/ready"),
                (StatusReply, "/live"),
                (LoadReply, "/load"),
                (TokenizerInfo, "/tokenizer_info"),
                (VersionReply, "/version"),
            ):
                replies.setdefault(kind, []).append((await served.client.get(path)).json())
            for kind, listed in replies.items():
                for reply in listed:
                    extra = "allow" if kind is TokenizerInfo else "forbid"
                    assert TypeAdapter(kind).validate_python(reply, strict=True, extra=extra) == reply
            endpoints = served.app.state.service.endpoints
            assert {endpoint.reply for endpoint in endpoints} == {*replies, *AGENTS_REPLIES, str}

    run(work())


def test_public_endpoints_are_those_without_a_key() -> None:
    async def work() -> None:
        async with served_app(ServeSettings(keys=Keys.of(["a-key"]))) as served:
            endpoints = served.app.state.service.endpoints
            refused = {
                one.path: (await served.client.request(one.method, one.path)).status_code == 401
                for one in endpoints
            }
            assert refused == {one.path: not one.public for one in endpoints}
            assert [path for path, needs_key in refused.items() if not needs_key] == [
                "/health",
                "/ready",
                "/live",
                "/version",
                "/metrics",
            ]
            for path in ("/", "/docs", "/openapi.json"):
                assert (await served.client.get(path)).status_code == 200
            assert len({one.operation_id for one in endpoints}) == len(endpoints)

    run(work())


def test_a_mounted_application_names_its_prefix_in_the_document() -> None:
    async def work() -> None:
        async with served_app() as served:
            outer = httpx.ASGITransport(Starlette(routes=[Mount("/api", served.app)]))
            async with httpx.AsyncClient(transport=outer, base_url="http://x") as client:
                assert (await client.get("/api/openapi.json")).json()["servers"] == [{"url": "/api"}]
            assert "servers" not in (await served.client.get("/openapi.json")).json()

    run(work())


def test_the_docs_page_is_complete_and_loads_nothing_from_other_servers() -> None:
    async def work() -> None:
        async with served_app() as served:
            page = await served.client.get("/docs")
            assert page.headers["content-type"].startswith("text/html")
            assert "default-src 'none'" in page.headers["content-security-policy"]
            links = re.findall(r'(?:href|src)="([^"]*)"', page.text)
            assert not [link for link in links if ":" in link or link.startswith("/")]
            for link in links:
                if not link.startswith("#"):
                    assert (await served.client.get(f"/{link}")).status_code == 200
            for text in (CHAT, "/metrics", "max_completion_tokens", "integer, minimum 0", "Retry-After"):
                assert text in page.text
            ids = re.findall(r' id="([^"]*)"', page.text)
            assert len(ids) == len(set(ids))
            assert {link[1:] for link in links if link.startswith("#")} <= set(ids)

    run(work())


def test_head_is_answered_where_get_is() -> None:
    async def work() -> None:
        async with served_app(on_port=True) as served:
            for path in (
                "/",
                "/docs",
                "/health",
                "/ready",
                "/live",
                "/load",
                "/version",
                "/metrics",
                "/v1/models",
            ):
                response = await served.client.head(path)
                assert (response.status_code, response.content) == (200, b"")
                assert response.headers["x-request-id"]
            assert (await served.client.head(COMPLETIONS)).status_code == 405
            assert (await served.client.put("/health")).headers["allow"] == "GET, HEAD"
            document = (await served.client.get("/openapi.json")).json()
            assert not [path for path, methods in document["paths"].items() if "head" in methods]

    run(work())


def test_the_helper_splits_events() -> None:
    assert events_of('data: {"a":1}\n\ndata: [DONE]\n\n') == [{"a": 1}]
