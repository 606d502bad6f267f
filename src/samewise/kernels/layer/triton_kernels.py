"""The Triton functions of norms and rotary positions on CUDA. `triton.py` launches them.

One program takes whole rows or whole heads, so a sum's order follows from its length alone.
"""

# ruff: noqa: N803, N806 - compile-time constants of a kernel are capitals, as is usual in Triton
# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _rounded(value: tl.tensor, like: tl.tensor) -> tl.tensor:
    """A float32 value as an element of `like` would hold it."""
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def norm_rows(
    x: tl.tensor,  # [R, WIDTH], strided by row
    weight: tl.tensor,  # [WIDTH]
    out: tl.tensor,  # [R, WIDTH]
    x_row: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """RMS norm of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    known = column < WIDTH
    scale = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * x_row + column, mask=known, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(values * values, axis=0), WIDTH * 1.0)
    values = _rounded(values * tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon)), out)
    tl.store(out + row * WIDTH + column, (values * scale).to(out.dtype.element_ty), mask=known)


@triton.jit
def _norm_heads(
    low: tl.tensor,  # [HEADS, HALF] the first half of each head, float32
    high: tl.tensor,
    weight: tl.tensor,  # [2 * HALF]
    dim: tl.tensor,
    known: tl.tensor,
    epsilon: tl.tensor,
    like: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """RMS norm of each head."""
    mean = tl.div_rn(tl.sum(low * low + high * high, axis=1), HALF * 2.0)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))[:, None]
    low_weight = tl.load(weight + dim, mask=known, other=0.0).to(tl.float32)[None, :]
    high_weight = tl.load(weight + HALF + dim, mask=known, other=0.0).to(tl.float32)[None, :]
    low = _rounded(_rounded(low * factor, like) * low_weight, like)
    high = _rounded(_rounded(high * factor, like) * high_weight, like)
    return low, high


@triton.jit
def rotate_and_store(  # noqa: PLR0917 - Triton functions take plain values only
    qkv: tl.tensor,  # [R, (Q_HEADS + 2 * KV_HEADS) * 2 * HALF]; q is rotated in place
    cos: tl.tensor,  # [R, 2 * HALF], both halves alike
    sin: tl.tensor,
    q_weight: tl.tensor,  # [2 * HALF], likewise k_weight; read if NORMED
    k_weight: tl.tensor,
    k_cache: tl.tensor,  # [P, KV_HEADS, PAGE, 2 * HALF]
    v_cache: tl.tensor,
    slots: tl.tensor,  # [R]
    q_epsilon: tl.tensor,
    k_epsilon: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,  # heads per program
    PAGE: tl.constexpr,
    NORMED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Norm and rotate some heads of one row: q stays in place, K and V go to the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    Q_GROUPS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    DIM: tl.constexpr = 2 * HALF
    dim = tl.arange(0, HALF_PAD)
    known = dim < HALF
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row)
    place = (slot // PAGE).to(tl.int64) * (KV_HEADS * PAGE * DIM) + (slot % PAGE) * DIM
    line = qkv + row * ((Q_HEADS + 2 * KV_HEADS) * DIM)
    if group < Q_GROUPS + KV_GROUPS:
        is_q = group < Q_GROUPS
        head = tl.where(is_q, group, group - Q_GROUPS) * HEADS + tl.arange(0, HEADS)
        mask = (head < tl.where(is_q, Q_HEADS, KV_HEADS))[:, None] & known[None, :]
        source = line + tl.where(is_q, 0, Q_HEADS * DIM) + head[:, None] * DIM + dim[None, :]
        low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        if NORMED:
            if is_q:
                low, high = _norm_heads(low, high, q_weight, dim, known, q_epsilon, qkv, HALF)
            else:
                low, high = _norm_heads(low, high, k_weight, dim, known, k_epsilon, qkv, HALF)
        c = tl.load(cos + row * DIM + dim, mask=known, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + row * DIM + dim, mask=known, other=0.0).to(tl.float32)[None, :]
        turned_low = (_rounded(low * c, qkv) - _rounded(high * s, qkv)).to(qkv.dtype.element_ty)
        turned_high = (_rounded(high * c, qkv) + _rounded(low * s, qkv)).to(qkv.dtype.element_ty)
        if is_q:
            tl.store(source, turned_low, mask=mask)
            tl.store(source + HALF, turned_high, mask=mask)
        else:
            target = k_cache + place + head[:, None] * (PAGE * DIM) + dim[None, :]
            tl.store(target, turned_low, mask=mask)
            tl.store(target + HALF, turned_high, mask=mask)
    else:
        head = (group - Q_GROUPS - KV_GROUPS) * HEADS + tl.arange(0, HEADS)
        mask = (head < KV_HEADS)[:, None] & known[None, :]
        source = line + (Q_HEADS + KV_HEADS) * DIM + head[:, None] * DIM + dim[None, :]
        target = v_cache + place + head[:, None] * (PAGE * DIM) + dim[None, :]
        tl.store(target, tl.load(source, mask=mask), mask=mask)
        tl.store(target + HALF, tl.load(source + HALF, mask=mask), mask=mask)


__all__ = ["norm_rows", "rotate_and_store"]
