"""The routes of trainers: off by default, only with a key, and in the shapes that their clients read."""

import asyncio
import base64
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_bodies import HERMES, named_events
from served_app import run, served_app

from samewise import AsyncLLM
from samewise.errors import BadParameter
from samewise.serve.app import make_app
from samewise.serve.settings import Keys, ServeSettings
from samewise.testing import tiny_engine, tiny_model

KEY = {"Authorization": "Bearer secret"}
SETTINGS = ServeSettings(training=True, keys=Keys.of(["secret"]))
TOKENS = [65, 66, 67]


@functools.cache
def contract_of(seed: int) -> str:
    return tiny_engine(seed=seed).contract.id


def training(**options: Any) -> Any:
    """Without drafts a request of 400 tokens runs for as many paced steps: long enough to be aborted."""
    return served_app(settings=SETTINGS, headers=KEY, **{"proposer": "none"} | options)


def folder(path: Path, seed: int) -> str:
    tiny_model(seed=seed).save_pretrained(path)
    return str(path)


def piece(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    data = base64.b64encode(tensor.contiguous().view(torch.uint8).numpy().tobytes()).decode()
    return {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape), "data": data}


def test_the_routes_are_not_there_unless_enabled() -> None:
    app = make_app(AsyncLLM.over(tiny_engine()))
    paths = {getattr(route, "path", "") for route in app.routes}
    assert not paths & {"/pause", "/update_weights", "/generate", "/update_named_param/"}
    app.state.service.worker.llm.close()


def test_without_a_key_they_are_refused() -> None:
    with pytest.raises(BadParameter, match="give it a key"):
        ServeSettings(training=True)


def test_a_wrong_key_is_refused_and_a_key_may_be_a_password() -> None:
    async def scenario() -> None:
        async with served_app(settings=SETTINGS) as app:
            basic = {"Authorization": "Basic " + base64.b64encode(b"any:secret").decode()}
            for headers, status in (
                ({}, 401), ({"Authorization": "Bearer no"}, 401), (KEY, 200), (basic, 200),
                (basic | {"Origin": "http://other"}, 401), ({"Authorization": "Basic ?"}, 401),
            ):  # fmt: skip
                reply = await app.client.get("/is_paused", headers=headers)
                assert reply.status_code == status, headers

    run(scenario())


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_pause_and_resume(mode: str) -> None:
    async def scenario() -> None:
        async with training() as app:
            assert (await app.client.post(f"/pause?mode={mode}")).json() == {"status": "paused"}
            assert (await app.client.get("/is_paused")).json() == {"is_paused": True}
            waiting = asyncio.create_task(app.complete())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            assert (await app.client.post("/resume")).json() == {"status": "resumed"}
            await waiting
            assert (await app.client.get("/is_paused")).json() == {"is_paused": False}
            assert (await app.refusal("/pause?mode=now", {}))[1]["param"] == "mode"

    run(scenario())


def test_aborted_requests_return_what_they_have() -> None:
    async def scenario() -> None:
        async with training() as app:
            body = {"prompt": TOKENS, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
            running = asyncio.create_task(app.post("/v1/completions", body))
            while not (await app.llm.stats())["output_tokens"]:
                await asyncio.sleep(0.01)
            assert await app.post("/abort_requests", {}) == {"status": "aborted", "aborted": 1}
            (choice,) = (await running)["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "aborted")
            assert choice["token_ids"]
            await app.check_idle()

    run(scenario())


async def aborted(app: Any, path: str, body: dict[str, Any]) -> Any:
    """The reply to a request that is aborted after its first tokens."""
    before = (await app.llm.stats())["output_tokens"]
    running = asyncio.create_task(app.client.post(path, json=body))
    while (await app.llm.stats())["output_tokens"] < before + 8:
        await asyncio.sleep(0.01)
    assert (await app.post("/abort_requests", {}))["aborted"] == 1
    return await running


def test_aborted_responses_are_incomplete_and_have_what_was_held_back() -> None:
    """Text that may begin a call is held back until the answer ends, however it ends."""

    async def scenario() -> None:
        async with training() as app:
            app.llm.intake.tokenizer.chat_template = HERMES
            tool = {"type": "function", "name": "f"}
            (opening,) = app.llm.intake.encode("<")
            body = {"input": "hello", "max_output_tokens": 400, "tools": [tool], "return_token_ids": True}
            body |= {"logit_bias": {str(opening): 100}, "ignore_eos": True}
            for extra in ({}, {"stream": True}):
                reply = await aborted(app, "/v1/responses", body | extra)
                assert reply.status_code == 200
                response = {} if extra else reply.json()
                if extra:
                    events = named_events(reply.text)
                    assert events[-1]["type"] == "response.incomplete"
                    response = events[-1]["response"]
                assert (response["status"], response["incomplete_details"]) == ("incomplete", None)
                (item,) = response["output"]
                assert item["status"] == "incomplete"
                assert item["content"][0]["text"] == "<" * len(response["token_ids"])
            await app.check_idle()

    run(scenario())


def test_aborted_messages_end_with_an_error() -> None:
    """There is no stop reason that says so, and clients send the request again."""

    async def scenario() -> None:
        async with training() as app:
            hello = [{"role": "user", "content": "hello"}]
            body = {"messages": hello, "max_tokens": 400, "ignore_eos": True}
            reply = await aborted(app, "/v1/messages", body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "aborted")
            reply = await aborted(app, "/v1/messages", body | {"stream": True})
            events = named_events(reply.text)
            assert (events[0]["type"], events[-1]["type"]) == ("message_start", "error")
            assert events[-1]["error"]["type"] == "overloaded_error"
            assert "message_delta" not in {event["type"] for event in events}
            await app.check_idle()

    run(scenario())


NATIVE = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
GENERATE = {"token_ids": TOKENS, "sampling_params": {"max_tokens": 400, "ignore_eos": True}}
LONG = {"prompt": TOKENS, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.parametrize(
    ("path", "body", "ended"),
    [
        ("/abort_requests", {}, "abcde"), ("/abort_requests", {"request_ids": []}, "abcde"),
        ("/abort_requests", {"request_ids": None}, "abcde"), ("/abort_request", {"abort_all": True}, "abcde"),
        ("/abort_requests", {"request_ids": ["a", "cmpl-b", "none"]}, "ab"),
        ("/abort_requests", {"request_ids": ["d"]}, "d"), ("/abort_request", {"rid": "c"}, "c"),
        ("/abort_request", {"rid": "none"}, ""), ("/abort_request", {}, ""),
    ],
)  # fmt: skip
def test_requests_are_ended_by_the_names_their_clients_gave_them(path: str, body: Any, ended: str) -> None:
    async def scenario() -> None:
        async with training() as app:

            async def lengths(path: str, body: Any, **options: Any) -> list[int]:
                """How long the answers are, all of which were cut off."""
                reply = (await app.client.post(path, json=body, **options)).json()
                if "choices" in reply:
                    (choice,) = reply["choices"]
                    assert choice["finish_reason"] == "abort"
                    return [len(choice["token_ids"])]
                replies = reply if isinstance(reply, list) else [reply]
                assert all(one["meta_info"]["finish_reason"]["type"] == "abort" for one in replies)
                return [len(one["output_ids"]) for one in replies]

            two = NATIVE | {"rid": ["d", "e"], "input_ids": [TOKENS, TOKENS]}
            running = [
                asyncio.create_task(lengths("/inference/v1/generate", GENERATE | {"request_id": "a"})),
                asyncio.create_task(lengths("/v1/completions", LONG, headers={"X-Request-Id": "b"})),
                asyncio.create_task(lengths("/generate", NATIVE | {"rid": "c"})),
                asyncio.create_task(lengths("/generate", two)),
            ]
            while (await app.llm.stats())["running"] < 5:
                await asyncio.sleep(0.005)
            await app.client.post("/pause?mode=keep")  # nothing ends by itself
            assert await app.post(path, body) == {"status": "aborted", "aborted": len(ended)}
            stats = await app.llm.stats()
            assert stats["running"] == 5 - len(ended)
            for name, one in zip("abc", running, strict=False):
                if name in ended:
                    await one
                assert one.done() == (name in ended)
            await app.post("/resume", {})
            while ended == "d" and (await app.llm.stats())["output_tokens"] < stats["output_tokens"] + 90:
                await asyncio.sleep(0.005)
            await app.post("/abort_requests", {})
            first, second = (await asyncio.gather(*running))[-1]
            assert first < second or ended != "d"
            await app.check_idle()

    run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/abort_requests", {"request_ids": "a"}, "request_ids"),
        ("/abort_requests", {"request_ids": [1]}, "request_ids"),
        ("/abort_request", {"rid": ["a"]}, "rid"), ("/generate", NATIVE | {"rid": [1]}, "rid"),
    ],
)  # fmt: skip
def test_names_that_are_no_texts_are_refused(path: str, body: Any, param: str) -> None:
    async def scenario() -> None:
        async with training() as app:
            status, error = await app.refusal(path, body)
            assert (status, error["param"]) == (400, param)

    run(scenario())


def test_requests_without_a_body_are_taken() -> None:
    """TRL's asynchronous client sends none to `/finish_weight_update`, and then no Content-Type."""

    async def scenario() -> None:
        async with training() as app:
            paths = (
                "/start_weight_update", "/finish_weight_update", "/abort_requests", "/pause", "/resume",
                "/pause_generation", "/continue_generation", "/reset_prefix_cache",
            )  # fmt: skip
            for path in paths:
                assert (await app.client.post(path)).status_code == 200, path
            text = await app.client.post("/abort_requests", content="{}")
            assert text.status_code == 415

    run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights", {"weight_dir": "FOLDER"}),
        ("/update_weights", {"update_info": {"path": "FOLDER"}}),
        (
            "/update_weights_from_disk",
            {"model_path": "FOLDER", "weight_version": "step-1", "flush_cache": True},
        ),
    ],
)
def test_weights_from_a_folder(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    where = folder(tmp_path, 1)

    def filled(value: Any) -> Any:
        return (
            {k: filled(v) for k, v in value.items()}
            if isinstance(value, dict)
            else where
            if value == "FOLDER"
            else value
        )

    async def scenario() -> None:
        async with training() as app:
            assert (await app.complete())["weights_version"] == 0
            await app.post(path, filled(body))
            info = (await app.client.get("/weight_info")).json()
            assert info == {"weight_version": body.get("weight_version", "1"), "contract": contract_of(1)}
            answer = await app.complete()
            assert (answer["weights_version"], answer["system_fingerprint"]) == (1, contract_of(1))
            assert (await app.refusal(path, filled({k: v for k, v in body.items() if k == "x"})))[0] == 400

    run(scenario())


def test_weights_in_pieces() -> None:
    state = tiny_model(seed=1).state_dict()
    names = list(state)

    async def scenario() -> None:
        async with training() as app:
            await app.post("/start_weight_update", {"is_checkpoint_format": True})
            for name in names[:-1]:
                await app.post("/update_named_param/", piece(name, state[name]))
            tensors = [piece(names[-1], state[names[-1]])]
            await app.post("/update_weights", {"update_info": {"tensors": tensors}})
            assert app.llm.weights_version == 0  # the old weights serve until the end
            await app.post("/finish_weight_update?mode=wait", {})
            assert app.llm.contract.id == contract_of(1)
            assert (await app.refusal("/finish_weight_update", {}))[0] == 400
            assert app.llm.weights_version == 1

    run(scenario())


def test_answers_under_two_weights_say_which_token_is_whose(tmp_path: Path) -> None:
    """Frozen, given new weights and gone on with: whole answers of three routes, and a stream."""
    where = folder(tmp_path, 1)
    num = 200
    plain = {"max_tokens": num, "temperature": 0, "ignore_eos": True}
    native = {"max_new_tokens": num, "temperature": 0, "ignore_eos": True}
    whole = {"prompt": TOKENS, "return_token_ids": True} | plain

    async def scenario() -> None:
        async with training(proposer="none") as app:
            requests = [
                app.post("/v1/completions", whole),
                app.post("/inference/v1/generate", {"token_ids": TOKENS, "sampling_params": plain}),
                app.post("/generate", {"input_ids": TOKENS, "sampling_params": native}),
                app.events("/v1/completions", whole),
            ]
            tasks = [asyncio.create_task(request) for request in requests]
            while (await app.llm.stats())["running"] < len(tasks):
                await asyncio.sleep(0.005)
            num_before = (await app.llm.stats())["output_tokens"]
            while (await app.llm.stats())["output_tokens"] < num_before + 40:
                await asyncio.sleep(0.005)
            await app.client.post("/pause?mode=keep")
            await app.post("/update_weights", {"weight_dir": where})
            await app.client.post("/resume")
            completion, generated, native_reply, events = [await task for task in tasks]
            (choice,), (same,) = completion["choices"], generated["choices"]
            meta = native_reply["meta_info"]
            for weights, ids in (
                (choice["weights"], choice["token_ids"]), (same["weights"], same["token_ids"]),
                (meta["weights"], native_reply["output_ids"]),
            ):  # fmt: skip
                first, second = weights
                assert (first["start"], first["version"], first["contract"]) == (0, 0, contract_of(0))
                assert (second["version"], second["contract"]) == (1, contract_of(1))
                start = second["start"]
                body = whole | {"prompt": [*TOKENS, *ids[:start]], "max_tokens": num - start}
                rest = await app.post("/v1/completions", body)
                assert rest["choices"][0]["token_ids"] == ids[start:]
            assert (completion["weights_version"], meta["weight_version"]) == (1, "1")
            versions = [event.get("weights_version", 0) for event in events if event["choices"]]
            assert versions == sorted(versions)
            assert set(versions) == {0, 1}
            await app.check_idle()

    run(scenario())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"data": None}, "data"), ({"data": "?"}, "data"), ({"data": "AAAA"}, "data"),
        ({"dtype": "int8"}, "dtype"), ({"shape": "x"}, "shape"), ({"shape": [-1]}, "shape"),
        ({"name": 3}, "name"), ({"name": "nothing"}, "update"),
    ],
)  # fmt: skip
def test_a_piece_that_is_no_tensor_is_refused(change: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        async with training() as app:
            body = piece("model.norm.weight", torch.zeros(64)) | change
            status, error = await app.refusal("/update_named_param/", body)
            assert (status, error["param"]) == (400, param)
            await app.complete()

    run(scenario())


def test_the_communicator_is_refused_with_the_way_that_works() -> None:
    async def scenario() -> None:
        async with training() as app:
            for path in ("/init_communicator/", "/init_weight_transfer_engine"):
                status, error = await app.refusal(path, {"host": "0.0.0.0", "port": 1, "world_size": 2})
                assert status == 501
                assert "no NCCL group here; send weights as a folder" in error["message"]
            assert (await app.client.get("/get_world_size/")).json() == {"world_size": 1}

    run(scenario())


def test_tokens_in_and_out() -> None:
    async def scenario() -> None:
        async with training() as app:
            sampling = {
                "temperature": 0.7,
                "max_tokens": 5,
                "logprobs": 1,
                "seed": 3,
                "n": 2,
                "output_kind": 2,
            }
            body = {"request_id": "r-1", "token_ids": TOKENS, "sampling_params": sampling}
            reply = await app.post("/inference/v1/generate", body)
            assert reply["request_id"] == "r-1"
            plain = await app.complete(TOKENS, return_token_ids=True, **sampling)
            for choice, same in zip(reply["choices"], plain["choices"], strict=True):
                assert choice["token_ids"] == same["token_ids"]
                values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                assert values == same["logprobs"]["token_logprobs"]
            for wrong, param in (
                ({"token_ids": "x"}, "token_ids"), ({"sampling_params": 3}, "sampling_params"),
                ({"sampling_params": {"temperature": -1}}, "temperature"), ({"stream": True}, "stream"),
            ):  # fmt: skip
                assert (await app.refusal("/inference/v1/generate", body | wrong))[1]["param"] == param

    run(scenario())


def test_slimes_routes() -> None:
    async def scenario() -> None:
        async with training() as app:
            sampling = {
                "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 5, "stop": None,
                "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True,
                "spaces_between_special_tokens": False, "sampling_seed": 9,
            }  # fmt: skip
            body = {"input_ids": TOKENS, "sampling_params": sampling, "return_logprob": True}
            reply = await app.post("/generate", body)
            pairs = reply["meta_info"]["output_token_logprobs"]
            assert [token for _, token, _ in pairs] == reply["output_ids"]
            (score,) = await scores(app, TOKENS, reply["output_ids"])
            assert [value for value, _, _ in pairs] == score
            assert reply["meta_info"]["finish_reason"]["type"] in ("length", "stop")
            assert len(await app.post("/generate", body | {"input_ids": [TOKENS, [70]]})) == 2
            assert (await app.client.get("/flush_cache")).status_code == 200
            assert (await app.post("/pause_generation", {}))["status"] == "ok"
            assert (await app.post("/continue_generation", {}))["status"] == "ok"
            assert (await app.client.get("/server_info")).json()["tp_size"] == 1

    run(scenario())


def test_slimes_teacher_scores_a_prompt() -> None:
    async def scenario() -> None:
        async with training() as app:
            text = [*TOKENS, 80, 81, 82]
            body = {
                "input_ids": text, "return_logprob": True, "logprob_start_len": 0,
                "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
            }  # fmt: skip
            reply = await app.post("/generate", body)
            values = reply["meta_info"]["input_token_logprobs"]
            assert [token for _, token, _ in values] == text
            (score,) = await scores(app, text[:1], text[1:])
            assert [value for value, _, _ in values] == [None, *score]
            assert reply["output_ids"] == []
            last = (await app.post("/generate", body | {"logprob_start_len": 4}))["meta_info"]
            assert last["input_token_logprobs"] == [[None, 81, None], values[5]]
            none = (await app.post("/generate", body | {"logprob_start_len": -1}))["meta_info"]
            assert "input_token_logprobs" not in none
            for wrong, param in (
                ({"logprob_start_len": [0]}, "logprob_start_len"),
                ({"lora_path": "x"}, "lora_path"),
            ):
                assert (await app.refusal("/generate", body | wrong))[1]["param"] == param

    run(scenario())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 0.0])
@pytest.mark.parametrize("num", [0, 5])
def test_slimes_prompts_are_scored_without_the_temperature(temperature: float, num: int) -> None:
    """As in SGLang; the answer's tokens have the values of the distribution they were drawn from."""

    async def scenario() -> None:
        async with training() as app:
            text = [*TOKENS, 80, 81, 82]
            sampling = {"temperature": temperature, "max_new_tokens": num, "sampling_seed": 3}
            body = {"input_ids": text, "sampling_params": sampling, "return_logprob": True}
            plain = await app.post("/generate", body)
            reply = await app.post("/generate", body | {"logprob_start_len": 0})
            (raw,) = await scores(app, text[:1], text[1:])
            values = [value for value, _, _ in reply["meta_info"].pop("input_token_logprobs")]
            assert values == [None, *raw]
            for name in ("output_token_logprobs", "output_top_logprobs", "finish_reason", "seed"):
                assert reply["meta_info"][name] == plain["meta_info"][name]
            several = body | {"input_ids": [text, text[:3]], "logprob_start_len": 2}
            replies = await app.post("/generate", several)
            listed = [one["meta_info"]["input_token_logprobs"] for one in replies]
            assert [[value for value, _, _ in one] for one in listed] == [[None, *raw[2:]], [None]]

    run(scenario())


async def scores(app: Any, prompt: list[int], answer: list[int]) -> list[list[float]]:
    reply = await app.post(
        "/get_sequence_logprobs/",
        {"sequences": [prompt + answer], "prompt_lengths": [len(prompt)], "top_logprobs": 3},
    )
    return [[value for (value,) in row] for row in reply["actual_logprobs"]]


def test_trls_routes() -> None:
    async def scenario() -> None:
        async with training() as app:
            body = {
                "prompts": [TOKENS, [70]],
                "n": 2,
                "temperature": 0.7,
                "max_tokens": 4,
                "generation_kwargs": {"seed": 1},
            }
            reply = await app.post("/generate/", body)
            assert reply["prompt_ids"] == [TOKENS, [70]]
            assert len(reply["completion_ids"]) == 4
            assert [len(row) for row in reply["logprobs"]] == [len(ids) for ids in reply["completion_ids"]]
            chat = {
                "messages": [[{"role": "user", "content": "hi"}]] * 2,
                "max_tokens": 3,
                "generation_kwargs": {"seed": 1},
            }
            reply = await app.post("/chat/", chat)
            assert reply["completion_ids"][0] == reply["completion_ids"][1]
            assert (await app.refusal("/generate/", {"prompts": [TOKENS], "images": [["x"]]}))[1][
                "param"
            ] == "images"
            assert (await app.refusal("/get_sequence_logprobs/", {"sequences": [[1]], "prompt_lengths": []}))[
                0
            ] == 400

    run(scenario())
