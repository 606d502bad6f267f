"""Linears under the frame rule: a row gets the bits of the canonical number of rows, at every frame size.

*Siblings* are linears that transformers always gives the same input: q/k/v and gate/up projections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from samewise.kernels.linear.packed import PackedWeight, multiply, pack
from samewise.model.row_pieces import Pieces, in_pieces
from samewise.model.surgery import with_class

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class StackedRows(NamedTuple):
    """Rows [start, stop) of the weight and bias that siblings share; the compiler merges their products."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    start: int
    stop: int


class MergedProduct:
    """One product of packed weights for siblings; each takes its own columns.

    The first sibling to be called computes the product for all. It is dropped once every sibling has taken
    its columns, and computed anew when one asks twice or with another input.
    """

    __slots__ = ("_input", "_pending", "_product", "bias", "packed", "starts")

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None, starts: frozenset[int]) -> None:
        self.packed, self.bias, self.starts = packed, bias, starts
        self._input: torch.Tensor | None = None
        self._product: torch.Tensor | None = None
        self._pending: set[int] = set()  # first columns not yet taken

    def columns(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Columns [start, stop) of x W' + b."""
        product = self._product
        if product is None or self._input is not x or start not in self._pending:
            product = multiply(x, self.packed, self.bias)
            self._input, self._product, self._pending = x, product, set(self.starts)
        self._pending.discard(start)
        if not self._pending:
            self._input = self._product = None
        return product[..., start:stop]


class FrameLinear(nn.Linear):
    """A linear under the frame rule; shares the weights of the linear it replaces.

    It may run at another number of rows (`pieces`), as a part of its siblings' product (`stacked` when
    compiled, `merged` when packed), from packed weights that are exactly its own, or where it is `ordered`
    by torch's product for some numbers of rows (`library_rows`). None of these changes a row's bits.
    """

    times_packed: ClassVar[int] = 0
    """How often `pack_linears` gave any linear of the process its packed weights."""
    pieces: Pieces
    ordered: bool  # whether its sums have the stated order of `kernels.linear.triton`
    library_rows: frozenset[int]  # numbers of rows at which torch's product was found to give its bits
    stacked: StackedRows | None
    packed: PackedWeight | None  # its own weights, or those of all siblings where `merged` is set
    merged: tuple[MergedProduct, int, int] | None  # the siblings' product, and its columns [start, stop)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> FrameLinear:
        """The same linear under the frame rule; no tensor is copied."""
        result = with_class(linear, cls)
        result.pieces = {}
        result.ordered, result.library_rows = False, frozenset()
        result.stacked = None
        result.packed = None
        result.merged = None
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x W' + b."""
        if self.packed is not None:
            return self._packed_product(x, self.packed)
        if self.stacked is None or not torch.compiler.is_compiling():
            return self._product(x, self.weight, self.bias)
        weight, bias, start, stop = self.stacked
        return self._product(x, weight, bias)[..., start:stop]

    def _packed_product(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            if self.merged is None:
                return multiply(x, packed, self.bias)
            product, start, stop = self.merged
            return product.columns(x, start, stop)
        bias = self.bias if self.merged is None else self.merged[0].bias
        y: torch.Tensor = torch.ops.samewise.linear(
            x, list(packed.tensors), bias, packed.form, packed.outputs
        )
        return y if self.merged is None else y[..., self.merged[1] : self.merged[2]]

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.ordered and x.shape[-2] not in self.library_rows:
            y: torch.Tensor = torch.ops.samewise.ordered_linear(x, weight, bias)
            return y
        piece = self.pieces.get(x.shape[1]) if x.dim() == 3 else None
        if piece is None:
            return F.linear(x, weight, bias)
        return in_pieces(lambda part: F.linear(part, weight, bias), x, piece)


def pack_linears(
    model: nn.Module, pack_weight: Callable[[torch.Tensor], PackedWeight | None] = pack
) -> Counter[str]:
    """Let every linear run from packed weights, siblings from one product. Returns uses by form."""
    forms: Counter[str] = Counter()
    merged: set[FrameLinear] = set()
    for linears in _siblings(model):
        is_plain = all(type(linear) is FrameLinear for linear in linears)
        if is_plain and (form := _merge(linears, pack_weight)):
            forms[form] += 1
            merged.update(linears)
    for module in model.modules():
        if type(module) is FrameLinear and module not in merged:
            module.packed, module.merged = pack_weight(module.weight), None
            forms[module.packed.form if module.packed is not None else "torch"] += 1
    FrameLinear.times_packed += 1
    return forms


def order_linears(model: nn.Module) -> None:
    """Let every linear sum in the stated order of the CUDA kernel, whatever the number of rows."""
    import samewise.kernels.linear.triton  # noqa: F401 - registers the operator; imports Triton

    for module in model.modules():
        if type(module) is FrameLinear:
            module.ordered = True


def _siblings(model: nn.Module) -> Iterator[list[FrameLinear]]:
    """Siblings that can share one product: equal input width and dtypes, all with or all without a bias."""
    for module in model.modules():
        for names in SIBLINGS:
            children = [getattr(module, name, None) for name in names]
            linears = [child for child in children if isinstance(child, FrameLinear)]
            kinds = {(one.in_features, *_dtypes(one)) for one in linears}
            if len(linears) == len(names) and len(kinds) == 1:
                yield linears


def _dtypes(linear: FrameLinear) -> tuple[torch.dtype, torch.dtype | None]:
    """Of the weight, and of the bias if there is one."""
    return linear.weight.dtype, None if linear.bias is None else linear.bias.dtype


def _merge(linears: list[FrameLinear], pack_weight: Callable[[torch.Tensor], PackedWeight | None]) -> str:
    """Pack siblings as one weight. Returns its form, or "" where packing would only copy the weights."""
    packed = pack_weight(torch.cat([linear.weight.data for linear in linears]))
    if packed is None or packed.form == str(linears[0].weight.dtype).removeprefix("torch."):
        return ""
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    bounds = [0, *accumulate(linear.out_features for linear in linears)]
    product = MergedProduct(packed, torch.cat(biases) if biases else None, frozenset(bounds[:-1]))
    for linear, (start, stop) in zip(linears, pairwise(bounds), strict=True):
        linear.packed, linear.merged = packed, (product, start, stop)
    return packed.form


def stacks_siblings(device: torch.device) -> bool:
    """Whether linears that share their input run as one product there: on a CPU it is no faster."""
    return device.type == "cuda"


def stack_siblings(model: nn.Module) -> None:
    """Let siblings share one stacked weight, of which their own weights become views.

    Done once per model: a second engine over the same modules finds them stacked.
    """
    for linears in _siblings(model):
        if linears[0].stacked is None:
            _stack(linears)


def _stack(linears: list[FrameLinear]) -> None:
    weight = torch.cat([linear.weight.data for linear in linears])
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    bounds = [0, *accumulate(linear.out_features for linear in linears)]
    for linear, (start, stop) in zip(linears, pairwise(bounds), strict=True):
        linear.weight.data = weight[start:stop]
        if bias is not None:
            linear.bias.data = bias[start:stop]
        linear.stacked = StackedRows(weight, bias, start, stop)


__all__ = [
    "FrameLinear",
    "MergedProduct",
    "StackedRows",
    "order_linears",
    "pack_linears",
    "stack_siblings",
    "stacks_siblings",
]
