"""Norms, rotary positions and the storing of K and V on CUDA, rounded where transformers' modules round."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from samewise.kernels.attention.base import PAGE, LayerKV
from samewise.kernels.dependent import launch_options
from samewise.kernels.layer.triton_kernels import norm_rows, rotate_and_store

NAME = "triton-1"
"""Kernels and version, part of the contract: it changes whenever bits may change."""
HEADS_PER_PROGRAM = 16


class RmsNorm(NamedTuple):
    """The weight of an RMS norm, and what is added to the mean square."""

    weight: torch.Tensor
    epsilon: float


def rms_norm(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """The RMS norm of every row of x [R, H]."""
    num_rows, width = x.shape
    out = x.new_empty(num_rows, width)
    norm_rows[(num_rows,)](
        x,
        norm.weight,
        out,
        x.stride(0),
        norm.epsilon,
        WIDTH=width,
        WIDTH_PAD=triton.next_power_of_2(width),
        num_warps=8,
        enable_fp_fusion=False,
        **launch_options(x.device),
    )
    return out


def rotate_and_keep(
    qkv: torch.Tensor,  # [R, (Hq + 2 Hkv) D], contiguous; changed in place
    angles: tuple[torch.Tensor, torch.Tensor],  # cos and sin [R, D]
    norms: tuple[RmsNorm, RmsNorm] | None,  # of q's and k's heads
    kv: LayerKV,
    slots: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Rotate q and k, store K and V in the rows' slots; returns q [R, Hq, D], a view of `qkv`."""
    num_rows = qkv.shape[0]
    num_kv_heads, dim = kv.k.shape[1], kv.k.shape[3]
    q_norm, k_norm = norms or (RmsNorm(qkv, 0.0), RmsNorm(qkv, 0.0))  # not read
    programs = triton.cdiv(num_heads, HEADS_PER_PROGRAM) + 2 * triton.cdiv(num_kv_heads, HEADS_PER_PROGRAM)
    rotate_and_store[(num_rows, programs)](
        qkv,
        *angles,
        q_norm.weight,
        k_norm.weight,
        kv.k,
        kv.v,
        slots,
        q_norm.epsilon,
        k_norm.epsilon,
        Q_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=dim // 2,
        HALF_PAD=triton.next_power_of_2(dim // 2),
        HEADS=HEADS_PER_PROGRAM,
        PAGE=PAGE,
        NORMED=norms is not None,
        num_warps=4,
        enable_fp_fusion=False,
        **launch_options(qkv.device),
    )
    return qkv[:, : num_heads * dim].view(num_rows, num_heads, dim)


__all__ = ["NAME", "RmsNorm", "rms_norm", "rotate_and_keep"]
