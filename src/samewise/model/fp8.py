"""Linears in float8 on CUDA, for drafts only, where they are measured to be faster.

One scale for the weights and one for each input: rounded numbers, so no emitted token is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from samewise.errors import BadParameter
from samewise.kernels.graph import CapturedGraph
from samewise.model.linear import FrameLinear
from samewise.model.surgery import replace_child

E4M3_MAX = 448.0  # largest finite float8 e4m3
MIN_SCALE = 1e-12  # keeps a tensor of zeros from being divided by zero


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """How a float8 linear is compared with the original; all set by hand."""

    num_rows: int = 16  # rows of a typical draft pass
    num_calls: int = 20  # calls in one captured graph: enough that one event pair resolves them
    max_ratio: float = 0.95  # of the original's time; a smaller gain is within the noise of the measurement


class Fp8Linear(nn.Module):
    """x W' + b with x and W in float8."""

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
        """Quantize the original weights again, in place: captured graphs read these tensors."""
        weight = self._weight.detach().float()
        self.scale.copy_((weight.abs().amax() / E4M3_MAX).clamp(min=MIN_SCALE))
        self.data.copy_((weight / self.scale).to(torch.float8_e4m3fn))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, in x's dtype."""
        flat = x.reshape(-1, x.shape[-1])
        scale = (flat.abs().amax().float() / E4M3_MAX).clamp(min=MIN_SCALE)
        quantized = (flat.float() / scale).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(  # noqa: SLF001 - torch has no public function for this product
            quantized, self.data.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype
        )
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)


@torch.inference_mode()
def use_fp8(model: nn.Module) -> list[Fp8Linear]:
    """Replace the linears that are slower than their float8 versions, and return those."""
    if torch.cuda.get_device_capability() < (8, 9):
        raise BadParameter(
            "draft_weights='fp8': this card has no float8 products; use 'same'", param="draft_weights"
        )
    faster: dict[tuple[int, int], bool] = {}  # by weight shape
    replaced: list[Fp8Linear] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, FrameLinear) or child.weight.dtype == torch.float32:
                continue
            outputs, inputs = child.weight.shape
            if outputs % 16 or inputs % 16:  # torch._scaled_mm takes multiples of 16 only
                continue
            if (outputs, inputs) not in faster:
                faster[outputs, inputs] = _is_faster(child)
            if faster[outputs, inputs]:
                replaced.append(Fp8Linear(child))
                replace_child(module, name, replaced[-1])
    return replaced


def _is_faster(linear: FrameLinear) -> bool:
    timing = TimingSettings()
    weight = linear.weight
    x = torch.randn(1, timing.num_rows, linear.in_features, device=weight.device, dtype=weight.dtype)
    fp8_ms = _milliseconds(Fp8Linear(linear), x, timing.num_calls)
    return fp8_ms < timing.max_ratio * _milliseconds(linear, x, timing.num_calls)


def _milliseconds(module: nn.Module, x: torch.Tensor, num_calls: int) -> float:
    """Time of `num_calls` calls in one captured graph, so that launches are not counted."""
    captured = CapturedGraph(lambda: [module(x) for _ in range(num_calls)][-1], x.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    captured()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


__all__ = ["Fp8Linear", "TimingSettings", "use_fp8"]
