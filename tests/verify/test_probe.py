"""The probe at start-up: an operator that breaks the frame property is refused and named."""

from typing import Any

import pytest
import torch
from torch import nn

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.engine import assemble as assemble_module
from samewise.errors import GuaranteeLost
from samewise.execute.choices import pick_kernel
from samewise.execute.load import Loaded
from samewise.kernels.attention.base import AttentionKernel, LayerKV, Rows
from samewise.model.linear import FrameLinear
from samewise.testing import submit, tiny, tiny_engine
from samewise.types import Sampling
from samewise.verify.operators import check_linears
from samewise.verify.probe import probe

CONFIG = EngineConfig(model="tiny", kv_memory=2**22, device="cpu", max_num_seqs=4, frame_rows=64)
DOWN_PROJ = "model.layers.1.mlp.down_proj"
DIFFERING_ROWS = 7  # the one number of rows at which ActivationByNumRows differs


class LinearByIndex(FrameLinear):
    """A linear whose output depends on the row's index."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-6 * torch.arange(x.shape[-2])[:, None]


class LinearByMax(FrameLinear):
    """A linear whose output depends on the other rows, but not on their order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A maximum is exact in any order, so the same rows in another order give the same bits.
        return super().forward(x) + 1e-5 * x.amax(-2, keepdim=True).sum(-1, keepdim=True)


class LinearByMean(FrameLinear):
    """A linear whose output depends on the mean over rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-5 * x.mean(-2, keepdim=True).mean(-1, keepdim=True)


class LinearBySplit(FrameLinear):
    """A linear that sums the first rows in another order than the others, as real kernels do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.in_features // 2
        output = super().forward(x)
        if x.shape[-2] < 4:
            return output
        halves = x[..., :3, :half] @ self.weight[:, :half].T + x[..., :3, half:] @ self.weight[:, half:].T
        return torch.cat([halves, output[..., 3:, :]], -2)


class NormByIndex(nn.Module):
    """A norm whose output depends on the row's index."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self._eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * (x * scale) * (1 + 1e-6 * torch.arange(x.shape[-2])[:, None])


class ActivationByNumRows(nn.Module):
    """An activation that differs at one number of rows.

    Built on relu, which is exact: an activation with an exponential would differ at further numbers of rows,
    depending on the CPU's vector width.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu(x)
        return y + 1e-6 if x.shape[1] == DIFFERING_ROWS else y


class NeighbourKernel(AttentionKernel):
    """An attention kernel whose rows depend on the row before them in the frame."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel

    @property
    def name(self) -> str:
        return "neighbour"

    def allocate(self, *args: Any) -> LayerKV:
        return self._kernel.allocate(*args)

    def plan(self, *args: Any) -> Any:
        return self._kernel.plan(*args)

    def __call__(self, q: Any, k: Any, v: Any, kv: LayerKV, rows: Rows, **kwargs: Any) -> torch.Tensor:
        out = self._kernel(q, k, v, kv, rows, **kwargs)
        return out + 1e-5 * out.roll(1, 0)


def tiny_with(linear: type[FrameLinear], name: str = DOWN_PROJ) -> Loaded:
    """A tiny model with one linear replaced by one of this class."""
    loaded = tiny()
    parent, _, child = name.rpartition(".")
    module = loaded.model.get_submodule(parent)
    setattr(module, child, linear.from_linear(getattr(module, child)))
    return loaded


@pytest.mark.parametrize("linear", [LinearByIndex, LinearByMax, LinearByMean, LinearBySplit])
def test_a_linear_that_breaks_the_frame_property_is_refused_and_named(linear: type[FrameLinear]) -> None:
    with pytest.raises(GuaranteeLost, match=r"layers\.1\.mlp\.down_proj") as caught:
        Engine(tiny_with(linear), CONFIG)
    assert "will not start" in str(caught.value)
    assert "ry " in str(caught.value)  # and what to try


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj",
        "model.layers.2.self_attn.o_proj",
        "model.layers.0.mlp.up_proj",
        "lm_head",
    ],
)
def test_a_broken_linear_is_named_anywhere_in_the_model(name: str) -> None:
    with pytest.raises(GuaranteeLost, match=name.replace(".", r"\.")):
        Engine(tiny_with(LinearByMax, name), CONFIG)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_a_broken_linear_is_named_in_other_families(family: str) -> None:
    loaded = tiny(family)
    mlp = loaded.model.get_submodule("model.layers.1.mlp")
    mlp.down_proj = LinearByMax.from_linear(mlp.down_proj)
    with pytest.raises(GuaranteeLost, match=r"layers\.1\.mlp\.down_proj"):
        Engine(loaded, CONFIG)


@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm"])
def test_a_norm_that_breaks_the_frame_property_is_refused_and_named(name: str) -> None:
    loaded = tiny()
    layer = loaded.model.get_submodule("model.layers.1")
    setattr(layer, name, NormByIndex(getattr(layer, name)))
    with pytest.raises(GuaranteeLost, match=rf"layers\.1\.{name}"):
        Engine(loaded, CONFIG)


def test_an_activation_that_depends_on_the_number_of_rows_is_refused_and_named() -> None:
    loaded = tiny()
    loaded.model.model.layers[1].mlp.act_fn = ActivationByNumRows()
    expected = rf"layers\.1\.mlp\.act_fn gives other bits at {DIFFERING_ROWS} rows than at 64"
    with pytest.raises(GuaranteeLost, match=expected):
        Engine(loaded, CONFIG)


def test_attention_that_depends_on_neighbouring_rows_is_named_as_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assemble_module, "pick_kernel", lambda *args: NeighbourKernel(pick_kernel(*args)))
    with pytest.raises(GuaranteeLost, match=r"before model\.layers\.0\.self_attn\.o_proj \(attention"):
        Engine(tiny(), CONFIG)


def test_a_broken_linear_is_found_before_the_kv_cache_takes_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise AssertionError("the KV cache was sized")

    monkeypatch.setattr(assemble_module, "count_pages", fail)
    with pytest.raises(GuaranteeLost, match=r"down_proj \(64×112, torch\.float32\).*frame_rows=128"):
        Engine(tiny_with(LinearBySplit), CONFIG)


@pytest.mark.parametrize("linear", [LinearByIndex, LinearBySplit])
def test_check_linears_names_a_broken_linear(linear: type[FrameLinear]) -> None:
    with pytest.raises(GuaranteeLost, match=DOWN_PROJ.replace(".", r"\.")):
        check_linears(tiny_with(linear).model, 16, {})


@pytest.mark.parametrize(
    ("family", "rows"),
    [("llama", 1), ("llama", 16), ("llama", 64), ("qwen3", 16), ("mistral", 16), ("gemma3_text", 16)],
)
def test_an_unbroken_model_passes(family: str, rows: int) -> None:
    engine = tiny_engine(family, frame_rows=rows)
    assert engine.report.frames > 3
    assert len(engine.report.digest) == 64


@pytest.mark.parametrize("width", [8, 107, 120])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_mlp_width_that_is_no_multiple_of_a_vector_passes(width: int, dtype: str) -> None:
    assert tiny_engine(overrides={"intermediate_size": width}, dtype=dtype).report.digest


@pytest.mark.parametrize("settings", [{"max_model_len": 2}, {"max_model_len": 17}, {"kv_memory": 4 * 12288}])
def test_the_probe_fits_the_smallest_engine(settings: dict[str, int]) -> None:
    assert tiny_engine(**settings).report.digest


def test_probing_again_gives_the_same_digest_and_holds_no_page() -> None:
    engine = tiny_engine()
    again = probe(engine.verifier, max_model_len=engine.max_model_len)
    assert again.digest == engine.report.digest
    engine.check()
    assert engine.stats()["pages_available"] == engine.stats()["pages"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_the_digest_does_not_depend_on_what_the_kv_pages_held_before(value: float) -> None:
    engine = tiny_engine()
    engine.runner.store.fill(value)
    assert probe(engine.verifier, max_model_len=engine.max_model_len).digest == engine.report.digest


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])  # run by modules, and by fused layers
def test_an_operator_broken_later_is_found_when_weights_are_updated(family: str) -> None:
    engine = tiny_engine(family)
    mlp = engine.runner.model.get_submodule("model.layers.1.mlp")
    mlp.down_proj = LinearByMax.from_linear(mlp.down_proj)
    with pytest.raises(GuaranteeLost, match=r"down_proj|LinearByMax"):
        engine.update_weights({})
    with pytest.raises(GuaranteeLost, match="not the certified ones"):
        submit(engine, [1, 2, 3], Sampling(), max_tokens=4)


def test_a_refused_model_does_not_affect_the_next_one() -> None:
    with pytest.raises(GuaranteeLost):
        Engine(tiny_with(LinearByIndex), CONFIG)
    assert Engine(tiny(), CONFIG).report.frames > 3
