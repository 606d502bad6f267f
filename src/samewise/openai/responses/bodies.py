"""Bodies of `/v1/responses`: the request, and the types of its replies."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from typing_extensions import TypedDict  # typing's own is not accepted by pydantic before Python 3.12

from samewise.openai.bodies import MAX_LOGPROBS, Integer

RESPONSES = "/v1/responses"

MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_VALUE = 512
"""OpenAI's limits of `metadata`: entries, and characters of a name and of a value."""

_TEXT_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {
            "type": {"enum": ["input_text", "output_text", "text"]}, "text": {"type": "string"},
        },
    },
}  # fmt: skip
_ITEM = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "type": {"const": "message"},
                "role": {"enum": ["system", "developer", "user", "assistant"]},
                "content": {"anyOf": [{"type": "string"}, _TEXT_PARTS]},
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "name", "arguments"],
            "properties": {
                "type": {"const": "function_call"},
                "call_id": {"type": "string"},
                "name": {"type": "string"},
                "arguments": {"type": "string"},
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "output"],
            "properties": {
                "type": {"const": "function_call_output"},
                "call_id": {"type": "string"},
                "output": {"anyOf": [{"type": "string"}, _TEXT_PARTS]},
            },
        },
    ]
}
_INPUT = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": _ITEM, "minItems": 1}]}

Input = Annotated[Any, WithJsonSchema(_INPUT)]
Anything = Annotated[Any, WithJsonSchema({})]


class ReasoningConfig(BaseModel):
    """How much the model reasons, where its chat template can be told."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: str | None = Field(None, description="For templates that know `reasoning_effort`.")


class TextConfig(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="allow", strict=True)

    format: dict[str, Anything] | None = Field(
        None, description="`text`, `json_object`, or `json_schema` with `name` and `schema`."
    )
    verbosity: str | None = Field(None, description="For templates that know it.")


class ResponsesBody(BaseModel):
    """The body of `/v1/responses`. Fields of chats that it does not name are read as those of a chat."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="One of `/v1/models`; absent: the model served.")
    input: Input = None
    instructions: str | None = Field(
        None, description="The system message; not taken from earlier responses."
    )
    previous_response_id: str | None = Field(None, description="A stored response that this one continues.")
    store: bool | None = Field(None, description="False: the response is not kept. It is by default.")
    max_output_tokens: Integer | None = Field(None, json_schema_extra={"minimum": 1})
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, Anything] | None = None
    tools: list[dict[str, Anything]] | None = Field(
        None, description="Functions are used, other types passed over."
    )
    tool_choice: Anything = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = Field(
        None, description="`message.output_text.logprobs`, `reasoning.encrypted_content`; others pass."
    )
    top_logprobs: Integer | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})
    truncation: str | None = None
    metadata: dict[str, str] | None = Field(
        None, description="Returned with the response.", json_schema_extra={"maxProperties": MAX_METADATA}
    )
    user: str | None = None


class ResponseUsage(TypedDict):
    """Tokens a response took."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseReply(TypedDict):
    """A response, from `POST` or `GET`."""

    id: str
    object: str
    created_at: int
    completed_at: int | None
    status: str
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    system_fingerprint: str
    weights_version: NotRequired[int]  # of a complete one
    seed: NotRequired[int]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    receipt: NotRequired[Any]


class DeletedReply(TypedDict):
    """The response of `DELETE`."""

    id: str
    object: str
    deleted: bool


__all__ = [
    "MAX_METADATA",
    "MAX_METADATA_NAME",
    "MAX_METADATA_VALUE",
    "RESPONSES",
    "DeletedReply",
    "ReasoningConfig",
    "ResponseReply",
    "ResponseUsage",
    "ResponsesBody",
    "TextConfig",
]
