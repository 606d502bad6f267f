"""Row-wise operators run at another number of rows than a frame has: padded, or in pieces.

An operator's bits for a row depend on the number of rows of a call, never on which rows they are. An operator
that gives other bits at a frame's size is therefore run on the same rows at a size where its bits are the
canonical ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from samewise.model.surgery import change_class

Pieces = dict[int, int]
"""Rows an operator is given -> rows it is run at. A missing size is run as it is."""


def piece_for(size: int, good: Sequence[int], canonical: int) -> int:
    """Rows to run an operator at for `size` rows, where only the sizes `good` give canonical bits."""
    if size in good:
        return size
    above = [rows for rows in good if size < rows <= canonical]
    if above:
        return min(above)
    return max(rows for rows in good if size % rows == 0)


def in_pieces(
    operator: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,  # [1, R, ...]
    piece: int,
) -> torch.Tensor:
    """`operator` over the rows of x in calls of `piece` rows; fewer rows are padded with zeros."""
    rows = x.shape[1]
    if rows < piece:
        return operator(F.pad(x, (0, 0) * (x.dim() - 2) + (0, piece - rows)))[:, :rows]
    return torch.cat([operator(part) for part in torch.split(x, piece, dim=1)], dim=1)


_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""A norm's class -> its subclass that runs in pieces."""


def use_pieces(norm: nn.Module, pieces: Pieces) -> None:
    """Make a norm run in `pieces` from now on; the module object and its weights stay."""
    cls = type(norm)
    if cls not in _SUBCLASSES.values():
        if cls not in _SUBCLASSES:
            _SUBCLASSES[cls] = _subclass_in_pieces(cls)
        change_class(norm, _SUBCLASSES[cls])
    norm.pieces = pieces  # type: ignore[assignment]


def _subclass_in_pieces(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or x.dim() < 3:
            return cls.forward(self, x, *args, **kwargs)
        piece = self.pieces.get(x.shape[1])
        if piece is None:
            return cls.forward(self, x)
        return in_pieces(lambda part: cls.forward(self, part), x, piece)

    return type(f"{cls.__name__}InPieces", (cls,), {"forward": forward, "__doc__": cls.__doc__})


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by any name: a leaf whose parameters are vectors."""
    sizes = [parameter.dim() for parameter in module.parameters(recurse=False)]
    return bool(sizes) and max(sizes) == 1 and not any(True for _ in module.children())


def norm_width(norm: nn.Module) -> int:
    """Elements a norm takes together."""
    return max(parameter.numel() for parameter in norm.parameters(recurse=False))


__all__ = ["Pieces", "in_pieces", "is_norm", "norm_width", "piece_for", "use_pieces"]
