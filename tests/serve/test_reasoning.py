"""Reasoning at chats: apart from the content, and the fields that reach the chat template."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from samewise import AsyncLLM
from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.serve.app import make_app
from samewise.testing import byte_tokenizer, paced, tiny

from agent_bodies import HERMES, THINKING, THOUGHT  # isort: skip
from served_app import CHAT, COMPLETIONS, ServedApp, run, served_app  # isort: skip

HELLO = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {
    "messages": HELLO, "temperature": 0.8, "seed": 5, "max_tokens": 80, "response_format": THOUGHT,
}  # fmt: skip


def test_reasoning_is_apart_from_the_content_whole_and_streamed() -> None:
    async def work() -> None:
        async with served_app(eos=True) as served:
            template = served.llm.intake.tokenizer.chat_template
            plain = await served.post(CHAT, BODY | {"return_token_ids": True})
            text = plain["choices"][0]["message"]["content"]
            assert plain["choices"][0]["message"]["reasoning"] is None  # the template knows no marks
            served.llm.intake.tokenizer.chat_template = template + "{# </think> #}"
            whole = await served.post(CHAT, BODY | {"return_token_ids": True, "logprobs": True})
            message = whole["choices"][0]["message"]
            assert text == f"<think>\n{message['reasoning']}\n</think>\n\n{message['content']}"
            assert message["reasoning_content"] == message["reasoning"]
            assert whole["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
            assert len(whole["choices"][0]["logprobs"]["content"]) == len(plain["choices"][0]["token_ids"])
            spent = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert spent == text.index("</think>") + len("</think>")
            events = await served.events(
                CHAT, BODY | {"stream_options": {"include_usage": True}, "logprobs": True}
            )
            assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == spent
            choices = [choice for event in events for choice in event["choices"]]
            for name in ("reasoning", "reasoning_content", "content"):
                parts = "".join(choice["delta"].get(name) or "" for choice in choices)
                assert parts == message[name]
            rows = [row for choice in choices if choice["logprobs"] for row in choice["logprobs"]["content"]]
            assert rows == whole["choices"][0]["logprobs"]["content"]
            quiet = await served.post(CHAT, BODY | {"include_reasoning": False})
            assert quiet["choices"][0]["message"].get("reasoning") is None
            assert quiet["choices"][0]["message"]["content"] == message["content"]

    run(work())


@pytest.mark.parametrize(
    ("template", "fields", "reached"),
    [
        ("{{ reasoning_effort }}!", {"reasoning_effort": "high"}, "high!"),
        ("{{ verbosity }}!", {"verbosity": "low"}, "low!"),
        ("{{ enable_thinking }}!", {"enable_thinking": False}, "False!"),
        ("{{ enable_thinking }}!", {"reasoning_effort": "none"}, "False!"),
        ("{{ thinking }}!", {"enable_thinking": True}, "True!"),
        ("!", {"reasoning_effort": "high", "verbosity": "low", "enable_thinking": True}, "!"),
    ],
)
def test_fields_reach_the_template(template: str, fields: dict[str, Any], reached: str) -> None:
    async def work() -> None:
        async with served_app() as served:
            served.llm.intake.tokenizer.chat_template = template
            reply = await served.post(
                CHAT, {"messages": HELLO, "max_tokens": 1, "return_token_ids": True} | fields
            )
            assert served.llm.intake.decode(reply["prompt_token_ids"]) == reached
            tokenized = await served.post("/tokenize", {"messages": HELLO} | fields)
            assert tokenized["tokens"] == reply["prompt_token_ids"]

    run(work())


def test_reasoning_of_a_message_reaches_the_template_under_either_name() -> None:
    async def work() -> None:
        async with served_app() as served:
            served.llm.intake.tokenizer.chat_template = THINKING
            prompts = []
            for name in ("reasoning", "reasoning_content"):
                messages = [*HELLO, {"role": "assistant", "content": "yes", name: "so"}]
                reply = await served.post("/tokenize", {"messages": messages})
                prompts.append(served.llm.intake.decode(reply["tokens"]))
            assert prompts[0] == prompts[1]
            assert "<think>\nso\n</think>\n\nyes" in prompts[0]

    run(work())


CHANNELS = (
    "start: <[259]> /analysis/ <[260]> /[a-c]{4,8}/ <[261]> <[262]> /assistant/ "
    "<[259]> /final/ <[260]> /[d-f]{3,6}/"
)
"""A grammar over an answer in channels, by the ids of the tokens in `with_special_tokens`."""


@asynccontextmanager
async def with_special_tokens(*words: str) -> AsyncIterator[ServedApp]:
    """A server whose tokenizer has further special tokens, from id 259 on, without a role."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(word, special=True) for word in words])
    tokenizer.chat_template = str(tokenizer.chat_template) + "{# " + " ".join(words) + " analysis #}"
    config = EngineConfig(model="tiny", device="cpu", kv_memory=2**22)
    engine = Engine(replace(tiny(eos=True), tokenizer=tokenizer), config)
    async with AsyncLLM.over(paced(engine)) as llm:
        app = make_app(llm)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            yield ServedApp(client, llm, app)


@pytest.mark.parametrize(
    ("words", "grammar"),
    [
        (("[THINK]", "[/THINK]"), "start: <[259]> /[a-c]{4,8}/ <[260]> /[d-f]{3,6}/"),
        (("<|channel|>", "<|message|>", "<|end|>", "<|start|>"), CHANNELS),
    ],
    ids=["marks", "channels"],
)
def test_marks_that_are_special_tokens_are_found(words: tuple[str, ...], grammar: str) -> None:
    """Also where the tokenizer gives them no role, as those of gpt-oss and of Mistral's models do."""

    async def work() -> None:
        async with with_special_tokens(*words) as served:
            response_format = {"type": "grammar", "syntax": "lark", "definition": grammar}
            body = {"messages": HELLO, "response_format": response_format, "max_tokens": 60}
            message = (await served.post(CHAT, body))["choices"][0]["message"]
            assert 4 <= len(message["reasoning"]) <= 8
            assert set(message["reasoning"]) <= set("abc")
            assert 3 <= len(message["content"]) <= 6
            assert set(message["content"]) <= set("def")
            events = await served.events(CHAT, body)
            for name in ("reasoning", "content"):
                parts = [choice["delta"].get(name) or "" for event in events for choice in event["choices"]]
                assert "".join(parts) == message[name]

    run(work())


def test_an_answer_of_reasoning_alone_can_be_sent_back() -> None:
    """One that was cut off: its content is null."""

    async def work() -> None:
        async with served_app() as served:
            served.llm.intake.tokenizer.chat_template = THINKING
            cut = await served.post(CHAT, {"messages": HELLO, "response_format": THOUGHT, "max_tokens": 12})
            message = cut["choices"][0]["message"]
            assert (message["content"], len(message["reasoning"])) == (None, 4)
            messages = [*HELLO, message, *HELLO]
            reply = await served.post(CHAT, {"messages": messages, "max_tokens": 1, "return_token_ids": True})
            prompt = served.llm.intake.decode(reply["prompt_token_ids"])
            assert f"<think>\n{message['reasoning']}\n</think>" in prompt

    run(work())


def test_calls_that_are_required_have_no_reasoning_before_them() -> None:
    """Also where the template opens the marks in the prompt."""

    async def work() -> None:
        async with served_app(eos=True) as served:
            served.llm.intake.tokenizer.chat_template = HERMES + "<think>\n{# </think> #}"
            tool = {"type": "function", "function": {"name": "f"}}
            body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "max_tokens": 80}
            reply = await served.post(CHAT, body | {"parallel_tool_calls": False})
            message = reply["choices"][0]["message"]
            assert message["tool_calls"][0]["function"]["name"] == "f"
            assert message.get("reasoning") is None

    run(work())


def test_completions_have_no_template_to_tell() -> None:
    async def work() -> None:
        async with served_app() as served:
            for field in ({"reasoning_effort": "high"}, {"enable_thinking": True}):
                status, error = await served.refusal(COMPLETIONS, {"prompt": "a"} | field)
                assert (status, error["param"]) == (400, *field)

    run(work())
