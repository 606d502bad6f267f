"""A compiler pass that merges equal products.

Linears that share their input (query, key and value; gate and up) are written as slices of one product over
their stacked weights, each computing the whole product. Merging the copies leaves one wide kernel instead of
several narrow ones. Exact: only copies are removed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from samewise.execute.passes.cache_key import cache_key

_ATEN = torch.ops.aten
MERGEABLE = frozenset({
    _ATEN.mm.default, _ATEN.addmm.default, _ATEN.view.default, _ATEN.reshape.default, _ATEN.permute.default,
    _ATEN.t.default, _ATEN.unsqueeze.default, _ATEN.constant_pad_nd.default, _ATEN.slice.Tensor,
    _ATEN.cat.default,
})  # fmt: skip
"""Products, and the padding, slicing and reshaping around them. None writes to its arguments."""
MERGEABLE_BY_NAME = frozenset({"samewise.linear.default", "samewise.ordered_linear.default"})
"""The native and the CUDA kernel's linear, whose operators may not be registered here."""


class Dedupe(CustomGraphPass):
    """Replaces every mergeable node by the first one equal to it."""

    def __call__(self, graph: Any) -> None:
        """Walk the graph in order."""
        seen: dict[Any, Any] = {}
        for node in list(graph.nodes):
            mergeable = node.target in MERGEABLE or str(node.target) in MERGEABLE_BY_NAME
            if node.op != "call_function" or not mergeable or node.kwargs:
                continue
            key = (node.target, repr(node.args))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)

    def uuid(self) -> bytes:
        """The key of this pass in the compiler's cache."""
        return cache_key(__file__)


DEDUPE = Dedupe()

__all__ = ["DEDUPE", "Dedupe"]
