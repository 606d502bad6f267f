"""A layer seen whole, without its attention, without its MLP, or passed by.

A view is a shallow copy of a layer with modules of its own: what it leaves out adds nothing to the residual
stream. Weights and seats are the layer's; nothing is set, so nothing has to be put back. How a layer is built
is found by watching one pass, not by its family's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from samewise.errors import BadParameter
from samewise.model.arch import Arch, layer_list
from samewise.model.surgery import with_children, with_forward, with_layers
from samewise.types import LayerSet


class _Silent(nn.Module):
    """A sublayer that adds nothing."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Zeros of the input's shape, which take no memory."""
        return hidden_states.new_zeros(()).expand(hidden_states.shape)


class _SilentAttention(_Silent):
    """Attention that adds nothing and writes no KV."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Zeros, and no weights."""
        return super().forward(hidden_states), None


class _Same(nn.Module):
    """What feeds only a silent sublayer need not be computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x


class Views:
    """Every layer of a model with any of its sublayers left out.

    `watch` runs any pass through the model; what feeds what is seen from it.
    """

    def __init__(self, model: nn.Module, arch: Arch, watch: Callable[[], object]) -> None:
        self._model = model
        self._name, layers = layer_list(model, arch)
        self._layers: list[nn.Module] = list(layers)
        self._attention = [
            facts.module.removeprefix(f"{self._name}.{i}.") for i, facts in enumerate(arch.layers)
        ]
        self._mlp = [
            _mlp_name(layer, attention, arch.model_type)
            for layer, attention in zip(self._layers, self._attention, strict=True)
        ]
        self._feeders = _watch(self._layers[0], (self._attention[0], self._mlp[0]), watch)
        self._made: dict[tuple[int, bool, bool, bool], nn.Module] = {}

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self._layers)

    def weights(self, layer: int) -> tuple[float, float]:
        """Bytes of a layer's attention and of its MLP."""
        parts = (self._attention[layer], self._mlp[layer])
        sizes = [
            float(sum(p.nbytes for p in self._layers[layer].get_submodule(part).parameters()))
            for part in parts
        ]
        return sizes[0], sizes[1]

    def without(self, skipped: LayerSet, prepare: Callable[[nn.Module], Any] | None = None) -> nn.Module:
        """The model with these sublayers left out; every view goes once through `prepare`, if given."""
        layers = [
            self._view(i, prepare, attention=i in skipped.attention, mlp=i in skipped.mlp)
            for i in range(len(self._layers))
        ]
        return with_layers(self._model, self._name, layers)

    def layers(self) -> list[tuple[nn.Module, tuple[nn.Module, nn.Module]]]:
        """Every layer, with its attention and its MLP."""
        return [
            (layer, (layer.get_submodule(attention), layer.get_submodule(mlp)))
            for layer, attention, mlp in zip(self._layers, self._attention, self._mlp, strict=True)
        ]

    def _view(
        self, i: int, prepare: Callable[[nn.Module], Any] | None, *, attention: bool, mlp: bool
    ) -> nn.Module:
        key = (i, attention, mlp, prepare is not None)
        if key not in self._made:
            if attention and mlp:
                self._made[key] = _passed_by(self._layers[i])
            else:
                view = self._some(i, attention=attention, mlp=mlp)
                self._made[key] = view if prepare is None else prepare(view)
        return self._made[key]

    def _some(self, i: int, *, attention: bool, mlp: bool) -> nn.Module:
        layer = self._layers[i]
        if not attention and not mlp:
            return layer
        changes: dict[str, nn.Module] = {}
        for out, name, stand_in in (
            (attention, self._attention[i], _SilentAttention()),
            (mlp, self._mlp[i], _Silent()),
        ):
            if out:
                changes[name] = stand_in
                for feeder in self._feeders[0 if name == self._attention[i] else 1]:
                    changes[feeder] = _Same()
        return with_children(layer, changes)


def _passed_by(layer: nn.Module) -> nn.Module:
    """Stands where the layer stood, with whatever the model may want to know of it, and does nothing."""
    return with_forward(layer, _straight_through)


def _straight_through(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


def _mlp_name(layer: nn.Module, attention: str, family: str) -> str:
    found = [
        name
        for name, child in layer.named_children()
        if name != attention and any(isinstance(m, nn.Linear) for m in child.modules())
    ]
    if "." in attention or len(found) != 1:
        raise BadParameter(
            f"proposer='skip': a layer of {family} is not one attention and one MLP (beside {attention} it "
            f"has {', '.join(found) or 'nothing'}); use another proposer"
        )
    return found[0]


class _Watcher:
    """Sees whose output a layer's modules are given."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}
        self.taken: dict[str, list[str]] = {}  # by maker: who took its output

    def before(self, name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            for given in (*args, *named.values()):
                for maker in [maker for maker, output in self._made.items() if given is output]:
                    self.taken.setdefault(maker, []).append(name)

        return note

    def after(self, name: str) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                self._made[name] = output

        return note


def _watch(
    layer: nn.Module, parts: tuple[str, str], watch: Callable[[], object]
) -> tuple[list[str], list[str]]:
    """For each part, the siblings whose output goes to it and to nobody else."""
    watcher, handles = _Watcher(), []
    for name, child in layer.named_children():
        handles.append(child.register_forward_pre_hook(watcher.before(name), with_kwargs=True))
        handles.append(child.register_forward_hook(watcher.after(name)))
    try:
        watch()
    finally:
        for handle in handles:
            handle.remove()
    attention, mlp = (
        [maker for maker, takers in watcher.taken.items() if takers == [part]] for part in parts
    )
    return attention, mlp


__all__ = ["Views"]
