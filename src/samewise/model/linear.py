"""Linears under the frame rule: a row gets the bits of the canonical number of rows, at every frame size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from samewise.kernels.linear.packed import Packed, multiply, pack
from samewise.model.row_pieces import Pieces, in_pieces
from samewise.model.surgery import adopt_state


class Part(NamedTuple):
    """A linear's place among siblings that share its input: rows [start, stop) of one stacked weight."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    start: int
    stop: int


class Group:
    """One product for linears that are given the same input, each of which takes its own columns of it.

    The first to be asked computes it for all; it is forgotten as soon as everybody has theirs, or somebody
    asks twice or with another input.
    """

    __slots__ = ("_given", "_left", "_product", "bias", "packed", "parts")

    def __init__(self, packed: Packed, bias: torch.Tensor | None, parts: frozenset[int]) -> None:
        self.packed, self.bias, self.parts = packed, bias, parts
        self._given: torch.Tensor | None = None
        self._product: torch.Tensor | None = None
        self._left: set[int] = set()

    def take(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Columns [start, stop) of x W' + b."""
        product = self._product
        if product is None or self._given is not x or start not in self._left:
            product = multiply(x, self.packed, self.bias)
            self._given, self._product, self._left = x, product, set(self.parts)
        self._left.discard(start)
        if not self._left:
            self._given = self._product = None
        return product[..., start:stop]


class FrameLinear(nn.Linear):
    """A linear under the frame rule: it gives the bits of the canonical number of rows.

    The one place where a linear may run in another form than its own: at another number of rows, as a part
    of a wider product where the compiler merges those, or from packed weights that are exactly its own,
    whose bits do not depend on the number of rows. Shares the weights of the linear it replaces.
    """

    pieces: Pieces  # of the product it is a part of, where it is one
    part: Part | None
    packed: Packed | None  # its own, or the one it is a part of
    group: tuple[Group, int, int] | None

    @classmethod
    def around(cls, linear: nn.Linear) -> FrameLinear:
        """The same linear, wrapped; no memory of its own."""
        wrapped = adopt_state(cls, linear)
        wrapped.pieces = {}
        wrapped.part = None
        wrapped.packed = None
        wrapped.group = None
        return wrapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x W' + b: by itself, from packed weights, or cut from the product it is a part of."""
        packed = self.packed
        if packed is not None:
            bias: torch.Tensor | None = self.bias
            start, stop = 0, packed.outputs
            if self.group is not None:
                group, start, stop = self.group
                if not torch.compiler.is_compiling():
                    return group.take(x, start, stop)
                bias = group.bias
            if torch.compiler.is_compiling():
                found: torch.Tensor = torch.ops.samewise.linear(
                    x, list(packed.tensors), bias, packed.form, packed.outputs
                )
                return found[..., start:stop] if self.group is not None else found
            return multiply(x, packed, bias)
        part = self.part
        if part is None or not torch.compiler.is_compiling():
            return self._product(x, self.weight, self.bias)
        return self._product(x, part.weight, part.bias)[..., part.start : part.stop]

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        piece = self.pieces.get(x.shape[1]) if x.dim() == 3 else None
        if piece is None:
            return F.linear(x, weight, bias)
        return in_pieces(lambda part: F.linear(part, weight, bias), x, piece)


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def pack_linears(model: nn.Module, how: Callable[[torch.Tensor], Packed | None] = pack) -> Counter[str]:
    """Let every linear of these modules run from packed weights, siblings from one; the forms taken."""
    forms: Counter[str] = Counter()
    done: set[FrameLinear] = set()
    for module in model.modules():
        for names in SIBLINGS:
            linears = [getattr(module, name, None) for name in names]
            alike = [linear for linear in linears if type(linear) is FrameLinear]
            if len(alike) == len(names) and _alike(alike) and (form := _group(alike, how)):
                forms[form] += 1
                done.update(alike)
    for module in model.modules():
        if type(module) is FrameLinear and module not in done:
            module.packed, module.group = how(module.weight), None
            forms[module.packed.form if module.packed is not None else "torch"] += 1
    return forms


def _alike(linears: list[FrameLinear]) -> bool:
    return len({(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}) == 1


def _group(linears: list[FrameLinear], how: Callable[[torch.Tensor], Packed | None]) -> str:
    """Pack siblings as one; the form it took, or nothing where that would only copy the weights."""
    packed = how(torch.cat([linear.weight.data for linear in linears]))
    if packed is None or packed.form == str(linears[0].weight.dtype).removeprefix("torch."):
        return ""
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    ends = list(accumulate(linear.out_features for linear in linears))
    starts = [0, *ends[:-1]]
    group = Group(packed, torch.cat(biases) if biases else None, frozenset(starts))
    for linear, start, stop in zip(linears, starts, ends, strict=True):
        linear.packed, linear.group = packed, (group, start, stop)
    return packed.form


def stack_siblings(model: nn.Module) -> None:
    """Let linears that are given the same input share one stacked weight, of which theirs become views.

    Only names that in transformers always share their input, and only linears that look alike. Once:
    another engine over the same modules finds them stacked.
    """
    for module in model.modules():
        for names in SIBLINGS:
            linears = [getattr(module, name, None) for name in names]
            if all(isinstance(linear, FrameLinear) for linear in linears):
                _stack([linear for linear in linears if isinstance(linear, FrameLinear)])


def _stack(linears: list[FrameLinear]) -> None:
    biases = [linear.bias for linear in linears]
    if linears[0].part is not None or not _alike(linears):
        return
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None if biases[0] is None else torch.cat([bias.data for bias in biases])
    start = 0
    for linear in linears:
        stop = start + linear.out_features
        linear.weight.data = weight[start:stop]
        if bias is not None:
            linear.bias.data = bias[start:stop]
        linear.part = Part(weight, bias, start, stop)
        start = stop


__all__ = ["FrameLinear", "Group", "Part", "pack_linears", "stack_siblings"]
