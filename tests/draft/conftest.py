"""Fixtures of the tests of `skip`."""

import pytest

from samewise.model import fused_layer, fused_stack
from samewise.model.layer_parts import attention_of, mlp_of


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty user's cache: no layer set is stored."""
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def fused_hooks(monkeypatch):
    """Let fused layers call the forward hooks of their attention and MLP, by which the tests' clock moves."""

    def with_hooks(call, layers_of):
        def called(self, *args, **named):
            out = call(self, *args, **named)
            for layer in layers_of(self):
                for part in (attention_of(layer._layer), mlp_of(layer._layer)):
                    for hook in part._forward_hooks.values() if part is not None else ():
                        hook(part, (), out)
            return out

        return called

    one, many = fused_layer.FusedForward, fused_stack.StackedForward
    monkeypatch.setattr(one, "__call__", with_hooks(one.__call__, lambda layer: [layer]))
    monkeypatch.setattr(many, "__call__", with_hooks(many.__call__, lambda stack: stack.layers))
