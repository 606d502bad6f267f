"""Row-wise operators at another number of rows than a frame has: padded up, or piece by piece.

An operator's result for a row depends on how many rows it is given, never on which rows they are. So an
operator that gives other bits at a frame's size is run at a size where it gives the canonical ones, on the
same rows: exact, whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from samewise.model.surgery import change_class

Pieces = dict[int, int]
"""Rows an operator may be given → rows it is run at. A size that is not there is run as it is."""


def piece_for(size: int, good: Sequence[int], canonical: int) -> int:
    """At how many rows to run an operator that is given `size`, if only these sizes give canonical bits."""
    if size in good:
        return size
    above = [rows for rows in good if size < rows <= canonical]
    if above:
        return min(above)
    return max(rows for rows in good if size % rows == 0)


def in_pieces(
    work: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,  # [1, R, ...]
    piece: int,
) -> torch.Tensor:
    """`work` over rows of x, given `piece` of them at a time; what is missing is zeros, and cut off again."""
    rows = x.shape[1]
    if rows < piece:
        return work(F.pad(x, (0, 0) * (x.dim() - 2) + (0, piece - rows)))[:, :rows]
    return torch.cat([work(part) for part in torch.split(x, piece, dim=1)], dim=1)


_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


def fit(module: nn.Module, pieces: Pieces) -> None:
    """Let a norm follow `pieces` from now on: the same module with the same weights, of a kind of its own."""
    kind = type(module)
    if kind not in _KINDS.values():
        if kind not in _KINDS:
            _KINDS[kind] = _fitted(kind)
        change_class(module, _KINDS[kind])
    module.pieces = pieces  # type: ignore[assignment]


def _fitted(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: torch.Tensor, *others: Any, **named: Any) -> Any:
        if others or named or x.dim() < 3:
            return kind.forward(self, x, *others, **named)
        piece = self.pieces.get(x.shape[1])
        if piece is None:
            return kind.forward(self, x)
        return in_pieces(lambda part: kind.forward(self, part), x, piece)

    return type(f"Fitted{kind.__name__}", (kind,), {"forward": forward, "__doc__": kind.__doc__})


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a leaf that scales each row by a vector of its own: a norm, by any name."""
    sizes = [parameter.dim() for parameter in module.parameters(recurse=False)]
    return bool(sizes) and max(sizes) == 1 and not any(True for _ in module.children())


def norm_width(norm: nn.Module) -> int:
    """Elements a norm takes together."""
    return max(parameter.numel() for parameter in norm.parameters(recurse=False))


__all__ = ["Pieces", "fit", "in_pieces", "is_norm", "norm_width", "piece_for"]
