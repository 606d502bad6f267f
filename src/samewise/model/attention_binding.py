"""transformers' attention modules, bound to a canonical kernel and to their layer's KV pages.

A binding is set once, when a runner is built; what differs between passes arrives as the argument `rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from samewise.kernels.attention.base import AttentionKernel, LayerKV, Rows
from samewise.model.arch import Arch, AttentionFacts

ATTENTION = "samewise"  # name of `attend` in transformers' AttentionInterface


@dataclass(frozen=True, slots=True)
class AttentionBinding:
    """An attention module's kernel, its layer's KV pages, and its shapes."""

    kernel: AttentionKernel
    kv: LayerKV
    facts: AttentionFacts


def attend(
    module: nn.Module,
    query: torch.Tensor,  # [1, Hq, R, D]
    key: torch.Tensor,  # [1, Hkv, R, D]
    value: torch.Tensor,  # [1, Hkv, R, D]
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature; masks are switched off
    scaling: float,
    dropout: float = 0.0,  # noqa: ARG001 - transformers' signature; zero when evaluating
    *,
    rows: Rows,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Canonical attention behind transformers' signature: [1, R, Hq, D], and no attention weights."""
    binding: AttentionBinding = module.binding  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = binding.kernel(q, k, v, binding.kv, rows, scale=scaling, window=sliding_window)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend)


def bind_attention(model: nn.Module, arch: Arch, kernel: AttentionKernel, store: list[LayerKV]) -> None:
    """Set the binding of every attention module; `store` has one entry per layer."""
    for facts, kv in zip(arch.layers, store, strict=True):
        model.get_submodule(facts.module).binding = AttentionBinding(kernel, kv, facts)  # type: ignore[assignment]


__all__ = ["ATTENTION", "AttentionBinding", "attend", "bind_attention"]
