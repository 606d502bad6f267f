"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`: the requests, and the types of their replies."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from typing_extensions import TypedDict  # typing's own is not accepted by pydantic before Python 3.12

from samewise.openai.bodies import Integer

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"

_TEXT_BLOCK = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK}]}
_TOOL_USE = {
    "type": "object",
    "required": ["type", "id", "name", "input"],
    "properties": {
        "type": {"const": "tool_use"},
        "id": {"type": "string"},
        "name": {"type": "string"},
        "input": {"type": "object"},
    },
}
_TOOL_RESULT = {
    "type": "object",
    "required": ["type", "tool_use_id"],
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": {"type": "string"},
        "content": _TEXTS,
        "is_error": {"type": "boolean"},
    },
}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [_TEXT_BLOCK, _TOOL_USE, _TOOL_RESULT]}},
    ]
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _CONTENT},
}

MessageList = Annotated[
    list[dict[str, Any]], WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE})
]
System = Annotated[Any, WithJsonSchema({"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]})]
Anything = Annotated[Any, WithJsonSchema({})]


class CountTokensBody(BaseModel):
    """The body of `/v1/messages/count_tokens`. Fields of chats that it does not name are read as a chat's."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="One of `/v1/models`; absent: the model served.")
    messages: MessageList
    system: System = None
    tools: list[dict[str, Anything]] | None = Field(
        None, description="Tools of the client are used, other types passed over."
    )
    tool_choice: dict[str, Anything] | None = None
    thinking: dict[str, Anything] | None = Field(
        None, description="For templates that know `enable_thinking`. The budget is not enforced."
    )
    output_config: dict[str, Anything] | None = Field(
        None, description="`format` is a JSON schema; `effort` is for templates that know `reasoning_effort`."
    )
    output_format: dict[str, Anything] | None = Field(None, description="As `output_config.format`.")


class MessagesBody(CountTokensBody):
    """The body of `/v1/messages`."""

    max_tokens: Integer = Field(
        description="At most; the context may end the answer before. 0: the prompt is read into the cache.",
        json_schema_extra={"minimum": 0},
    )
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Integer | None = None
    top_p: float | None = None
    metadata: dict[str, Anything] | None = None


class MessageUsage(TypedDict):
    """Tokens a message took. Input tokens that the prefix cache had are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[dict[str, int]]


class MessageReply(TypedDict):
    """The response of `/v1/messages`."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    system_fingerprint: str
    weights_version: NotRequired[int]
    seed: NotRequired[int]
    logprobs: NotRequired[dict[str, Any]]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    receipt: NotRequired[Any]


class CountTokensReply(TypedDict):
    """The response of `/v1/messages/count_tokens`."""

    input_tokens: int


__all__ = [
    "COUNT_TOKENS",
    "MESSAGES",
    "CountTokensBody",
    "CountTokensReply",
    "MessageReply",
    "MessageUsage",
    "MessagesBody",
]
