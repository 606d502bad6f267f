"""Linears in eight-bit floats on CUDA, for guesses alone, where that is measured to be faster.

One scale for the weights, one for each input: not the model's own numbers, so nothing that is emitted ever
comes from here.
"""

from __future__ import annotations

import torch
from torch import nn

from samewise.errors import BadParameter
from samewise.kernels.graph import Captured
from samewise.model.linear import FrameLinear
from samewise.model.surgery import replace_child

LARGEST = 448.0  # of float8 e4m3
ROWS = 16  # at which the two ways are compared
CALLS = 20


class Fp8Linear(nn.Module):
    """x W' + b with both in float8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape
        self._weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.scale = torch.ones((), device=device)
        self.data = torch.empty(linear.weight.shape, dtype=torch.float8_e4m3fn, device=device)
        self.renew()

    @torch.inference_mode()
    def renew(self) -> None:
        """Take the weights anew, in place: captured passes read these very tensors."""
        weight = self._weight.detach().float()
        self.scale.copy_((weight.abs().amax() / LARGEST).clamp(min=1e-12))
        self.data.copy_((weight / self.scale).to(torch.float8_e4m3fn))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, in x's dtype."""
        flat = x.reshape(-1, x.shape[-1])
        scale = (flat.abs().amax().float() / LARGEST).clamp(min=1e-12)
        small = (flat.float() / scale).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(  # noqa: SLF001 - torch's one way to this product
            small, self.data.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype
        )
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)


@torch.inference_mode()
def use(model: nn.Module) -> list[Fp8Linear]:
    """Put float8 linears in place of those they are faster than, and return them."""
    if torch.cuda.get_device_capability() < (8, 9):
        raise BadParameter("draft_weights='fp8': this card has no float8 products; use 'same'")
    faster: dict[tuple[int, int], bool] = {}
    made: list[Fp8Linear] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, FrameLinear) or child.weight.dtype == torch.float32:
                continue
            outputs, inputs = child.weight.shape
            if outputs % 16 or inputs % 16:
                continue
            if (outputs, inputs) not in faster:
                faster[outputs, inputs] = _faster(child)
            if faster[outputs, inputs]:
                made.append(Fp8Linear(child))
                replace_child(module, name, made[-1])
    return made


def _faster(linear: FrameLinear) -> bool:
    x = torch.randn(1, ROWS, linear.in_features, device=linear.weight.device, dtype=linear.weight.dtype)
    other = Fp8Linear(linear)
    return _seconds(other, x) < 0.95 * _seconds(linear, x)


def _seconds(module: nn.Module, x: torch.Tensor) -> float:
    """Of some calls, captured, so that launching does not count."""
    captured = Captured(lambda: [module(x) for _ in range(CALLS)][-1], x.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    captured()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


__all__ = ["Fp8Linear", "use"]
