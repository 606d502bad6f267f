"""Trying linears at every frame size: on made weights once per shape, on loaded ones once per model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import CUDA  # before Triton is imported: it may choose the interpreter

from samewise.config import EngineConfig
from samewise.engine import Engine, assemble
from samewise.errors import GuaranteeLost
from samewise.execute.load import Loaded
from samewise.kernels import graph
from samewise.kernels.linear import triton as linears
from samewise.model.linear import FrameLinear, order_linears, pack_linears, stack_siblings
from samewise.testing import tiny, tiny_engine
from samewise.verify import frame_sizes, operators
from samewise.verify.operators import check_linears, recheck_linears

FACTS = {"cpu": "this one"}


class LinearByBias(FrameLinear):
    """A linear whose bias is added in another way to the first row: without one it is as it should be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if self.bias is not None:
            output[..., 0, :] = (output[..., 0, :] - self.bias) * (1 + 2**-20) + self.bias
        return output


class LinearByWeight(FrameLinear):
    """A linear that is wrong in its first row with one weight only."""

    marked: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if torch.equal(self.weight, self.marked):
            output[..., 0, :] *= 1 + 2**-20
        return output


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of linears that were tried, with the kind of trial."""
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path))
    names: list[str] = []
    for kind in ("_try_made", "_try_loaded"):
        real = getattr(operators, kind)

        def counted(*args, kind=kind, real=real):
            names.append(f"{kind} {args[1]}")
            return real(*args)

        monkeypatch.setattr(operators, kind, counted)
    return names


def test_each_shape_is_tried_once_and_then_cached(tried: list[str]) -> None:
    for _ in range(2):
        # Five shapes: q and o, k and v, gate and up, down, head; each on a made and on its loaded weight.
        assert len(check_linears(tiny().model, 16, FACTS, weights="a")) == 5
        assert len(tried) == 10
    check_linears(tiny().model, 16, {"cpu": "another"}, weights="a")
    assert len(tried) == 20


def test_other_weights_are_tried_again_and_made_ones_are_not(tried: list[str]) -> None:
    check_linears(tiny().model, 16, FACTS, weights="a")
    tried.clear()
    check_linears(tiny(seed=1).model, 16, FACTS, weights="b")
    assert [name.split()[0] for name in tried] == ["_try_loaded"] * 5


def test_nothing_is_cached_about_weights_without_a_digest(tried: list[str]) -> None:
    for _ in range(2):
        check_linears(tiny().model, 16, FACTS)
    assert len(tried) == 5 + 2 * 5


def replaced(linear: type[FrameLinear], *, family: str = "qwen2") -> Loaded:
    """A model of a family with one linear of this class."""
    loaded = tiny(family)
    attention = loaded.model.get_submodule("model.layers.0.self_attn")
    attention.q_proj = linear.from_linear(attention.q_proj)
    return loaded


def test_a_linear_that_is_wrong_with_its_loaded_bias_only_is_refused() -> None:
    loaded = replaced(LinearByBias)
    assert loaded.model.model.layers[0].self_attn.q_proj.bias.abs().max() > 0
    with pytest.raises(GuaranteeLost, match=r"layers\.0\.self_attn\.q_proj"):
        check_linears(loaded.model, 16, FACTS)


def test_a_linear_that_is_wrong_with_its_loaded_weight_only_is_refused() -> None:
    loaded = replaced(LinearByWeight, family="llama")
    linear = loaded.model.model.layers[0].self_attn.q_proj
    linear.marked = linear.weight.detach().clone()
    with pytest.raises(GuaranteeLost, match=r"layers\.0\.self_attn\.q_proj"):
        check_linears(loaded.model, 16, FACTS)
    linear.weight.data = linear.weight.data + 1.0
    assert check_linears(loaded.model, 16, FACTS)


def test_stacked_siblings_are_tried_as_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("qwen2")
    stack_siblings(loaded.model)
    seen = []
    real = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        seen.append((tuple(weight.shape), bias is not None))
        return real(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    check_linears(loaded.model, 16, FACTS, stacked=True)
    assert ((128, 64), True) in seen  # q, k and v with their biases: 64 + 32 + 32 outputs
    assert ((224, 64), False) in seen  # gate and up


def test_packed_siblings_are_tried_as_one_product_with_their_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("qwen2")
    pack_linears(loaded.model)
    seen = []
    real = operators.multiply

    def multiply(x, packed, bias=None):
        seen.append((packed, bias))
        return real(x, packed, bias)

    monkeypatch.setattr(operators, "multiply", multiply)
    check_linears(loaded.model, 16, FACTS)
    q_proj = loaded.model.model.layers[0].self_attn.q_proj
    own = q_proj.bias if q_proj.merged is None else q_proj.merged[0].bias
    assert any(packed is q_proj.packed and bias is own for packed, bias in seen)


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loaded:
    """A model whose linears sum in the stated order; nothing is cached yet."""
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(operators, "LIBRARY_FROM", 32)
    if not CUDA:  # in the interpreter few large tiles take the least time
        tile = linears.LinearTile(rows=32, columns=512, described=False)
        monkeypatch.setattr(linears, "pick_tile", lambda *_, **__: tile)
    loaded = tiny("qwen2", num_hidden_layers=1)
    loaded.model.to("cuda" if CUDA else "cpu")
    stack_siblings(loaded.model)
    order_linears(loaded.model)
    return loaded


NEED_DEVICE = [pytest.param(None, marks=pytest.mark.gpu) if CUDA else None]


@pytest.mark.parametrize("_", NEED_DEVICE)
@pytest.mark.parametrize(("use_library", "rows"), [(True, (32,)), (False, ())])
def test_the_library_multiplies_wide_frames_where_it_gives_the_ordered_bits(
    use_library: bool, rows: tuple[int, ...], _: None, ordered: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the library's place stands the ordered product itself, which does."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.ops.samewise.ordered_linear)
    found = check_linears(ordered.model, 16, FACTS, (1, 16, 32), use_library=use_library)
    assert {operator.library_rows for operator in found} == {rows}
    assert ordered.model.lm_head.library_rows == frozenset(rows)


@pytest.mark.parametrize("_", NEED_DEVICE)
def test_the_library_never_multiplies_the_canonical_frame(
    _: None, ordered: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", torch.ops.samewise.ordered_linear)
    found = check_linears(ordered.model, 32, FACTS, (1, 32, 64))
    assert {operator.library_rows for operator in found} == {(64,)}


@pytest.mark.parametrize("cublas", [True, False])
def test_the_library_is_tried_only_where_the_setting_allows_it(
    cublas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    real = operators.check_linears

    def check(*args: Any, use_library: bool, **given: Any) -> list[operators.Operator]:
        used.append(use_library)
        return real(*args, use_library=use_library, **given)

    monkeypatch.setattr(assemble.operators, "check_linears", check)
    tiny_engine(cublas=cublas)
    assert used == [cublas]


@pytest.mark.parametrize("_", NEED_DEVICE)
@pytest.mark.parametrize("weight", ["made", "loaded"])
def test_a_library_with_other_bits_on_one_of_the_weights_is_not_used(
    weight: str, _: None, ordered: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {parameter.data_ptr() for parameter in ordered.model.parameters()}

    def library(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.ops.samewise.ordered_linear(x, w, bias)
        if (w.data_ptr() in own) == (weight == "loaded"):
            y[..., 3, 1] *= 1 + 2**-20
        return y

    monkeypatch.setattr(torch.nn.functional, "linear", library)
    found = check_linears(ordered.model, 16, FACTS, (1, 16, 32))
    assert {operator.library_rows for operator in found} == {()}


@pytest.mark.parametrize("_", NEED_DEVICE)
def test_an_ordered_linear_with_other_bits_at_a_size_is_refused(
    _: None, ordered: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.ops.samewise.ordered_linear

    class Ops:
        @staticmethod
        def ordered_linear(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            y = real(x, *rest)
            return y * (1 + 2**-20) if x.shape[-2] == 4 else y

    monkeypatch.setattr(torch.ops, "samewise", Ops)
    with pytest.raises(GuaranteeLost, match="other bits at 4 rows than at 16"):
        check_linears(ordered.model, 16, FACTS, (1, 4, 16))


@pytest.mark.gpu
def test_on_cuda_linears_are_tried_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []
    real = graph.CapturedGraph

    class Counted(real):
        def __init__(self, *args):
            captured.append(args)
            super().__init__(*args)

    monkeypatch.setattr(operators, "CapturedGraph", Counted)
    model = tiny("qwen2", dtype=torch.bfloat16).model.to("cuda")
    check_linears(model, 16, {**FACTS, "weights": ""}, sizes=(1, 16, 64))  # nothing is cached
    assert len(captured) >= 5 * 2 * 3


def test_an_engine_tries_the_weights_it_runs(tried: list[str]) -> None:
    Engine(tiny(), EngineConfig(model="tiny", kv_memory=2**22, device="cpu"))
    assert sum(name.startswith("_try_loaded") for name in tried) == 5


def test_replaced_weights_are_tried_again() -> None:
    loaded = replaced(LinearByWeight, family="llama")
    linear = loaded.model.model.layers[0].self_attn.q_proj
    linear.marked = linear.weight.detach() + 1.0
    check_linears(loaded.model, 16, FACTS, sizes=(1, 16))
    recheck_linears(loaded.model, 16, (1, 16), stacked=False)
    linear.weight.data = linear.marked
    with pytest.raises(GuaranteeLost, match=r"layers\.0\.self_attn\.q_proj"):
        recheck_linears(loaded.model, 16, (1, 16), stacked=False)


def test_the_products_tried_on_new_weights_are_those_that_were_tried_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where linears that share their input run as one product, as on CUDA."""
    for module in (assemble, frame_sizes):
        monkeypatch.setattr(module, "stacks_siblings", lambda _: True)
    tried: list[set[str]] = []
    kinds_of = operators._kinds_of

    def record(model: torch.nn.Module, *, stacked: bool) -> Any:
        kinds = kinds_of(model, stacked=stacked)
        tried.append({kind.label for kind in kinds})
        return kinds

    monkeypatch.setattr(operators, "_kinds_of", record)
    engine = tiny_engine(linear="torch", attention="torch", frame_rows=16)
    engine.update_weights({})
    first, again = tried
    assert first == again
    model = engine.runner.model
    stacked = {one.stacked.weight.shape for one in model.modules() if getattr(one, "stacked", None)}
    assert len(stacked) == 2  # q, k, v and gate, up


def test_a_size_that_is_wrong_with_the_replaced_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny().model
    check_linears(model, 16, FACTS, sizes=(1, 16))
    monkeypatch.setattr(operators, "_try_loaded", lambda *_: [16])
    for linear in model.modules():
        if isinstance(linear, FrameLinear):
            linear.pieces = {1: 16}
    recheck_linears(model, 16, (1, 16), stacked=False)  # one row is padded to sixteen
    model.lm_head.pieces = {}
    with pytest.raises(GuaranteeLost, match=r"lm_head .* gives other bits at 1 rows than at 16"):
        recheck_linears(model, 16, (1, 16), stacked=False)


@pytest.mark.parametrize("linear", ["auto", "torch"])
def test_an_update_of_weights_tries_the_linears_again(tried: list[str], linear: str) -> None:
    engine = Engine(tiny(), EngineConfig(model="tiny", kv_memory=2**22, device="cpu", linear=linear))
    tried.clear()
    engine.update_weights({})
    assert [name.split()[0] for name in tried] == ["_try_loaded"] * 5
