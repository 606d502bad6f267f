"""Attention on the CPU: the choice of kernel, and the one in plain torch for machines without a compiler.

The torch kernel keeps the law by calling SDPA at shapes that are a function of absolute position alone.
Queries go in tiles of 16 consecutive positions, aligned to multiples of 16, absent rows standing as zeros;
keys run to the end of the tile, from the page where the window of the tile's first position begins. At one
shape a row's bits depend on neither its place nor its neighbours; a masked key adds an exact zero.

Knows tensors; has never heard of a request or a model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from samewise.errors import BadParameter
from samewise.kernels.attention.base import PAGE, Heads, Kernel, LayerKV, Rows
from samewise.kernels.attention.native import NativeKernel, register
from samewise.kernels.native import available

_log = logging.getLogger(__name__)
_CALM = 1e4
"""Magnitude below which a masked K or V cannot make an infinity, and so cannot leak."""


def pick(name: str) -> Kernel:
    """The kernel called `name`: ``native``, ``torch``, or ``auto`` (native where there is a compiler).

    A compiler that is there but fails is an error under ``auto`` too: another kernel is another contract.
    """
    if name == "native":
        return NativeKernel()
    if name == "torch":
        return TorchKernel()
    if name != "auto":
        raise BadParameter(f"attention={name!r} is not a CPU kernel: choose auto, native or torch.")
    if available():
        return NativeKernel()
    _log.warning(
        "No C++ compiler found: attention runs in plain torch, which is slower and gives other bits than the "
        "native kernel, so this machine's contract differs. Install g++ or clang++ to get the native one."
    )
    return TorchKernel()


class TorchKernel:
    """Canonical attention in plain torch."""

    @property
    def name(self) -> str:
        """Its version. The bits are also torch's own, which the contract names besides."""
        return "torch-1"

    def allocate(
        self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """K and V pages, both [P, Hkv, PAGE, D]."""
        shape = (num_pages, num_kv_heads, PAGE, head_dim)
        return LayerKV(
            torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
        )

    def plan(self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int) -> None:
        """None needed."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: LayerKV,
        rows: Rows,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write this pass's K and V, then attend."""
        out: torch.Tensor = torch.ops.samewise.attend_torch(
            q, k, v, kv.k, kv.v, rows.lengths, rows.slots, rows.page_start, rows.pages, scale, window
        )
        return out


class _Tile(NamedTuple):
    """Positions [16 * number, 16 * number + 16) of one sequence, and which rows of the pass lie there."""

    page_start: int
    number: int
    rows: list[tuple[int, int]]  # (row of the pass, its length), in the pass's order


def _tiles(lengths: list[int], page_start: list[int]) -> list[_Tile]:
    tiles: dict[tuple[int, int], _Tile] = {}
    for row, (length, start) in enumerate(zip(lengths, page_start, strict=True)):
        if length > 0:
            number = (length - 1) // PAGE
            tiles.setdefault((start, number), _Tile(start, number, [])).rows.append((row, length))
    return list(tiles.values())


def _attend_torch(
    q: torch.Tensor,  # [R, Hq, D]
    k: torch.Tensor,  # [R, Hkv, D]
    v: torch.Tensor,  # [R, Hkv, D]
    k_cache: torch.Tensor,  # [P, Hkv, PAGE, D]
    v_cache: torch.Tensor,  # [P, Hkv, PAGE, D]
    lengths: torch.Tensor,
    slots: torch.Tensor,
    page_start: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    page, offset = slots.long() // PAGE, slots.long() % PAGE
    k_cache[page, :, offset] = k
    v_cache[page, :, offset] = v
    out = torch.zeros(q.shape, dtype=q.dtype)
    for tile in _tiles(lengths.tolist(), page_start.tolist()):
        first = _first_page(tile.number, window)
        held = pages[tile.page_start + first : tile.page_start + tile.number + 1].long()
        keys, values = _run(k_cache, held), _run(v_cache, held)
        for rows in _safe_together(tile.rows, keys, values, first * PAGE, window):
            _attend_tile(q, keys, values, rows, tile.number, out, scale=scale, window=window)
    return out


def _first_page(number: int, window: int | None) -> int:
    """The page where the window of the tile's first position begins."""
    return 0 if window is None else max(0, number * PAGE + 1 - window) // PAGE


def _run(cache: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """The keys or values of the pages `held`, end to end: [Hkv, n, D], a copy."""
    _, num_heads, _, head_dim = cache.shape
    return cache[held].transpose(0, 1).reshape(num_heads, -1, head_dim)


def _lowest(length: int, window: int | None) -> int:
    return 0 if window is None else max(0, length - window)


def _safe_together(
    rows: list[tuple[int, int]], keys: torch.Tensor, values: torch.Tensor, first_key: int, window: int | None
) -> list[list[tuple[int, int]]]:
    """The tile's rows as one group; each alone where a key that only some may see could leak into the others.

    The grouping changes no bit of a row that sees finite numbers: the shapes are the same either way.
    """
    ends = [length - first_key for _, length in rows]
    begins = [_lowest(length, window) - first_key for _, length in rows]
    edges = [slice(min(begins), max(begins)), slice(min(ends), max(ends))]
    calm = all(bool((x[:, edge].abs() < _CALM).all()) for x in (keys, values) for edge in edges)
    return [rows] if calm else [[row] for row in rows]


def _attend_tile(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: list[tuple[int, int]],
    number: int,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
) -> None:
    """Let `rows` of tile `number` attend; what none of them may see is zeroed, for it may be NaN."""
    num_kv_heads, num_keys, head_dim = keys.shape
    first_key = (number + 1) * PAGE - num_keys
    key = torch.arange(first_key, first_key + num_keys)
    begin = min(_lowest(length, window) for _, length in rows)
    end = max(length for _, length in rows)
    hidden = ((key < begin) | (key >= end))[:, None]

    at = torch.tensor([row for row, _ in rows])
    place = torch.tensor([(length - 1) % PAGE for _, length in rows])
    group = q.shape[1] // num_kv_heads
    tile = q.new_zeros(PAGE, num_kv_heads, group, head_dim)
    tile[place] = q[at].reshape(-1, num_kv_heads, group, head_dim)
    answer = scaled_dot_product_attention(
        tile.permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * PAGE, head_dim),
        keys.masked_fill(hidden, 0)[None],
        values.masked_fill(hidden, 0)[None],
        attn_mask=_mask(key, number, window).repeat(group, 1),
        scale=scale,
    )
    by_place = answer.reshape(num_kv_heads, group, PAGE, head_dim).permute(2, 0, 1, 3)
    out[at] = by_place[place].flatten(1, 2)


def _mask(key: torch.Tensor, number: int, window: int | None) -> torch.Tensor:
    """Which keys each position of the tile sees: [16, n], a function of the tile alone."""
    position = torch.arange(number * PAGE, (number + 1) * PAGE)[:, None]
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


register("attend_torch", _attend_torch)


__all__ = ["TorchKernel", "pick"]
