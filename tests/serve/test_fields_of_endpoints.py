"""Fields of one endpoint in a body of another, without a server: honoured, refused by name, or harmless."""

from collections.abc import Callable
from typing import Any

import pytest

from samewise.anthropic.bodies import MESSAGES, MessagesBody
from samewise.anthropic.parse import parse_message
from samewise.openai.bodies import CHAT, COMPLETIONS, ChatBody, CompletionBody
from samewise.openai.errors import ApiError
from samewise.openai.parse import parse
from samewise.openai.request import ParsedRequest, ParseOptions
from samewise.openai.responses.bodies import RESPONSES, ResponsesBody
from samewise.openai.responses.parse import parse_response
from samewise.params import SamplingParams

OPTIONS = ParseOptions(
    defaults=SamplingParams(),
    receipts=True,
    template=lambda tools: "{{ enable_thinking }}{{ reasoning_effort }}{{ verbosity }}<tool_call>",
    decode=lambda ids: "",
)
USER = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

ENDPOINTS: dict[str, tuple[Any, Callable[..., Any], dict[str, Any]]] = {
    # path: (type of the body, how it is read, the smallest body)
    COMPLETIONS: (CompletionBody, lambda body: parse(COMPLETIONS, body, OPTIONS), {"prompt": "hi"}),
    CHAT: (ChatBody, lambda body: parse(CHAT, body, OPTIONS), {"messages": USER}),
    RESPONSES: (
        ResponsesBody,
        lambda body: parse_response(body, OPTIONS, earlier=lambda _: [], find=lambda _: {}).parsed,
        {"input": "hi"},
    ),
    MESSAGES: (
        MessagesBody,
        lambda body: parse_message(body, OPTIONS).parsed,
        {"messages": USER, "max_tokens": 9},
    ),
}

VALUES: dict[str, Any] = {
    # Of every field a value that asks for something, and that a chat takes if it is a chat's.
    "add_generation_prompt": False, "allowed_token_ids": [1], "bad_words": ["x"], "cache_salt": "x",
    "chat_template_kwargs": {"x": 1}, "continue_final_message": True, "echo": True, "enable_thinking": True,
    "explain": True, "frequency_penalty": 1.0, "ignore_eos": True, "include": ["x"],
    "include_reasoning": False, "include_stop_str_in_output": True, "input": "bye", "instructions": "x",
    "logit_bias": {"1": 1.0}, "logprob_token_ids": [1], "logprobs": True,
    "logprobs_mode": "processed_logprobs",
    "max_completion_tokens": 5, "max_output_tokens": 5, "max_tokens": 5, "messages": [*USER, *USER],
    "metadata": {"x": "x"}, "min_p": 0.5, "min_tokens": 1, "model": "x", "n": 2,
    "output_config": {"effort": "low"}, "output_format": {"type": "json_schema", "schema": {}},
    "parallel_tool_calls": False, "prediction": {"type": "content", "content": "x"}, "presence_penalty": 1.0,
    "previous_response_id": "resp_1", "priority": 1, "prompt": "bye", "prompt_logprobs": 1,
    "proposer": "none", "reasoning": {"effort": "low"}, "reasoning_effort": "low", "receipt": True,
    "repetition_penalty": 2.0, "response_format": {"type": "json_object"}, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "seed": 1, "share": False, "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "special_tokens_in_content": False, "stop": "x",
    "stop_sequences": ["x"], "stop_token_ids": [1], "store": True, "stream": True,
    "stream_options": {"include_usage": True}, "structured_outputs": {"choice": ["x"]}, "system": "x",
    "temperature": 0.5, "text": {"verbosity": "low"}, "thinking": {"type": "enabled"},
    "tool_choice": "required", "tools": [FUNCTION], "top_k": 5, "top_logprobs": 1, "top_p": 0.5,
    "truncate_prompt_tokens": 5, "truncation": "auto", "truncation_side": "right", "user": "x",
    "verbosity": "low", "verify": False,
}  # fmt: skip

HARMLESS = {"metadata", "parallel_tool_calls", "store", "user"}
"""Fields that pass where they are not the endpoint's own: no answer depends on them. Without tools there are
no parallel calls."""

KEPT_BY_PARSER = {"include_reasoning"}
"""Fields that reach the parser of the answer's text, which requests are not compared by."""


def fields_of(path: str) -> set[str]:
    return set(ENDPOINTS[path][0].model_fields)


def read(path: str, **fields: Any) -> ParsedRequest:
    _, parse_body, smallest = ENDPOINTS[path]
    parsed: ParsedRequest = parse_body(smallest | fields)
    return parsed


def test_every_field_has_a_value() -> None:
    assert VALUES.keys() == set().union(*map(fields_of, ENDPOINTS))


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("origin", ENDPOINTS)
def test_no_field_of_another_endpoint_vanishes(path: str, origin: str) -> None:
    plain = read(path)
    for name in sorted(fields_of(origin) - fields_of(path) - HARMLESS):
        try:
            honoured = read(path, **{name: VALUES[name]}) != plain or name in KEPT_BY_PARSER
            refused = False
        except ApiError as error:
            honoured, refused = False, (error.status, error.param) == (400, name)
        assert honoured or refused, name


@pytest.mark.parametrize("path", ENDPOINTS)
def test_null_and_harmless_fields_of_other_endpoints_pass(path: str) -> None:
    others = set(VALUES) - fields_of(path)
    assert read(path, **dict.fromkeys(sorted(others))) == read(path)
    for name in sorted(others & HARMLESS):
        assert read(path, **{name: VALUES[name]}) == read(path), name


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_limit_of_time_is_refused(path: str) -> None:
    """llama.cpp ends an answer after so many milliseconds: its text would depend on the machine."""
    with pytest.raises(ApiError, match="limit the tokens") as caught:
        read(path, t_max_predict_ms=500)
    assert caught.value.param == "t_max_predict_ms"
    for off in (None, 0, -1):
        assert read(path, t_max_predict_ms=off) == read(path)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(("name", "value"), [("explain", True), ("prompt_logprobs", 0)])
def test_agents_endpoints_refuse_what_their_answers_have_no_place_for(
    path: str, name: str, value: Any
) -> None:
    with pytest.raises(ApiError, match=f"use {CHAT}") as caught:
        read(path, **{name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    assert read(path, explain=False, prompt_logprobs=None) == read(path)
