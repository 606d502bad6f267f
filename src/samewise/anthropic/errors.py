"""Errors as Anthropic's clients know them: `{"type": "error", "error": {type, message}, "request_id"}`."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from samewise.openai.errors import ApiError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorDetail(TypedDict):
    """What went wrong. `param` and `code` are those of the other endpoints."""

    type: str
    message: str
    param: NotRequired[str | None]
    code: NotRequired[str | None]


class MessageErrorBody(TypedDict):
    """The body of every response with an error status."""

    type: str
    error: ErrorDetail
    request_id: NotRequired[str]


def error_body(error: ApiError, request_id: str | None = None) -> MessageErrorBody:
    """An error in Anthropic's form."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body: MessageErrorBody = {
        "type": "error",
        "error": {"type": kind, "message": error.message, "param": error.param, "code": error.code},
    }
    if request_id is not None:
        body["request_id"] = request_id
    return body


__all__ = ["ErrorDetail", "MessageErrorBody", "error_body"]
