"""`/v1/chat/completions` and the chat template over a tiny model."""

from typing import Any

from served_app import (
    CHAT,
    run,
    served_app,
)

from samewise import LLM, SamplingParams
from samewise.testing import tiny_engine


def engine_answer(prompt: Any, **params: Any) -> Any:
    """The same request to the engine, without a server."""
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 6} | params)
    return LLM.over(tiny_engine()).generate(prompt, sampling, use_tqdm=False)[0]


def test_a_chat_returns_logprobs_in_order_of_rank() -> None:
    async def work() -> None:
        async with served_app() as served:
            body = await served.chat(
                logprobs=True, top_logprobs=3, return_token_ids=True, max_completion_tokens=6
            )
            assert body["object"] == "chat.completion"
            (choice,) = body["choices"]
            assert choice["message"]["role"] == "assistant"
            prompt = (await served.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}))[
                "tokens"
            ]
            assert body["prompt_token_ids"] == prompt
            wanted = engine_answer(prompt, logprobs=3)
            assert choice["message"]["content"] == wanted.outputs[0].text
            content = choice["logprobs"]["content"]
            assert [entry["logprob"] for entry in content] == wanted.outputs[0].token_logprobs
            for entry in content:
                values = [top["logprob"] for top in entry["top_logprobs"]]
                assert len(values) == 3
                assert values == sorted(values, reverse=True)
                assert entry["logprob"] == values[0]  # greedy
            plain = await served.chat(logprobs=True)
            assert [entry["top_logprobs"] for entry in plain["choices"][0]["logprobs"]["content"]] == [[]] * 6

    run(work())


def test_developer_messages_and_text_parts_equal_plain_messages() -> None:
    async def work() -> None:
        async with served_app() as served:
            request = {"temperature": 0, "max_tokens": 6}
            plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a\nb"}]
            parts = [
                {"role": "developer", "content": "be kind"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ]
            one = await served.post(CHAT, {"messages": plain} | request)
            two = await served.post(CHAT, {"messages": parts} | request)
            assert one["choices"][0]["message"] == two["choices"][0]["message"]

    run(work())


def test_template_fields_reach_the_chat_template() -> None:
    async def work() -> None:
        async with served_app() as served:
            messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]

            async def text(**fields: Any) -> str:
                tokenized = await served.post("/tokenize", {"messages": messages} | fields)
                return str((await served.post("/detokenize", {"tokens": tokenized["tokens"]}))["prompt"])

            assert (await text()).endswith("<s>assistant: well\n<s>assistant: ")
            assert (await text(continue_final_message=True)).endswith("<s>assistant: well")
            assert (await text(add_generation_prompt=False)).endswith("<s>assistant: well\n")
            served.llm.intake.tokenizer.chat_template += "{{ mood }}"
            assert (await text(chat_template_kwargs={"mood": "glad"})).endswith("glad")
            both = {"add_generation_prompt": True, "continue_final_message": True}
            status, error = await served.refusal("/tokenize", {"messages": messages} | both)
            assert (status, error["param"]) == (400, "continue_final_message")

    run(work())


def test_a_streamed_chat_joins_to_the_whole_one() -> None:
    async def work() -> None:
        async with served_app() as served:
            request = {
                "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "n": 2, "seed": 5,
                "logprobs": True, "top_logprobs": 1, "return_token_ids": True,
            }  # fmt: skip
            body = await served.post(CHAT, request)
            events = await served.events(
                CHAT, request | {"stream_options": {"include_usage": True}, "explain": True}
            )
            *chunks, last = events
            assert {event["object"] for event in events} == {"chat.completion.chunk"}
            assert len({event["id"] for event in events}) == 1
            assert last["choices"] == []
            assert [e["prompt_token_ids"] for e in chunks[:2]] == [body["prompt_token_ids"]] * 2
            assert all("prompt_token_ids" not in event for event in chunks[2:])
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert last["usage"][name] == body["usage"][name]
            assert all(event["usage"] is None for event in chunks)
            for choice in body["choices"]:
                mine = [e["choices"][0] for e in chunks if e["choices"][0]["index"] == choice["index"]]
                assert mine[0]["delta"] == {"role": "assistant", "content": ""}
                assert all("role" not in one["delta"] for one in mine[1:])
                text = "".join(one["delta"].get("content", "") for one in mine)
                assert text == choice["message"]["content"]
                assert [token for one in mine[1:] for token in one["token_ids"]] == choice["token_ids"]
                parts = [part for one in mine if one["logprobs"] for part in one["logprobs"]["content"]]
                assert parts == choice["logprobs"]["content"]
                assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]
                assert mine[-1]["seed"] == choice["seed"]
                assert all(set(one["samewise"]) == {"guessed", "accepted"} for one in mine[1:])

    run(work())


def test_bytes_of_tokens_join_to_characters() -> None:
    """Streamed text holds whole characters; log-probabilities hold the bytes of each part."""

    async def work() -> None:
        async with served_app() as served:
            word = "héllo 🙂 漢"
            ids = list(word.encode())
            request = {
                "messages": [{"role": "user", "content": "a"}], "max_tokens": len(ids), "logprobs": True,
                "response_format": {"type": "grammar", "syntax": "regex", "definition": word},
            }  # fmt: skip
            content = (await served.post(CHAT, request))["choices"][0]["logprobs"]["content"]
            assert bytes(byte for part in content for byte in part["bytes"]) == word.encode()
            pieces = [
                e["choices"][0]["delta"].get("content") or "" for e in await served.events(CHAT, request)
            ]
            assert "".join(pieces) == word
            assert not any("\ufffd" in piece for piece in pieces)

    run(work())


def test_an_error_of_the_chat_template_is_the_callers() -> None:
    async def work() -> None:
        async with served_app() as served:
            request = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            for template, message in (
                ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
                ("{{ 1 / 0 }}", "it failed; the log says how"),
                ("{{ messages[7]['content'] }}", "no element 7"),
                ("{% for", "template refused"),
                ("{{ messages.__class__.__mro__ }}", "it failed; the log says how"),
            ):
                served.llm.intake.tokenizer.chat_template = template
                status, error = await served.refusal(CHAT, request)
                assert status == 400, error
                assert message in error["message"]
            served.llm.intake.tokenizer.chat_template = None
            status, error = await served.refusal(CHAT, request)
            assert (status, error["param"]) == (400, "messages")
            assert "no chat template" in error["message"]

    run(work())
