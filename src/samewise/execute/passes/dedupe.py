"""A compiler pass: a product that is written twice is computed once.

Linears that share their input (query, key and value; gate and up) are written as slices of one product
over their stacked weights, each asking for the whole of it. This pass makes the equal products one, so
the device runs one wide kernel instead of several narrow ones. Exact: it removes copies, nothing else.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

_ATEN = torch.ops.aten
PURE = frozenset({
    _ATEN.mm.default, _ATEN.addmm.default, _ATEN.view.default, _ATEN.reshape.default, _ATEN.permute.default,
    _ATEN.t.default, _ATEN.unsqueeze.default, _ATEN.constant_pad_nd.default, _ATEN.slice.Tensor,
    _ATEN.cat.default,
})  # fmt: skip
"""What may be merged: products, and what pads, cuts and reshapes around them. None of it is written to."""
OURS = "samewise.linear.default"  # likewise


class Dedupe(CustomGraphPass):
    """Merge equal products."""

    def __call__(self, graph: Any) -> None:
        """Walk the graph in order; a node equal to an earlier one is replaced by it."""
        seen: dict[Any, Any] = {}
        for node in list(graph.nodes):
            pure = node.target in PURE or str(node.target) == OURS
            if node.op != "call_function" or not pure or node.kwargs:
                continue
            key = (node.target, repr(node.args))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)

    def uuid(self) -> bytes:
        """Compiled code is cached under this: it changes with the pass."""
        return sha256(Path(__file__).read_bytes()).digest()


DEDUPE = Dedupe()

__all__ = ["DEDUPE", "Dedupe"]
