"""A layer as one call: the bits its source states, the families it knows, what it must leave alone."""

import ctypes

import pytest
import torch
from test_linear import bits, random, stated
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from samewise.engine import Engine
from samewise.errors import GuaranteeLost, InvariantBroken
from samewise.execute.runner import kv_shapes
from samewise.kernels.attention.base import PAGE, Rows
from samewise.kernels.attention.cpu import TorchKernel
from samewise.kernels.attention.native import NativeKernel
from samewise.kernels.native import build as native_build
from samewise.kv.store import KVStore
from samewise.model import fused_layer as layers
from samewise.model.arch import layer_list, inspect_model
from samewise.model.attention_binding import ATTENTION, bind_attention
from samewise.model.linear import pack_linears
from samewise.model.load import wrap_modules
from samewise.testing import submit, tiny, tiny_engine
from samewise.types import LayerSet, Sampling

pytestmark = pytest.mark.skipif(not native_build.compiler_available(), reason="no C++ compiler")

WIDTH, INNER, HEADS, KV_HEADS, DIM = 40, 72, 4, 2, 24  # nothing a whole number of vectors


def settings(family, **more):
    shape = {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "max_position_embeddings": 256,
    }  # fmt: skip
    return AutoConfig.for_model(family, **shape | more)


def seated(family, kernel=None, *, dtype=torch.float32, coarse=False, **more):
    """A random model whose attention has its seats, and its layers."""
    torch.manual_seed(0)
    arch = inspect_model(settings(family, **more))
    model = AutoModelForCausalLM.from_config(settings(family, **more), attn_implementation=ATTENTION).to(
        dtype
    )
    for name, weight in model.named_parameters():
        with torch.no_grad():
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.dim() > 1 else 0.5) + ("norm" in name))
            if coarse:  # what a file in bfloat16 holds: siblings are packed as one
                weight.copy_(weight.bfloat16())
    wrap_modules(model)
    pack_linears(model)
    kernel = kernel or NativeKernel()
    store = KVStore(kernel, kv_shapes(arch), 6, dtype, torch.device("cpu"))
    bind_attention(model, arch, kernel, store.layers)
    return model, list(layer_list(model, arch)[1])


def inputs(num, layer=None, seed=0):
    """Rows of one sequence, with angles that are anything."""
    width = WIDTH if layer is None else layer.self_attn.q_proj.in_features
    dim = DIM if layer is None else layer.self_attn.binding.facts.head_dim
    x, cos, sin = (random(1, num, size, seed=seed + i) for i, size in enumerate((width, dim, dim)))
    reach = torch.arange(1, num + 1, dtype=torch.int32)
    pages = torch.tensor([3, 1, 4], dtype=torch.int32)
    slots = pages[(reach - 1).long() // PAGE] * PAGE + (reach - 1) % PAGE
    return x, (cos, sin), Rows(reach, slots, torch.zeros_like(reach), pages, torch.zeros(0), torch.zeros(0))


def some(rows, keep):
    return Rows(rows.lengths[keep], rows.slots[keep], rows.page_start[keep], *rows[3:])


def run(layer, x, turns, rows):
    with torch.inference_mode():
        return layer(x, position_embeddings=turns, rows=rows, attention_mask=None)


def norm(module, x):
    """The order layer.cpp states."""
    square = torch.zeros(*x.shape[:-1], -(-x.shape[-1] // 16) * 16)
    square[..., : x.shape[-1]] = x
    lanes = torch.zeros(*x.shape[:-1], 16)
    for k in range(0, square.shape[-1], 16):
        part = square[..., k : k + 16].double()
        lanes = (part * part + lanes.double()).float()
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    mean = lanes / x.shape[-1] + torch.tensor(module.variance_epsilon)
    root = mean.double().sqrt().float()  # torch's own in float32 is not always the nearest
    return module.weight * (x * (1.0 / root))


def exponential(given):
    """`exp_below` of lanes.h, one float32 operation at a time."""

    def fma(a, b, c):
        return (a.double() * torch.as_tensor(b).double() + torch.as_tensor(c).double()).float()

    f = torch.tensor
    x = given.clamp(min=-87.0)
    shift = f(float.fromhex("0x1.8p23"))
    shifted = fma(x, f(float.fromhex("0x1.715476p+0")), shift)
    n = shifted - shift
    r = fma(n, f(-float.fromhex("0x1.7f7d1cp-20")), fma(n, f(-float.fromhex("0x1.62e4p-1")), x))
    y = fma(f(1.9875691500e-4), r, f(1.3981999507e-3))
    for term in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = fma(y, r, f(term))
    y = fma(y, r * r, r) + 1.0
    power = ((n.int() + 127) << 23).view(torch.float32)
    return torch.where(given < -87.0, 0.0, y * power)


def told(layer, x, turns, rows):
    """What layer.cpp says it does, by the kernels it names and the operations it states."""
    a, m, dim = layer.self_attn, layer.mlp, layer.self_attn.binding.facts.head_dim
    x, (cos, sin) = x[0], (turn[0][:, None] for turn in turns)
    normed = norm(layer.input_layernorm, x)
    q, k, v = (
        stated(normed, linear.weight, linear.bias).view(x.shape[0], -1, dim)
        for linear in (a.q_proj, a.k_proj, a.v_proj)
    )
    if hasattr(a, "q_norm"):
        q, k = norm(a.q_norm, q), norm(a.k_norm, k)

    def rotate(y):
        half = dim // 2
        return y * cos + torch.cat([-y[..., half:], y[..., :half]], dim=-1) * sin

    place = a.binding
    seen = place.kernel(
        rotate(q), rotate(k), v, place.kv, rows, scale=a.scaling, window=place.facts.window
    ).reshape(x.shape[0], -1)
    x = x + stated(seen, a.o_proj.weight, a.o_proj.bias)
    normed = norm(layer.post_attention_layernorm, x)
    g, u = (stated(normed, linear.weight, linear.bias) for linear in (m.gate_proj, m.up_proj))
    e = exponential(-g.abs())
    gated = g * (torch.where(g < 0, e, 1.0) / (1.0 + e)) * u
    return (x + stated(gated, m.down_proj.weight, m.down_proj.bias))[None]


SHAPES = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "wide heads": ("qwen3", {"head_dim": 128}),
}  # fmt: skip


@pytest.mark.parametrize("coarse", [False, True], ids=["apart", "packed as one"])
@pytest.mark.parametrize("shape", SHAPES)
def test_its_bits_are_those_its_source_states(shape, coarse):
    family, more = SHAPES[shape]
    for layer in seated(family, coarse=coarse, **more)[1]:
        assert (layer.self_attn.q_proj.merged is not None) == coarse
        for num in (1, 2, 19):
            given = inputs(num, layer)
            with torch.inference_mode():
                expected = told(layer, *given)
            assert torch.equal(bits(run(layers.fuse_layer(layer), *given)), bits(expected))


@pytest.mark.parametrize("shape", SHAPES)
def test_it_answers_as_its_modules_do(shape):
    family, more = SHAPES[shape]
    for layer in seated(family, **more)[1]:
        assert layers.unfusable_reason(layer) is None
        given = inputs(19, layer, seed=7)
        one, other = run(layer, *given), run(layers.fuse_layer(layer), *given)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_rows_company_and_threads_do_not_matter():
    layer = layers.fuse_layer(seated("qwen3")[1][0])
    x, (cos, sin), rows = inputs(33)
    whole = bits(run(layer, x, (cos, sin), rows))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for step in (1, 2, 5, 16, 33):
                for start in range(0, 33, step):
                    keep = slice(start, start + step)
                    part = run(layer, x[:, keep], (cos[:, keep], sin[:, keep]), some(rows, keep))
                    assert torch.equal(bits(part), whole[:, keep])
    finally:
        torch.set_num_threads(before)


def test_many_rows_on_several_threads_are_what_each_is_alone():
    """Wide enough that rows between the products are shared out."""
    _, (layer, _) = seated("qwen3", hidden_size=1600, intermediate_size=2048)
    made = layers.fuse_layer(layer)
    x, (cos, sin), rows = inputs(40, layer)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        whole = bits(run(made, x, (cos, sin), rows))
        for i in range(40):
            keep = slice(i, i + 1)
            alone = run(made, x[:, keep], (cos[:, keep], sin[:, keep]), some(rows, keep))
            assert torch.equal(bits(alone), whole[:, keep])
    finally:
        torch.set_num_threads(before)


def test_another_instruction_set_has_the_same_bits(tmp_path, monkeypatch):
    layer, given = seated("qwen3")[1][0], inputs(19)
    expected = bits(run(layers.fuse_layer(layer), *given))
    target = tmp_path / "portable.so"
    native_build.build(target, ("-DSAMEWISE_PORTABLE",))
    entry = native_build.load_library(target).samewise_layer
    entry.argtypes = [ctypes.POINTER(layers._Layer), ctypes.POINTER(layers._Visit)]
    monkeypatch.setattr(layers, "_entry", lambda: entry)
    assert torch.equal(bits(run(layers.fuse_layer(layer), *given)), expected)


def test_great_and_tiny_gates_are_what_torch_says():
    g = torch.tensor([-200.0, -90.0, -87.5, -20.0, -1e-30, 0.0, 1e-30, 3.0, 90.0, 200.0])
    e = exponential(-g.abs())
    share = torch.where(g < 0, e, 1.0) / (1.0 + e)
    torch.testing.assert_close(g * share, torch.nn.functional.silu(g), rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("out", ["attention", "mlp"])
def test_a_layer_without_one_of_its_sublayers(out):
    engine = tiny_engine()
    views = engine.runner.views()
    kept = {"attention": (), "mlp": ()} | {out: (0,)}
    skipped = LayerSet(tuple(kept["attention"]), tuple(kept["mlp"]))
    one = views.without(skipped)
    other = views.without(skipped, layers.fuse_layer)
    width, dim = engine.loaded.model.config.hidden_size, engine.loaded.arch.layers[0].head_dim
    x, cos, sin = (random(1, 5, size, seed=i) for i, size in enumerate((width, dim, dim)))
    reach = torch.arange(1, 6, dtype=torch.int32)
    page = torch.ones(1, dtype=torch.int32)
    rows = Rows(reach, PAGE + reach - 1, torch.zeros_like(reach), page, torch.zeros(0), torch.zeros(0))
    first = [layer_list(model, engine.loaded.arch)[1][0] for model in (one, other)]
    expected, got = (run(layer, x, (cos, sin), rows) for layer in first)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class Odd(torch.nn.Module):
    """A norm that is not what it looks like."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return x


def test_a_layer_that_does_something_else_is_left_alone():
    _, (layer, other) = seated("llama")
    assert layers.unfusable_reason(layer) is None
    layer.mlp.act_fn.inner = ACT2FN["gelu"]
    with torch.no_grad():
        layer.mlp.down_proj.weight.zero_()  # no number shows it
    pack_linears(layer)
    assert "SiLU" in layers.unfusable_reason(layer)
    handle = other.mlp.register_forward_hook(lambda *_: None)
    assert layers.unfusable_reason(other)  # somebody listens
    handle.remove()
    assert layers.unfusable_reason(other) is None
    other.input_layernorm = Odd(other.input_layernorm)
    assert layers.unfusable_reason(other)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma", {}),
        ("llama", {"kernel": TorchKernel()}),
        ("llama", {"dtype": torch.bfloat16}),
        ("granite", {"residual_multiplier": 0.5}),
    ],
    ids=["family", "attention", "dtype", "arithmetic"],
)
def test_what_it_does_not_know_runs_as_its_modules(family, change):
    assert not any(layers.unfusable_reason(layer) is None for layer in seated(family, **change)[1])


def test_numbers_are_the_second_lock():
    _, (layer, _) = seated("llama")
    layer.self_attn.scaling = 0.3  # an attribute like any other, which modules and kernel both read
    assert layers.unfusable_reason(layer) is None
    layer.post_attention_layernorm.variance_epsilon = 1e-6
    made = layers.fuse_layer(layer)
    layer.post_attention_layernorm.variance_epsilon = 1.0
    assert not layers._agrees(layer, made)


def test_a_linear_without_packed_weights_is_an_error_and_no_answer():
    _, (layer, _) = seated("llama")
    for module in layer.modules():
        if hasattr(module, "packed"):
            module.packed = module.merged = None
    assert "not native" in layers.unfusable_reason(layer)
    with pytest.raises(GuaranteeLost, match="replaced"):
        layers.fuse_layer(layer)


def test_rows_that_do_not_fit_are_an_error():
    layer = layers.fuse_layer(seated("llama")[1][0])
    x, (cos, sin), rows = inputs(4)
    with pytest.raises(InvariantBroken, match="width 40"):
        run(layer, x[..., :39], (cos, sin), rows)
    with pytest.raises(InvariantBroken, match="was given"):
        run(layer, x, (cos[..., :6], sin[..., :6]), rows)
    with pytest.raises(InvariantBroken, match="slot"):
        run(layer, x, (cos, sin), rows._replace(slots=rows.slots + 1000))
    with pytest.raises(InvariantBroken, match="int64"):
        run(layer, x, (cos, sin), rows._replace(pages=rows.pages.long()))


def test_new_weights_are_seen():
    _, (layer, _) = seated("llama")
    made, given = layers.fuse_layer(layer), inputs(3)
    before = run(made, *given)
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(1.5)
    pack_linears(layer)
    after = run(made, *given)
    assert not torch.equal(before, after)
    assert torch.equal(bits(after), bits(run(layers.fuse_layer(layer), *given)))


@pytest.mark.parametrize("name", ["layers.1.input_layernorm.weight", "layers.0.self_attn.q_proj.bias",
                                  "layers.1.mlp.up_proj.weight"])  # fmt: skip
def test_an_engine_with_new_weights_is_the_engine_that_began_with_them(name):
    def answer(engine):
        submit(engine, [5, 9, 77, 200], Sampling(), max_tokens=12)
        return [token for _ in iter(lambda: engine.idle, True) for d in engine.step() for token in d.tokens]

    engine, other = tiny_engine("qwen2"), tiny("qwen2")
    before, weight = answer(engine), other.model.get_parameter(f"model.{name}")
    with torch.no_grad():
        weight.copy_(weight.flip(0) * 3 + 1)
    engine.update_weights({f"model.{name}": weight.detach().clone()})
    fresh = Engine(other, engine.config)
    assert engine.runner.fused
    assert fresh.report.digest == engine.report.digest
    after = answer(engine)
    assert after == answer(fresh) != before


def test_a_process_with_another_default_dtype_sees_the_same():
    before = torch.get_default_dtype()
    _, (layer, _) = seated("llama")
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert layers.unfusable_reason(layer) is None
    finally:
        torch.set_default_dtype(before)


def test_the_contract_says_which_it_is():
    assert dict(tiny_engine().contract.facts)["layers"] == "native"
    assert dict(tiny_engine(linear="torch").contract.facts)["layers"] == "modules"
