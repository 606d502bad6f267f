"""Loading: what the fact `weights` covers, and that a model in memory does not follow its files."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.errors import GuaranteeLost
from samewise.execute import load as load_module
from samewise.execute.load import fingerprint, load
from samewise.model.load import load_model
from samewise.testing import tiny, tiny_engine


class Small(nn.Module):
    """Parameters and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).reshape(4, 6))
        self.register_buffer("kept", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("left_out", torch.ones(3), persistent=False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("empty", torch.empty(0, 4))


@pytest.mark.parametrize("name", ["weight", "kept", "left_out", "scale"])
def test_fingerprint_changes_with_any_bit_of_any_tensor(name: str) -> None:
    model = Small()
    before = fingerprint(model)
    tensor = getattr(model, name).data
    bits = tensor.reshape(-1).view(torch.uint8)
    bits[-1] ^= 1
    assert fingerprint(model) != before
    bits[-1] ^= 1
    assert fingerprint(model) == before


def test_fingerprint_changes_with_name_shape_and_dtype() -> None:
    def of(name: str, tensor: torch.Tensor) -> str:
        module = nn.Module()
        module.register_buffer(name, tensor)
        return fingerprint(module)

    zeros = torch.zeros(4, 6)
    assert of("a", zeros) == of("a", zeros.clone())
    others = [of("b", zeros), of("a", zeros.T), of("a", zeros.int()), of("a", torch.zeros(4, 6, 1))]
    assert len({of("a", zeros), *others}) == 5


def test_fingerprint_of_swapped_pieces_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "FINGERPRINT_PIECE", 48)  # two rows
    model, swapped = Small(), Small()
    swapped.weight.data = swapped.weight.data[[2, 3, 0, 1]]
    assert fingerprint(model) != fingerprint(swapped)
    transposed = Small()
    transposed.weight.data = model.weight.data.T.contiguous().T  # the same values, laid out differently
    assert fingerprint(transposed) == fingerprint(model)


def test_a_buffer_that_differs_gives_another_contract() -> None:
    loaded = tiny()
    first = Engine(loaded, EngineConfig(model="tiny", kv_memory=2**22, device="cpu"))
    changed = copy.deepcopy(loaded)
    changed.model.model.rotary_emb.inv_freq.mul_(1.0001)
    other = Engine(changed, EngineConfig(model="tiny", kv_memory=2**22, device="cpu"))
    facts, other_facts = dict(first.contract.facts), dict(other.contract.facts)
    assert facts["weights"] != other_facts["weights"]
    assert first.contract.id != other.contract.id


def test_weights_changed_in_memory_before_the_engine_is_built_give_another_contract() -> None:
    loaded = tiny()
    config = EngineConfig(model="tiny", kv_memory=2**22, device="cpu")
    first = dict(Engine(loaded, config).contract.facts)["weights"]
    loaded.model.lm_head.weight.data[0, 0] += 1.0
    assert dict(Engine(loaded, config).contract.facts)["weights"] != first


def test_updating_to_the_same_weights_gives_the_same_contract() -> None:
    engine = tiny_engine()
    before = engine.contract
    assert engine.update_weights({}) == before


def test_a_file_overwritten_after_loading_changes_no_weight(folder) -> None:
    loaded = load(EngineConfig(model=str(folder), device="cpu", dtype="float32"))
    before = {name: tensor.clone() for name, tensor in loaded.model.named_parameters()}
    file = folder / "model.safetensors"
    content = file.read_bytes()
    try:
        with file.open("r+b") as opened:  # in place: a mapped tensor would change with it
            opened.seek(len(content) // 8)
            opened.write(bytes(len(content) - len(content) // 8))
        assert all(torch.equal(before[name], tensor) for name, tensor in loaded.model.named_parameters())
    finally:
        file.write_bytes(content)


def test_a_file_changed_between_its_digest_and_the_end_of_loading_is_refused(folder, monkeypatch) -> None:
    def load_and_touch(*args, **kwargs):
        os.utime(folder / "model.safetensors")
        return load_model(*args, **kwargs)

    monkeypatch.setattr(load_module, "load_model", load_and_touch)
    with pytest.raises(GuaranteeLost, match=r"model\.safetensors was changed while it was loaded"):
        load(EngineConfig(model=str(folder), device="cpu", dtype="float32"))


CONFIG = EngineConfig(model="tiny", kv_memory=2**22, device="cpu")


def weights_of(engine: Engine) -> str:
    return dict(engine.contract.facts)["weights"]


def test_an_engine_built_after_another_one_updated_the_model_names_the_weights_in_memory() -> None:
    loaded = replace(tiny(), facts={"weights": "ab" * 32})  # as if it came from files
    first = Engine(loaded, CONFIG)
    assert weights_of(first) == "ab" * 32
    first.update_weights({"model.norm.weight": torch.full((64,), 7.0)})
    second = Engine(loaded, CONFIG)
    assert weights_of(second) == weights_of(first) == fingerprint(first.runner.model)


def test_weights_from_files_written_before_the_engine_is_built_are_named_by_their_content(folder) -> None:
    config = replace(CONFIG, model=str(folder), dtype="float32")
    loaded = load(config)
    from_files = weights_of(Engine(loaded, config))
    assert from_files == loaded.facts["weights"]
    with torch.no_grad():
        loaded.model.model.norm.weight.mul_(2.0)
    engine = Engine(loaded, config)
    assert weights_of(engine) == fingerprint(engine.runner.model)


def test_writes_are_counted_also_of_a_model_loaded_in_inference_mode(folder) -> None:
    with torch.inference_mode():
        loaded = load(EngineConfig(model=str(folder), device="cpu", dtype="float32"))
    assert not any(tensor.is_inference() for tensor in loaded.model.parameters())
