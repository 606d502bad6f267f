"""A compiler pass: sums along a row whose order does not matter.

How a compiler lays a sum out over threads depends on how many rows there are and on what it is fused with,
and with it the order of the additions and the last bit of the result. So sums, means and variances in the
compiled layers of a card are taken over integers, scaled by the largest element of the row: of the same
elements no order gives another sum. More exact than floats, too, and no slower by more than a hundredth of
a step.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

FINE = 2.0**40  # integers to the largest power of two in a row: finer than floats, room for 2**22 elements
EXPONENT = 0x7F800000  # the bits of a float32 that are its power of two
LEAST, MOST = 47 << 23, 253 << 23  # 2**-80, below which a row loses bits, and 2**126, by their exponents
TURNED = 254 << 23  # less the exponent of a power of two: that of its reciprocal

_ATEN = torch.ops.aten


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum of float32 [..., n] along its rows, [..., 1]; not finite where one of them is not."""
    most = x.abs().amax(-1, keepdim=True)
    power = (most.view(torch.int32) & EXPONENT).clamp(LEAST, MOST)
    scale = (TURNED - power).view(torch.float32) * FINE  # products of powers of two: nothing is rounded
    whole = (x * scale).to(torch.int64).sum(-1, keepdim=True)
    return whole.to(torch.float32) * (power.view(torch.float32) / FINE) + (most - most)


def _sum(x: torch.Tensor, _: float) -> tuple[torch.Tensor, ...]:
    return (total(x),)


def _mean(x: torch.Tensor, _: float) -> tuple[torch.Tensor, ...]:
    return (total(x) / x.shape[-1],)


def _var(x: torch.Tensor, correction: float) -> tuple[torch.Tensor, ...]:
    return _var_mean(x, correction)[:1]


def _var_mean(x: torch.Tensor, correction: float) -> tuple[torch.Tensor, ...]:
    mean = total(x) / x.shape[-1]
    apart = x - mean
    return total(apart * apart) / max(x.shape[-1] - correction, 0.0), mean


SAME: dict[Any, Callable[[torch.Tensor, float], tuple[torch.Tensor, ...]]] = {
    _ATEN.sum.dim_IntList: _sum,
    _ATEN.mean.dim: _mean,
    _ATEN.var.correction: _var,
    _ATEN.var_mean.correction: _var_mean,
}


class Sums(CustomGraphPass):
    """Replace sums, means and variances of floats along the last dimensions."""

    def __call__(self, graph: Any) -> None:
        """Walk the graph; each that is found gives way to what `SAME` says of it."""
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in SAME and _trailing(node):
                _replace(graph, node)

    def uuid(self) -> bytes:
        """Compiled code is cached under this: it changes with the pass."""
        return sha256(Path(__file__).read_bytes()).digest()


def _trailing(node: Any) -> int:
    """How many of the last dimensions a node takes together; 0 where it takes others, or no floats."""
    x, dims = node.args[0].meta["val"], node.args[1] if len(node.args) > 1 else None
    short = x.is_floating_point() and x.element_size() <= torch.float32.itemsize
    if not short or not x.dim() or node.kwargs.get("dtype") not in (None, x.dtype, torch.float32):
        return 0
    taken = sorted({dim % x.dim() for dim in dims}) if dims else list(range(x.dim()))
    return len(taken) if taken == list(range(x.dim() - len(taken), x.dim())) else 0


def _replace(graph: Any, node: Any) -> None:
    x, num = node.args[0].meta["val"], _trailing(node)
    several = isinstance(node.meta["val"], tuple | list)
    example = node.meta["val"][0] if several else node.meta["val"]
    correction = node.kwargs.get("correction")

    def same(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.float().reshape(*x.shape[:-num], prod(x.shape[-num:]))
        found = SAME[node.target](rows, 1.0 if correction is None else float(correction))
        return tuple(one.reshape(example.shape).to(example.dtype) for one in found)

    with x.fake_mode:
        written = make_fx(same, select_decomp_table())(x)
    with graph.inserting_before(node):
        (given,) = (one for one in written.graph.nodes if one.op == "placeholder")
        found = graph.graph_copy(written.graph, {given: node.args[0]})
    if several:
        for use in list(node.users):  # each takes one of them
            use.replace_all_uses_with(found[use.args[1]])
            graph.erase_node(use)
    else:
        node.replace_all_uses_with(found[0])
    graph.erase_node(node)


SUMS = Sums()

__all__ = ["SAME", "SUMS", "Sums", "total"]
