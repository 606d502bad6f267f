"""JSON and server-sent events, as they go over the wire. Host only."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"

# Made once: json.dumps() would make one for every call.
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_ESCAPE = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def dump(body: Any) -> bytes:
    """JSON; a lone surrogate, which UTF-8 cannot hold, goes escaped."""
    try:
        return _ENCODE(body).encode()
    except UnicodeEncodeError:
        return _ESCAPE(body).encode()


def event(body: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + dump(body) + b"\n\n"


__all__ = ["DONE", "dump", "event"]
