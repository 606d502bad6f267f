"""Gates: one model that skips other sublayers in each of its rows, as tensors on the device say.

A gated layer computes every sublayer and adds it to the residual stream only in rows whose gate is open. That
saves no time, but any layer set is a matter of data: one captured pass serves all sets, several at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samewise.model.surgery import with_children, with_forward
from samewise.types import LayerSet

# The kinds of a sublayer, as indices.
ATTENTION = 0
MLP = 1


class LayerGates:
    """The gates of a pass of R rows over L layers, and what its sublayers added to the residual stream.

    Owned by the pass that reads them; `set` is called between two runs.
    """

    @torch.inference_mode(mode=False)  # written inside and outside of inference mode
    def __init__(self, num_layers: int, num_rows: int, device: torch.device) -> None:
        self.num_layers, self.num_rows = num_layers, num_rows
        shape = (num_layers, 2, num_rows)
        self._host = torch.ones(shape, dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda")
        self._open = torch.ones(shape, dtype=torch.bool, device=device)
        self._added = torch.zeros(shape, dtype=torch.float32, device=device)  # norms
        self._stream = torch.zeros(num_layers, num_rows, dtype=torch.float32, device=device)  # norms

    def set(self, sets: list[LayerSet], rows_each: int) -> None:
        """Skip the first set's sublayers in the first `rows_each` rows, the second set's in the next, …"""
        gates = self._host.numpy()
        gates[:] = True
        for i, skipped in enumerate(sets):
            rows = slice(i * rows_each, (i + 1) * rows_each)
            gates[sorted(skipped.attention), ATTENTION, rows] = False
            gates[sorted(skipped.mlp), MLP, rows] = False
        self._open.copy_(self._host, non_blocking=True)

    def shares(self, num_rows: int) -> list[tuple[float, float]]:
        """For each layer, norms of what attention and MLP added over the stream's norm before the layer.

        Means over the first rows of the last run.
        """
        stream = self._stream[:, None, :num_rows].clamp_min(1e-12)
        means = (self._added[:, :, :num_rows] / stream).mean(dim=-1).tolist()
        return [(attention, mlp) for attention, mlp in means]

    def gated(self, layer: nn.Module, number: int, attention: str, mlp: str) -> nn.Module:
        """A copy of the layer of this number whose sublayers of these names have gates."""
        changes: dict[str, nn.Module] = {
            name: _GatedSublayer(
                layer.get_submodule(name), self._open[number, kind], self._added[number, kind]
            )
            for name, kind in ((attention, ATTENTION), (mlp, MLP))
        }
        return with_forward(layer, _MeasuredForward(with_children(layer, changes), self._stream[number]))


class _GatedSublayer(nn.Module):
    """A sublayer whose output is replaced by zeros in rows whose gate is closed."""

    def __init__(self, inner: nn.Module, gate: torch.Tensor, added: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        self._gate, self._added = gate, added  # [R]

    def forward(self, *args: Any, **named: Any) -> Any:
        """The sublayer's output [1, R, H], and whatever else it returns."""
        out = self.inner(*args, **named)
        value = out[0] if isinstance(out, tuple) else out
        torch.linalg.vector_norm(value[0], dim=-1, dtype=torch.float32, out=self._added)
        # Not a product: zero times infinity would not be zero.
        value = torch.where(self._gate[None, :, None], value, value.new_zeros(()))
        return (value, *out[1:]) if isinstance(out, tuple) else value


class _MeasuredForward:
    """A layer's `forward` that also notes the norm of the residual stream before it."""

    def __init__(self, layer: nn.Module, stream: torch.Tensor) -> None:
        self._layer, self._stream = layer, stream  # [R]

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **named: Any) -> Any:
        """The layer's output."""
        torch.linalg.vector_norm(hidden_states[0], dim=-1, dtype=torch.float32, out=self._stream)
        return self._layer(hidden_states, *args, **named)


__all__ = ["LayerGates"]
