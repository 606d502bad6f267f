"""A compiler pass that makes sums along a row independent of their order.

How a compiler lays a sum out over threads depends on the number of rows and on what the sum is fused with;
with it vary the order of the additions and the last bit. So in layers compiled for CUDA sums, means and
variances are taken over integers, scaled by the row's largest element: every order gives the same sum. That
is more exact than floats, and slower by less than 1% of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from samewise.execute.passes.cache_key import cache_key

UNITS = 2.0**40  # integers per largest power of two of a row: finer than float32, room for 2**22 elements
EXPONENT = 0x7F800000  # the exponent bits of a float32
MIN_POWER, MAX_POWER = (
    47 << 23,
    253 << 23,
)  # exponent bits of 2**-80, below which a row loses bits, and of 2**126
RECIPROCAL = 254 << 23  # minus the exponent bits of a power of two: those of its reciprocal

_ATEN = torch.ops.aten


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum of float32 [..., n] along its rows, [..., 1]; not finite where an element of the row is not."""
    largest = x.abs().amax(-1, keepdim=True)
    power = (largest.view(torch.int32) & EXPONENT).clamp(MIN_POWER, MAX_POWER)
    scale = (RECIPROCAL - power).view(torch.float32) * UNITS  # a product of powers of two: nothing is rounded
    units = (x * scale).to(torch.int64).sum(-1, keepdim=True)
    return units.to(torch.float32) * (power.view(torch.float32) / UNITS) + (largest - largest)


def _sum(x: torch.Tensor, _: float) -> tuple[torch.Tensor, ...]:
    return (total(x),)


def _mean(x: torch.Tensor, _: float) -> tuple[torch.Tensor, ...]:
    return (total(x) / x.shape[-1],)


def _var(x: torch.Tensor, correction: float) -> tuple[torch.Tensor, ...]:
    return _var_mean(x, correction)[:1]


def _var_mean(x: torch.Tensor, correction: float) -> tuple[torch.Tensor, ...]:
    mean = total(x) / x.shape[-1]
    deviation = x - mean
    return total(deviation * deviation) / max(x.shape[-1] - correction, 0.0), mean


REPLACEMENTS: dict[Any, Callable[[torch.Tensor, float], tuple[torch.Tensor, ...]]] = {
    _ATEN.sum.dim_IntList: _sum,
    _ATEN.mean.dim: _mean,
    _ATEN.var.correction: _var,
    _ATEN.var_mean.correction: _var_mean,
}


class RowSums(CustomGraphPass):
    """Replaces sums, means and variances of floats along the last dimensions."""

    def __call__(self, graph: Any) -> None:
        """Walk the graph in order."""
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in REPLACEMENTS and _num_trailing_dims(node):
                _replace(graph, node)

    def uuid(self) -> bytes:
        """The key of this pass in the compiler's cache."""
        return cache_key(__file__)


def _num_trailing_dims(node: Any) -> int:
    """How many of the last dimensions a node reduces; 0 where it reduces others, or no short floats."""
    x, dims = node.args[0].meta["val"], node.args[1] if len(node.args) > 1 else None
    short = x.is_floating_point() and x.element_size() <= torch.float32.itemsize
    if not short or not x.dim() or node.kwargs.get("dtype") not in (None, x.dtype, torch.float32):
        return 0
    reduced = sorted({dim % x.dim() for dim in dims}) if dims else list(range(x.dim()))
    return len(reduced) if reduced == list(range(x.dim() - len(reduced), x.dim())) else 0


def _replace(graph: Any, node: Any) -> None:
    x, num = node.args[0].meta["val"], _num_trailing_dims(node)
    several = isinstance(node.meta["val"], tuple | list)
    example = node.meta["val"][0] if several else node.meta["val"]
    correction = node.kwargs.get("correction")

    def replacement(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.float().reshape(*x.shape[:-num], prod(x.shape[-num:]))
        results = REPLACEMENTS[node.target](rows, 1.0 if correction is None else float(correction))
        return tuple(result.reshape(example.shape).to(example.dtype) for result in results)

    with x.fake_mode:
        traced = make_fx(replacement, select_decomp_table())(x)
    with graph.inserting_before(node):
        (argument,) = (one for one in traced.graph.nodes if one.op == "placeholder")
        outputs = graph.graph_copy(traced.graph, {argument: node.args[0]})
    if several:
        for use in list(node.users):  # each user is a getitem of one output
            use.replace_all_uses_with(outputs[use.args[1]])
            graph.erase_node(use)
    else:
        node.replace_all_uses_with(outputs[0])
    graph.erase_node(node)


ROW_SUMS = RowSums()

__all__ = ["REPLACEMENTS", "ROW_SUMS", "RowSums", "total"]
