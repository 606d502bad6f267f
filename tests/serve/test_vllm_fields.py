"""Fields, keys and addresses of vLLM's and llama.cpp's servers that their clients and tests rely on."""

import asyncio
from typing import Any

import pytest
from served_app import CHAT, COMPLETIONS, error_of, run, served_app

from samewise.openai.replies import CHOICE_NULLS, COMPLETION_NULLS, MESSAGE_NULLS, NULLS
from samewise.testing import byte_tokenizer

USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
RAW = b'{"prompt": "a", "max_tokens": 1}'


# -- what is refused


def test_a_body_that_is_not_json_gets_415() -> None:
    types = (None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
             "text/plain; application/json", "application/jsonp", "application/x-ndjson")  # fmt: skip

    async def work() -> None:
        async with served_app() as served:
            for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
                for content_type in types:
                    headers = {} if content_type is None else {"Content-Type": content_type}
                    response = await served.client.post(path, content=RAW, headers=headers)
                    assert (response.status_code, error_of(response)["code"]) == (
                        415,
                        "unsupported_media_type",
                    )
            await served.check_idle()
            for content_type in ("application/json", "Application/JSON; charset=utf-8"):
                headers = {"Content-Type": content_type}
                response = await served.client.post(COMPLETIONS, content=RAW, headers=headers)
                assert response.status_code == 200

    run(work())


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("do_sample", False, "use temperature"),
        ("do_sample", True, "use temperature"),
        ("min_new_tokens", 5, "use min_tokens"),
        ("bad_words_ids", [[1]], "use bad_words"),
        ("truncation_side", "middle", "choose one of left, right"),
        ("logprob_token_ids", [1], "needs logprobs"),
        ("priority", 2**63, "64 bits"),
        ("structured_outputs", {"structural_tag": "{}"}, "is not supported"),
        ("top_n_sigma", 1.5, "use top_p"),
        ("lora", [{"id": 0, "scale": 0.5}], "merged weights"),
        ("stop_regex", "a+", "use stop"),
        ("no_stop_trim", True, "use include_stop_str_in_output"),
        ("num_beams", 4, "ask for n"),
        ("separate_reasoning", False, "use include_reasoning"),
        ("reasoning_format", "none", "use include_reasoning"),
        ("thinking_budget_tokens", 100, "use max_tokens"),
    ],
)
def test_fields_are_refused_by_name(field: str, value: Any, remedy: str) -> None:
    async def work() -> None:
        async with served_app() as served:
            for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
                status, error = await served.refusal(path, body | {field: value})
                assert (status, error["param"]) == (400, field)
                assert remedy in error["message"]

    run(work())


def test_values_that_change_nothing_are_taken() -> None:
    async def work() -> None:
        async with served_app() as served:
            plain = await served.complete()
            same = await served.complete(min_new_tokens=0, do_sample=None, truncation_side="left", priority=0)
            assert same["choices"] == plain["choices"]
            same = await served.complete(top_n_sigma=-1.0, lora=[], reasoning_format="auto", num_beams=1)
            assert same["choices"] == plain["choices"]

    run(work())


# -- fields that work


def test_truncation_side_chooses_which_end_of_the_prompt_is_kept() -> None:
    async def work() -> None:
        async with served_app() as served:
            fields = {"truncate_prompt_tokens": 3, "return_token_ids": True}
            for side, kept in (("left", "def"), ("right", "abc"), (None, "def")):
                body = await served.complete("abcdef", **fields, truncation_side=side)
                assert body["choices"][0]["prompt_token_ids"] == byte_tokenizer().encode(kept)
                assert body["choices"][0]["text"] == (await served.complete(kept))["choices"][0]["text"]

    run(work())


def test_echo_works_with_prompt_logprobs_of_their_own_number() -> None:
    async def work() -> None:
        async with served_app() as served:
            plain = (await served.complete(prompt_logprobs=2))["choices"][0]
            echoed = (await served.complete(echo=True, prompt_logprobs=2))["choices"][0]
            assert echoed["prompt_logprobs"] == plain["prompt_logprobs"]
            assert echoed["text"] == "hello" + plain["text"]
            assert echoed["logprobs"] is None
            table = (await served.complete(echo=True, logprobs=1))["choices"][0]["logprobs"]
            for num in (0, 1, 3):
                both = (await served.complete(echo=True, logprobs=1, prompt_logprobs=num))["choices"][0]
                wanted = (await served.complete(prompt_logprobs=num))["choices"][0]
                assert both["prompt_logprobs"] == wanted["prompt_logprobs"]
                assert both["logprobs"] == table

    run(work())


def test_prompt_logprobs_hold_ranks_in_the_whole_vocabulary() -> None:
    async def work() -> None:
        async with served_app() as served:
            (choice,) = (await served.complete(prompt_logprobs=0))["choices"]
            ranks = [entry["rank"] for one in choice["prompt_logprobs"][1:] for entry in one.values()]
            assert len(ranks) == 4
            assert max(ranks) > 1
            chat = await served.chat(prompt_logprobs=0)
            assert all(entry["rank"] >= 1 for one in chat["prompt_logprobs"][1:] for entry in one.values())

    run(work())


def test_named_tokens_stand_in_place_of_the_most_probable() -> None:
    async def work() -> None:
        async with served_app() as served:
            fields = {"logprob_token_ids": [300, 65], "return_tokens_as_token_ids": True, "max_tokens": 3}
            chat = await served.chat(logprobs=True, top_logprobs=5, **fields)
            plain = await served.chat(logprobs=True, **fields | {"logprob_token_ids": None})
            content = chat["choices"][0]["logprobs"]["content"]
            wanted = plain["choices"][0]["logprobs"]["content"]
            assert [one["token"] for one in content] == [one["token"] for one in wanted]
            for one in content:
                assert {top["token"] for top in one["top_logprobs"]} == {"token_id:300", "token_id:65"}
                values = [top["logprob"] for top in one["top_logprobs"]]
                assert values == sorted(values, reverse=True)
            table = (await served.complete(logprobs=5, **fields))["choices"][0]["logprobs"]
            for token, tops in zip(table["tokens"], table["top_logprobs"], strict=True):
                assert set(tops) == {token, "token_id:300", "token_id:65"}
            many = {"prompt": "a", "logprobs": 1, "logprob_token_ids": [1] * 129}
            status, error = await served.refusal(COMPLETIONS, many)
            assert (status, error["param"]) == (400, "logprob_token_ids")

    run(work())


def test_a_request_of_lower_priority_number_runs_earlier_and_gets_the_same_bits() -> None:
    async def work() -> None:
        async with served_app(max_num_seqs=1) as served:
            alone = [await served.complete(f"{i}", max_tokens=30) for i in range(5)]
            order: list[int] = []

            async def ask(i: int, priority: int) -> None:
                body = await served.complete(f"{i}", max_tokens=30, priority=priority)
                assert body["choices"] == alone[i]["choices"]
                order.append(i)

            first = asyncio.create_task(served.complete("first", max_tokens=400, ignore_eos=True))
            while not (await served.llm.stats())["running"]:
                await asyncio.sleep(0)
            tasks = []
            for i, priority in enumerate((5, 0, -1, 0, 5)):
                tasks.append(asyncio.create_task(ask(i, priority)))
                while (await served.llm.stats())["waiting"] <= i:
                    await asyncio.sleep(0)
            await asyncio.gather(first, *tasks)
            assert order == [2, 1, 3, 0, 4]

    run(work())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"structured_outputs": {"choice": ["left", "right"]}}, ("left", "right")),
        ({"structured_outputs": {"regex": "ab|cd"}}, ("ab", "cd")),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-1]'}}, ("x0", "x1")),
        ({"structured_outputs": {"json": {"enum": [17, 42]}}}, ("17", "42")),
        ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, ('"42"',)),
        ({"response_format": {"type": "json_schema", "schema": {"const": "42"}}}, ('"42"',)),
    ],
)
def test_structured_outputs_and_schemas_of_formats_are_followed(given: Any, wanted: tuple[str, ...]) -> None:
    async def work() -> None:
        async with served_app() as served:
            request = {"max_tokens": 20, "temperature": 1, "seed": 3} | given
            assert (await served.complete(**request))["choices"][0]["text"] in wanted
            assert (await served.chat(**request))["choices"][0]["message"]["content"] in wanted
            both = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
            status, error = await served.refusal(COMPLETIONS, {"prompt": "a"} | both)
            assert (status, error["param"]) == (400, "structured_outputs")

    run(work())


def test_roles_that_the_template_renders_are_taken_and_others_refused() -> None:
    async def work() -> None:
        async with served_app() as served:
            messages = [{"role": "critic", "content": "well"}, *USER]
            tokens = (await served.post("/tokenize", {"messages": messages}))["tokens"]
            text = (await served.post("/detokenize", {"tokens": tokens}))["prompt"]
            assert "critic: well\n" in text
            assert (await served.post(CHAT, {"messages": messages, "max_tokens": 2}))["choices"]
            served.llm.intake.tokenizer.chat_template = (
                "{% for m in messages %}{% if m['role'] in ('user', 'assistant', 'system') %}"
                "{{ m['role'] }}: {{ m['content'] }}\n{% endif %}{% endfor %}"
            )
            status, error = await served.refusal(CHAT, {"messages": messages})
            assert (status, error["param"]) == (400, "messages")
            assert "leaves out messages of the role 'critic'" in error["message"]
            assert (await served.post(CHAT, {"messages": USER, "max_tokens": 2}))["choices"]

    run(work())


# -- keys of replies


def test_tokens_are_shown_as_the_vocabulary_spells_them() -> None:
    async def work() -> None:
        async with served_app() as served:
            body = await served.post("/tokenize", {"prompt": "a é", "return_token_strs": True})
            assert body["token_strs"] == ["a", "Ġ", "Ã", "©"]

    run(work())


def test_keys_that_vllm_sends_as_null_are_there() -> None:
    async def work() -> None:
        async with served_app() as served:
            chat, text = await served.chat(), await served.complete()
            assert {name: chat[name] for name in NULLS} == NULLS
            (choice,) = chat["choices"]
            assert {name: choice["message"][name] for name in MESSAGE_NULLS} == MESSAGE_NULLS
            assert "tool_calls" not in choice["message"]
            assert {choice[name] for name in (*CHOICE_NULLS, "logprobs", "stop_reason")} == {None}
            assert {name: text[name] for name in COMPLETION_NULLS} == COMPLETION_NULLS
            (choice,) = text["choices"]
            nulls = {*CHOICE_NULLS, "logprobs", "stop_reason", "prompt_logprobs", "prompt_token_ids"}
            assert {choice[name] for name in nulls} == {None}
            assert (await served.post("/tokenize", {"prompt": "a"}))["token_strs"] is None
            models = (await served.client.get("/v1/models")).json()
            assert models["data"][0]["parent"] is None
            for event in await served.events(COMPLETIONS, {"prompt": "a", "max_tokens": 3}):
                (choice,) = event["choices"]
                nulls = {"logprobs", "stop_reason", "prompt_token_ids", "token_ids"}
                assert {choice[name] for name in nulls} == {None}
            first, *events = await served.events(CHAT, {"messages": USER, "max_tokens": 3})
            assert first["prompt_token_ids"] is None
            for event in events:
                (choice,) = event["choices"]
                assert (choice["logprobs"], choice["token_ids"]) == (None, None)

    run(work())


@pytest.mark.parametrize("n", [1, 3])
def test_role_chunks_come_first_and_count_no_tokens(n: int) -> None:
    async def work() -> None:
        async with served_app() as served:
            options = {"include_usage": True, "continuous_usage_stats": True}
            request = {"messages": USER, "max_tokens": 4, "n": n, "seed": 1, "stream_options": options}
            events = await served.events(CHAT, request)
            roles, others = events[:n], events[n:]
            for index, event in enumerate(roles):
                (choice,) = event["choices"]
                assert (choice["index"], choice["delta"]) == (index, {"role": "assistant", "content": ""})
                usage = event["usage"]
                assert usage["completion_tokens"] == 0
                assert usage["prompt_tokens"] == usage["total_tokens"] == events[-1]["usage"]["prompt_tokens"]
            counts = [event["usage"]["completion_tokens"] for event in others]
            assert counts == sorted(counts)
            assert counts[0] > 0
            assert counts[-1] == 4 * n
            assert not any("role" in one["delta"] for event in others for one in event["choices"])

    run(work())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streamed_prompt_token_ids_stand_where_the_whole_reply_has_them(path: str) -> None:
    async def work() -> None:
        async with served_app() as served:
            request: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "hello"}
            request |= {"max_tokens": 3, "return_token_ids": True}
            whole, events = await served.post(path, request), await served.events(path, request)
            if path == CHAT:
                assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
                assert "prompt_token_ids" not in events[0]["choices"][0]
            else:
                wanted = whole["choices"][0]["prompt_token_ids"]
                given = [event["choices"][0]["prompt_token_ids"] for event in events]
                assert given == [wanted] + [None] * (len(events) - 1)

    run(work())


# -- addresses


def test_tokenize_renders_tools() -> None:
    async def work() -> None:
        async with served_app() as served:
            served.llm.intake.tokenizer.chat_template = (
                "{% for tool in tools or [] %}{{ tool['function']['name'] }};{% endfor %}"
                "{{ messages[0]['content'] }}"
            )
            for tools, text in (([TOOL], "weather;hello"), ([], "hello"), (None, "hello")):
                body = await served.post("/tokenize", {"messages": USER, "tools": tools})
                assert body["tokens"] == byte_tokenizer().encode(text)
                assert body["count"] == len(text)
            status, error = await served.refusal("/tokenize", {"messages": USER, "tools": [TOOL, TOOL]})
            assert (status, error["param"]) == (400, "tools")

    run(work())


def test_tokenizer_info_shows_the_configuration_and_no_paths() -> None:
    async def work() -> None:
        async with served_app() as served:
            tokenizer = served.llm.intake.tokenizer
            tokenizer.init_kwargs |= {"name_or_path": "/home/me/model", "vocab_file": "/home/me/vocab.json"}
            response = await served.client.get("/tokenizer_info")
            assert response.status_code == 200
            assert "/home/me" not in response.text
            info = response.json()
            assert info["tokenizer_class"] == type(tokenizer).__name__
            assert info["chat_template"] == tokenizer.chat_template
            assert info["bos_token"] == tokenizer.bos_token
            assert not {"backend", "is_local", "local_files_only"} & info.keys()
            added = info["added_tokens_decoder"][str(tokenizer.bos_token_id)]
            assert (added["content"], added["special"]) == (tokenizer.bos_token, True)

    run(work())


def test_load_counts_the_requests_under_way() -> None:
    async def work() -> None:
        async with served_app() as served:
            waiting = [served.worker.begin() for _ in range(3)]
            assert (await served.client.get("/load")).json() == {"server_load": 3}
            for one in waiting:
                one.close()
            assert (await served.client.get("/load")).json() == {"server_load": 0}

    run(work())
