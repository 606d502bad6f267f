"""Schemathesis over the server's OpenAPI document: no request makes the server fail."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import CLIENT_ENV, NAME, ServerProcess

pytest.importorskip("schemathesis", reason="schemathesis is not installed; see make test-clients")

CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"
ANSWERING = ("/v1/completions", "/v1/chat/completions")
AGENTS = ("/v1/responses", "/v1/messages")
COUNT_TOKENS = "/v1/messages/count_tokens"
WEATHER = {
    "type": "object", "properties": {"town": {"enum": ["Ulm", "Bonn"]}}, "required": ["town"],
    "additionalProperties": False,
}  # fmt: skip
HOSTED = {"type": "web_search", "name": "web_search"}


def run(
    server: ServerProcess, folder: Path, document: str, *options: str
) -> collections.Counter[tuple[str, int]]:
    """Run it; returns the number of responses by path and status."""
    seen = len(server.log.read_text().splitlines())
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", document, "--url", server.url),
        *("--checks", CHECKS, "--seed", "1", "--generation-database", "none", "--request-timeout", "60"),
        *("--continue-on-failure", "--no-shrink", "--no-color", "--warnings", "off", *options),
    ]
    env = os.environ | CLIENT_ENV
    ran = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=400
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    server.check_idle()
    assert httpx.get(f"{server.url}/ready").status_code == 200
    entries = [json.loads(line) for line in server.log.read_text().splitlines()[seen:]]
    return collections.Counter((entry["path"], entry["status"]) for entry in entries if "path" in entry)


def test_random_bodies_never_cause_a_server_error(server: ServerProcess, tmp_path: Path) -> None:
    """Bodies that follow the document, and bodies that do not."""
    counts = run(
        server, tmp_path, f"{server.url}/openapi.json", "--max-examples", "24", "--phases", "coverage,fuzzing"
    )
    assert max(status for _, status in counts) < 500
    for path in (*ANSWERING, *AGENTS, COUNT_TOKENS, "/tokenize", "/detokenize"):
        assert counts[path, 200] > 0, counts
        assert counts[path, 400] > 0, counts


def test_likely_requests_are_answered(server: ServerProcess, tmp_path: Path) -> None:
    """The document with its fields narrowed to values that are likely to be accepted, in any combination."""
    document = tmp_path / "narrow.json"
    document.write_text(json.dumps(narrowed(httpx.get(f"{server.url}/openapi.json").json())))
    counts = run(
        server, tmp_path, str(document), "--max-examples", "100", "--mode", "positive", "--phases", "fuzzing"
    )
    assert {status for path, status in counts if path in ANSWERING} <= {200, 400}
    for path in ANSWERING:
        assert counts[path, 200] > 40, counts


def test_likely_requests_of_agents_are_answered(server: ServerProcess, tmp_path: Path) -> None:
    """The same for the agents' endpoints."""
    document = tmp_path / "narrow.json"
    document.write_text(json.dumps(narrowed_for_agents(httpx.get(f"{server.url}/openapi.json").json())))
    counts = run(
        server, tmp_path, str(document), "--max-examples", "80", "--mode", "positive", "--phases", "fuzzing"
    )
    assert {status for path, status in counts if path in AGENTS} <= {200, 400}
    for path in (*AGENTS, COUNT_TOKENS):
        assert counts[path, 200] > 25, counts


def narrowed_for_agents(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the agents' paths, and narrow types for values that would be refused."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}}
    narrow: dict[str, Any] = {
        "model": {"enum": [NAME, None]},
        "max_tokens": {"enum": [1, 2, 7, 24]},
        "max_output_tokens": {"enum": [1, 2, 7, 24]},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": 1, "maximum": 400},
        "previous_response_id": {"type": "null"},
        "truncation": {"enum": ["disabled", None]},
        "top_logprobs": {"enum": [None, 0, 2]},
        "include": {
            "enum": [None, [], ["reasoning.encrypted_content"], ["message.output_text.logprobs"]]
        },
        "thinking": {"enum": [None, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}]},
        "output_format": {"type": "null"},
        "output_config": {
            "enum": [None, {"effort": "low"}, {"format": {"type": "json_schema", "schema": schema}}]
        },
        "text": {"enum": [None, {"format": {"type": "text"}}, {"verbosity": "low"}]},
        "reasoning": {"enum": [None, {"effort": "low"}, {"effort": "none", "summary": "auto"}]},
        "stop_sequences": {"type": "array", "items": {"enum": ["x", "yz"]}, "maxItems": 2},
    }  # fmt: skip
    function = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    of_responses = narrow | {
        "tools": {"enum": [None, [], [HOSTED], [function], [function, HOSTED]]},
        "tool_choice": {"enum": [None, "auto", "none", "required", {"type": "function", "name": "weather"}]},
    }
    tool = {"name": "weather", "input_schema": WEATHER}
    of_messages = narrow | {
        "tools": {"enum": [None, [], [HOSTED], [tool], [tool | {"strict": True}, HOSTED]]},
        "tool_choice": {"enum": [None, *({"type": kind} for kind in ("auto", "none", "any"))]},
    }
    for name, fields in (
        ("ResponsesBody", of_responses), ("MessagesBody", of_messages), ("CountTokensBody", of_messages),
    ):  # fmt: skip
        body = document["components"]["schemas"][name]
        for field in body["properties"].keys() & fields.keys():
            body["properties"][field] = fields[field]
        body["additionalProperties"] = False
    document["components"]["schemas"]["ResponsesBody"]["required"] = ["input", "max_output_tokens"]
    document["paths"] = {path: document["paths"][path] for path in (*AGENTS, COUNT_TOKENS)}
    return document


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with two paths, and with narrow types for fields whose random values would be refused."""
    token = {"type": "integer", "minimum": 0, "maximum": 255}
    word = {"type": "string", "minLength": 1, "maxLength": 6}
    schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    narrow: dict[str, Any] = {
        "model": {"enum": [NAME, None]},
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": 60},
                {"type": "array", "items": token, "minItems": 1, "maxItems": 60},
                {"type": "array", "items": word, "minItems": 1, "maxItems": 3},
            ]
        },
        "messages": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": word},
                "required": ["role", "content"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 3,
        },
        "max_tokens": {"enum": [0, 1, 2, 7, 24]},
        "max_completion_tokens": {"type": "null"},
        "temperature": {"type": "number", "minimum": 0, "maximum": 3},
        "top_k": {"type": "integer", "minimum": -1, "maximum": 400},
        "n": {"type": "integer", "minimum": 1, "maximum": 3},
        "stop": {"type": "array", "items": word, "maxItems": 3},
        "bad_words": {"type": "array", "items": word, "maxItems": 2},
        "proposer": {"enum": ["none", "auto", None]},
        "logit_bias": {
            "type": "object",
            "properties": {str(i): {"type": "number", "minimum": -100, "maximum": 100} for i in (0, 65, 319)},
            "additionalProperties": False,
        },
        "stop_token_ids": {"type": "array", "items": token, "maxItems": 3},
        "allowed_token_ids": {"type": "array", "items": token, "minItems": 4, "maxItems": 12},
        "min_tokens": {"type": "integer", "minimum": 0, "maximum": 2},
        "prompt_logprobs": {"type": "null"},
        "truncate_prompt_tokens": {"type": "integer", "minimum": 1, "maximum": 99},
        "cache_salt": word,
        "stream_options": {"type": "null"},
        "response_format": {
            "enum": [
                *(None, {"type": "text"}, {"type": "json_object"}),
                {"type": "json_schema", "json_schema": schema},
            ]
        },
        "structured_outputs": {"enum": [None, {"choice": ["x", "yz"]}, {"regex": "[ab]{2}"}]},
        "receipt": {"enum": [False, None]},
        "tools": {"enum": [None, [], [{"type": "function", "function": {"name": "f", "strict": True}}]]},
        "tool_choice": {"enum": [None, "auto", "none"]},
        "logprobs": {"type": "null"},
        "top_logprobs": {"enum": [None, 0]},
        "add_generation_prompt": {"type": "null"},
        "continue_final_message": {"enum": [False, None]},
        "chat_template_kwargs": {"enum": [None, {}, {"extra": 1}]},
    }  # fmt: skip
    for name in ("CompletionBody", "ChatBody"):
        body = document["components"]["schemas"][name]
        for field in body["properties"].keys() & narrow.keys():
            body["properties"][field] = narrow[field]
        body["additionalProperties"] = False
        body["required"] = [*body["required"], "max_tokens"]
    document["components"]["schemas"]["CompletionBody"]["properties"]["logprobs"] = {
        "type": "integer", "minimum": 0, "maximum": 20,
    }  # fmt: skip
    document["components"]["schemas"]["ChatBody"]["properties"]["logprobs"] = {"type": "boolean"}
    document["paths"] = {path: document["paths"][path] for path in ANSWERING}
    return document
