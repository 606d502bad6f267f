"""Bodies on the wire: pydantic models of requests, and the types of responses.

A field that would change the output is one of these or refused (`unsupported`); any other is ignored. Types
are strict and those of JSON Schema: `"5"` is not a number, `true` is not 1, `5.0` is an integer and `5.5` is
not. Ranges are shown here and checked by SamplingParams and `parse`. The OpenAPI document is generated from
these types.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from typing_extensions import TypedDict  # typing's own is not accepted by pydantic before Python 3.12

from samewise.config import PROPOSERS
from samewise.params import json_schema_of

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

MAX_N = 128
MAX_LOGPROBS = 20
"""OpenAI's limits of `n` and of the alternatives per token. SamplingParams itself has none."""

ROLE_PATTERN = r"^[A-Za-z0-9_.\-]{1,64}$"
"""Roles of messages: OpenAI's, and others that the chat template renders. No control token is such a word."""

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS | {"minItems": 1},
        {"type": "array", "items": _IDS | {"minItems": 1}, "minItems": 1},
    ]
}
_STOP = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_ANY: dict[str, Any] = {}

_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "pattern": ROLE_PATTERN},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                    {"type": "null"},
                ]
            },
        },
    },
}

_PREDICTION = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type", "content"],
            "properties": {
                "type": {"const": "content"},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            },
                        },
                    ]
                },
            },
        },
        {"type": "null"},
    ]
}

Prompt = Annotated[Any, WithJsonSchema(_PROMPT)]
Stop = Annotated[Any, WithJsonSchema(_STOP)]
Prediction = Annotated[Any, WithJsonSchema(_PREDICTION)]
Anything = Annotated[Any, WithJsonSchema(_ANY)]
Messages = Annotated[list[dict[str, Any]], WithJsonSchema(_MESSAGES)]


def as_integer(value: Any) -> Any:
    """`5.0` as 5, as JSON Schema reads it; any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(as_integer)]


def _ranged(description: str | None = None, **json_schema: Any) -> Any:
    """An optional field. The range is shown in the document only."""
    return Field(None, description=description, json_schema_extra=json_schema)


def _sampling(name: str, description: str | None = None, **json_schema: Any) -> Any:
    """An optional field with the range of a parameter of SamplingParams, and `json_schema` besides."""
    return _ranged(description, **(json_schema_of(name) | json_schema))


_EFFORT: Any = Field(None, description="For templates that know it; others are not changed by it.")
_THINKING: Any = Field(None, description="Whether to reason, for templates that know it.")
_VERBOSITY: Any = Field(None, description="For templates that know it; others are not changed by it.")
_CONTENT_TOKENS: Any = Field(
    None, description="False: control tokens in messages are encoded as text. The server may always do so."
)


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = Field(None, description="One last chunk with `usage` and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="`usage` so far, in every chunk.")


class Body(BaseModel):
    """Fields of both completions and chats. `null` is the same as absent."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="One of `/v1/models`; absent: the model served.")
    max_tokens: Integer | None = _sampling("max_tokens")
    temperature: float | None = _sampling("temperature", "0 is greedy; absent: the checkpoint's, else 1.")
    top_p: float | None = _sampling("top_p")
    n: Integer | None = _sampling("n", maximum=MAX_N)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop = None
    seed: Integer | None = _sampling(
        "seed", "Absent: derived from the prompt or drawn (--unseeded), and returned."
    )
    presence_penalty: float | None = _sampling("presence_penalty")
    frequency_penalty: float | None = _sampling("frequency_penalty")
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    response_format: dict[str, Anything] | None = None
    prediction: Prediction = Field(
        None,
        description="What the answer is expected to be, or to contain: faster where it is right, and the "
        "same answer in any case. Not with `n` above 1; cut to the length of the context.",
    )
    # Not OpenAI's: vLLM's and our own.
    verify: bool | None = Field(None, description="False gives up the promise of equal bits.")
    proposer: str | None = Field(
        None,
        description="`none`: no drafts, and the same output. Otherwise the server's own, "
        f"one of {', '.join(PROPOSERS)}.",
    )
    top_k: Integer | None = _sampling("top_k")
    min_p: float | None = _sampling("min_p")
    repetition_penalty: float | None = _sampling("repetition_penalty")
    min_tokens: Integer | None = _sampling("min_tokens")
    ignore_eos: bool | None = None
    stop_token_ids: list[Integer] | None = _sampling("stop_token_ids")
    allowed_token_ids: list[Integer] | None = _sampling("allowed_token_ids")
    bad_words: list[str] | None = None
    prompt_logprobs: Integer | None = _ranged(minimum=0, maximum=MAX_LOGPROBS)
    logprobs_mode: str | None = Field(
        None,
        description="`raw_logprobs`: the model's own; `processed_logprobs`: of what tokens are drawn from.",
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Integer | None = _sampling("truncate_prompt_tokens")
    truncation_side: str | None = Field(None, description="`left` keeps the last tokens, `right` the first.")
    logprob_token_ids: list[Integer] | None = _sampling(
        "logprob_token_ids", "With `logprobs`: these tokens, in place of the most probable."
    )
    priority: Integer | None = _sampling("priority", "Lower runs earlier, among the requests of one key.")
    structured_outputs: dict[str, Anything] | None = Field(
        None,
        description="vLLM's form of a grammar: one of `json`, `regex`, `choice`, `grammar`, `json_object`.",
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = Field(None, description="Prefixes are shared only under an equal salt.")
    share: bool | None = Field(None, description="False: the answer serves no other request's drafts.")
    receipt: bool | None = Field(None, description="Return a receipt, to check the answer with later.")
    explain: bool | None = Field(None, description="Return the drafted and accepted tokens of every chunk.")


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Integer | None = _ranged(minimum=0, maximum=MAX_LOGPROBS)


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Integer | None = _sampling("max_tokens")
    logprobs: bool | None = None
    top_logprobs: Integer | None = _ranged(minimum=0, maximum=MAX_LOGPROBS)
    tools: list[dict[str, Anything]] | None = None
    tool_choice: Anything = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = _EFFORT
    enable_thinking: bool | None = _THINKING
    verbosity: str | None = _VERBOSITY
    include_reasoning: bool | None = Field(None, description="False: the answer comes without its reasoning.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Anything] | None = None
    special_tokens_in_content: bool | None = _CONTENT_TOKENS


class TokenizeBody(BaseModel):
    """The body of `/tokenize`: a prompt, or a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = _EFFORT
    enable_thinking: bool | None = _THINKING
    verbosity: str | None = _VERBOSITY
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Anything] | None = None
    special_tokens_in_content: bool | None = _CONTENT_TOKENS
    return_token_strs: bool | None = None
    tools: list[dict[str, Anything]] | None = None


class DetokenizeBody(BaseModel):
    """The body of `/detokenize`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: list[Integer]


# ---- responses


class Usage(TypedDict):
    """Tokens a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class CompletionReply(TypedDict):
    """The response of `/v1/completions` and `/v1/chat/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    service_tier: None
    system_fingerprint: str
    usage: Usage
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]
    prompt_text: NotRequired[None]
    receipt: NotRequired[Any]
    weights_version: int


class ModelCard(TypedDict):
    """One entry of `/v1/models`."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    contract: str


class ModelList(TypedDict):
    """The response of `/v1/models`."""

    object: str
    data: list[ModelCard]


class TokenizeReply(TypedDict):
    """The response of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(TypedDict):
    """The response of `/detokenize`."""

    prompt: str


class TokenizerInfo(TypedDict):
    """The response of `/tokenizer_info`: the tokenizer's configuration, without paths of files."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    tokenizer_class: str
    chat_template: NotRequired[str]


class StatusReply(TypedDict):
    """The response of `/health`, `/ready` and `/live`."""

    status: str


class LoadReply(TypedDict):
    """The response of `/load`."""

    server_load: int


class VersionReply(TypedDict):
    """The response of `/version`."""

    version: str
    contract: str | None


__all__ = [
    "CHAT",
    "COMPLETIONS",
    "MAX_LOGPROBS",
    "MAX_N",
    "ROLE_PATTERN",
    "Body",
    "ChatBody",
    "CompletionBody",
    "CompletionReply",
    "DetokenizeBody",
    "DetokenizeReply",
    "Integer",
    "LoadReply",
    "ModelCard",
    "ModelList",
    "StatusReply",
    "StreamOptions",
    "TokenizeBody",
    "TokenizeReply",
    "TokenizerInfo",
    "Usage",
    "VersionReply",
    "as_integer",
]
