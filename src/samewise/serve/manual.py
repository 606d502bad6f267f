"""The OpenAPI document as a page that people can read: plain HTML, nothing from elsewhere, works offline.

Pure: a document goes in, a page comes out. Host only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]


def render(document: Json) -> str:
    """The page."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    operations = [
        (method.upper(), path, one)
        for path, methods in document["paths"].items()
        for method, one in methods.items()
    ]
    links = "".join(
        f'<li><a href="#{_anchor(one)}"><code>{method} {escape(path)}</code></a></li>'
        for method, path, one in operations
    )
    parts = "".join(_operation(method, path, one, document) for method, path, one in operations)
    return f"""<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>{title}: the interface</title>
  <link rel="icon" href="samewise/page/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="samewise/page/manual.css">
</head>
<body>
  <header>
    <h1>{title}</h1>
    <p>{_prose(document["info"].get("description", ""))}</p>
    <p>For tools: <a href="openapi.json">openapi.json</a>. For people: <a href="./">the page</a>.</p>
    <nav aria-label="Routes"><ul>{links}</ul></nav>
  </header>
  <main>{parts}</main>
</body>
</html>
"""


def _operation(method: str, path: str, one: Json, document: Json) -> str:
    answers = "".join(
        f"<tr><td><code>{escape(status)}</code></td><td>{_prose(answer['description'])}</td></tr>"
        for status, answer in sorted(one["responses"].items())
    )
    return (
        f'<section id="{_anchor(one)}" aria-labelledby="{_anchor(one)}_name">'
        f'<h2 id="{_anchor(one)}_name"><code>{method} {escape(path)}</code></h2>'
        f"<p>{_prose(one.get('summary', ''))}</p>{_fields(one, document)}"
        f'<table><thead><tr><th scope="col">Status</th><th scope="col">Meaning</th></tr></thead>'
        f"<tbody>{answers}</tbody></table></section>"
    )


def _fields(one: Json, document: Json) -> str:
    """The fields of a body, where there is one."""
    if "requestBody" not in one:
        return ""
    ref = one["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = _resolve(ref, document)
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(field, document))}"
        f"{' (required)' if name in needed else ''}</td><td>{_prose(field.get('description', ''))}</td></tr>"
        for name, field in schema["properties"].items()
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Field", "What it is", ""))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _kind(field: Json, document: Json) -> str:
    """A schema in a few words: `whole number, 0 or more`."""
    kinds = list(dict.fromkeys(_kinds(field, document)))
    least, most = field.get("minimum"), field.get("maximum")
    if least is not None and most is not None:
        return f"{' or '.join(kinds)}, {least} to {most}"
    return " or ".join(kinds) + (f", {least} or more" if least is not None else "")


def _kinds(field: Json, document: Json) -> Iterator[str]:
    if "$ref" in field:
        yield "object: " + ", ".join(_resolve(field["$ref"], document)["properties"])
        return
    others = field.get("anyOf")
    if others is not None:
        for one in others:
            yield from (kind for kind in _kinds(one, document) if kind != "null")
        return
    kind = str(field.get("type", "anything"))
    if kind == "array":
        yield f"list of {' or '.join(_plural(one) for one in _kinds(field.get('items', {}), document))}"
    else:
        yield _WORDS.get(kind, kind)


def _plural(word: str) -> str:
    return word.replace("list of", "lists of", 1) if word.startswith("list") else f"{word}s"


_WORDS = {"string": "text", "integer": "whole number", "boolean": "true or false"}


def _resolve(ref: str, document: Json) -> Json:
    found: Json = document["components"]["schemas"][ref.rsplit("/", 1)[1]]
    return found


def _anchor(one: Json) -> str:
    return escape(one["operationId"], quote=True)


def _prose(text: str) -> str:
    """A text with `code` in it."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


__all__ = ["render"]
