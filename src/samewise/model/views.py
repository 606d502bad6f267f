"""Layers with sublayers left out, for drafting: without attention, without the MLP, or skipped.

A view is a shallow copy of a layer with other children: a sublayer left out adds zeros to the residual
stream. Weights and attention bindings are the layer's own, and the layer itself is never changed. How a layer
is built is read from one recorded pass, not from its family's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from samewise.errors import BadParameter
from samewise.model.arch import Arch, layer_list
from samewise.model.gates import LayerGates
from samewise.model.surgery import with_children, with_forward, with_layers
from samewise.types import LayerSet


class _ZeroMLP(nn.Module):
    """An MLP that adds nothing."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Zeros of the input's shape; one element in memory."""
        return hidden_states.new_zeros(()).expand(hidden_states.shape)


class _ZeroAttention(nn.Module):
    """Attention that adds nothing and writes no KV."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Zeros of the input's shape, and no attention weights."""
        return hidden_states.new_zeros(()).expand(hidden_states.shape), None


def without_attention(layer: nn.Module) -> nn.Module:
    """The layer but for its attention, where the children are named as in Llama."""
    return with_children(layer, {"self_attn": _ZeroAttention()})


def without_mlp(layer: nn.Module) -> nn.Module:
    """The layer but for its MLP, where the children are named as in Llama."""
    return with_children(layer, {"mlp": _ZeroMLP()})


class LayerViews:
    """Every layer of a model with any of its sublayers left out.

    `run_pass` runs any pass through the model; which modules feed which is recorded from it.
    """

    def __init__(self, model: nn.Module, arch: Arch, run_pass: Callable[[], object]) -> None:
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
        self._attention_feeders, self._mlp_feeders = _find_feeders(
            self._layers[0], (self._attention[0], self._mlp[0]), run_pass
        )
        self._views: dict[tuple[int, bool, bool, bool], nn.Module] = {}

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self._layers)

    def sublayer_bytes(self, layer: int) -> tuple[float, float]:
        """Bytes of weights in a layer's attention and in its MLP."""
        attention, mlp = (
            float(sum(p.nbytes for p in self._layers[layer].get_submodule(name).parameters()))
            for name in (self._attention[layer], self._mlp[layer])
        )
        return attention, mlp

    def without(self, skipped: LayerSet, prepare: Callable[[nn.Module], Any] | None = None) -> nn.Module:
        """The model with these sublayers left out; `prepare`, if given, is applied once to each view."""
        layers = [
            self._view(i, prepare, attention=i in skipped.attention, mlp=i in skipped.mlp)
            for i in range(len(self._layers))
        ]
        return with_layers(self._model, self._name, layers)

    def gated(self, gates: LayerGates, prepare: Callable[[nn.Module], Any] | None = None) -> nn.Module:
        """The model whose sublayers have these gates; `prepare`, if given, is applied to each layer."""
        names = zip(self._layers, self._attention, self._mlp, strict=True)
        layers = [gates.gated(layer, i, attention, mlp) for i, (layer, attention, mlp) in enumerate(names)]
        return with_layers(self._model, self._name, [prepare(x) for x in layers] if prepare else layers)

    def layers(self) -> list[tuple[nn.Module, tuple[nn.Module, nn.Module]]]:
        """Every layer, with its attention and its MLP."""
        return [
            (layer, (layer.get_submodule(attention), layer.get_submodule(mlp)))
            for layer, attention, mlp in zip(self._layers, self._attention, self._mlp, strict=True)
        ]

    def _view(
        self, i: int, prepare: Callable[[nn.Module], Any] | None, *, attention: bool, mlp: bool
    ) -> nn.Module:
        """Layer i without its attention, its MLP or both, where these are True; made once."""
        key = (i, attention, mlp, prepare is not None)
        if key not in self._views:
            if attention and mlp:
                self._views[key] = with_forward(self._layers[i], _return_input)
            else:
                view = self._without_sublayer(i, attention=attention, mlp=mlp)
                self._views[key] = view if prepare is None else prepare(view)
        return self._views[key]

    def _without_sublayer(self, i: int, *, attention: bool, mlp: bool) -> nn.Module:
        """Modules that only feed the sublayer left out are replaced too, to save their time."""
        if attention:
            changes: dict[str, nn.Module] = {name: nn.Identity() for name in self._attention_feeders}
            return with_children(self._layers[i], changes | {self._attention[i]: _ZeroAttention()})
        if mlp:
            changes = {name: nn.Identity() for name in self._mlp_feeders}
            return with_children(self._layers[i], changes | {self._mlp[i]: _ZeroMLP()})
        return self._layers[i]


def _return_input(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


def _mlp_name(layer: nn.Module, attention: str, family: str) -> str:
    """The one child beside attention that has linears."""
    names = [
        name
        for name, child in layer.named_children()
        if name != attention and any(isinstance(m, nn.Linear) for m in child.modules())
    ]
    if "." in attention or len(names) != 1:
        raise BadParameter(
            f"proposer='skip': a layer of {family} is not one attention and one MLP (beside {attention} it "
            f"has {', '.join(names) or 'nothing'}); use another proposer",
            param="proposer",
        )
    return names[0]


class _FlowRecorder:
    """Records which of a layer's children are given the output of which."""

    def __init__(self) -> None:
        self._outputs: dict[str, torch.Tensor] = {}
        self.consumers: dict[str, list[str]] = {}  # producer -> children given its output, in order

    def before(self, name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in (*args, *kwargs.values()):
                for producer in [other for other, output in self._outputs.items() if value is output]:
                    self.consumers.setdefault(producer, []).append(name)

        return record

    def after(self, name: str) -> Callable[..., None]:
        def record(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                self._outputs[name] = output

        return record


def _find_feeders(
    layer: nn.Module, sublayers: tuple[str, str], run_pass: Callable[[], object]
) -> tuple[list[str], list[str]]:
    """For each sublayer, the children whose output goes to it and nowhere else."""
    recorder, handles = _FlowRecorder(), []
    for name, child in layer.named_children():
        handles.append(child.register_forward_pre_hook(recorder.before(name), with_kwargs=True))
        handles.append(child.register_forward_hook(recorder.after(name)))
    try:
        run_pass()
    finally:
        for handle in handles:
            handle.remove()
    attention, mlp = (
        [producer for producer, consumers in recorder.consumers.items() if consumers == [sublayer]]
        for sublayer in sublayers
    )
    return attention, mlp


__all__ = ["LayerViews", "without_attention", "without_mlp"]
