"""Updates over HTTP: tensors that come one by one, folders that are refused, pauses and the cache."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from served_app import CHAT, COMPLETIONS, run
from test_training import TOKENS, contract_of, folder, piece, scores, training

from samewise.errors import GuaranteeLost
from samewise.serve import training as training_routes
from samewise.testing import tiny_model

LONG = {"prompt": TOKENS, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


async def send_all(app: Any, seed: int = 1) -> None:
    """Every parameter, one by one, as TRL's client sends them."""
    for name, tensor in tiny_model(seed=seed).named_parameters():
        await app.post("/update_named_param/", piece(name, tensor.detach()))


@pytest.mark.parametrize("end", ["/reset_prefix_cache/", "/flush_cache", "/finish_weight_update", "/resume"])
def test_parameters_sent_one_by_one_are_used_together(end: str) -> None:
    async def scenario() -> None:
        async with training() as app:
            await send_all(app)
            assert app.llm.weights_version == 0
            assert (await app.client.post(end)).status_code == 200
            assert (app.llm.weights_version, app.llm.contract.id) == (1, contract_of(1))

    run(scenario())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate", "/inference/v1/generate", "/generate/"])
def test_the_next_answer_is_under_all_parameters_that_were_sent(path: str) -> None:
    body: Any = {
        COMPLETIONS: {"prompt": TOKENS, "max_tokens": 2},
        CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "/generate": {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 2}},
        "/inference/v1/generate": {"token_ids": TOKENS, "sampling_params": {"max_tokens": 2}},
        "/generate/": {"prompts": [TOKENS], "max_tokens": 2},
    }[path]

    async def scenario() -> None:
        async with training() as app:
            await send_all(app)
            replies = await asyncio.gather(*(app.post(path, body) for _ in range(3)))
            assert app.llm.weights_version == 1
            for reply in replies:
                version = reply.get("weights_version", reply.get("meta_info", {}).get("weight_version"))
                assert int(version) == 1

    run(scenario())


def leave(app: Any) -> tuple[asyncio.Task[Any], asyncio.Event]:
    """A request for an answer, in the server's event loop, and what makes its client disconnect."""
    gone = asyncio.Event()
    body = [b'{"prompt": [65], "max_tokens": 2}']

    async def receive() -> dict[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(),
        "query_string": b"", "headers": headers, "server": ("served", 80), "scheme": "http",
    }  # fmt: skip
    return asyncio.create_task(app.app(scope, receive, send)), gone


def test_parameters_are_not_lost_where_the_client_that_waits_for_them_leaves() -> None:
    async def scenario() -> None:
        async with training() as app:
            update, held, began = app.llm.update_weights, asyncio.Event(), asyncio.Event()

            async def hold(*args: Any, **options: Any) -> Any:
                began.set()
                await held.wait()
                return await update(*args, **options)

            app.llm.update_weights = hold
            await send_all(app)
            request, gone = leave(app)
            await began.wait()
            gone.set()
            await request
            assert app.llm.weights_version == 0
            held.set()
            answer = await app.complete()
            assert (answer["weights_version"], answer["system_fingerprint"]) == (1, contract_of(1))

    run(scenario())


def test_parameters_whose_update_fails_are_kept_for_the_next_request() -> None:
    async def scenario() -> None:
        async with training() as app:
            update = app.llm.update_weights

            async def fail(*_: Any, **__: Any) -> Any:
                app.llm.update_weights = update
                raise GuaranteeLost("the update failed")

            await send_all(app)
            app.llm.update_weights = fail
            assert (await app.refusal(COMPLETIONS, {"prompt": TOKENS}))[0] == 500
            answer = await app.complete()
            assert (answer["weights_version"], answer["system_fingerprint"]) == (1, contract_of(1))
            await app.post("/start_weight_update", {})
            state = dict(tiny_model(seed=2).named_parameters())
            tensors = [piece(name, tensor.detach()) for name, tensor in state.items()]
            await app.post("/update_weights", {"update_info": {"tensors": tensors}})
            app.llm.update_weights = fail
            assert (await app.refusal("/finish_weight_update", {}))[0] == 500
            await app.post("/finish_weight_update", {})
            assert (app.llm.weights_version, app.llm.contract.id) == (2, contract_of(2))

    run(scenario())


def test_a_folder_takes_the_place_of_parameters_that_came_before_it(tmp_path: Path) -> None:
    where = folder(tmp_path, 2)

    async def scenario() -> None:
        async with training() as app:
            await send_all(app)
            await app.post("/update_weights", {"weight_dir": where})
            answer = await app.complete()
            assert (answer["weights_version"], answer["system_fingerprint"]) == (1, contract_of(2))

    run(scenario())


def test_tensors_that_come_while_the_update_ends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is lost: the client is told, where it would otherwise believe that it was used."""
    read, slow = training_routes._tensors, asyncio.Event()

    async def scenario() -> None:
        async with training() as app:
            loop = asyncio.get_running_loop()

            def wait(bodies: Any) -> Any:
                asyncio.run_coroutine_threadsafe(slow.wait(), loop).result()
                return read(bodies)

            monkeypatch.setattr(training_routes, "_tensors", wait)
            await app.post("/start_weight_update", {})
            tensors = [piece("model.norm.weight", torch.ones(64))]
            sent = asyncio.create_task(app.refusal("/update_weights", {"update_info": {"tensors": tensors}}))
            await asyncio.sleep(0.05)
            await app.post("/finish_weight_update", {})
            slow.set()
            status, error = await sent
            assert (status, error["param"]) == (400, "tensors")
            assert "the update ended" in error["message"]

    run(scenario())


def test_two_requests_may_bring_tensors_at_once() -> None:
    async def scenario() -> None:
        async with training() as app:
            await app.post("/start_weight_update", {})
            state = dict(tiny_model(seed=1).named_parameters())
            bodies = [{"update_info": {"tensors": [piece(n, t.detach())]}} for n, t in state.items()]
            await asyncio.gather(*(app.post("/update_weights", body) for body in bodies))
            await app.post("/finish_weight_update", {})
            assert app.llm.contract.id == contract_of(1)

    run(scenario())


def test_weights_that_cannot_be_used_are_refused_and_requests_go_on(tmp_path: Path) -> None:
    whole = Path(folder(tmp_path, 1))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model-00001-of-00002.safetensors").write_bytes(b"")
    nan = piece("model.norm.weight", torch.full((64,), float("nan")))

    async def scenario() -> None:
        async with training() as app:
            running = asyncio.create_task(app.post(COMPLETIONS, LONG))
            while not (await app.llm.stats())["output_tokens"]:
                await asyncio.sleep(0.005)
            for path, body in (
                ("/update_weights?mode=abort", {"weight_dir": str(broken)}),
                ("/update_weights?mode=abort", {"weight_dir": str(tmp_path / "nowhere")}),
                ("/update_weights_from_disk", {"model_path": str(broken), "abort_all_requests": True}),
                ("/update_named_param/", nan),
                ("/update_named_param/", piece("model.nrom.weight", torch.ones(64))),
            ):
                status, error = await app.refusal(path, body)
                assert (status, error["param"]) == (400, "update"), error
            assert (await running)["choices"][0]["finish_reason"] == "length"
            assert app.llm.weights_version == 0
            await app.post("/update_weights", {"weight_dir": str(whole)})

    run(scenario())


def test_the_cache_is_flushed_while_requests_are_retracted() -> None:
    """slime asks until it is. What was retracted is computed again, to the same bits."""

    async def scenario() -> None:
        async with training(proposer="none") as app:
            alone = await app.post(COMPLETIONS, LONG)
            running = asyncio.create_task(app.post(COMPLETIONS, LONG))
            while not (await app.llm.stats())["running"]:
                await asyncio.sleep(0.005)
            assert (await app.client.get("/flush_cache")).status_code == 400
            await app.post("/pause_generation", {"mode": "retract"})
            assert (await app.client.get("/flush_cache")).status_code == 200
            stats = await app.llm.stats()
            assert stats["pages_available"] == stats["pages"]
            await app.post("/continue_generation", {})
            assert (await running)["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
            await app.check_idle()

    run(scenario())


def test_slime_ends_requests_until_none_is_left() -> None:
    async def scenario() -> None:
        async with training() as app:

            async def load() -> tuple[int, int]:
                (one,) = (await app.client.get("/v1/loads?include=core,disagg,queues")).json()["loads"]
                return one["num_running_reqs"], one["num_waiting_reqs"]

            assert await load() == (0, 0)
            running = asyncio.create_task(app.post(COMPLETIONS, LONG))
            while not (await app.llm.stats())["running"]:
                await asyncio.sleep(0.005)
            await app.post("/pause_generation", {"mode": "in_place"})
            later = asyncio.create_task(app.post(COMPLETIONS, LONG))
            while not app.llm._held:
                await asyncio.sleep(0.005)
            assert await load() == (1, 1)
            await app.post("/abort_request", {"abort_all": True})
            assert await load() == (0, 1)
            assert (await running)["choices"][0]["finish_reason"] == "abort"
            await app.post("/continue_generation", {})
            while sum(await load()):
                await app.post("/abort_request", {"abort_all": True})
            await later

    run(scenario())


@pytest.mark.parametrize(("query", "reason"), [("true", "length"), ("false", "abort")])
def test_vllms_older_flag_of_a_pause(query: str, reason: str) -> None:
    async def scenario() -> None:
        async with training() as app:
            running = asyncio.create_task(app.post(COMPLETIONS, LONG))
            while not (await app.llm.stats())["output_tokens"]:
                await asyncio.sleep(0.005)
            await app.client.post(f"/pause?wait_for_inflight_requests={query}")
            assert (await running)["choices"][0]["finish_reason"] == reason
            await app.client.post("/resume")

    run(scenario())


def test_without_max_tokens_an_answer_goes_on_to_the_end_of_the_context() -> None:
    async def scenario() -> None:
        async with training() as app:
            sampling = {"temperature": 0, "ignore_eos": True}
            for given in (sampling, sampling | {"max_tokens": None}):
                body = {"token_ids": TOKENS, "sampling_params": given}
                reply = await app.post("/inference/v1/generate", body)
                num = app.llm.max_model_len - len(TOKENS)
                assert len(reply["choices"][0]["token_ids"]) == num
                usage = reply["usage"]
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(TOKENS), num)

    run(scenario())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_lengths": [0]}, "prompt_lengths"), ({"prompt_lengths": ["1"]}, "prompt_lengths"),
        ({"prompt_lengths": [True]}, "prompt_lengths"), ({"prompt_lengths": [9]}, "prompt_lengths"),
        ({"sequences": TOKENS}, "sequences"), ({"sequences": []}, "sequences"),
        ({"top_logprobs": "3"}, "top_logprobs"), ({"top_logprobs": -1}, "top_logprobs"),
    ],
)  # fmt: skip
def test_sequences_that_cannot_be_scored_are_refused(change: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        async with training() as app:
            body = {"sequences": [TOKENS], "prompt_lengths": [1], "top_logprobs": 3} | change
            status, error = await app.refusal("/get_sequence_logprobs/", body)
            assert (status, error["param"]) == (400, param)
            assert await scores(app, TOKENS[:1], TOKENS[1:])

    run(scenario())


def test_every_endpoint_says_the_weights_of_its_answer() -> None:
    """Of the first ones too, and of an answer during which they were replaced those of its last token."""
    message = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 300}
    message |= {"model": "tiny-llama", "ignore_eos": True}
    bodies: dict[str, Any] = {
        COMPLETIONS: LONG,
        CHAT: message,
        "/v1/messages": message,
        "/v1/responses": {"input": "hi", "temperature": 0, "max_output_tokens": 300, "ignore_eos": True},
    }

    async def scenario() -> None:
        async with training(proposer="none") as app:

            async def ask_all(version: int) -> None:
                for reply in await asyncio.gather(*(app.post(path, body) for path, body in bodies.items())):
                    said = (reply["weights_version"], reply["system_fingerprint"])
                    assert said == (version, contract_of(version)), reply

            await ask_all(0)
            running = asyncio.create_task(ask_all(1))
            while (await app.llm.stats())["running"] < len(bodies):
                await asyncio.sleep(0.005)
            state = dict(tiny_model(seed=1).state_dict())
            await app.llm.update_weights(state, mode="keep")
            await running

    run(scenario())
