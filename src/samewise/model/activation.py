"""Activations under the frame rule: an element's result does not depend on the number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

ACTIVATIONS = frozenset({"torch.nn.modules.activation", "transformers.activations"})
LANES = 64  # a multiple of the elements any CPU's vector loop takes at once, in any dtype
GRAIN = 32768  # elements below which torch leaves a loop to one thread


class FrameActivation(nn.Module):
    """An activation under the frame rule: on a CPU no element is ever the rest of a vector or a thread's end.

    torch's vector loops and the scalar loops that finish them differ in the last bit, so what an element
    becomes would depend on how many rows there are. Here every row is whole vectors, on one thread.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of x [..., R, D]."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return self._of(x)
        width = x.shape[-1]
        if width % LANES:
            return self.forward(F.pad(x, (0, -width % LANES)))[..., :width]
        x = x.contiguous()  # another library may take what lies in one piece
        if x.numel() <= GRAIN:
            return self._of(x)
        return torch.cat([self._of(part) for part in torch.split(x, max(1, GRAIN // width), dim=-2)], dim=-2)

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y


__all__ = ["ACTIVATIONS", "FrameActivation"]
