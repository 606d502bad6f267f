"""Views of layers: a pass that skips sublayers is the model in which they add nothing."""

import pytest
import torch

from samewise.execute.pack import pack_frame
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
