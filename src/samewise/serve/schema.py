"""The OpenAPI document: what the routes take and give, for people and for tools."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from samewise.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from samewise.openai.parsed import CHAT, COMPLETIONS

DESCRIPTION = (
    "OpenAI's interface to a model that answers the same way every time: for a verified request, tokens "
    "and log-probabilities are a function of the contract (`system_fingerprint`), prompt, sampling "
    "parameters and seed."
)
BODIES = {
    COMPLETIONS: CompletionBody,
    CHAT: ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STREAMS = (COMPLETIONS, CHAT)
_PLAIN = ("/metrics",)
_OPEN = ("/health", "/ready", "/version", "/metrics")
_MEANING = {
    "200": "The answer.",
    "400": "The body is wrong; `param` names the field.",
    "401": "No key, or not one of this server's.",
    "404": "No such model.",
    "413": "The body is too large.",
    "429": "The queue is full; see `Retry-After`.",
    "500": "The engine failed.",
    "503": "Loading, shutting down, or stopped.",
}


def taken(method: str, path: str) -> dict[str, Any]:
    """What FastAPI cannot see: bodies are read by hand, so that all errors are ours."""
    found: dict[str, Any] = {} if path in _OPEN else {"security": [{}, {"key": []}]}
    if method == "POST":
        ref = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref}}}
    if "{model_id" in path:
        found["parameters"] = [
            {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    return found


def given(method: str, path: str) -> dict[int | str, dict[str, Any]]:
    """Statuses a route may answer with."""
    codes = ["200", "503"] if path in _OPEN else ["200", "401", "404", "500", "503"]
    codes += ["400", "413"] if method == "POST" else []
    codes += ["429"] if path in _STREAMS else []
    found: dict[int | str, dict[str, Any]] = {}
    for code in sorted(codes):
        kind = "application/json"
        content: dict[str, Any] = {kind: {"schema": {"type": "object"} if code == "200" else ERROR}}
        if path in ("/health", "/ready"):
            content = {kind: {"schema": {"type": "object"}}}
        if code == "200" and path in _STREAMS:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        if code == "200" and path in _PLAIN:
            content = {"text/plain": {"schema": {"type": "string"}}}
        found[int(code)] = {"description": _MEANING[code], "content": content}
    return found


def describe(app: FastAPI) -> None:
    """Have the application's document carry the bodies' schemas and the key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            kinds = [(kind, "validation") for kind in BODIES.values()]
            _, found = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            parts = document.setdefault("components", {})
            parts.setdefault("schemas", {}).update(found.get("$defs", {}))
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


__all__ = ["DESCRIPTION", "describe", "given", "taken"]
