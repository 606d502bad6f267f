"""The choice of a CPU attention kernel, and the one in plain torch for machines without a C++ compiler.

The torch kernel calls SDPA at shapes that are a function of absolute position alone. Queries are grouped in
tiles of 16 consecutive positions aligned to multiples of 16, with zeros for absent rows; keys run to the end
of the tile, from the page where the window of the tile's first position begins. At one shape a row's bits
depend on neither its index in the tile nor the other rows; a masked key adds an exact zero.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from samewise.errors import BadParameter
from samewise.kernels.attention.base import NUM_TABLES, PAGE, AttentionKernel, Heads, LayerKV, Rows
from samewise.kernels.attention.native import NativeKernel, register
from samewise.kernels.native.build import compiler_available

_log = logging.getLogger(__name__)
_MAX_SAFE = 1e4
"""Magnitude below which a masked K or V element cannot overflow to infinity in a product, and so cannot leak
as NaN through its zero weight. Chosen by hand, inside float16's range (65,504)."""


def pick_cpu_kernel(name: str) -> AttentionKernel:
    """The kernel called `name`: ``native``, ``torch``, or ``auto`` (native where there is a compiler).

    A compiler that fails is an error under ``auto`` too, because another kernel is another contract.
    """
    if name == "native":
        return NativeKernel()
    if name == "torch":
        return TorchKernel()
    if name != "auto":
        raise BadParameter(
            f"attention={name!r} is not a CPU kernel: choose auto, native or torch.", param="attention"
        )
    if compiler_available():
        return NativeKernel()
    _log.warning(
        "No C++ compiler found: attention runs in plain torch, which is slower and gives other bits than the "
        "native kernel, so this machine's contract differs. Install g++ or clang++ to get the native one."
    )
    return TorchKernel()


class TorchKernel(AttentionKernel):
    """Canonical attention in plain torch."""

    @property
    def name(self) -> str:
        """Its version. The bits also depend on torch's version, another fact of the contract."""
        return "torch-1"

    def plan(self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int) -> None:
        """None: torch allocates its own scratch."""

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
            q, k, v, kv.k, kv.v, *rows[:NUM_TABLES], scale, window
        )
        return out


class _Tile(NamedTuple):
    """The 16 positions of a sequence from 16 * tile_index on, and the rows of the pass among them.

    A row with a tail has a tile of its own.
    """

    page_start: int
    tile_index: int
    tail: tuple[int, int] | None  # (its first key, index of that key's slot in the page list)
    rows: list[tuple[int, int]]  # (row of the pass, its length), in the pass's order


def _make_tiles(
    lengths: list[int], page_start: list[int], tail_start: list[int], tail: list[int]
) -> list[_Tile]:
    tiles: dict[tuple[int, int], _Tile] = {}
    with_tails = []
    tables = zip(lengths, page_start, tail_start, tail, strict=True)
    for row, (length, start, first, slots) in enumerate(tables):
        index = (length - 1) // PAGE
        if length > first:
            with_tails.append(_Tile(start, index, (first, slots), [(row, length)]))
        elif length > 0:
            tiles.setdefault((start, index), _Tile(start, index, None, [])).rows.append((row, length))
    return [*tiles.values(), *with_tails]


def _attend_torch(
    q: torch.Tensor,  # [R, Hq, D]
    k: torch.Tensor,  # [R, Hkv, D]
    v: torch.Tensor,  # [R, Hkv, D]
    k_cache: torch.Tensor,  # [P, Hkv, PAGE, D]
    v_cache: torch.Tensor,  # [P, Hkv, PAGE, D]
    lengths: torch.Tensor,
    slots: torch.Tensor,
    page_start: torch.Tensor,
    tail_start: torch.Tensor,
    tail: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    page, offset = slots.long() // PAGE, slots.long() % PAGE
    k_cache[page, :, offset] = k
    v_cache[page, :, offset] = v
    out = torch.zeros(q.shape, dtype=q.dtype)
    tables = (table.tolist() for table in (lengths, page_start, tail_start, tail))
    for tile in _make_tiles(*tables):
        first_page = _first_page(tile.tile_index, window)
        if tile.tail is None:
            first, end = tile.page_start + first_page, tile.page_start + tile.tile_index + 1
            keys, values = (_gather(cache, pages[first:end].long()) for cache in (k_cache, v_cache))
        else:
            tile_slots = _tile_slots(tile, first_page, pages)
            keys, values = (_gather_slots(cache, tile_slots) for cache in (k_cache, v_cache))
        for rows in _leak_free_groups(tile.rows, keys, values, first_page * PAGE, window):
            _attend_tile(q, keys, values, rows, tile.tile_index, out, scale=scale, window=window)
    return out


def _first_page(index: int, window: int | None) -> int:
    """The page where the window of the tile's first position begins."""
    return 0 if window is None else max(0, index * PAGE + 1 - window) // PAGE


def _gather(cache: torch.Tensor, page_numbers: torch.Tensor) -> torch.Tensor:
    """The keys or values of these pages, end to end: [Hkv, n, D], a copy."""
    _, num_heads, _, head_dim = cache.shape
    return cache[page_numbers].transpose(0, 1).reshape(num_heads, -1, head_dim)


def _tile_slots(tile: _Tile, first_page: int, pages: torch.Tensor) -> torch.Tensor:
    """The slots of a tile's keys for its one row, which has a tail; after the row's length any valid slot."""
    assert tile.tail is not None
    (first, slots), (_, length) = tile.tail, tile.rows[0]
    key = torch.arange(first_page * PAGE, (tile.tile_index + 1) * PAGE)
    in_pages = pages[tile.page_start + key.clamp(max=max(0, first - 1)) // PAGE].long() * PAGE + key % PAGE
    in_tail = pages[slots + (key.clamp(first, length - 1) - first)].long()
    return torch.where(key < first, in_pages, in_tail)


def _gather_slots(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The keys or values in these slots: [Hkv, n, D], a copy, contiguous."""
    return cache[slots // PAGE, :, slots % PAGE].transpose(0, 1).contiguous()


def _first_key(length: int, window: int | None) -> int:
    """The first key that a row of this length sees."""
    return 0 if window is None else max(0, length - window)


def _leak_free_groups(
    rows: list[tuple[int, int]], keys: torch.Tensor, values: torch.Tensor, first_key: int, window: int | None
) -> list[list[tuple[int, int]]]:
    """The tile's rows as one group; one group per row if a key that only some rows see could leak.

    The grouping changes no bit of a row that sees finite numbers: the shapes are the same either way.
    """
    ends = [length - first_key for _, length in rows]
    begins = [_first_key(length, window) - first_key for _, length in rows]
    edges = [slice(min(begins), max(begins)), slice(min(ends), max(ends))]
    safe = all(bool((x[:, edge].abs() < _MAX_SAFE).all()) for x in (keys, values) for edge in edges)
    return [rows] if safe else [[row] for row in rows]


def _attend_tile(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: list[tuple[int, int]],
    index: int,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
) -> None:
    """Attend for `rows` of tile `index`. Keys that none of them may see are zeroed, as they may be NaN."""
    num_kv_heads, num_keys, head_dim = keys.shape
    first_key = (index + 1) * PAGE - num_keys
    key = torch.arange(first_key, first_key + num_keys)
    begin = min(_first_key(length, window) for _, length in rows)
    end = max(length for _, length in rows)
    hidden = ((key < begin) | (key >= end))[:, None]

    row_indices = torch.tensor([row for row, _ in rows])
    offsets = torch.tensor([(length - 1) % PAGE for _, length in rows])
    group = q.shape[1] // num_kv_heads
    tile = q.new_zeros(PAGE, num_kv_heads, group, head_dim)
    tile[offsets] = q[row_indices].reshape(-1, num_kv_heads, group, head_dim)
    result = scaled_dot_product_attention(
        tile.permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * PAGE, head_dim),
        keys.masked_fill(hidden, 0)[None],
        values.masked_fill(hidden, 0)[None],
        attn_mask=_mask(key, index, window).repeat(group, 1),
        scale=scale,
    )
    by_offset = result.reshape(num_kv_heads, group, PAGE, head_dim).permute(2, 0, 1, 3)
    out[row_indices] = by_offset[offsets].flatten(1, 2)


def _mask(key: torch.Tensor, index: int, window: int | None) -> torch.Tensor:
    """Which keys each position of the tile sees: [16, n], a function of the tile alone."""
    position = torch.arange(index * PAGE, (index + 1) * PAGE)[:, None]
    visible = key <= position
    return visible if window is None else visible & (key > position - window)


register("attend_torch", _attend_torch)


__all__ = ["TorchKernel", "pick_cpu_kernel"]
