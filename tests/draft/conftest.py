"""Fixtures of the tests of `skip`."""

import pytest

from samewise.model import fused_layer


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty user's cache: no layer set is stored."""
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def fused_hooks(monkeypatch):
    """Let a fused layer call the forward hooks of its attention and MLP, by which the tests' clock moves."""
    call = fused_layer.FusedForward.__call__

    def with_hooks(self, *args, **named):
        out = call(self, *args, **named)
        for part in (self._attention, self._mlp):
            for hook in part._forward_hooks.values() if part is not None else ():
                hook(part, (), out)
        return out

    monkeypatch.setattr(fused_layer.FusedForward, "__call__", with_hooks)
