"""Requests that are refused, and unusual ones that are not."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from served_app import (
    CHAT,
    COMPLETIONS,
    error_of,
    run,
    served_app,
)

from samewise.serve.settings import ServeSettings

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETIONS, {}, "prompt", "is missing"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "give text"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "give text"),
        (COMPLETIONS, {"prompt": [9999]}, "prompt", "9999"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "-1"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "Unicode"),
        (COMPLETIONS, {"prompt": "a", "temperature": "1"}, "temperature", "valid number"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "0 (greedy) or more"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "more than 0"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "give 1 to"),
        (COMPLETIONS, {"prompt": "a", "n": 100000}, "n", "give 1 to"),
        (COMPLETIONS, {"prompt": "a", "n": True}, "n", "valid integer"),
        (COMPLETIONS, {"prompt": ["a"] * 200, "n": 100}, "prompt", "send fewer"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "give 0 to 20"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", "0 or more"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "valid integer"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt", "give text"),
        (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt", "give text"),
        (COMPLETIONS, {"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens", "use max_tokens"),
        (COMPLETIONS, {"prompt": "a", "top_logprobs": 5}, "top_logprobs", "use logprobs"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "min_tokens": 2}, "min_tokens", "max_tokens=1"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 99}, "stop", "more than"),
        (COMPLETIONS, {"prompt": "a", "stop": "x" * 9999}, "stop", "longer"),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop", "give text"),
        (COMPLETIONS, {"prompt": "a", "stop": {}}, "stop", "give text"),
        (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", "non-empty"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed", "64 bits"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", "0 to 319"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "not supported"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search", "not supported"),
        (COMPLETIONS, {"prompt": "a", "proposer": "model"}, "proposer", "is not available"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options", "stream: true"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt", "1 to 1024"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "xml"}}, "response_format", "xml"),
        (CHAT, {"messages": []}, "messages", "empty"),
        (CHAT, {"messages": "hi"}, "messages", "valid list"),
        (CHAT, {"messages": ["hi"]}, "messages", "valid dict"),
        (CHAT, {"messages": [{"role": "the wizard", "content": "a"}]}, "messages", "the wizard"),
        (CHAT, {"messages": [{"role": "user<|x|>", "content": "a"}]}, "messages", "user<|x|>"),
        (CHAT, {"messages": [{"role": "", "content": "a"}]}, "messages", "role is ''"),
        (CHAT, {"messages": [{"role": 5, "content": "a"}]}, "messages", "role is '5'"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "content is text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, "top_logprobs", "needs"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
            "contradicts",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "functions": [{}]}, "functions", "use tools"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"},
            "chat_template",
            "model's own",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs",
            "not for a template",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "echo": True}, "echo", "for completions"),
        ("/tokenize", {}, "prompt", "one of them"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools", "type"),
        ("/detokenize", {"tokens": [1, 99999]}, "tokens", "99999"),
        ("/detokenize", {"tokens": "a"}, "tokens", "valid list"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused_with_their_field(
    server: Any, path: str, body: Any, param: str, message: str
) -> None:
    response = server.post_raw(path, json.dumps(body))
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert message in error["message"]
    assert len(error["message"]) < 1000
    assert error["type"] == "invalid_request_error"


class SharedServer:
    """One server for many tests, with an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._context = served_app()
        self._served = self._loop.run_until_complete(self._context.__aenter__())

    def post_raw(self, path: str, text: str | bytes, **options: Any) -> Any:
        content = text if isinstance(text, bytes) else text.encode()
        options = {"headers": JSON} | options
        return self._loop.run_until_complete(self._served.client.post(path, content=content, **options))

    def request(self, method: str, path: str) -> Any:
        return self._loop.run_until_complete(self._served.client.request(method, path))

    def close(self) -> None:
        self._loop.run_until_complete(self._served.check_idle())
        self._loop.run_until_complete(self._context.__aexit__(None, None, None))
        self._loop.close()


@pytest.fixture(scope="module")
def server() -> Any:
    shared = SharedServer()
    yield shared
    shared.close()


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[1]", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}', b"1" * 5000,
     b'{"prompt": "a", "user": "b", "metadata": {"c": -1e400}}'],
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_refused(server: Any, raw: bytes) -> None:
    response = server.post_raw(COMPLETIONS, raw)
    assert response.status_code == 400
    assert error_of(response)["code"] in ("invalid_json", "invalid_body")


def test_unknown_fields_that_change_nothing_are_ignored(server: Any) -> None:
    ignored = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "suffix": None,
        "best_of": 1, "use_beam_search": False, "anything": [1], "model": None,
    }  # fmt: skip
    response = server.post_raw(COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 1} | ignored))
    assert response.status_code == 200


def test_integers_may_be_written_as_floats(server: Any) -> None:
    integers = {"max_tokens": 3, "n": 2, "seed": 5, "top_k": 9, "logprobs": 1}
    floats = {name: float(value) for name, value in integers.items()}
    bodies: list[dict[str, Any]] = [
        integers | {"prompt": [104, 105]},
        floats | {"prompt": [104.0, 105.0]},
        floats | {"prompt": [[104.0, 105.0]]},
    ]
    choices = [server.post_raw(COMPLETIONS, json.dumps(body)).json()["choices"] for body in bodies]
    assert choices[0] == choices[1] == choices[2]


def test_unknown_models_are_refused(server: Any) -> None:
    response = server.post_raw(COMPLETIONS, json.dumps({"prompt": "a", "model": "gpt\ud800"}))
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    response = server.request("GET", "/v1/models/other/one")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "not_found"),
    ],
)
def test_other_paths_and_methods_are_refused(
    server: Any, method: str, path: str, status: int, code: str
) -> None:
    response = server.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert path in error_of(response)["message"]


def test_a_prompt_longer_than_the_context_is_refused_with_openais_code(server: Any) -> None:
    response = server.post_raw(COMPLETIONS, json.dumps({"prompt": "a" * 600}))
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "512" in error["message"]


def test_a_body_above_the_limit_is_refused() -> None:
    async def work() -> None:
        async with served_app(ServeSettings(max_body=2048)) as served:
            status, error = await served.refusal(COMPLETIONS, {"prompt": "a" * 4096})
            assert (status, error["code"]) == (413, "body_too_large")

            async def pieces() -> Any:
                for _ in range(10):
                    yield b"a" * 1000

            response = await served.client.post(COMPLETIONS, content=pieces(), headers=JSON)
            assert response.status_code == 413

    run(work())


def test_a_client_that_sends_too_large_a_body_sees_why() -> None:
    """The rest of the body is read: a connection closed before that is reset, and its answer lost."""

    async def work() -> None:
        async with served_app(on_port=True) as served:
            for _ in range(5):
                async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
                    response = await client.post(COMPLETIONS, content=b" " * (9 * 2**20), headers=JSON)
                assert response.status_code == 413

    run(work())


def test_a_large_body_is_parsed() -> None:
    async def work() -> None:
        async with served_app() as served:
            status, error = await served.refusal(COMPLETIONS, {"prompt": "a" * 200_000})
            assert (status, error["code"]) == (400, "context_length_exceeded")
            status, error = await served.refusal(
                COMPLETIONS, {"prompt": "a", "pad": "x" * 200_000, "suffix": "b"}
            )
            assert (status, error["param"]) == (400, "suffix")

    run(work())
