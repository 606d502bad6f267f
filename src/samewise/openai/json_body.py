"""Bytes → JSON → a body of a type. What is not one raises ApiError, which names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from samewise.openai.errors import ApiError, invalid
from samewise.openai.nesting import MAX_NESTING, nests_deeper

B = TypeVar("B", bound=BaseModel)

MAX_DIGITS = 64
"""Digits of an integer in a body. Set by hand: schemas bound integers of 128 bits, which have 39."""


def read_json(raw: bytes) -> Any:
    """A body as JSON. Raises ApiError."""
    try:
        return load_json(raw, parse_int=_short_int)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None


def load_json(text: str | bytes, parse_int: Callable[[str], int] | None = None) -> Any:
    """JSON that can be written again: without NaN, Infinity and numbers beyond floats, which Python reads.

    Raises ValueError or RecursionError.
    """
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=parse_int)


def _short_int(text: str) -> int:
    """An integer. Reading one of 4,300 digits takes 60 µs, of which a body could have thousands."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits, more than {MAX_DIGITS}")
    return int(text)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def validate(kind: type[B], body: object) -> B:
    """A body of this type; its first mistake as an ApiError."""
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON object, not {quote(body)}", code="invalid_body")
    for name, value in body.items():
        if nests_deeper(value, MAX_NESTING - 1):
            raise invalid(name, f"nests more than {MAX_NESTING} levels deep; make it flatter")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ApiError(f"{where} is missing", param=param, code="missing_required_parameter") from None
        message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise ApiError(
            f"{where}={quote(first['input'])}: {message}", param=param, code="invalid_type"
        ) from None


def quote(value: object) -> str:
    """A value for a message: JSON, at most 80 characters. No more of it is written than is shown."""
    text = ""
    try:
        for piece in json.JSONEncoder().iterencode(value):
            text += piece
            if len(text) > 80:
                return text[:80] + "…"
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
    return text


__all__ = ["load_json", "quote", "read_json", "validate"]
