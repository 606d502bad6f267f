"""Layers in one call: the bits of the layers one by one, and which layers are joined."""

import pytest
import torch
from test_fused_layer import DTYPES, SHAPES, bound_layers, random_inputs, run_layer

from cpp_reference import bits
from samewise.errors import InvariantBroken
from samewise.kernels.native import build as native_build
from samewise.model.fused_layer import FusedForward, fuse_layer
from samewise.model.fused_stack import StackedForward, stack_layers
from samewise.model.linear import pack_linears
from samewise.testing import tiny_engine
from samewise.types import LayerSet

pytestmark = pytest.mark.skipif(not native_build.compiler_available(), reason="no C++ compiler")


def forwards(model_layers):
    return [type(layer.__dict__.get("forward")) for layer in model_layers]


# No stack: Gemma 3's layers have positions of two kinds, some of SmolLM3's none. OLMo 2 in 16 bits: modules.
STACKED = [
    (shape, dtype)
    for shape, (family, _) in SHAPES.items()
    for dtype in DTYPES
    if family not in ("gemma3_text", "smollm3") and (family, dtype) not in [("olmo2", d) for d in DTYPES[1:]]
]


@pytest.mark.parametrize(("shape", "dtype"), STACKED)
def test_bits_are_those_of_the_layers_one_by_one(shape, dtype):
    family, overrides = SHAPES[shape]
    modules = bound_layers(family, dtype=dtype, **overrides)
    layers = [fuse_layer(layer) for layer in modules]
    (stack,) = stack_layers(layers)
    for num_rows in (1, 4, 5, 9, 19, 23):
        x, angles, rows = random_inputs(num_rows, modules[0], dtype=dtype)
        expected = x
        for layer in layers:
            expected = run_layer(layer, expected, angles, rows)
        assert torch.equal(bits(run_layer(stack, x, angles, rows)), bits(expected))


def test_bits_do_not_depend_on_threads():
    (stack,) = stack_layers([fuse_layer(layer) for layer in bound_layers("qwen3")])
    inputs, before = random_inputs(33), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(bits(run_layer(stack, *inputs)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_repacked_weights_are_used():
    layers = bound_layers("llama")
    (stack,), inputs = stack_layers([fuse_layer(layer) for layer in layers]), random_inputs(3)
    before = run_layer(stack, *inputs)
    with torch.no_grad():
        layers[1].mlp.down_proj.weight.mul_(1.5)
    for layer in layers:
        pack_linears(layer)
    after = run_layer(stack, *inputs)
    assert not torch.equal(before, after)
    (anew,) = stack_layers([fuse_layer(layer) for layer in layers])
    assert torch.equal(bits(after), bits(run_layer(anew, *inputs)))


def test_layers_that_are_not_fused_stay_as_they_are():
    plain = bound_layers("llama")
    assert stack_layers(plain) == plain
    fused = [fuse_layer(layer) for layer in plain]
    mixed = [plain[0], *fused, plain[1], fused[0]]
    joined = stack_layers(mixed)
    assert [joined[0], joined[2], joined[3]] == [plain[0], plain[1], fused[0]]
    assert forwards(joined)[1] is StackedForward


def test_an_engine_runs_its_frames_and_views_as_stacks():
    runner = tiny_engine().runner
    (stack,) = runner._canonical.model.layers
    assert type(stack.forward) is StackedForward
    whole = LayerSet((0,), (0,))  # a layer left out whole cuts the others off
    path = runner.skip_path(runner.views(), whole)
    assert set(forwards(path.model.model.layers)) <= {StackedForward, FusedForward, type(lambda: 0)}
    assert len(path.model.model.layers) == 2


def test_a_slot_outside_of_the_pages_breaks_an_invariant():
    (stack,) = stack_layers([fuse_layer(layer) for layer in bound_layers("llama")])
    x, angles, rows = random_inputs(4)
    with pytest.raises(InvariantBroken, match="slot"):
        run_layer(stack, x, angles, rows._replace(slots=rows.slots + 1000))
