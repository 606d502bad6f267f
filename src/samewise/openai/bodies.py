"""Bodies on the wire: pydantic models of requests, fields refused by name, and the types of responses.

A field that would change the output is honoured or refused; any other unknown field is ignored. Types are
strict and those of JSON Schema: `"5"` is not a number, `true` is not 1, `5.0` is an integer and `5.5` is not.
Ranges are shown here and checked by SamplingParams and `parse`. The OpenAPI document is generated from these
types.
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


UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    # name: (values that change nothing, what to do instead)
    "add_special_tokens": ((), "is not supported; give the prompt as token ids"),
    "audio": ((), "is not supported; text only"),
    "bad_words_ids": ((), "is not supported; use bad_words"),
    "best_of": ((1,), "is not supported; ask for n answers and choose"),
    "chat_template": ((), "is not taken from requests; the model's own is used"),
    "conversation": ((), "is not supported; send the whole conversation"),
    "custom_logit_processor": ((), "is not supported; use logit_bias"),
    "do_sample": ((), "is not known here; use temperature, 0 is greedy"),
    "documents": ((), "is not supported; put them into a message"),
    "dry_multiplier": ((0,), "is not supported; use repetition_penalty"),
    "dynatemp_range": ((0,), "is not supported; use temperature"),
    "early_stopping": ((False,), "is not supported; there is no beam search"),
    "ebnf": ((), "is not supported; use response_format"),
    "epsilon_cutoff": ((0,), "is not supported; use top_p or min_p"),
    "eta_cutoff": ((0,), "is not supported; use top_p or min_p"),
    "function_call": (("none",), "is not supported; use tools and tool_choice"),
    "functions": (([],), "is not supported; use tools"),
    "grammar": (("",), "is not supported; use response_format"),
    "guided_choice": ((), "is not supported; use response_format"),
    "guided_decoding_backend": ((), "is not supported; use response_format"),
    "guided_grammar": ((), "is not supported; use response_format"),
    "guided_json": ((), "is not supported; use response_format"),
    "guided_json_object": ((False,), "is not supported; use response_format"),
    "guided_regex": ((), "is not supported; use response_format"),
    "guided_whitespace_pattern": ((), "is not supported; use response_format"),
    "include": (([],), "is for /v1/responses; use logprobs"),
    "json_schema": ((), "is not supported; use response_format"),
    "length_penalty": ((1, 1.0), "is not supported; there is no beam search"),
    "logits_processors": (([],), "is not supported; use logit_bias"),
    "lora": (([],), "is not supported; serve the merged weights"),
    "lora_path": ((), "is not supported; serve the merged weights"),
    "max_length": ((), "is not known here; use max_tokens"),
    "max_new_tokens": ((), "is not known here; use max_tokens"),
    "max_output_tokens": ((), "is not known here; use max_tokens"),
    "min_new_tokens": ((0,), "is not known here; use min_tokens"),
    "mirostat": ((0,), "is not supported; use temperature and top_p"),
    "mirostat_mode": ((0,), "is not supported; use temperature and top_p"),
    "mm_processor_kwargs": ((), "is not supported; text only"),
    "modalities": ((["text"],), "other than ['text'] is not supported"),
    "n_predict": ((), "is not known here; use max_tokens"),
    "no_repeat_ngram_size": ((0,), "is not supported; use repetition_penalty"),
    "no_stop_trim": ((False,), "is not known here; use include_stop_str_in_output"),
    "num_beams": ((1,), "is not supported; ask for n answers and choose"),
    "num_predict": ((), "is not known here; use max_tokens"),
    "num_return_sequences": ((1,), "is not known here; use n"),
    "output_config": (({},), "is not known here; use response_format, or /v1/messages"),
    "output_format": ((), "is not known here; use response_format"),
    "penalty_alpha": ((0,), "is not supported; use repetition_penalty"),
    "previous_response_id": ((), "is for /v1/responses; send the whole conversation"),
    "prompt_embeds": ((), "is not supported; give text or token ids"),
    "reasoning": ((), "is not known here; use reasoning_effort, or /v1/responses"),
    "reasoning_budget": ((-1,), "is not supported; use max_tokens"),
    "reasoning_format": (("auto", "deepseek", "parsed"), "is not supported; use include_reasoning"),
    "regex": ((), "is not supported; use response_format"),
    "repeat_penalty": ((1,), "is not known here; use repetition_penalty"),
    "repetition_detection": ((), "is not supported"),
    "samplers": ((), "is not supported; they are applied in one order"),
    "separate_reasoning": ((True,), "is not supported; use include_reasoning"),
    "smoothing_factor": ((0,), "is not supported; use temperature"),
    "stop_regex": (([], ""), "is not supported; use stop"),
    "stop_sequences": (([],), "is not known here; use stop"),
    "suffix": (("",), "is not supported; this server continues text"),
    "t_max_predict_ms": ((-1, 0), "is not supported; limit the tokens"),
    "text": (({"format": {"type": "text"}},), "is not known here; use response_format, or /v1/responses"),
    "tfs_z": ((1, 1.0), "is not supported; use top_p or min_p"),
    "thinking": ((), "is not known here; use enable_thinking, or /v1/messages"),
    "thinking_budget": ((), "is not supported; use max_tokens"),
    "thinking_budget_tokens": ((-1,), "is not supported; use max_tokens"),
    "thinking_token_budget": ((), "is not supported; use max_tokens"),
    "top_a": ((0,), "is not supported; use top_p or min_p"),
    "top_n_sigma": ((-1, 0), "is not supported; use top_p or min_p"),
    "truncation": (("disabled",), "is not known here; use truncate_prompt_tokens"),
    "typical": ((1,), "is not supported; use top_p or min_p"),
    "typical_p": ((1, 1.0), "is not supported; use top_p or min_p"),
    "use_beam_search": ((False,), "is not supported; ask for n answers and choose"),
    "web_search_options": ((), "is not supported; the server has no network access"),
    "xtc_probability": ((0,), "is not supported; use top_p or min_p"),
}
"""Fields that would change the output and cannot be honoured: neither by completions nor by chats."""

_CONVERSATIONS = f"is for conversations; use {CHAT}"

COMPLETION_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "add_generation_prompt": ((), _CONVERSATIONS),
    "chat_template_kwargs": (({},), _CONVERSATIONS),
    "continue_final_message": ((False,), _CONVERSATIONS),
    "enable_thinking": ((), _CONVERSATIONS),
    "include_reasoning": ((True,), _CONVERSATIONS),
    "input": (("", []), "is not known here; use prompt"),
    "instructions": (("",), "is for conversations; put them into the prompt"),
    "max_completion_tokens": ((), "is for conversations; use max_tokens"),
    "messages": (([],), _CONVERSATIONS),
    "reasoning_effort": (("none",), _CONVERSATIONS),
    "special_tokens_in_content": ((True,), "is for conversations; give the prompt as token ids"),
    "system": (("", []), "is for conversations; put it into the prompt"),
    "tool_choice": (("none", "auto"), _CONVERSATIONS),
    "tools": (([],), _CONVERSATIONS),
    "top_logprobs": ((0,), "is for conversations; use logprobs"),
    "verbosity": ((), _CONVERSATIONS),
}
"""Fields of other endpoints that completions refuse besides, in the same form."""

CHAT_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "echo": ((False,), f"is for completions; use {COMPLETIONS}, or continue_final_message"),
    "input": (("", []), "is not known here; use messages"),
    "instructions": (("",), "is not known here; use a message of the role system"),
    "prompt": (("", []), f"is for completions; use messages, or {COMPLETIONS}"),
    "system": (("", []), "is not known here; use a message of the role system"),
}
"""Fields of other endpoints that chats and /tokenize refuse besides, in the same form."""


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
    "CHAT_UNSUPPORTED",
    "COMPLETIONS",
    "COMPLETION_UNSUPPORTED",
    "MAX_LOGPROBS",
    "MAX_N",
    "ROLE_PATTERN",
    "UNSUPPORTED",
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
