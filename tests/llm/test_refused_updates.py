"""New weights that cannot be used: nothing changes, or requests wait until an update succeeds."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aio_cases import assert_idle, paced_llm, run_async, wait_until
from llm_cases import PROMPT, bits, generate
from test_update_modes import SAMPLED, check_tokens, weights

from samewise import LLM
from samewise.errors import BadParameter, CallerError, GuaranteeLost
from samewise.model.source import INDEX, SAFETENSORS
from samewise.testing import tiny_engine, tiny_model

NORM = "model.norm.weight"


def torn_pieces() -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of which the first is written before the second turns out not to fit."""
    yield NORM, torch.zeros(64)
    yield "lm_head.weight", torch.zeros(3)


# -- an update that fails half-way --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "abort", None])
def test_requests_wait_after_a_failed_update_until_another_one_succeeds(mode: str | None) -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            running = None
            if mode == "keep":
                running = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
                await wait_until(lambda: bool(llm._readers))
            with pytest.raises(
                BadParameter, match=r"shape \(3,\).*requests wait until another one"
            ) as caught:
                await llm.update_weights(torn_pieces(), mode=mode)
            assert caught.value.param == "update"
            later = asyncio.create_task(llm.generate(PROMPT, SAMPLED.clone(seed=9)))
            await asyncio.sleep(0.05)
            assert llm.alive
            assert not later.done()
            with pytest.raises(BadParameter, match="requests wait"):  # and once more
                await llm.update_weights(torn_pieces(), mode="wait")
            contract = await llm.update_weights(weights(1), mode="wait")  # nothing runs: at once
            after = await later
            assert after.contract == contract.id
            check_tokens(after, SAMPLED.clone(seed=9), [0, 1])
            if running is not None:
                check_tokens(await running, SAMPLED, [0, 1])
                assert running.result().outputs[0].finish_reason == "length"
            await assert_idle(llm)

    run_async(scenario())


def test_any_failure_while_weights_are_written_freezes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            running = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._readers))

            def fail(*_: object, **__: object) -> None:
                raise RuntimeError("no memory")

            with monkeypatch.context() as patch:
                patch.setattr("samewise.engine.engine.apply_update", fail)
                with pytest.raises(GuaranteeLost, match=r"failed: no memory; .* requests wait"):
                    await llm.update_weights(weights(1), mode="keep")
            await asyncio.sleep(0.05)
            assert not running.done()
            await llm.update_weights(weights(1), mode="keep")
            check_tokens(await running, SAMPLED, [0, 1])

    run_async(scenario())


@pytest.mark.parametrize("update", ["mapping", "list", "first of an iterator"])
def test_what_can_be_checked_first_leaves_everything_running(update: str) -> None:
    bad = {"lm_head.weight": torch.zeros(3)} if update != "list" else dict(torn_pieces())

    async def scenario() -> None:
        async with paced_llm() as llm:
            running = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._readers))
            for mode in ("abort", "keep"):
                given: Any = {"mapping": bad, "list": list(bad.items())}.get(update, iter(bad.items()))
                with pytest.raises(BadParameter, match=r"the model's has \(320, 64\)$"):
                    await llm.update_weights(given, mode=mode)
            output = await running
            assert output.outputs[0].finish_reason == "length"
            check_tokens(output, SAMPLED, [0])

    run_async(scenario())


def test_a_misspelt_name_aborts_no_stream() -> None:
    llm = LLM.over(tiny_engine())
    stream = llm.stream(PROMPT, SAMPLED)
    chunks = [next(stream)]
    with pytest.raises(BadParameter, match=r"no tensor 'lm_head.wait'"):
        llm.update_weights({"lm_head.wait": torch.zeros(1)}, mode="abort")
    chunks += stream
    assert chunks[-1].finish_reason == "length"


# -- values that are no numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_change_nothing(value: float) -> None:
    llm = LLM.over(tiny_engine())
    before, contract = bits(generate(llm, PROMPT)), llm.contract
    damaged = weights(1)[NORM].clone()
    damaged[7] = value
    for update in (weights(1) | {NORM: damaged}, [(NORM, damaged)], iter([(NORM, damaged)])):
        with pytest.raises(BadParameter, match=f"{NORM} holds values that are no finite numbers"):
            llm.update_weights(update)
    assert (bits(generate(llm, PROMPT)), llm.contract) == (before, contract)


def test_values_beyond_the_models_format_are_no_numbers_there() -> None:
    llm = LLM.over(tiny_engine(dtype="bfloat16"))
    llm.update_weights({NORM: torch.full((64,), 1e5)})
    with pytest.raises(BadParameter, match=r"no finite numbers in torch.bfloat16"):
        llm.update_weights({NORM: torch.full((64,), 1e300, dtype=torch.float64)})


def test_weights_in_memory_that_are_no_numbers_are_not_certified() -> None:
    llm = LLM.over(tiny_engine())
    model = llm.engine.loaded.model
    with torch.no_grad():
        model.get_parameter(NORM)[0] = float("nan")
    for update in ({}, model.state_dict()):
        with pytest.raises(BadParameter, match=f"{NORM} holds"):
            llm.update_weights(update)
    with pytest.raises(GuaranteeLost):
        generate(llm, PROMPT)


# -- folders ------------------------------------------------------------------------------------------


def test_a_folder_without_all_weights_changes_nothing(tmp_path: Path) -> None:
    llm = LLM.over(tiny_engine())
    before = llm.contract
    state = {name: tensor for name, tensor in weights(1).items() if name not in (NORM, "lm_head.weight")}
    tiny_model(seed=1).save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(BadParameter, match=rf"{tmp_path} lacks {NORM} and 1 more"):
        llm.update_weights(tmp_path)
    assert llm.contract == before


def test_a_folder_has_tied_weights_once(tmp_path: Path) -> None:
    engines = [tiny_engine(seed=seed, overrides={"tie_word_embeddings": True}) for seed in (0, 1)]
    llm, new = map(LLM.over, engines)
    tiny_model(seed=1, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert llm.update_weights(tmp_path) == new.contract


def test_folders_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    llm = LLM.over(tiny_engine())
    before = llm.contract

    def refused(message: str) -> None:
        with pytest.raises(CallerError, match=message) as caught:
            llm.update_weights(tmp_path)
        assert caught.value.param == "update"
        assert llm.contract == before

    tiny_model(seed=1).save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / INDEX).read_text())
    shard = tmp_path / index["weight_map"][NORM]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    refused(f"{shard.name} cannot be read .* bytes")
    shard.write_bytes(b"")
    refused(f"{shard.name} cannot be read")
    shard.unlink()
    refused(f"{shard.name} cannot be read .*No such file")
    (tmp_path / INDEX).write_text("{")
    refused(f"{INDEX} cannot be read")
    (tmp_path / INDEX).unlink()
    refused(f"holds neither {SAFETENSORS} nor {INDEX}")
