"""TilePlan's constants for tiles.cpp, which writes work lists as `TilePlan.write` does.

The library that tiles.cpp is part of is built by `execute.native.pack`: one call packs a pass and writes its
work list. Host only.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from samewise.kernels.attention.tiles import TilePlan

SOURCE = Path(__file__).with_name("tiles.cpp")


class TileConstants(ctypes.Structure):
    """TileConstants of tiles.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tile_rows", "wide_rows", "split", "window", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("num_slots", "programs")),
        ("cut_threshold", ctypes.c_double),
    ]


def constants_of(plan: TilePlan, num_rows: int) -> TileConstants:
    """The constants for passes of `num_rows` rows."""
    return TileConstants(
        tile_rows=plan.tile_rows,
        wide_rows=plan.wide_rows if plan.num_lists(num_rows) == 2 else 0,
        split=plan.split,
        window=-1 if plan.window is None else plan.window,
        kv_heads=plan.kv_heads,
        num_slots=plan.num_slots,
        programs=plan.num_concurrent(num_rows),
        cut_threshold=plan.cut_threshold,
    )


__all__ = ["SOURCE", "TileConstants", "constants_of"]
