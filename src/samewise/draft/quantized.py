"""Copies of the target model's modules with quantized linears, over the same KV: for drafts only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from samewise.execute.runner import FastPath, Runner
from samewise.kernels.linear.packed import PackedWeight
from samewise.model.fp8 import use_fp8
from samewise.model.linear import pack_linears
from samewise.model.surgery import copy_modules

log = logging.getLogger("samewise")


@dataclass(frozen=True, slots=True)
class QuantizedCopy:
    """A path through quantized weights, and how to quantize again after the weights were replaced."""

    path: FastPath
    requantize: Callable[[], object]


def packed_copy(runner: Runner, quantize: Callable[[torch.Tensor], PackedWeight | None]) -> QuantizedCopy:
    """A copy whose linears run from weights packed by `quantize` (CPU: int8 or int4)."""
    model = copy_modules(runner.model)
    pack_linears(model, quantize)
    return QuantizedCopy(runner.fast_path(model), partial(pack_linears, model, quantize))


def fp8_copy(runner: Runner) -> QuantizedCopy | None:
    """A copy with float8 linears for the shapes where they are faster; None if there is none."""
    model = copy_modules(runner.model)
    linears = use_fp8(model)
    shapes = sorted({f"{linear.outputs}×{linear.inputs}" for linear in linears})
    log.info("float8 drafts: faster here for linears of %s", ", ".join(shapes) or "no shape")
    if not linears:
        return None
    return QuantizedCopy(runner.fast_path(model), lambda: [linear.renew() for linear in linears])


__all__ = ["QuantizedCopy", "fp8_copy", "packed_copy"]
