"""The routes, over a tiny model: what goes in, what comes out, and what is refused."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from shop import CHAT, COMPLETIONS, error, events, go, shop
from starlette.applications import Starlette
from starlette.routing import Mount

from samewise import LLM, SamplingParams
from samewise.serve.settings import Keys, ServeSettings
from samewise.testing import tiny_engine

# ---- answers


def whole(prompt: Any, **params: Any) -> Any:
    """The same question, asked of the engine itself."""
    asked = SamplingParams(**{"temperature": 0, "max_tokens": 6} | params)
    return LLM.over(tiny_engine()).generate(prompt, asked, use_tqdm=False)[0]


def test_a_completion_is_the_engines_own() -> None:
    wanted = whole("hello", seed=3, temperature=1, n=2, logprobs=2)

    async def work() -> None:
        async with shop() as here:
            body = await here.complete(seed=3, temperature=1, n=2, logprobs=2, return_token_ids=True)
            assert body["object"] == "text_completion"
            assert body["id"].startswith("cmpl-")
            assert body["model"] == "tiny-llama"
            assert body["system_fingerprint"] == here.llm.contract.id
            assert [choice["index"] for choice in body["choices"]] == [0, 1]
            for choice, one in zip(body["choices"], wanted.outputs, strict=True):
                assert choice["text"] == one.text
                assert choice["token_ids"] == one.token_ids
                assert choice["prompt_token_ids"] == wanted.prompt_token_ids
                assert choice["logprobs"]["token_logprobs"] == one.token_logprobs  # bit for bit
                assert choice["seed"] == 3
                assert choice["finish_reason"] == "length"
            assert body["usage"]["prompt_tokens"] == 5
            assert body["usage"]["completion_tokens"] == 12

    go(work())


def test_a_prompt_has_four_shapes() -> None:
    async def work() -> None:
        async with shop() as here:
            (ids,) = [(await here.post("/tokenize", {"prompt": "hello"}))["tokens"]]
            alone = (await here.complete("hello"))["choices"][0]["text"]
            assert (await here.complete(ids))["choices"][0]["text"] == alone
            for several in (["hello", "you", "there"], [ids, ids, ids]):
                body = await here.complete(several, n=2)
                assert [choice["index"] for choice in body["choices"]] == list(range(6))
                assert body["choices"][0]["text"] == body["choices"][1]["text"] == alone
            await here.quiet()

    go(work())


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs(max_tokens: int, as_ids: bool) -> None:
    """What lm-evaluation-harness asks: the prompt's own log-probabilities."""
    wanted = whole("hello there", max_tokens=max_tokens, logprobs=1, prompt_logprobs=1)
    scores = [
        next(iter(entry.values())).logprob for entry in wanted.prompt_logprobs[1:]
    ] + wanted.outputs[0].token_logprobs  # fmt: skip

    async def work() -> None:
        async with shop() as here:
            prompt = wanted.prompt_token_ids if as_ids else "hello there"
            asked = {"max_tokens": max_tokens, "logprobs": 1, "echo": True, "temperature": 0}
            body = await here.complete(prompt, **asked)
            (choice,) = body["choices"]
            table = choice["logprobs"]
            assert choice["text"] == "hello there" + wanted.outputs[0].text
            assert table["token_logprobs"] == [None, *scores]
            assert table["top_logprobs"][0] is None
            assert [len(top) for top in table["top_logprobs"][1:]] >= [1] * len(scores)
            assert len({len(column) for column in table.values()}) == 1
            assert "".join(table["tokens"][: len("hello there")]) == "hello there"
            assert table["text_offset"][:3] == [0, 1, 2]
            assert body["usage"]["completion_tokens"] == max_tokens
            streamed = await here.events(COMPLETIONS, {"prompt": prompt} | asked)
            columns: dict[str, list[Any]] = {name: [] for name in table}
            for event in streamed:
                for name, column in event["choices"][0]["logprobs"].items():
                    columns[name] += column
            assert columns == table
            assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]

    go(work())


def test_a_chat_and_its_logprobs() -> None:
    async def work() -> None:
        async with shop() as here:
            body = await here.chat(
                logprobs=True, top_logprobs=3, return_token_ids=True, max_completion_tokens=6
            )
            assert body["object"] == "chat.completion"
            (choice,) = body["choices"]
            assert choice["message"]["role"] == "assistant"
            prompt = (await here.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}))[
                "tokens"
            ]
            assert body["prompt_token_ids"] == prompt
            wanted = whole(prompt, logprobs=3)
            assert choice["message"]["content"] == wanted.outputs[0].text
            content = choice["logprobs"]["content"]
            assert [entry["logprob"] for entry in content] == wanted.outputs[0].token_logprobs
            for entry in content:
                values = [top["logprob"] for top in entry["top_logprobs"]]
                assert len(values) == 3
                assert values == sorted(values, reverse=True)
                assert entry["logprob"] == values[0]  # greedy
            plain = await here.chat(logprobs=True)
            assert [entry["top_logprobs"] for entry in plain["choices"][0]["logprobs"]["content"]] == [[]] * 6

    go(work())


def test_roles_and_parts() -> None:
    async def work() -> None:
        async with shop() as here:
            asked = {"temperature": 0, "max_tokens": 6}
            plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a\nb"}]
            fancy = [
                {"role": "developer", "content": "be kind"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ]
            one = await here.post(CHAT, {"messages": plain} | asked)
            two = await here.post(CHAT, {"messages": fancy} | asked)
            assert one["choices"][0]["message"] == two["choices"][0]["message"]

    go(work())


def test_the_template_is_told_what_was_said_about_it() -> None:
    async def work() -> None:
        async with shop() as here:
            said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]

            async def text(**fields: Any) -> str:
                found = await here.post("/tokenize", {"messages": said} | fields)
                return str((await here.post("/detokenize", {"tokens": found["tokens"]}))["prompt"])

            assert (await text()).endswith("<s>assistant: well\n<s>assistant: ")
            assert (await text(continue_final_message=True)).endswith("<s>assistant: well")
            assert (await text(add_generation_prompt=False)).endswith("<s>assistant: well\n")
            here.llm._desk.tokenizer.chat_template += "{{ mood }}"
            assert (await text(chat_template_kwargs={"mood": "glad"})).endswith("glad")
            both = {"add_generation_prompt": True, "continue_final_message": True}
            status, told = await here.refusal("/tokenize", {"messages": said} | both)
            assert (status, told["param"]) == (400, "continue_final_message")

    go(work())


# ---- streams


def test_a_streamed_chat_adds_up() -> None:
    async def work() -> None:
        async with shop() as here:
            asked = {
                "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "n": 2, "seed": 5,
                "logprobs": True, "top_logprobs": 1, "return_token_ids": True,
            }  # fmt: skip
            body = await here.post(CHAT, asked)
            found = await here.events(
                CHAT, asked | {"stream_options": {"include_usage": True}, "explain": True}
            )
            *chunks, last = found
            assert {event["object"] for event in found} == {"chat.completion.chunk"}
            assert len({event["id"] for event in found}) == 1
            assert last["choices"] == []
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert last["usage"][name] == body["usage"][name]
            assert all(event["usage"] is None for event in chunks)
            for choice in body["choices"]:
                mine = [e["choices"][0] for e in chunks if e["choices"][0]["index"] == choice["index"]]
                assert mine[0]["delta"] == {"role": "assistant", "content": ""}
                assert mine[0]["prompt_token_ids"] == body["prompt_token_ids"]
                assert all("role" not in one["delta"] for one in mine[1:])
                text = "".join(one["delta"].get("content", "") for one in mine)
                assert text == choice["message"]["content"]
                assert [token for one in mine[1:] for token in one["token_ids"]] == choice["token_ids"]
                parts = [part for one in mine if one["logprobs"] for part in one["logprobs"]["content"]]
                assert parts == choice["logprobs"]["content"]
                assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]
                assert mine[-1]["seed"] == choice["seed"]
                assert all(set(one["samewise"]) == {"guessed", "accepted"} for one in mine[1:])

    go(work())


def test_usage_in_every_chunk() -> None:
    async def work() -> None:
        async with shop() as here:
            asked = {"prompt": ["hello", "you"], "max_tokens": 5, "temperature": 0}
            found = await here.events(
                COMPLETIONS,
                asked | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            )
            counts = [event["usage"]["completion_tokens"] for event in found]
            assert counts == sorted(counts)
            assert counts[-1] == 10
            assert found[-1]["usage"]["total_tokens"] == 18
            plain = await here.events(COMPLETIONS, asked)
            assert all("usage" not in event for event in plain)
            texts = ["", ""]
            for event in plain:
                texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
            body = await here.post(COMPLETIONS, asked)
            assert texts == [choice["text"] for choice in body["choices"]]

    go(work())


def test_details_of_usage_are_real() -> None:
    async def work() -> None:
        async with shop(proposer="ngram") as here:
            asked = {"max_tokens": 60, "ignore_eos": True}
            first = await here.complete("ab" * 40, **asked)
            again = await here.complete("ab" * 40, **asked)
            assert first["choices"][0]["text"] == again["choices"][0]["text"]
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            details = again["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 0
            assert details["rejected_prediction_tokens"] >= 0
            none = await here.complete("ab" * 40, **asked, proposer="none")
            assert none["choices"][0]["text"] == first["choices"][0]["text"]
            assert none["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
            assert none["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 0

    go(work())


def test_sampling_fields_reach_the_engine() -> None:
    async def work() -> None:
        async with shop(eos=True) as here:
            text = (await here.complete(max_tokens=40, ignore_eos=True))["choices"][0]["text"]
            stop = next(c for c in text[5:] if c.isprintable())
            body = await here.complete(max_tokens=40, ignore_eos=True, stop=[stop])
            (choice,) = body["choices"]
            assert choice["text"] == text[: text.index(stop)]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
            kept = await here.complete(
                max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=True
            )
            assert kept["choices"][0]["text"] == text[: text.index(stop) + 1]
            only = await here.complete(max_tokens=4, allowed_token_ids=[70, 71], return_token_ids=True)
            assert set(only["choices"][0]["token_ids"]) <= {70, 71}
            biased = await here.complete(max_tokens=4, logit_bias={"70": 100}, return_token_ids=True)
            assert biased["choices"][0]["token_ids"] == [70] * 4
            ended = await here.complete(
                max_tokens=40, stop_token_ids=[70], logit_bias={"70": 100}, min_tokens=3
            )
            assert ended["usage"]["completion_tokens"] == 4
            assert ended["choices"][0]["stop_reason"] == 70
            scored = await here.complete(prompt_logprobs=1)
            listed = scored["choices"][0]["prompt_logprobs"]
            assert listed[0] is None
            assert all("logprob" in entry for one in listed[1:] for entry in one.values())
            free = await here.complete(verify=False)
            assert free["choices"][0]["text"]

    go(work())


def test_the_checkpoints_own_defaults_hold() -> None:
    engine_defaults = {"temperature": 0.0}

    async def work() -> None:
        async with shop() as here:
            here.llm._engine.loaded.generation.update(engine_defaults)  # type: ignore[attr-defined]
            wanted = (await here.complete(max_tokens=8))["choices"][0]["text"]
            body = await here.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 8})
            assert body["choices"][0]["text"] == wanted
            hot = await here.post(
                COMPLETIONS, {"prompt": "hello", "max_tokens": 8, "temperature": 2, "seed": 1}
            )
            assert hot["choices"][0]["text"] != wanted

    go(work())


# ---- refusals


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (COMPLETIONS, {}, "prompt", "is missing"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "give text"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "give text"),
        (COMPLETIONS, {"prompt": [9999]}, "prompt", "9999"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "-1"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "Unicode"),
        (COMPLETIONS, {"prompt": "a", "temperature": "1"}, "temperature", "valid number"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "0 (greedy) or more"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "more than 0"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "give 1 to"),
        (COMPLETIONS, {"prompt": "a", "n": 100000}, "n", "give 1 to"),
        (COMPLETIONS, {"prompt": "a", "n": True}, "n", "valid integer"),
        (COMPLETIONS, {"prompt": ["a"] * 200, "n": 100}, "prompt", "send fewer"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "give 0 to 20"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", "0 or more"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "valid integer"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt", "give text"),
        (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt", "give text"),
        (COMPLETIONS, {"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens", "use max_tokens"),
        (COMPLETIONS, {"prompt": "a", "top_logprobs": 5}, "top_logprobs", "use logprobs"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "min_tokens": 2}, "min_tokens", "max_tokens=1"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 99}, "stop", "more than"),
        (COMPLETIONS, {"prompt": "a", "stop": "x" * 9999}, "stop", "longer"),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop", "give text"),
        (COMPLETIONS, {"prompt": "a", "stop": {}}, "stop", "give text"),
        (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", "non-empty"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed", "64 bits"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", "0 to 319"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "not supported"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search", "not supported"),
        (COMPLETIONS, {"prompt": "a", "proposer": "model"}, "proposer", "cannot be had"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options", "stream: true"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt", "1 to 1024"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "xml"}}, "response_format", "xml"),
        (CHAT, {"messages": []}, "messages", "empty"),
        (CHAT, {"messages": "hi"}, "messages", "valid list"),
        (CHAT, {"messages": ["hi"]}, "messages", "valid dict"),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages", "wizard"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "content is text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, "top_logprobs", "needs"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
            "contradicts",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "functions": [{}]}, "functions", "use tools"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"},
            "chat_template",
            "model's own",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs",
            "not for a template",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "echo": True}, "echo", "for completions"),
        ("/tokenize", {}, "prompt", "one of them"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools", "usage"),
        ("/detokenize", {"tokens": [1, 99999]}, "tokens", "99999"),
        ("/detokenize", {"tokens": "a"}, "tokens", "valid list"),
    ],
)  # fmt: skip
def test_what_will_not_do_is_refused_by_name(busy: Any, path: str, body: Any, param: str, says: str) -> None:
    response = busy.post_raw(path, json.dumps(body))
    assert response.status_code == 400
    told = error(response)
    assert told["param"] == param
    assert says in told["message"]
    assert len(told["message"]) < 1000
    assert told["type"] == "invalid_request_error"


class Counter:
    """One shop for many refusals, asked from outside its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._context = shop()
        self._shop = self._loop.run_until_complete(self._context.__aenter__())

    def post_raw(self, path: str, text: str | bytes, **how: Any) -> Any:
        content = text if isinstance(text, bytes) else text.encode()
        return self._loop.run_until_complete(self._shop.client.post(path, content=content, **how))

    def request(self, method: str, path: str) -> Any:
        return self._loop.run_until_complete(self._shop.client.request(method, path))

    def close(self) -> None:
        self._loop.run_until_complete(self._shop.quiet())
        self._loop.run_until_complete(self._context.__aexit__(None, None, None))
        self._loop.close()


@pytest.fixture(scope="module")
def busy() -> Any:
    counter = Counter()
    yield counter
    counter.close()


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}', b"1" * 5000]
)
def test_what_is_not_a_json_object_is_refused(busy: Any, raw: bytes) -> None:
    response = busy.post_raw(COMPLETIONS, raw)
    assert response.status_code == 400
    assert error(response)["code"] in ("invalid_json", "invalid_body")


def test_harmless_fields_pass(busy: Any) -> None:
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "suffix": None,
        "best_of": 1, "use_beam_search": False, "anything": [1], "model": None,
    }  # fmt: skip
    response = busy.post_raw(COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 1} | harmless))
    assert response.status_code == 200


def test_whole_numbers_may_be_written_with_a_point(busy: Any) -> None:
    plain = {"prompt": [104, 105], "max_tokens": 3, "n": 2, "seed": 5, "top_k": 9, "logprobs": 1}
    pointed = {"prompt": [104.0, 105.0]} | {name: float(plain[name]) for name in plain if name != "prompt"}
    one, two = (busy.post_raw(COMPLETIONS, json.dumps(body)).json()["choices"] for body in (plain, pointed))
    assert one == two
    several = busy.post_raw(COMPLETIONS, json.dumps(pointed | {"prompt": [[104.0, 105.0]]}))
    assert several.json()["choices"] == one


def test_another_model_is_not_found(busy: Any) -> None:
    response = busy.post_raw(COMPLETIONS, json.dumps({"prompt": "a", "model": "gpt\ud800"}))
    assert (response.status_code, error(response)["code"]) == (404, "model_not_found")
    response = busy.request("GET", "/v1/models/other/one")
    assert (response.status_code, error(response)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/responses", 404, "unsupported_endpoint"),
        ("POST", "/v1/embeddings", 404, "not_found"),
    ],
)
def test_other_addresses(busy: Any, method: str, path: str, status: int, code: str) -> None:
    response = busy.request(method, path)
    assert (response.status_code, error(response)["code"]) == (status, code)
    assert path in error(response)["message"]


def test_too_long_a_prompt_says_so_in_openais_words(busy: Any) -> None:
    response = busy.post_raw(COMPLETIONS, json.dumps({"prompt": "a" * 600}))
    told = error(response)
    assert (response.status_code, told["code"]) == (400, "context_length_exceeded")
    assert "512" in told["message"]


def test_too_large_a_body() -> None:
    async def work() -> None:
        async with shop(ServeSettings(max_body=2048)) as here:
            status, told = await here.refusal(COMPLETIONS, {"prompt": "a" * 4096})
            assert (status, told["code"]) == (413, "body_too_large")

            async def pieces() -> Any:
                for _ in range(10):
                    yield b"a" * 1000

            response = await here.client.post(COMPLETIONS, content=pieces())
            assert response.status_code == 413

    go(work())


def test_a_large_body_is_understood_aside() -> None:
    async def work() -> None:
        async with shop() as here:
            status, told = await here.refusal(COMPLETIONS, {"prompt": "a" * 200_000})
            assert (status, told["code"]) == (400, "context_length_exceeded")
            status, told = await here.refusal(
                COMPLETIONS, {"prompt": "a", "pad": "x" * 200_000, "suffix": "b"}
            )
            assert (status, told["param"]) == (400, "suffix")

    go(work())


def test_a_template_that_refuses_is_the_callers_mistake() -> None:
    async def work() -> None:
        async with shop() as here:
            asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            for template, says in (
                ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
                ("{{ 1 / 0 }}", "division"),
                ("{{ messages[7]['content'] }}", "no element 7"),
                ("{% for", "template refused"),
                ("{{ messages.__class__.__mro__ }}", "unsafe"),
            ):
                here.llm._desk.tokenizer.chat_template = template
                status, told = await here.refusal(CHAT, asked)
                assert status == 400, told
                assert says in told["message"]
            here.llm._desk.tokenizer.chat_template = None
            status, told = await here.refusal(CHAT, asked)
            assert (status, told["param"]) == (400, "messages")
            assert "no chat template" in told["message"]

    go(work())


# ---- keys, names, ids


def test_keys_open_and_keep_apart(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")

    async def work() -> None:
        async with shop(ServeSettings(keys=Keys.of(["alpha-key", "beta-key"])), proposer="ngram") as here:

            async def ask(key: str, **body: Any) -> Any:
                return await here.client.post(
                    COMPLETIONS,
                    json={"prompt": "ab" * 40, "temperature": 0, "max_tokens": 4} | body,
                    headers={"Authorization": f"Bearer {key}"},
                )

            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic alpha-key"}):
                for path in (COMPLETIONS, CHAT, "/tokenize"):
                    status, told = await here.refusal(path, {}, headers=headers)
                    assert (status, told["code"]) == (401, "invalid_api_key")
            for path in ("/health", "/ready", "/version", "/metrics", "/docs"):
                assert (await here.client.get(path)).status_code == 200
            cached = []
            for key in ("alpha-key", "beta-key", "alpha-key", "beta-key"):
                response = await ask(key)
                cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
            assert cached == [False, False, True, True]
            salted = (await ask("alpha-key", cache_salt="mine")).json()
            assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            pools = here.llm._engine.proposer._pools  # type: ignore[attr-defined]
            assert len(pools) == 3
            assert b"" not in pools

    go(work())
    assert "alpha-key" not in caplog.text
    assert "abab" not in caplog.text


def test_mounted_elsewhere_the_keys_are_still_asked_for() -> None:
    async def work() -> None:
        async with shop(ServeSettings(keys=Keys.of(["k"]))) as here:
            outer = httpx.ASGITransport(Starlette(routes=[Mount("/api", here.app)]))
            async with httpx.AsyncClient(transport=outer, base_url="http://x") as client:
                for path in ("v1/models", "v1/nothing", "samewise/live", "nothing"):
                    assert (await client.get(f"/api/{path}")).status_code == 401
                for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
                    assert (await client.post(f"/api{path}", json={})).status_code == 401
                for path in ("/", "/health", "/docs", "/samewise/page/icon.svg"):
                    assert (await client.get(f"/api{path}")).status_code == 200
                client.headers["Authorization"] = "Bearer k"
                said = [{"role": "user", "content": "a"}]
                whole = await client.post(f"/api{COMPLETIONS}", json={"prompt": "a", "max_tokens": 1})
                assert whole.json()["object"] == "text_completion"
                talk = await client.post(f"/api{CHAT}", json={"messages": said, "max_tokens": 1})
                assert talk.json()["object"] == "chat.completion"

    go(work())


def test_names() -> None:
    async def work() -> None:
        async with shop(ServeSettings(model_names=("org/good", "other"))) as here:
            listed = (await here.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["org/good", "other"]
            assert (await here.client.get("/v1/models/org/good")).json()["max_model_len"] == 512
            assert (await here.complete())["model"] == "org/good"
            assert (await here.complete(model="other"))["model"] == "other"
            status, _ = await here.refusal(COMPLETIONS, {"prompt": "a", "model": "tiny-llama"})
            assert status == 404

    go(work())


def test_request_ids() -> None:
    async def work() -> None:
        async with shop() as here:
            body = {"prompt": "a", "max_tokens": 1}
            response = await here.client.post(COMPLETIONS, json=body, headers={"X-Request-Id": "mine-7"})
            assert response.headers["x-request-id"] == "mine-7"
            assert response.json()["id"] == "cmpl-mine-7"
            for bad in ("a b", "x" * 300, "é"):
                response = await here.client.post(
                    COMPLETIONS, json=body, headers={"X-Request-Id": bad.encode("latin-1")}
                )
                assert response.headers["x-request-id"].isalnum()

    go(work())


def test_origins() -> None:
    async def work() -> None:
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        async with shop() as here:
            response = await here.client.options(COMPLETIONS, headers=asked)
            assert "access-control-allow-origin" not in response.headers
        settings = ServeSettings(allowed_origins=("https://a.example",), keys=Keys.of(["k"]))
        async with shop(settings) as here:
            response = await here.client.options(COMPLETIONS, headers=asked)
            assert response.headers["access-control-allow-origin"] == "https://a.example"
            other = await here.client.options(COMPLETIONS, headers=asked | {"Origin": "https://b.example"})
            assert "access-control-allow-origin" not in other.headers

    go(work())


def test_the_document_names_every_route() -> None:
    async def work() -> None:
        async with shop() as here:
            document = (await here.client.get("/openapi.json")).json()
            assert {COMPLETIONS, CHAT, "/v1/models", "/tokenize", "/metrics"} <= set(document["paths"])
            assert "$defs" not in json.dumps(document)
            fields = document["components"]["schemas"]["ChatBody"]["properties"]
            assert {"messages", "verify", "proposer", "tools", "response_format"} <= set(fields)
            for path in ("/health", "/ready", "/version"):
                assert (await here.client.get(path)).status_code == 200

    go(work())


def test_the_manual_needs_nothing_from_elsewhere() -> None:
    async def work() -> None:
        async with shop() as here:
            page = await here.client.get("/docs")
            assert page.headers["content-type"].startswith("text/html")
            assert "default-src 'none'" in page.headers["content-security-policy"]
            links = re.findall(r'(?:href|src)="([^"]*)"', page.text)
            assert not [link for link in links if ":" in link or link.startswith("/")]
            for link in links:
                if not link.startswith("#"):
                    assert (await here.client.get(f"/{link}")).status_code == 200
            for said in (CHAT, "/metrics", "max_completion_tokens", "whole number, 0 or more", "Retry-After"):
                assert said in page.text
            ids = re.findall(r' id="([^"]*)"', page.text)
            assert len(ids) == len(set(ids))
            assert {link[1:] for link in links if link.startswith("#")} <= set(ids)

    go(work())


def test_headers_alone() -> None:
    async def work() -> None:
        async with shop(real=True) as here:
            for path in ("/", "/docs", "/health", "/ready", "/version", "/metrics", "/v1/models"):
                response = await here.client.head(path)
                assert (response.status_code, response.content) == (200, b"")
                assert response.headers["x-request-id"]
            assert (await here.client.head(COMPLETIONS)).status_code == 405
            assert (await here.client.put("/health")).headers["allow"] == "GET"
            document = (await here.client.get("/openapi.json")).json()
            assert not [path for path, methods in document["paths"].items() if "head" in methods]

    go(work())


def test_characters_of_several_tokens_can_be_put_together() -> None:
    """In text as it streams there is no half of one; log-probabilities name the bytes of each part."""

    async def work() -> None:
        async with shop() as here:
            word = "héllo 🙂 漢"
            ids = list(word.encode())
            asked = {
                "messages": [{"role": "user", "content": "a"}], "max_tokens": len(ids), "logprobs": True,
                "response_format": {"type": "grammar", "syntax": "regex", "definition": word},
            }  # fmt: skip
            content = (await here.post(CHAT, asked))["choices"][0]["logprobs"]["content"]
            assert bytes(byte for part in content for byte in part["bytes"]) == word.encode()
            pieces = [e["choices"][0]["delta"].get("content") or "" for e in await here.events(CHAT, asked)]
            assert "".join(pieces) == word
            assert not any("\ufffd" in piece for piece in pieces)

    go(work())


def test_events_are_what_the_helper_thinks() -> None:
    assert events('data: {"a":1}\n\ndata: [DONE]\n\n') == [{"a": 1}]
