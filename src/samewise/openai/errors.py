"""Errors as OpenAI's clients know them: an HTTP status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing_extensions import TypedDict

from samewise.errors import (
    BadPrompt,
    CallerError,
    MachineError,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    SamewiseError,
    UnknownModel,
)

RETRY_AFTER = 1
"""Seconds in the Retry-After header: the smallest HTTP can express; a place is often free sooner."""

FIELD_OF_PARAM = {"grammar": "response_format"}
"""Sampling parameters that a body sets through a field of another name."""


class ErrorDetail(TypedDict):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every response with an error status."""

    error: ErrorDetail


class ApiError(SamewiseError):
    """An error for the client. `status` is the HTTP status; message, kind, param and code are in the body.

    `close`: the connection ends with the response, because the rest of the request is not read.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind
        self.param, self.code, self.retry_after, self.close = param, code, retry_after, close

    def body(self) -> ErrorBody:
        """The response body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Response headers."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"Connection": "close"} if self.close else {})

    @classmethod
    def of(cls, error: BaseException, *, prompt_field: str = "prompt") -> ApiError:
        """Any exception as an ApiError. The text of an error that is not the caller's is for the log alone:
        it may tell of the machine, or quote another request.

        `prompt_field` is the field of the body that held the prompt.
        """
        if isinstance(error, ApiError):
            return error
        message = _shorten(str(error))
        if isinstance(error, QueueFull):
            return cls(
                message, status=429, kind="rate_limit_error", code="queue_full", retry_after=RETRY_AFTER
            )
        if isinstance(error, PromptTooLong):
            return cls(message, param=prompt_field, code="context_length_exceeded")
        if isinstance(error, UnknownModel):
            return cls(message, status=404, param="model", code="model_not_found")
        if isinstance(error, BadPrompt):
            return cls(message, param=prompt_field, code="invalid_prompt")
        if isinstance(error, CallerError):
            param = None if error.param is None else FIELD_OF_PARAM.get(error.param, error.param)
            return cls(message, param=param, code="invalid_value")
        message, code = "the server failed; its log says how", "internal_error"
        if isinstance(error, RequestFailed):
            message, code = "this request failed and was ended; the server's log says how", "request_failed"
        elif isinstance(error, MachineError):
            message, code = "the engine failed; the server's log says how", "engine_failed"
        return cls(message, status=500, kind="server_error", code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A field that would change the output and cannot be honoured."""
    return ApiError(_about(param, message, " "), param=param, code="unsupported_parameter")


def invalid(param: str, message: str) -> ApiError:
    """A field with an unacceptable value."""
    return ApiError(_about(param, message, ": "), param=param, code="invalid_value")


def unavailable(message: str, code: str) -> ApiError:
    """The server takes no requests now."""
    return ApiError(message, status=503, kind="server_error", code=code, retry_after=RETRY_AFTER)


def _about(param: str, message: str, separator: str) -> str:
    """The message after the field's name, unless it begins with the place in the field: `input[0] …`."""
    named = message.startswith((f"{param} ", f"{param}[", f"{param}."))
    return message if named else param + separator + message


def _shorten(message: str) -> str:
    """Messages quote values, which may be as long as a body. The remedy is at the end, so both ends stay."""
    return message if len(message) <= 1000 else f"{message[:400]} … {message[-400:]}"


__all__ = ["RETRY_AFTER", "ApiError", "ErrorBody", "ErrorDetail", "invalid", "unavailable", "unsupported"]
