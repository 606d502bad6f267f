"""Bodies → requests, and exceptions → errors, without a server or an engine."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samewise.errors import (
    BadParameter,
    BadPrompt,
    GuaranteeLost,
    MachineError,
    PromptTooLong,
    QueueFull,
    UnknownModel,
)
from samewise.openai.bodies import CHAT, COMPLETIONS, Body
from samewise.openai.errors import ApiError
from samewise.openai.json_body import read_json
from samewise.openai.nesting import MAX_NESTING
from samewise.openai.parse import SAMPLING_FIELDS, parse, served_name
from samewise.openai.replies import encode_json
from samewise.openai.request import ParsedRequest, ParseOptions
from samewise.openai.stream import encode_event
from samewise.openai.unsupported import UNSUPPORTED
from samewise.params import SamplingParams

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ParsedRequest:
    return parse(CHAT, {"messages": USER} | fields)


def complete(**fields: Any) -> ParsedRequest:
    return parse(COMPLETIONS, {"prompt": "hi"} | fields)


# ---- bodies


def test_an_empty_body_gets_openais_defaults() -> None:
    assert complete().params == SamplingParams(max_tokens=16)
    assert chat().params == SamplingParams(max_tokens=None)
    assert chat().template == {"add_generation_prompt": True}
    assert not complete().stream


def test_null_is_the_same_as_absent() -> None:
    fields = (
        "max_tokens",
        "temperature",
        "n",
        "stop",
        "seed",
        "logprobs",
        "echo",
        "stream",
        "stream_options",
        "response_format",
    )
    assert complete(**dict.fromkeys(fields)) == complete()


def test_fields_reach_the_sampling_parameters() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "n": 3, "stop": ["a"], "seed": 4, "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": {"5": 2}, "verify": False, "top_k": 3, "min_p": 0.1,
        "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [1],
        "bad_words": ["x"], "prompt_logprobs": 2, "truncate_prompt_tokens": 9, "share": False,
        "skip_special_tokens": False, "max_tokens": 12,
    }  # fmt: skip
    params = complete(**fields).params
    for name, value in fields.items():
        wanted = {"stop": ("a",), "stop_token_ids": (1,), "bad_words": ("x",), "logit_bias": {5: 2.0}}
        assert getattr(params, name) == wanted.get(name, value), name
    parsed = chat(max_completion_tokens=5, logprobs=True, top_logprobs=2, cache_salt="s", model="m")
    assert (parsed.params.max_tokens, parsed.params.logprobs) == (5, 2)
    assert (parsed.cache_salt, parsed.model) == ("s", "m")


def test_a_body_overrides_the_checkpoints_defaults() -> None:
    options = ParseOptions(defaults=SamplingParams(temperature=0.3, top_k=7, max_tokens=99))
    assert parse(COMPLETIONS, {"prompt": "a"}, options).params == SamplingParams(
        temperature=0.3, top_k=7, max_tokens=16
    )
    assert parse(COMPLETIONS, {"prompt": "a", "temperature": 1, "top_k": 0}, options).params.top_k == 0


def test_echo_with_logprobs_includes_the_prompts_logprobs() -> None:
    assert complete(echo=True, logprobs=2, max_tokens=0).params.prompt_logprobs == 2
    assert complete(echo=True).params.prompt_logprobs is None
    both = complete(echo=True, logprobs=2, prompt_logprobs=3)
    assert (both.params.prompt_logprobs, both.prompt_logprobs) == (3, 3)
    assert complete(echo=True, logprobs=2, prompt_logprobs=0).params.prompt_logprobs == 2
    assert complete(echo=True, logprobs=2).prompt_logprobs is None


@pytest.mark.parametrize(
    ("own", "requested", "speculates"),
    [
        (None, "ngram", True),
        (None, "none", False),
        ("auto", None, True),
        ("auto", "auto", True),
        ("auto", "none", False),
        ("none", "none", True),
        ("ngram+decode", "ngram+decode", True),
        ("auto", "ngram", None),
        (None, "wizard", None),
    ],
)
def test_a_request_can_choose_the_servers_proposer_or_none(
    own: str | None, requested: str | None, speculates: bool | None
) -> None:
    body = {"prompt": "a", "proposer": requested}
    if speculates is None:
        with pytest.raises(ApiError, match="is not available"):
            parse(COMPLETIONS, body, ParseOptions(proposer=own))
    else:
        assert parse(COMPLETIONS, body, ParseOptions(proposer=own)).params.speculate is speculates


def test_a_prediction_is_text_or_parts_of_text() -> None:
    for content in ("ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]):
        given = {"type": "content", "content": content}
        assert complete(prediction=given).params.prediction == "ab"
        assert chat(prediction=given).params.prediction == "ab"
    assert complete(prediction=None).params.prediction is None
    assert complete(prediction={"type": "content", "content": []}).params.prediction == ""


@pytest.mark.parametrize(
    "wrong",
    [
        "ab",
        5,
        ["ab"],
        {},
        {"type": "text", "content": "ab"},
        {"type": "content"},
        {"type": "content", "content": None},
        {"type": "content", "content": [1, 2]},
        {"type": "content", "content": [{"type": "image_url"}]},
        {"type": "content", "content": [{"type": "text", "text": 5}]},
    ],
)
def test_what_is_no_prediction_is_refused(wrong: Any) -> None:
    for request in (complete, chat):
        with pytest.raises(ApiError) as caught:
            request(prediction=wrong)
        assert (caught.value.param, caught.value.code) == ("prediction", "invalid_value")


def test_a_prediction_is_refused_with_several_answers() -> None:
    with pytest.raises(ApiError, match="ask for n=1") as caught:
        chat(prediction={"type": "content", "content": "ab"}, n=2)
    assert caught.value.param == "n"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_fields_are_refused_unless_they_change_nothing(name: str) -> None:
    neutral, _ = UNSUPPORTED[name]
    with pytest.raises(ApiError) as caught:
        complete(**{name: {"anything": 1}})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    for value in (None, *neutral):
        assert complete(**{name: value}) == complete()


def test_best_of_equal_to_n_is_accepted() -> None:
    assert complete(best_of=3, n=3).params.n == 3


def test_messages_are_converted_for_the_chat_template() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
    ]
    result = parse(CHAT, {"messages": messages}).messages
    assert [one["role"] for one in result] == ["system", "user", "assistant", "tool", "assistant"]
    assert [one["content"] for one in result] == ["d", "a", "", "r", "no"]
    assert result[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert result[3]["tool_call_id"] == "c"
    assert "tool_calls" not in result[4]  # a template would render it as a call


@pytest.mark.parametrize(
    ("beside", "text"),
    [
        ({"reasoning": "so", "reasoning_content": "so", "refusal": None}, ""),
        ({"reasoning_content": "so"}, ""),
        ({"refusal": "no"}, "no"),
        ({"refusal": None, "tool_calls": [{"function": {"name": "f"}}]}, ""),
    ],
)
def test_an_assistants_message_may_have_null_as_content(beside: dict[str, Any], text: str) -> None:
    """Where it says something beside it, as replies do that are sent back in a conversation."""
    (message,) = parse(CHAT, {"messages": [{"role": "assistant", "content": None} | beside]}).messages
    assert message["content"] == text
    assert message.get("reasoning_content") == beside.get("reasoning_content")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"type": "custom"}]},
        {"role": "assistant", "tool_calls": "f"},
        {"role": "assistant", "content": "a", "function_call": {"name": "f"}},
        {"role": "user", "content": [{"type": "input_audio"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["a"]},
        {"role": "user", "content": 1},
        {"role": "user", "content": None, "reasoning": "so"},
        {"role": "assistant", "content": None, "reasoning": None, "refusal": None},
        {"role": "assistant", "content": None, "refusal": 1},
        {"role": "user", "content": "a", "name": 1},
        {"role": ["user"], "content": "a"},
    ],
)  # fmt: skip
def test_invalid_messages_are_refused(message: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse(CHAT, {"messages": [message]})
    assert caught.value.param == "messages"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted(
    {
        "prompt",
        "messages",
        "n",
        "stop",
        "logit_bias",
        "stream",
        "stream_options",
        "temperature",
        "seed",
        "tools",
    }
    | {"top_k", "logprobs", "echo", "response_format", "tool_choice", "chat_template_kwargs", "max_tokens"}
    | {"proposer", "verify", "cache_salt", "bad_words", "allowed_token_ids", "best_of", "functions"}
)


@given(
    endpoint=st.sampled_from([COMPLETIONS, CHAT]),
    body=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6) | JSON,
    good=st.booleans(),
)
def test_any_body_is_parsed_or_refused(endpoint: str, body: Any, good: bool) -> None:
    if good and isinstance(body, dict):
        body = {"prompt": "a", "messages": USER} | body
    refusal: ApiError | None = None
    try:
        assert parse(endpoint, body).num_choices >= 1
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert 400 <= refusal.status < 500
        assert json.loads(encode_json(refusal.body()))["error"]["message"]


# ---- errors


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("full"), 429, "queue_full"),
        (UnknownModel("m"), 404, "model_not_found"),
        (BadParameter("top_p=7: no", param="top_p"), 400, "invalid_value"),
        (MachineError("broken"), 500, "engine_failed"),
        (GuaranteeLost("lost"), 500, "internal_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_exceptions_become_statuses_and_codes(error: Exception, status: int, code: str) -> None:
    api_error = ApiError.of(error)
    assert (api_error.status, api_error.code) == (status, code)
    assert "secret" not in api_error.message
    if isinstance(error, BadParameter):
        assert api_error.param == "top_p"


def test_an_error_about_the_grammar_names_response_format() -> None:
    assert ApiError.of(BadParameter("grammar=x: no", param="grammar")).param == "response_format"


def test_a_prompt_error_names_the_field_of_the_prompt() -> None:
    for error, code in (
        (BadPrompt("empty"), "invalid_prompt"),
        (PromptTooLong("x"), "context_length_exceeded"),
    ):
        api_error = ApiError.of(error, prompt_field="messages")
        assert (api_error.status, api_error.param, api_error.code) == (400, "messages", code)


def test_every_sampling_parameter_of_a_body_is_passed_on() -> None:
    """A field declared in SamplingParams and in Body needs no further declaration."""
    own = {entry.name for entry in fields(SamplingParams)}
    others = {"max_tokens", "prompt_logprobs", "prediction"}
    assert set(SAMPLING_FIELDS) == own & Body.model_fields.keys() - others


def test_another_models_name_is_refused() -> None:
    assert served_name(None, ("a", "b")) == "a"
    assert served_name("b", ("a", "b")) == "b"
    with pytest.raises(ApiError, match="'c' is not served here; there is 'a', 'b'") as caught:
        served_name("c", ("a", "b"))
    assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")


def test_surrogates_and_numbers_survive_the_encoding() -> None:
    assert json.loads(encode_json({"a": "\ud800é"})) == {"a": "\ud800é"}
    assert encode_event({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'.encode()
    assert json.loads(encode_json([0.1 + 0.2])) == [0.1 + 0.2]


# ---- chat templates


@pytest.mark.parametrize(
    "name", ["self", "tokenizer", "date", "conversation", "conversations", "tokenize", "messages", "a b"]
)
def test_names_that_are_not_a_templates_are_refused_by_field(name: str) -> None:
    with pytest.raises(ApiError, match=name) as refused:
        chat(chat_template_kwargs={name: 1})
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")


def test_control_tokens_in_content_may_be_read_as_text() -> None:
    assert "special_tokens_in_content" not in chat().template
    assert "special_tokens_in_content" not in chat(special_tokens_in_content=True).template
    assert chat(special_tokens_in_content=False).template["special_tokens_in_content"] is False
    guarded = ParseOptions(special_tokens_in_content=False)
    for given_fields in ({}, {"special_tokens_in_content": False}):
        parsed = parse(CHAT, {"messages": USER} | given_fields, guarded)
        assert parsed.template["special_tokens_in_content"] is False
    with pytest.raises(ApiError, match="as text") as refused:
        parse(CHAT, {"messages": USER, "special_tokens_in_content": True}, guarded)
    assert refused.value.param == "special_tokens_in_content"


# ---- long lists


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a"] * 65),
        ("stop", "a" * 1025),
        ("bad_words", ["a"] * 1025),
        ("bad_words", ["a" * 1025]),
        ("bad_words", ["a" * 1024] * 33),
        ("stop_token_ids", [1] * 1025),
        ("logit_bias", {str(token): 1.0 for token in range(1025)}),
        ("allowed_token_ids", [1] * (2**18 + 1)),
    ],
)
def test_lists_that_would_take_long_are_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        complete(**{field: value})
    assert (refused.value.status, refused.value.param) == (400, field)


# ---- deep values


def nested(levels: int) -> Any:
    """Lists and objects within each other, in turn."""
    value: Any = "a"
    for level in range(levels):
        value = {"x": value} if level % 2 else [value]
    return value


def test_a_long_prompts_log_probabilities_are_in_few_choices() -> None:
    complete(echo=True, n=128).refuse_repeats(10**6)
    complete(echo=True, logprobs=20, n=1).refuse_repeats(10**6)
    complete(echo=True, logprobs=20, n=51).refuse_repeats(998)
    for one in ({"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}):
        with pytest.raises(ApiError, match="ask for fewer") as caught:
            complete(**one, n=51).refuse_repeats(1000)
        assert (caught.value.status, caught.value.param) == (400, "n")
    chat(prompt_logprobs=20, n=128).refuse_repeats(8000)


def test_chat_template_kwargs_have_a_limit() -> None:
    chat(chat_template_kwargs={"x": "a" * 65_000})
    for value in ("a" * 2**16, [0] * 2**16, {str(i): i for i in range(10_000)}):
        with pytest.raises(ApiError, match="longer than 64 KiB") as caught:
            chat(chat_template_kwargs={"x": value})
        assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("levels", range(900, 1000))
def test_bodies_that_are_nested_lists_are_refused(levels: int) -> None:
    """Some of them can be read, but not be written again."""
    with pytest.raises(ApiError) as caught:
        parse(CHAT, read_json(b"[" * levels + b"]" * levels))
    assert (caught.value.status, caught.value.code in ("invalid_json", "invalid_body")) == (400, True)


@pytest.mark.parametrize("levels", [200, *range(940, 1000)])
def test_arguments_of_calls_that_nest_too_deeply_are_refused(levels: int) -> None:
    text = '{"a":' * levels + "1" + "}" * levels
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    with pytest.raises(ApiError, match="arguments are a JSON object") as caught:
        chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert caught.value.status == 400


@pytest.mark.parametrize("field", ["metadata", "chat_template_kwargs", "tools", "response_format"])
def test_values_that_nest_too_deeply_are_refused_by_field(field: str) -> None:
    with pytest.raises(ApiError, match="levels deep") as refused:
        chat(**{field: {"x": nested(MAX_NESTING - 1)}})  # with the body itself one level too many
    assert (refused.value.status, refused.value.param) == (400, field)


def test_values_of_the_greatest_depth_are_read() -> None:
    value = nested(MAX_NESTING - 2)
    assert chat(chat_template_kwargs={"x": value}).template["x"] == value
    schema = {"type": "object", "x-deep": nested(MAX_NESTING - 4)}
    parsed = chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert parsed.params.grammar is not None
