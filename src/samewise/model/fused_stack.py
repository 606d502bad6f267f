"""Decoder layers that follow one another as one call of the CPU's kernels (``samewise_layers``).

Each layer is a fused layer (``fused_layer.py``). Together they run in one parallel region: threads are woken
once per pass, and the interpreter is entered once.
"""

from __future__ import annotations

import ctypes
import functools
from itertools import groupby
from typing import Any

import torch
from torch import nn

from samewise.kernels.attention.base import Rows
from samewise.kernels.native import build as native_build
from samewise.kernels.native.calls import Layer, Visit
from samewise.model.fused_layer import NATIVE_FAMILIES, FusedForward
from samewise.model.linear import FrameLinear
from samewise.model.surgery import with_forward

STACKED_FAMILIES = NATIVE_FAMILIES - {"gemma3"}
"""transformers' families that give every layer the same rotary positions."""


@functools.cache
def _entry() -> ctypes._NamedFuncPointer:
    entry = native_build.library().samewise_layers
    entry.argtypes = [ctypes.POINTER(ctypes.POINTER(Layer)), ctypes.c_int64, ctypes.POINTER(Visit)]
    entry.restype = ctypes.c_int
    return entry


class StackedForward:
    """The `forward` of several layers as one call."""

    def __init__(self, layers: list[FusedForward]) -> None:
        self.layers = layers
        self._entry = _entry()
        self._fields = (ctypes.POINTER(Layer) * len(layers))()
        self._read_weights()

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, R, H]
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        rows: Rows,
        **__: Any,
    ) -> torch.Tensor:
        """The last layer's output for R rows."""
        # A look at every linear would cost a tenth of a millisecond: a pass leaves none of them in a cache.
        if self._times_packed != FrameLinear.times_packed:
            self._read_weights()
        x, visit, y = self.layers[0].visit(hidden_states, position_embeddings, rows)
        FusedForward.raise_if_failed(self._entry(self._fields, len(self.layers), visit))
        del x  # its address is in `visit`
        return y.to(self.layers[0].dtype)

    def _read_weights(self) -> None:
        for i, layer in enumerate(self.layers):
            self._fields[i] = ctypes.pointer(layer.fields())
        self._times_packed = FrameLinear.times_packed


def stack_layers(layers: list[nn.Module]) -> list[nn.Module]:
    """The same layers, those in a row that are fused and take the same inputs as one module."""
    stacked: list[nn.Module] = []
    for kind, group in groupby(layers, _kind):
        run = list(group)
        if kind is None or len(run) == 1:
            stacked += run
        else:
            stacked.append(with_forward(run[0], StackedForward([layer.forward for layer in run])))  # type: ignore[misc]
    return stacked


def _kind(layer: nn.Module) -> tuple[object, ...] | None:
    """What layers of one stack have in common; None for a layer that runs by itself."""
    forward: Any = layer.forward
    family = type(layer).__module__.split(".")[2:3]
    if type(forward) is not FusedForward or not STACKED_FAMILIES.issuperset(family):
        return None
    return type(layer), forward.dtype, forward.width, forward.head_dim, forward.rotary


__all__ = ["STACKED_FAMILIES", "StackedForward", "stack_layers"]
