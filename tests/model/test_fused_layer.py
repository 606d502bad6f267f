"""The fused layer: the bits its source states, the families it supports, the layers that run as modules."""

import ctypes

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from cpp_reference import bits, exp_reference, linear_reference, norm_reference, random_tensor
from native_variants import variant_library
from samewise.engine import Engine
from samewise.errors import GuaranteeLost, InvariantBroken
from samewise.execute.runner import kv_shapes
from samewise.kernels.attention.base import NUM_TABLES, PAGE, Rows
from samewise.kernels.attention.cpu import TorchKernel
from samewise.kernels.attention.native import NativeKernel
from samewise.kernels.native import build as native_build
from samewise.kernels.native import calls
from samewise.kv.store import KVStore
from samewise.model import fused_layer
from samewise.model.arch import inspect_model, layer_list
from samewise.model.attention_binding import ATTENTION, bind_attention
from samewise.model.fused_layer import fuse_layer, unfusable_reason
from samewise.model.linear import pack_linears
from samewise.model.load import wrap_modules
from samewise.testing import FAMILIES, run, submit, tiny, tiny_engine
from samewise.types import LayerSet, Sampling

pytestmark = pytest.mark.skipif(not native_build.compiler_available(), reason="no C++ compiler")

BF16 = torch.bfloat16
DTYPES = [torch.float32, BF16, torch.float16]
WIDTH, INNER, HEADS, KV_HEADS, DIM = 40, 72, 4, 2, 24  # no multiples of a vector's length


def tiny_config(family, **overrides):
    shape = {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "max_position_embeddings": 256,
    }  # fmt: skip
    return AutoConfig.for_model(family, **shape | overrides)


def bound_layers(family, kernel=None, *, dtype=torch.float32, coarse=False, **overrides):
    """The layers of a random model, with native linears and attention bound to KV pages.

    `coarse`: weights are on the grid of bfloat16, so siblings are packed as one.
    """
    torch.manual_seed(0)
    arch = inspect_model(tiny_config(family, **overrides))
    model = AutoModelForCausalLM.from_config(
        tiny_config(family, **overrides), attn_implementation=ATTENTION
    ).to(dtype)
    for name, weight in model.named_parameters():
        with torch.no_grad():
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.dim() > 1 else 0.5) + ("norm" in name))
            if coarse:
                weight.copy_(weight.bfloat16())
    wrap_modules(model)
    pack_linears(model)
    kernel = kernel or NativeKernel()
    store = KVStore(kernel, kv_shapes(arch), 6, dtype, torch.device("cpu"))
    bind_attention(model, arch, kernel, store.layers)
    return list(layer_list(model, arch)[1])


def random_inputs(num_rows, layer=None, seed=0, dtype=torch.float32):
    """Hidden states, rotary tables of random numbers, and the rows of one sequence on pages 3, 1, 4."""
    width = WIDTH if layer is None else layer.self_attn.o_proj.out_features
    dim = DIM if layer is None else layer.self_attn.binding.facts.head_dim
    if layer is not None:
        dim = int(dim * layer.self_attn.config.rope_parameters.get("partial_rotary_factor", 1))
    x, cos, sin = (
        random_tensor(1, num_rows, size, seed=seed + i, dtype=dtype)
        for i, size in enumerate((width, dim, dim))
    )
    lengths = torch.arange(1, num_rows + 1, dtype=torch.int32)
    pages = torch.tensor([3, 1, 4], dtype=torch.int32)
    zeros = torch.zeros_like(lengths)
    slots = pages[(lengths - 1).long() // PAGE] * PAGE + (lengths - 1) % PAGE
    return (
        x,
        (cos, sin),
        Rows(lengths, slots, zeros, lengths, zeros, pages, torch.zeros(0), torch.zeros(0)),
    )


def select_rows(rows, keep):
    *tables, pages = rows[:NUM_TABLES]
    return Rows(*(table[keep] for table in tables), pages, *rows[NUM_TABLES:])


def run_layer(layer, x, angles, rows):
    with torch.inference_mode():
        return layer(x, position_embeddings=angles, rows=rows, attention_mask=None)


def layer_reference(layer, x, angles, rows):
    """The layer in the order that layer.cpp states, with the native attention kernel."""
    attention, mlp, binding = layer.self_attn, layer.mlp, layer.self_attn.binding
    x = x[0]
    if hasattr(layer, "input_layernorm"):
        after_attention, before_mlp, after_mlp = None, layer.post_attention_layernorm, None
        if hasattr(layer, "pre_feedforward_layernorm"):
            after_attention, before_mlp = before_mlp, layer.pre_feedforward_layernorm
            after_mlp = layer.post_feedforward_layernorm
        normed = norm_reference(layer.input_layernorm, x)
    else:
        after_attention, before_mlp = layer.post_attention_layernorm, None
        after_mlp, normed = layer.post_feedforward_layernorm, x
    q, k, v = heads_reference(attention, normed)
    attended = binding.kernel(
        rotate_reference(attention, q, angles), rotate_reference(attention, k, angles), v, binding.kv, rows,
        scale=attention.scaling, window=binding.facts.window,
    ).reshape(x.shape[0], -1)  # fmt: skip
    share = torch.tensor(getattr(layer, "residual_multiplier", 1.0))
    added = linear_reference(attended, attention.o_proj.weight, attention.o_proj.bias)
    x = x + (norm_reference(after_attention, added) if after_attention else added) * share
    normed = norm_reference(before_mlp, x) if before_mlp else x
    added = mlp_reference(mlp, normed)
    return (x + (norm_reference(after_mlp, added) if after_mlp else added) * share)[None]


def heads_reference(attention, x):
    """Queries, keys and values [R, heads, D], normed."""
    dim = attention.binding.facts.head_dim
    if hasattr(attention, "qkv_proj"):
        both = linear_reference(x, attention.qkv_proj.weight, None)
        widths = [heads * dim for heads in (HEADS, KV_HEADS, KV_HEADS)]
        flat = list(both.split(widths, dim=-1))
    else:
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        flat = [linear_reference(x, linear.weight, linear.bias) for linear in linears]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    whole = norms[0] is not None and norms[0].weight.shape[0] != dim
    if whole:
        flat[:2] = [norm_reference(norm, part) for norm, part in zip(norms, flat[:2], strict=True)]
    heads = [part.reshape(x.shape[0], -1, dim) for part in flat]
    if norms[0] is not None and not whole:
        heads[:2] = [norm_reference(norm, part) for norm, part in zip(norms, heads[:2], strict=True)]
    return heads


def rotate_reference(attention, x, angles):
    if not getattr(attention, "use_rope", True):
        return x
    cos, sin = (table[0][:, None] for table in angles)
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = cos.shape[-1] // 2
    turned = torch.cat([-turning[..., half:], turning[..., :half]], dim=-1)
    return torch.cat([turning * cos + turned * sin, rest], dim=-1)


def mlp_reference(mlp, x):
    if hasattr(mlp, "gate_up_proj"):
        gate, up = linear_reference(x, mlp.gate_up_proj.weight, None).chunk(2, dim=-1)
    else:
        gate, up = (linear_reference(x, one.weight, one.bias) for one in (mlp.gate_proj, mlp.up_proj))
    activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    s = gate
    if type(activation.inner) is type(ACT2FN["gelu_pytorch_tanh"]):
        cube = gate * gate * gate
        s = torch.tensor(1.59576912) * (gate + torch.tensor(0.044715) * cube)
    e = exp_reference(-s.abs())
    gated = gate * (torch.where(s < 0, e, 1.0) / (1.0 + e)) * up
    return linear_reference(gated, mlp.down_proj.weight, mlp.down_proj.bias)


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
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
    "gemma3": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}),
    "granite": ("granite", {"residual_multiplier": 0.7, "attention_multiplier": 0.3}),
    "olmo2": ("olmo2", TOKENS),
    "phi3": ("phi3", TOKENS),
    "phi3, half of a head turns": ("phi3", TOKENS | {"rope_parameters": PARTIAL_ROPE}),
    "smollm3": ("smollm3", TOKENS | {"no_rope_layers": [1, 0]}),
}  # fmt: skip


@pytest.mark.parametrize("coarse", [False, True], ids=["separate", "packed as one"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_stated_order(shape, coarse):
    family, overrides = SHAPES[shape]
    for layer in bound_layers(family, coarse=coarse, **overrides):
        if hasattr(layer.self_attn, "q_proj"):
            assert (layer.self_attn.q_proj.merged is not None) == coarse
        for num_rows in (1, 2, 19):
            inputs = random_inputs(num_rows, layer)
            with torch.inference_mode():
                expected = layer_reference(layer, *inputs)
            assert torch.equal(bits(run_layer(fuse_layer(layer), *inputs)), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_of_a_tree_has_the_bits_of_its_path(dtype):
    """Two guesses after 18 positions: the second lies one slot further and reads itself through its tail."""
    layer = fuse_layer(bound_layers("llama", dtype=dtype)[0])
    x, (cos, sin), rows = random_inputs(19, dtype=dtype)
    expected = run_layer(layer, x, (cos, sin), rows)[:, 18]

    at = [*range(18), 0, 18]  # the first guess is another token
    here = [*range(19), 18]  # both stand at position 18
    tree = select_rows(rows, here)
    slots = tree.slots.clone()
    slots[19] += 1
    tail_start, pages = tree.tail_start.clone(), torch.cat([rows.pages, slots[19:]])
    tail_start[19], tail = 18, torch.full_like(slots, len(rows.pages))
    tree = tree._replace(slots=slots, tail_start=tail_start, tail=tail, pages=pages)
    got = run_layer(layer, x[:, at], (cos[:, here], sin[:, here]), tree)[:, 19]
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("shape", SHAPES)
def test_result_equals_the_modules_up_to_rounding(shape):
    family, overrides = SHAPES[shape]
    for layer in bound_layers(family, **overrides):
        assert unfusable_reason(layer) is None
        inputs = random_inputs(19, layer, seed=7)
        expected = run_layer(layer, *inputs)
        torch.testing.assert_close(run_layer(fuse_layer(layer), *inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [name for name, (family, _) in SHAPES.items() if family != "olmo2"])
def test_most_elements_in_16_bits_are_those_of_the_modules(shape, dtype):
    """The kernel rounds where the modules do: only sums differ, in few last bits."""
    family, overrides = SHAPES[shape]
    for layer in bound_layers(family, dtype=dtype, **overrides):
        assert unfusable_reason(layer) is None
        inputs = random_inputs(19, layer, seed=7, dtype=dtype)
        expected, got = run_layer(layer, *inputs), run_layer(fuse_layer(layer), *inputs)
        assert got.dtype == dtype
        assert (got != expected).float().mean() < 0.3
        tolerance = fused_layer.CHECK_TOLERANCE[dtype]
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_in_16_bits(family, dtype):
    engine = tiny_engine(family, dtype=dtype)
    assert engine.runner.layers_name == ("modules" if family == "olmo2" else "native")
    (transcript,) = run(engine, [([5, 6, 7], Sampling(), 3)])
    assert len(transcript.tokens) == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_other_rows_or_threads(dtype):
    layer = fuse_layer(bound_layers("qwen3", dtype=dtype)[0])
    x, (cos, sin), rows = random_inputs(33, dtype=dtype)
    expected = bits(run_layer(layer, x, (cos, sin), rows))
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for step in (1, 2, 5, 16, 33):
                for start in range(0, 33, step):
                    keep = slice(start, start + step)
                    part = run_layer(layer, x[:, keep], (cos[:, keep], sin[:, keep]), select_rows(rows, keep))
                    assert torch.equal(bits(part), expected[:, keep])
    finally:
        torch.set_num_threads(num_threads)


def test_wide_layer_on_several_threads_gives_each_row_its_own_bits():
    """The layer is wide enough that norms and activations are split over threads, too."""
    layer, _ = bound_layers("qwen3", hidden_size=1600, intermediate_size=2048)
    fused = fuse_layer(layer)
    x, (cos, sin), rows = random_inputs(40, layer)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        expected = bits(run_layer(fused, x, (cos, sin), rows))
        for i in range(40):
            keep = slice(i, i + 1)
            alone = run_layer(fused, x[:, keep], (cos[:, keep], sin[:, keep]), select_rows(rows, keep))
            assert torch.equal(bits(alone), expected[:, keep])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_portable_build_gives_the_same_bits(monkeypatch, dtype):
    layer, inputs = bound_layers("qwen3", dtype=dtype)[0], random_inputs(19, dtype=dtype)
    expected = bits(run_layer(fuse_layer(layer), *inputs))
    entry = variant_library("portable, -O1").samewise_layer
    entry.argtypes = [ctypes.POINTER(calls.Layer), ctypes.POINTER(calls.Visit)]
    monkeypatch.setattr(fused_layer, "_entry", lambda: entry)
    assert torch.equal(bits(run_layer(fuse_layer(layer), *inputs)), expected)


def test_silu_reference_equals_torch_for_large_and_tiny_inputs():
    gate = torch.tensor([-200.0, -90.0, -87.5, -20.0, -1e-30, 0.0, 1e-30, 3.0, 90.0, 200.0])
    e = exp_reference(-gate.abs())
    sigmoid = torch.where(gate < 0, e, 1.0) / (1.0 + e)
    torch.testing.assert_close(gate * sigmoid, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("skipped", [LayerSet((0,), ()), LayerSet((), (0,))], ids=["attention", "mlp"])
def test_view_without_a_sublayer_can_be_fused(skipped):
    engine = tiny_engine()
    views = engine.runner.views()
    models = views.without(skipped), views.without(skipped, fuse_layer)
    width, dim = engine.loaded.model.config.hidden_size, engine.loaded.arch.layers[0].head_dim
    x, cos, sin = (random_tensor(1, 5, size, seed=i) for i, size in enumerate((width, dim, dim)))
    lengths = torch.arange(1, 6, dtype=torch.int32)
    page, zeros = torch.ones(1, dtype=torch.int32), torch.zeros_like(lengths)
    rows = Rows(lengths, PAGE + lengths - 1, zeros, lengths, zeros, page, torch.zeros(0), torch.zeros(0))
    layers = [layer_list(model, engine.loaded.arch)[1][0] for model in models]
    expected, got = (run_layer(layer, x, (cos, sin), rows) for layer in layers)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class IdentityNorm(torch.nn.Module):
    """Has a norm's attributes and returns its input."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return x


def test_changed_layer_runs_as_its_modules():
    layer, other = bound_layers("llama")
    assert unfusable_reason(layer) is None
    layer.mlp.act_fn.inner = ACT2FN["gelu"]
    with torch.no_grad():
        layer.mlp.down_proj.weight.zero_()  # the result is the same with any activation
    pack_linears(layer)
    assert "SiLU" in unfusable_reason(layer)
    handle = other.mlp.register_forward_hook(lambda *_: None)
    assert unfusable_reason(other)  # has a hook
    handle.remove()
    assert unfusable_reason(other) is None
    other.input_layernorm = IdentityNorm(other.input_layernorm)
    assert unfusable_reason(other)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma", {}),
        ("llama", {"kernel": TorchKernel()}),
    ],
    ids=["family", "attention"],
)
def test_unsupported_layer_runs_as_its_modules(family, change):
    assert not any(unfusable_reason(layer) is None for layer in bound_layers(family, **change))


def test_layer_of_two_dtypes_runs_as_its_modules():
    layer, _ = bound_layers("llama", dtype=BF16)
    layer.input_layernorm.float()
    assert unfusable_reason(layer) == "it is in torch.bfloat16, torch.float32"


def test_new_weights_of_norms_and_biases_are_read_again_in_bfloat16():
    layer = bound_layers("qwen2", dtype=BF16)[0]
    fused, inputs = fuse_layer(layer), random_inputs(5, dtype=BF16)
    before = run_layer(fused, *inputs)
    with torch.no_grad():
        layer.input_layernorm.weight.mul_(2)
        layer.self_attn.q_proj.bias.add_(1)
    pack_linears(layer)
    after = run_layer(fused, *inputs)
    assert not torch.equal(before, after)
    assert torch.equal(after, run_layer(fuse_layer(layer), *inputs))


def test_weights_of_norms_and_biases_may_be_strided():
    layer = bound_layers("qwen2")[0]
    fused, inputs = fuse_layer(layer), random_inputs(5)
    before = run_layer(fused, *inputs)
    for module in (layer.input_layernorm, layer.post_attention_layernorm):
        module.weight.data = torch.stack([module.weight.data] * 2, 1)[:, 0]
    for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
        module.bias.data = torch.stack([module.bias.data] * 2, 1)[:, 0]
    pack_linears(layer)
    assert unfusable_reason(layer) is None
    assert torch.equal(bits(run_layer(fuse_layer(layer), *inputs)), bits(before))


def test_result_is_compared_with_the_modules():
    layer, _ = bound_layers("llama")
    layer.self_attn.scaling = 0.3  # modules and kernel both read it
    assert unfusable_reason(layer) is None
    layer.post_attention_layernorm.variance_epsilon = 1e-6
    fused = fuse_layer(layer)
    layer.post_attention_layernorm.variance_epsilon = 1.0
    assert not fused_layer._agrees(layer, fused)


def test_layer_without_packed_weights_is_not_fused():
    layer, _ = bound_layers("llama")
    for module in layer.modules():
        if hasattr(module, "packed"):
            module.packed = module.merged = None
    assert "not native" in unfusable_reason(layer)
    with pytest.raises(GuaranteeLost, match="replaced"):
        fuse_layer(layer)


def test_inputs_of_wrong_shape_dtype_or_slot_break_an_invariant():
    layer = fuse_layer(bound_layers("llama")[0])
    x, (cos, sin), rows = random_inputs(4)
    with pytest.raises(InvariantBroken, match="width 40"):
        run_layer(layer, x[..., :39], (cos, sin), rows)
    with pytest.raises(InvariantBroken, match="was given"):
        run_layer(layer, x, (cos[..., :6], sin[..., :6]), rows)
    with pytest.raises(InvariantBroken, match="slot"):
        run_layer(layer, x, (cos, sin), rows._replace(slots=rows.slots + 1000))
    with pytest.raises(InvariantBroken, match="int64"):
        run_layer(layer, x, (cos, sin), rows._replace(pages=rows.pages.long()))


def test_repacked_weights_are_used():
    layer, _ = bound_layers("llama")
    fused, inputs = fuse_layer(layer), random_inputs(3)
    before = run_layer(fused, *inputs)
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(1.5)
    pack_linears(layer)
    after = run_layer(fused, *inputs)
    assert not torch.equal(before, after)
    assert torch.equal(bits(after), bits(run_layer(fuse_layer(layer), *inputs)))


@pytest.mark.parametrize("name", ["layers.1.input_layernorm.weight", "layers.0.self_attn.q_proj.bias",
                                  "layers.1.mlp.up_proj.weight"])  # fmt: skip
def test_engine_with_updated_weights_equals_an_engine_built_with_them(name):
    def generate(engine):
        submit(engine, [5, 9, 77, 200], Sampling(), max_tokens=12)
        return [token for _ in iter(lambda: engine.idle, True) for d in engine.step() for token in d.tokens]

    engine, other = tiny_engine("qwen2"), tiny("qwen2")
    before, weight = generate(engine), other.model.get_parameter(f"model.{name}")
    with torch.no_grad():
        weight.copy_(weight.flip(0) * 3 + 1)
    engine.update_weights({f"model.{name}": weight.detach().clone()})
    fresh = Engine(other, engine.config)
    assert engine.runner.fused
    assert fresh.report.digest == engine.report.digest
    after = generate(engine)
    assert after == generate(fresh) != before


def test_default_dtype_of_the_process_does_not_matter():
    dtype = torch.get_default_dtype()
    layer, _ = bound_layers("llama")
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert unfusable_reason(layer) is None
    finally:
        torch.set_default_dtype(dtype)


def test_contract_states_native_layers_or_modules():
    assert dict(tiny_engine().contract.facts)["layers"] == "native"
    assert dict(tiny_engine(linear="torch").contract.facts)["layers"] == "modules"
