"""An error as OpenAI's clients know it: a status, and `{"error": {message, type, param, code}}`.

Host only, and knows nothing of HTTP but the numbers.
"""

from __future__ import annotations

import re
from typing import Any

from samewise.errors import (
    BadPrompt,
    CallerError,
    MachineError,
    PromptTooLong,
    QueueFull,
    SamewiseError,
    UnknownModel,
)

RETRY_AFTER = 1  # seconds a client is asked to wait when the queue is full


class ApiError(SamewiseError):
    """Something the client is told. `status` is HTTP's; the rest stands in the body."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind
        self.param, self.code, self.retry_after = param, code, retry_after

    def body(self) -> dict[str, Any]:
        """What goes over the wire."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    @classmethod
    def of(cls, error: BaseException, *, prompt: str = "prompt") -> ApiError:
        """Any error as a client should see it. What is not meant for clients says only that it happened.

        `prompt` is the field that the prompt came in.
        """
        if isinstance(error, ApiError):
            return error
        message = _shortened(str(error))
        if isinstance(error, QueueFull):
            return cls(
                message, status=429, kind="rate_limit_error", code="queue_full", retry_after=RETRY_AFTER
            )
        if isinstance(error, PromptTooLong):
            return cls(message, param=prompt, code="context_length_exceeded")
        if isinstance(error, UnknownModel):
            return cls(message, status=404, param="model", code="model_not_found")
        if isinstance(error, BadPrompt):
            return cls(message, param=prompt, code="invalid_prompt")
        if isinstance(error, CallerError):
            return cls(message, param=_param(message), code="invalid_value")
        if isinstance(error, MachineError):
            return cls(message, status=500, kind="server_error", code="engine_failed")
        return cls(
            "the server failed; its log says how", status=500, kind="server_error", code="internal_error"
        )


def refused(param: str, message: str) -> ApiError:
    """A field that would change the output and cannot be honoured."""
    return ApiError(f"{param} {message}", param=param, code="unsupported_parameter")


def invalid(param: str, message: str) -> ApiError:
    """A field whose value will not do."""
    return ApiError(f"{param}: {message}", param=param, code="invalid_value")


def _shortened(message: str) -> str:
    """Errors quote the value they are about, which may be as long as a body; what to do stands at the end."""
    return message if len(message) <= 1000 else f"{message[:400]} … {message[-400:]}"


def _param(message: str) -> str | None:
    """Our own errors begin with `name=value`."""
    found = re.match(r"([a-z_]+)=", message)
    return {"grammar": "response_format"}.get(found[1], found[1]) if found else None


__all__ = ["RETRY_AFTER", "ApiError", "invalid", "refused"]
