"""Views of layers: a pass that skips sublayers is the model in which they add nothing."""

import pytest
import torch

from samewise.execute.pack import pack_frame
from samewise.execute.runner import FastPath
from samewise.model.gates import LayerGates
from samewise.testing import FAMILIES, tiny_engine
from samewise.types import LayerSet


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skipped_sublayer_adds_nothing(family):
    engine = tiny_engine(family, proposer="none", overrides={"num_hidden_layers": 4})
    runner = engine.runner
    skipped = LayerSet(frozenset({1, 2}), frozenset({2, 3}))
    path = runner.skip_path(runner.views(), skipped)
    inputs = pack_frame([], runner.staging(4))
    inputs.tokens.copy_(torch.tensor([[5, 9, 77, 200]]))
    full, without = runner.eager(inputs).clone(), runner.fast_eager(inputs, path).clone()
    layers = runner.model.model.layers
    with torch.no_grad():
        for i in skipped.attention:
            layers[i].self_attn.o_proj.weight.zero_()
            layers[i].self_attn.o_proj.packed = None
        for i in skipped.mlp:
            layers[i].mlp.down_proj.weight.zero_()
            layers[i].mlp.down_proj.packed = None
    zeroed = runner.eager(inputs)
    torch.testing.assert_close(without, zeroed)
    assert not torch.equal(full, zeroed)


def test_a_layer_skipped_entirely_is_not_called_and_the_model_is_unchanged():
    engine = tiny_engine(proposer="none", overrides={"num_hidden_layers": 4})
    runner = engine.runner
    before = runner.eager(pack_frame([], runner.staging(2))).clone()
    called = []
    handles = [m.register_forward_hook(lambda m, *_: called.append(m)) for m in runner.model.model.layers]
    path = runner.skip_path(runner.views(), LayerSet(frozenset({1}), frozenset({1, 2})))
    called.clear()
    runner.fast_eager(pack_frame([], runner.staging(2)), path)
    assert runner.model.model.layers[1] not in called
    for handle in handles:
        handle.remove()
    assert torch.equal(runner.eager(pack_frame([], runner.staging(2))), before)


def test_norms_that_feed_only_one_sublayer_are_found():
    engine = tiny_engine(proposer="none", overrides={"num_hidden_layers": 3})
    views = engine.runner.views()
    assert views._attention_feeders == ["input_layernorm"]
    assert views._mlp_feeders == ["post_attention_layernorm"]


SETS = [LayerSet(), LayerSet(frozenset({1, 2}), frozenset({2, 3})), LayerSet(mlp=frozenset({1}))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_behind_closed_gates_is_that_of_the_model_without_these_sublayers(family):
    engine = tiny_engine(family, proposer="none", overrides={"num_hidden_layers": 4})
    runner = engine.runner
    views, gates = runner.views(), LayerGates(4, 6, runner.device)
    gates.set(SETS, rows_each=2)
    inputs = pack_frame([], runner.staging(6))
    inputs.tokens.copy_(torch.tensor([[5, 9] * 3]))
    gated = runner.fast_eager(inputs, FastPath(views.gated(gates), None)).clone()
    for i, skipped in enumerate(SETS):
        without = runner.fast_eager(inputs, runner.skip_path(views, skipped))
        rows = slice(2 * i, 2 * i + 2)
        torch.testing.assert_close(gated[rows], without[rows])
    assert not torch.equal(gated[0:2], gated[2:4])


def test_a_closed_gate_stops_infinities():
    engine = tiny_engine(proposer="none", overrides={"num_hidden_layers": 4}, linear="torch")
    runner = engine.runner
    gates = LayerGates(4, 2, runner.device)
    gates.set([LayerSet(mlp=frozenset({2}))], rows_each=2)
    with torch.no_grad():
        runner.model.model.layers[2].mlp.down_proj.weight.fill_(float("inf"))
    path = FastPath(runner.views().gated(gates), None)
    assert runner.fast_eager(pack_frame([], runner.staging(2)), path).isfinite().all()


def test_gated_layers_measure_what_sublayers_add_to_the_stream():
    engine = tiny_engine(proposer="none", overrides={"num_hidden_layers": 3}, linear="torch")
    runner = engine.runner
    gates = LayerGates(3, 4, runner.device)
    with torch.no_grad():
        runner.model.model.layers[1].mlp.down_proj.weight.zero_()
    runner.fast_eager(pack_frame([], runner.staging(4)), FastPath(runner.views().gated(gates), None))
    shares = gates.shares(4)
    assert shares[1][1] == 0.0
    assert shares[0][1] > 0.0  # padding rows see no keys: attention adds nothing
    assert shares[2][1] > 0.0
