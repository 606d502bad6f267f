"""The OpenAPI document, generated from the endpoints and pydantic's schemas, and a page that shows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from samewise.openai.errors import ErrorBody

Document = dict[str, Any]

EVENT_SCHEMA = {
    "type": "object",
    "description": "A server-sent event; its data is a chunk as JSON, an error, or [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
STATUSES = {
    "200": "The answer.",
    "400": "The body is wrong; `param` names the field.",
    "401": "No key, or not one of this server's.",
    "404": "No such model, or no such response.",
    "413": "The body is too large.",
    "415": "The body is not `application/json`.",
    "429": "The queue is full; see `Retry-After`.",
    "500": "The engine failed.",
    "503": "Loading, shutting down, or stopped.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A route, with the types of its body and its reply. Its summary is its handler's docstring.

    `reply` is a type that pydantic can describe, or `str` for plain text.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    reply: Any
    body: Any = None
    error: Any = ErrorBody
    streams: bool = False  # replies with events where the body asks for them; may find the queue full
    public: bool = False  # needs no key
    state: bool = False  # answers 503, in the same form, while the engine is not available

    @property
    def operation_id(self) -> str:
        """A name for generated clients, unique among the endpoints."""
        fixed, parameter, _ = self.path.partition("{")
        return self.method.lower() + fixed.rstrip("/").replace("/", "_") + ("_one" if parameter else "")


def openapi_document(
    endpoints: Sequence[Endpoint], *, title: str, version: str, description: str
) -> Document:
    """The document. Paths are listed in the order of the endpoints."""
    refs, schemas = _schemas(endpoints)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": description},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(endpoints: Sequence[Endpoint]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """(a reference or schema by type, the schemas by name)."""
    kinds = [
        kind
        for endpoint in endpoints
        for kind in (endpoint.body, endpoint.reply, endpoint.error)
        if kind is not None
    ]
    inputs: Any = [(kind, "validation", TypeAdapter(kind)) for kind in dict.fromkeys(kinds)]
    refs, schemas = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    return {kind: ref for (kind, _), ref in refs.items()}, schemas["$defs"]


def _operation(endpoint: Endpoint, refs: Mapping[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.handler.__doc__ or "",
        "operationId": endpoint.operation_id,
        "responses": {status: _response(endpoint, status, refs) for status in _statuses(endpoint)},
    }
    if not endpoint.public:
        operation["security"] = [{}, {"key": []}]
    if endpoint.body is not None:
        content = {"application/json": {"schema": refs[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    if "{" in endpoint.path:
        name = endpoint.path.partition("{")[2].partition("}")[0].removesuffix(":path")
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    return operation


def _statuses(endpoint: Endpoint) -> list[str]:
    statuses = ["200"]
    statuses += ["401", "404", "500"] if not endpoint.public else []
    statuses += ["503"] if endpoint.state or not endpoint.public else []
    statuses += ["400", "413", "415"] if endpoint.body is not None else []
    statuses += ["429"] if endpoint.streams else []
    return sorted(statuses)


def _response(endpoint: Endpoint, status: str, refs: Mapping[Any, Any]) -> dict[str, Any]:
    kind = endpoint.reply if status == "200" or endpoint.state else endpoint.error
    content = {"text/plain" if kind is str else "application/json": {"schema": refs[kind]}}
    if status == "200" and endpoint.streams:
        content["text/event-stream"] = {"schema": EVENT_SCHEMA}
    return {"description": STATUSES[status], "content": content}


# ---- the page


def docs_page(document: Document) -> str:
    """The document as an HTML page that loads nothing from other servers."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    links = "".join(
        f'<li><a href="#{operation["operationId"]}"><code>{escape(route)}</code></a></li>'
        for route, operation in operations
    )
    sections = "".join(_section(route, operation, document) for route, operation in operations)
    return f"""<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>{title}: OpenAPI</title>
  <link rel="icon" href="samewise/page/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="samewise/page/docs.css">
</head>
<body>
  <header>
    <h1>{title}</h1>
    <p>{_markdown(document["info"]["description"])}</p>
    <p><a href="openapi.json">openapi.json</a></p>
    <nav aria-label="Routes"><ul>{links}</ul></nav>
  </header>
  <main>{sections}</main>
</body>
</html>
"""


def _section(route: str, operation: Mapping[str, Any], document: Document) -> str:
    name, fields = operation["operationId"], ""
    if "requestBody" in operation:
        schema = _resolve(operation["requestBody"]["content"]["application/json"]["schema"], document)
        fields = _table(
            ("Field", "Type", ""),
            [
                (
                    f"<code>{escape(field)}</code>",
                    escape(_type(entry)) + (" (required)" if field in schema.get("required", ()) else ""),
                    _markdown(entry.get("description", "")),
                )
                for field, entry in schema["properties"].items()
            ],
        )
    statuses = [
        (f"<code>{status}</code>", _markdown(response["description"]))
        for status, response in operation["responses"].items()
    ]
    return (
        f'<section id="{name}" aria-labelledby="{name}_name">'
        f'<h2 id="{name}_name"><code>{escape(route)}</code></h2><p>{_markdown(operation["summary"])}</p>'
        f"{fields}{_table(('Status', 'Meaning'), statuses)}</section>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def _type(schema: Mapping[str, Any]) -> str:
    """A schema's type and range: `integer, minimum 0`."""
    bounds = {"minimum": "minimum", "exclusiveMinimum": "more than", "maximum": "maximum"}
    if "$ref" in schema:
        text = str(schema["$ref"]).rpartition("/")[2]
    elif "anyOf" in schema:
        text = " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    elif schema.get("type") == "array":
        text = f"array of {_type(schema.get('items', {}))}"
    else:
        text = str(schema.get("type", "any"))
    return ", ".join([text, *(f"{word} {schema[key]}" for key, word in bounds.items() if key in schema)])


def _resolve(schema: Mapping[str, Any], document: Document) -> Mapping[str, Any]:
    name = str(schema["$ref"]).rpartition("/")[2]
    resolved: Mapping[str, Any] = document["components"]["schemas"][name]
    return resolved


def _markdown(text: str) -> str:
    """Text with `code` in backticks."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


__all__ = ["Document", "Endpoint", "docs_page", "openapi_document"]
