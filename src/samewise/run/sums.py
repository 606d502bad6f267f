"""A compiler pass: sums along a row whose order does not matter.

How a compiler lays a sum out over threads depends on how many rows there are, and with it the order of the
additions and the last bit of the result. So sums in the compiled layers of a card are taken over integers,
scaled by the largest element of the row: no order of integers gives another result, so neither does any
layout, on its own or fused into whatever stands beside it. More exact than floats, too, and no slower by
more than a hundredth of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

FINE = 2.0**40  # integers to the largest power of two in a row: finer than floats, room for 2**22 elements
LEAST = 2.0**-80  # rows smaller than this are as good as zero
EXPONENT = 0x7F800000  # of a float32

_ATEN = torch.ops.aten


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum of float32 [..., n] along its rows, [..., 1]; not finite where one of them is not."""
    most = x.abs().amax(-1, keepdim=True)
    power = (most.view(torch.int32) & EXPONENT).view(torch.float32).clamp(min=LEAST)
    whole = (x * (FINE / power)).to(torch.int64).sum(-1, keepdim=True)
    return whole.to(torch.float32) * (power / FINE) + (most - most)


def _sum(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (total(x.float()).to(x.dtype),)


def _mean(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((total(x.float()) / x.shape[-1]).to(x.dtype),)


def _var_mean(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean = total(x.float()) / x.shape[-1]
    apart = x.float() - mean
    return (total(apart * apart) / x.shape[-1]).to(x.dtype), mean.to(x.dtype)


SAME: dict[Any, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    _ATEN.sum.dim_IntList: _sum,
    _ATEN.mean.dim: _mean,
    _ATEN.var_mean.correction: _var_mean,
}


class Sums(CustomGraphPass):
    """Replace sums, means and variances of floats along the last dimension."""

    def __call__(self, graph: Any) -> None:
        """Walk the graph; each that is found gives way to what `SAME` says of it."""
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in SAME and _along_a_row(node):
                _replace(graph, node)

    def uuid(self) -> bytes:
        """Compiled code is cached under this: it changes with the pass."""
        return sha256(Path(__file__).read_bytes()).digest()


def _along_a_row(node: Any) -> bool:
    x = node.args[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else None
    if not x.is_floating_point() or x.dtype == torch.float64 or not dims or node.kwargs.get("dtype"):
        return False
    if node.target is _ATEN.var_mean.correction and node.kwargs.get("correction") != 0:
        return False
    return [dim % x.dim() for dim in dims] == [x.dim() - 1]


def _replace(graph: Any, node: Any) -> None:
    x = node.args[0].meta["val"]
    alone = not isinstance(node.meta["val"], tuple | list)
    kept = (node.meta["val"] if alone else node.meta["val"][0]).dim() == x.dim()

    def same(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = SAME[node.target](x)
        return found if kept else tuple(one.squeeze(-1) for one in found)

    with x.fake_mode:
        written = make_fx(same, select_decomp_table())(x)
    with graph.inserting_before(node):
        (given,) = (one for one in written.graph.nodes if one.op == "placeholder")
        found = graph.graph_copy(written.graph, {given: node.args[0]})
    if alone:
        node.replace_all_uses_with(found[0])
    else:
        for use in list(node.users):  # each takes one of them
            use.replace_all_uses_with(found[use.args[1]])
            graph.erase_node(use)
    graph.erase_node(node)


SUMS = Sums()

__all__ = ["SUMS", "Sums", "total"]
