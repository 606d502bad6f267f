"""LLM.update_weights: the bits of a new engine, or nothing changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from llm_cases import LETTERS, PROMPT, assert_idle, bits, generate, greedy, greedy_letters

from samewise import LLM
from samewise.errors import BadParameter, CallerError
from samewise.testing import tiny_engine, tiny_model


def other_weights() -> dict[str, torch.Tensor]:
    return dict(tiny_model(seed=1).state_dict())


@pytest.mark.parametrize("how", ["tensors", "folder", "sharded folder"])
def test_updated_weights_answer_like_a_new_engine(how: str, tmp_path: Path) -> None:
    llm, new = LLM.over(tiny_engine()), LLM.over(tiny_engine(seed=1))
    prompt, params = PROMPT * 2, greedy(max_tokens=20, logprobs=1)
    before, old = generate(llm, prompt, params), llm.contract
    update: Any = other_weights()
    if how != "tensors":
        size = "100KB" if how == "sharded folder" else "5GB"
        tiny_model(seed=1).save_pretrained(tmp_path, max_shard_size=size)
        update = tmp_path
    contract = llm.update_weights(update)
    assert contract == llm.contract == new.contract
    assert contract.id != old.id
    after = generate(llm, prompt, params)
    assert bits(after) == bits(generate(new, prompt, params)) != bits(before)
    assert after[0].num_cached_tokens == 0  # the prefix cache was emptied
    assert after[0].contract == contract.id
    llm.update_weights(dict(tiny_model(seed=0).state_dict()))
    assert llm.contract == old
    assert bits(generate(llm, prompt, params)) == bits(before)
    assert_idle(llm)


def test_a_single_tensor_can_be_updated(llm: LLM) -> None:
    old = llm.engine.runner.model.get_parameter("lm_head.weight").clone()
    before, contract = bits(generate(llm, PROMPT)), llm.contract
    llm.update_weights({"lm_head.weight": old.flip(0)})
    assert bits(generate(llm, PROMPT)) != before
    llm.update_weights({"lm_head.weight": old})
    assert (bits(generate(llm, PROMPT)), llm.contract) == (before, contract)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lm_head.wait", (320, 64), "has no tensor 'lm_head.wait'; names are those of its state dict"),
        ("lm_head.weight", (64, 320), r"lm_head.weight has shape \(64, 320\), the model's has \(320, 64\)"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    llm: LLM, name: str, shape: tuple[int, int], message: str
) -> None:
    before, contract = bits(generate(llm, PROMPT)), llm.contract
    good = {"model.norm.weight": torch.full((64,), 7.0)}
    with pytest.raises(BadParameter, match=message):
        llm.update_weights(good | {name: torch.zeros(shape)})
    assert (bits(generate(llm, PROMPT)), llm.contract) == (before, contract)


def test_a_folder_without_weights_is_refused(llm: LLM, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadParameter, match="safetensors"):
            llm.update_weights(folder)


def test_updating_weights_while_a_request_runs_is_refused(llm: LLM) -> None:
    stream = llm.stream(PROMPT, greedy(max_tokens=5))
    next(stream)
    with pytest.raises(CallerError, match="while requests are running; finish or abort"):
        llm.update_weights({})
    assert sum(len(chunk.token_ids) for chunk in stream) == 4
    llm.update_weights({})


@pytest.mark.parametrize("how", ["stop string", "left early"])
def test_weights_can_be_updated_while_an_ended_requests_frame_is_in_flight(how: str) -> None:
    llm = LLM.over(tiny_engine())
    if how == "stop string":
        generate(llm, PROMPT, greedy_letters(stop=list(LETTERS), max_tokens=50))
    else:
        for _ in llm.stream(PROMPT, greedy(max_tokens=50)):
            break
    assert llm.update_weights(other_weights()) == llm.contract
