"""transformers' attention modules, bound to a canonical kernel and to their layer's KV pages.

Nothing is patched while running: what a pass depends on comes in as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from samewise.kernels.attention.base import Kernel, LayerKV, Rows
from samewise.model.arch import Arch, AttentionFacts

ATTENTION = "samewise"


@dataclass(frozen=True, slots=True)
class AttentionBinding:
    """Where an attention module finds its kernel and its pages."""

    kernel: Kernel
    kv: LayerKV
    facts: AttentionFacts


def attend(
    module: nn.Module,
    query: torch.Tensor,  # [1, Hq, R, D]
    key: torch.Tensor,  # [1, Hkv, R, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature; masks are switched off
    scaling: float,
    dropout: float = 0.0,  # noqa: ARG001 - likewise
    *,
    rows: Rows,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature → canonical attention over the module's binding."""
    binding: AttentionBinding = module.binding  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = binding.kernel(q, k, v, binding.kv, rows, scale=scaling, window=sliding_window)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend)


def bind_attention(model: nn.Module, arch: Arch, kernel: Kernel, store: list[LayerKV]) -> None:
    """Give every attention module its kernel and pages."""
    for facts, kv in zip(arch.layers, store, strict=True):
        model.get_submodule(facts.module).binding = AttentionBinding(kernel, kv, facts)  # type: ignore[assignment]


__all__ = ["ATTENTION", "AttentionBinding", "attend", "bind_attention"]
