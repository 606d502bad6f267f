"""Replacing weights: all tensors fit or nothing changes, and only certified weights are served."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.engine.weights import PIECE, CertifiedWeights, apply_update, read_update
from samewise.errors import BadParameter, CallerError, GuaranteeLost
from samewise.testing import run, submit, tiny, tiny_engine, tiny_model
from samewise.types import Sampling

ASKS = [([65, 66, 67], Sampling(), 5)]
NORM = "model.norm.weight"


def equal_weights(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lm_head.wait", (320, 64), "has no tensor 'lm_head.wait'; names are those of its state dict"),
        ("lm_head.weight", (64, 320), r"lm_head.weight has shape \(64, 320\), the model's has \(320, 64\)"),
        ("lm_head.weight", (), r"lm_head.weight has shape \(\)"),
    ],
)
def test_an_unknown_name_or_another_shape_is_refused_and_changes_nothing(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(BadParameter, match=message) as refused:
        read_update({NORM: torch.full((64,), 7.0), name: torch.zeros(shape)}, model)
    assert refused.value.param == "update"
    assert equal_weights(model.state_dict(), before)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="safetensors") as refused:
        read_update(tmp_path, tiny_model())
    assert refused.value.param == "update"


@pytest.mark.parametrize("as_folder", [False, True])
def test_an_update_is_read_without_being_applied(as_folder: bool, tmp_path: Path) -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if as_folder:
        other.save_pretrained(tmp_path)
    update = read_update(tmp_path if as_folder else dict(other.state_dict()), model)
    assert equal_weights(model.state_dict(), before)
    apply_update(update, model, native=False)
    assert equal_weights(model.state_dict(), other.state_dict())
    assert not equal_weights(model.state_dict(), before)


def test_revoked_weights_are_refused_until_they_are_certified() -> None:
    model = tiny_model()
    own, other = CertifiedWeights(model), CertifiedWeights(model)
    own.check()
    own.revoke()
    for weights in (own, other):  # both engines share the model
        with pytest.raises(GuaranteeLost, match="the weights are not the certified ones"):
            weights.check()
    own.certify()
    own.check()
    with pytest.raises(GuaranteeLost):
        other.check()


def test_weights_can_be_updated_only_while_the_engine_is_idle() -> None:
    engine = tiny_engine()
    submit(engine, [1, 2], Sampling(), max_tokens=3)
    with pytest.raises(CallerError, match="while requests are running"):
        engine.update_weights({})
    while not engine.idle:
        engine.step()
    before = engine.contract
    assert engine.update_weights({}) == before


def test_a_refused_update_leaves_the_engine_serving_the_same_bits() -> None:
    engine = tiny_engine()
    before, contract = run(engine, ASKS), engine.contract
    with pytest.raises(BadParameter):
        engine.update_weights({NORM: torch.full((64,), 7.0), "lm_head.wait": torch.zeros(1)})
    assert (run(engine, ASKS), engine.contract) == (before, contract)


def test_an_engine_whose_update_failed_refuses_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    before = run(engine, ASKS)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("samewise.engine.engine.apply_update", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.update_weights({})
    with pytest.raises(GuaranteeLost):
        run(engine, ASKS)
    with pytest.raises(GuaranteeLost):
        engine.step()
    engine.update_weights({})
    assert run(engine, ASKS) == before


def repeat(times: int, call: Callable[[], object]) -> None:
    for _ in range(times):
        call()


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", NORM])
def test_weights_written_in_place_by_the_caller_are_refused(name: str) -> None:
    engine = tiny_engine()
    before = engine.contract
    submit(engine, [1, 2], Sampling(), max_tokens=30)
    engine.step()
    with torch.no_grad():
        engine.loaded.model.get_parameter(name).mul_(1.5)
    with pytest.raises(GuaranteeLost, match=r"written in place; give new weights to update_weights\(\)"):
        submit(engine, [1, 2], Sampling(), max_tokens=3)
    with pytest.raises(GuaranteeLost, match="written in place"):
        repeat(8, engine.step)
    engine.abort(0)
    assert engine.update_weights({}) != before
    run(engine, ASKS)


def test_every_tensor_is_looked_at_within_a_few_steps() -> None:
    model = torch.nn.ParameterList([torch.zeros(1) for _ in range(3 * PIECE)])
    weights = CertifiedWeights(model)
    for index in (0, PIECE, 3 * PIECE - 1):
        with torch.no_grad():
            model[index].add_(1.0)
        with pytest.raises(GuaranteeLost, match="written in place"):
            repeat(3, weights.check_some)
        with pytest.raises(GuaranteeLost, match="written in place"):
            weights.check()
        weights.certify()
        weights.check()


def test_a_model_made_in_inference_mode_is_served() -> None:
    """torch counts no writes to its tensors."""
    with torch.inference_mode():
        model = torch.nn.Linear(3, 3)
    weights = CertifiedWeights(model)
    weights.check()
    weights.check_some()


def test_a_second_engine_over_the_same_model_leaves_the_first_one_certified() -> None:
    loaded = tiny()
    config = EngineConfig(model="tiny", kv_memory=2**22, device="cpu")
    engine = Engine(loaded, config)
    before = run(engine, ASKS)
    other = Engine(loaded, config)
    assert run(other, ASKS) == run(engine, ASKS) == before
    assert other.contract == engine.contract
