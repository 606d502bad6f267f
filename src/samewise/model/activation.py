"""Activations under the frame rule: an element's result does not depend on the number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

ACTIVATION_MODULES = frozenset({"torch.nn.modules.activation", "transformers.activations"})
"""Python modules whose torch modules are all activations."""
VECTOR_LEN = 64
"""Elements; a multiple of what one vector iteration takes on any CPU in any dtype (AVX-512, 8 bits: 64)."""
GRAIN_SIZE = 32768
"""Elements up to which torch runs an elementwise loop on one thread (at::internal::GRAIN_SIZE)."""


class FrameActivation(nn.Module):
    """An activation under the frame rule.

    On a CPU, torch's vector loop and the scalar loop over the remaining elements differ in the last bit, so
    an element's bits would depend on where a thread's share ends, and with it on the number of rows. Here
    every row is padded to complete vectors, and no call is long enough to be split over threads.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of x [..., R, D]."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return self._apply_inner(x)
        width = x.shape[-1]
        if width % VECTOR_LEN:
            return self.forward(F.pad(x, (0, -width % VECTOR_LEN)))[..., :width]
        x = x.contiguous()  # torch may choose another implementation for strided input
        if x.numel() <= GRAIN_SIZE:
            return self._apply_inner(x)
        chunks = torch.split(x, max(1, GRAIN_SIZE // width), dim=-2)
        return torch.cat([self._apply_inner(chunk) for chunk in chunks], dim=-2)

    def _apply_inner(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y


__all__ = ["ACTIVATION_MODULES", "FrameActivation"]
