"""The proof at start-up: what breaks the frame property is refused and named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.engine import engine as engine_module
from samewise.errors import GuaranteeLost
from samewise.execute.load import Loaded, pick_kernel
from samewise.kernels.attention.base import LayerKV, Rows
from samewise.model.activation import FrameActivation
from samewise.model.linear import FrameLinear
from samewise.testing import tiny, tiny_engine
from samewise.types import Sampling
from samewise.verify import operators as operators_module
from samewise.verify.operators import check_linears
from samewise.verify.probe import probe

CONFIG = EngineConfig(model="tiny", kv_memory=2**22, device="cpu", max_num_seqs=4)
DOWN = "model.layers.1.mlp.down_proj"


class ByPlace(FrameLinear):
    """Its answer depends on where the row stands."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-6 * torch.arange(x.shape[-2])[:, None]


class ByCompany(FrameLinear):
    """Its answer depends on who stands beside it. Turning the rows around does not show it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A maximum is exact in any order, so the same company in another order gives the same bits.
        return super().forward(x) + 1e-5 * x.amax(-2, keepdim=True).sum(-1, keepdim=True)


class ByMean(FrameLinear):
    """Likewise, by the mean over rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-5 * x.mean(-2, keepdim=True).mean(-1, keepdim=True)


class SplitsEarly(FrameLinear):
    """Sums the first rows of a frame in another order than the rest: what real kernels do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.in_features // 2
        whole = super().forward(x)
        if x.shape[-2] < 4:
            return whole
        parts = x[..., :3, :half] @ self.weight[:, :half].T + x[..., :3, half:] @ self.weight[:, half:].T
        return torch.cat([parts, whole[..., 3:, :]], -2)


class NormByPlace(nn.Module):
    """A norm whose answer depends on where the row stands."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self._eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * (x * scale) * (1 + 1e-6 * torch.arange(x.shape[-2])[:, None])


class GossipKernel:
    """An attention kernel whose rows listen to their neighbours in the frame."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.name = "gossip"

    def allocate(self, *args: Any) -> LayerKV:
        return self._kernel.allocate(*args)

    def plan(self, *args: Any) -> Any:
        return self._kernel.plan(*args)

    def __call__(self, q: Any, k: Any, v: Any, kv: LayerKV, rows: Rows, **given: Any) -> torch.Tensor:
        out = self._kernel(q, k, v, kv, rows, **given)
        return out + 1e-5 * out.roll(1, 0)


def planted(kind: type[FrameLinear], where: str = DOWN) -> Loaded:
    loaded = tiny()
    parent, _, name = where.rpartition(".")
    module = loaded.model.get_submodule(parent)
    setattr(module, name, kind.around(getattr(module, name)))
    return loaded


@pytest.mark.parametrize("kind", [ByPlace, ByCompany, ByMean, SplitsEarly])
def test_a_linear_that_breaks_the_property_is_refused_and_named(kind: type[FrameLinear]) -> None:
    with pytest.raises(GuaranteeLost, match=r"layers\.1\.mlp\.down_proj") as caught:
        Engine(planted(kind), CONFIG)
    assert "will not start" in str(caught.value)
    assert "ry " in str(caught.value)  # and what to try


@pytest.mark.parametrize(
    "where",
    [
        "model.layers.0.self_attn.q_proj",
        "model.layers.2.self_attn.o_proj",
        "model.layers.0.mlp.up_proj",
        "lm_head",
    ],
)
def test_wherever_it_stands(where: str) -> None:
    with pytest.raises(GuaranteeLost, match=where.replace(".", r"\.")):
        Engine(planted(ByCompany, where), CONFIG)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_in_every_family(family: str) -> None:
    loaded = tiny(family)
    mlp = loaded.model.get_submodule("model.layers.1.mlp")
    mlp.down_proj = ByCompany.around(mlp.down_proj)
    with pytest.raises(GuaranteeLost, match=r"layers\.1\.mlp\.down_proj"):
        Engine(loaded, CONFIG)


@pytest.mark.parametrize("where", ["input_layernorm", "post_attention_layernorm"])
def test_a_norm_is_an_operator_like_the_rest(where: str) -> None:
    loaded = tiny()
    layer = loaded.model.get_submodule("model.layers.1")
    setattr(layer, where, NormByPlace(getattr(layer, where)))
    with pytest.raises(GuaranteeLost, match=rf"layers\.1\.{where}"):
        Engine(loaded, CONFIG)


def test_attention_that_listens_to_its_neighbours_is_named_as_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "pick_kernel", lambda *a: GossipKernel(pick_kernel(*a)))
    with pytest.raises(GuaranteeLost, match=r"before model\.layers\.0\.self_attn\.o_proj \(attention"):
        Engine(tiny(), CONFIG)


def test_a_linear_broken_at_its_shape_is_found_before_the_kv_cache_takes_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> int:
        raise AssertionError("the KV cache was sized")

    monkeypatch.setattr(engine_module, "count_pages", never)
    with pytest.raises(GuaranteeLost, match=r"down_proj \(64×112, torch\.float32\).*frame_rows=128"):
        Engine(planted(SplitsEarly), CONFIG)


@pytest.mark.parametrize("kind", [ByPlace, SplitsEarly])
def test_check_linears_alone_names_it(kind: type[FrameLinear]) -> None:
    with pytest.raises(GuaranteeLost, match=DOWN.replace(".", r"\.")):
        check_linears(planted(kind).model, 16, {})


def test_shapes_are_tried_once_each_and_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path))
    tried: list[str] = []
    real = operators_module._try_linear
    monkeypatch.setattr(operators_module, "_try_linear", lambda *a: (tried.append(a[1]), real(*a))[1])
    facts = {"cpu": "this one"}
    for _ in range(2):
        # q and o, k and v, gate and up, down, head
        assert len(check_linears(tiny().model, 16, facts)) == 5
        assert len(tried) == 5
    check_linears(tiny().model, 16, {"cpu": "another"})
    assert len(tried) == 10


@pytest.mark.parametrize(
    ("family", "rows"),
    [("llama", 1), ("llama", 16), ("llama", 64), ("qwen3", 16), ("mistral", 16), ("gemma3_text", 16)],
)
def test_a_good_model_passes(family: str, rows: int) -> None:
    engine = tiny_engine(family, frame_rows=rows)
    assert engine.report.frames > 3
    assert len(engine.report.digest) == 64


@pytest.mark.parametrize("settings", [{"max_model_len": 2}, {"max_model_len": 17}, {"kv_memory": 4 * 12288}])
def test_it_fits_the_smallest_engine(settings: dict[str, int]) -> None:
    assert tiny_engine(**settings).report.digest


def test_probing_again_gives_the_same_digest_and_holds_no_page() -> None:
    engine = tiny_engine()
    again = probe(engine.runner, max_model_len=engine.max_model_len)
    assert again.digest == engine.report.digest
    engine.check()
    assert engine.stats()["pages_available"] == engine.stats()["pages"]


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e30])
def test_what_lay_in_the_store_before_does_not_matter(junk: float) -> None:
    engine = tiny_engine()
    engine.runner.store.fill(junk)
    assert probe(engine.runner, max_model_len=engine.max_model_len).digest == engine.report.digest


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])  # by its modules, and as one call
def test_an_operator_that_breaks_later_is_found_when_weights_change(family: str) -> None:
    engine = tiny_engine(family)
    mlp = engine.runner.model.get_submodule("model.layers.1.mlp")
    mlp.down_proj = ByCompany.around(mlp.down_proj)
    with pytest.raises(GuaranteeLost, match=r"down_proj|ByCompany"):
        engine.update_weights({})
    with pytest.raises(GuaranteeLost, match="not the certified ones"):
        engine.add([1, 2, 3], Sampling(), max_tokens=4)


def test_a_model_that_was_refused_leaves_the_next_one_alone() -> None:
    with pytest.raises(GuaranteeLost):
        Engine(planted(ByPlace), CONFIG)
    assert Engine(tiny(), CONFIG).report.frames > 3


class BySize(nn.Module):
    """An activation that ends its vectors elsewhere when there are seven rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(x)
        return y + 1e-6 if x.shape[1] == 7 else y


def test_an_activation_that_feels_the_number_of_rows_is_found() -> None:
    loaded = tiny()
    loaded.model.model.layers[1].mlp.act_fn = BySize()
    with pytest.raises(GuaranteeLost, match=r"layers\.1\.mlp\.act_fn gives other bits at 7 rows than at 64"):
        Engine(loaded, CONFIG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "tanh", "sigmoid", "relu2"]
)
@pytest.mark.parametrize("width", [1, 8, 40, 64, 107, 112, 1536, 40000])
def test_a_steady_activation_does_not_feel_how_many_rows_there_are(
    name: str, width: int, dtype: torch.dtype
) -> None:
    activation = FrameActivation(ACT2FN[name])
    wide = torch.randn(1, 33, 3 * width, generator=torch.Generator().manual_seed(3)).mul_(3).to(dtype)
    x = wide[..., width : 2 * width]  # as it is cut from a wider product
    whole = activation(x)
    torch.testing.assert_close(whole, ACT2FN[name](x))
    for rows in (1, 2, 5, 22, 33):
        for start in (0, 33 - rows):
            here = slice(start, start + rows)
            assert torch.equal(activation(x[:, here]), whole[:, here])
            assert torch.equal(activation(x[:, here].contiguous()), whole[:, here])


@pytest.mark.parametrize("width", [8, 107, 120])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_widths_that_are_no_whole_vectors(width: int, dtype: str) -> None:
    assert tiny_engine(overrides={"intermediate_size": width}, dtype=dtype).report.digest
