"""Fills staging buffers in C++, built once by the machine's own compiler and called through ctypes.

A pass costs one call, whatever the number of sequences. Host only.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from array import array
from pathlib import Path
from typing import NamedTuple

from samewise.errors import InvariantBroken, MachineError
from samewise.follow_up import FollowUp
from samewise.kernels.attention import native_tiles
from samewise.kernels.attention.base import PAGE, AttentionPlan
from samewise.kernels.attention.tiles import TilePlan
from samewise.kernels.native.build import library_of
from samewise.kv.pages import TRASH

SOURCE = Path(__file__).with_name("pack.cpp")

log = logging.getLogger("samewise")


class Layout(NamedTuple):
    """Where the parts of a staging buffer begin, in elements. Fields of `num_rows` elements come first."""

    num_rows: int
    work_start: int
    moves_start: int
    keep_start: int
    pages_start: int
    size: int


class _BufferLayout(ctypes.Structure):
    """BufferLayout of pack.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_rows", "page", "trash", *Layout._fields[1:])),
        ("plan", ctypes.c_void_p),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library, its function declared; None where it cannot be built."""
    try:
        library = library_of(SOURCE, native_tiles.SOURCE)
    except MachineError as reason:
        log.info("passes are packed in Python, which is slower: %s", reason)
        return None
    address, whole = ctypes.c_void_p, ctypes.c_int64
    function = library.samewise_pack
    function.restype = whole
    function.argtypes = [*(address, address, whole, address, whole, address, whole, whole, whole)]
    return library


class Packer:
    """Fills the host side of staging buffers of one layout."""

    def __init__(self, library: ctypes.CDLL, layout: Layout, plan: TilePlan | None) -> None:
        self._pack = library.samewise_pack
        self._constants = None if plan is None else native_tiles.constants_of(plan, layout.num_rows)
        address = None if self._constants is None else ctypes.addressof(self._constants)
        self._layout = _BufferLayout(**layout._asdict(), page=PAGE, trash=TRASH, plan=address)
        self._address = ctypes.addressof(self._layout)

    def pack(
        self,
        host: int,
        num_spans: int,
        numbers: list[int],
        tables: list[array[int]],
        num_keep: int = -1,
        num_moves: int = 0,
    ) -> int:
        """Fill the buffer at the address `host`; returns the number of elements to send.

        `numbers`: rows, given, start, source, pages and parents of each span (the last two are counts); then
        the inputs of all spans, the parents of all, the rows to keep, and the pairs of slots to move.
        `num_keep` is -1 where no rows are chosen.
        """
        num, pages = len(numbers), b"".join(tables)
        packed = struct.pack(f"{num}i", *numbers)
        return self._fill(host, num_spans, packed, num, pages, len(pages) // 4, num_keep, num_moves)

    def pack_follow_up(self, host: int, follow_up: FollowUp, num_keep: int = -1) -> int:
        """Fill the buffer with a frame that is given as numbers already."""
        numbers, pages = follow_up.numbers, follow_up.pages
        return self._fill(
            host, follow_up.num_spans, numbers.ctypes.data, len(numbers), pages.ctypes.data, len(pages),
            num_keep, follow_up.num_moves,
        )  # fmt: skip

    def _fill(
        self,
        host: int,
        num_spans: int,
        numbers: bytes | int,
        num_numbers: int,
        pages: bytes | int,
        num_pages: int,
        num_keep: int,
        num_moves: int,
    ) -> int:
        end: int = self._pack(
            self._address, host, num_spans, numbers, num_numbers, pages, num_pages, num_keep, num_moves
        )
        if end < 0:
            _refuse(end, self._layout.num_rows)
        return end


def _refuse(status: int, num_rows: int) -> None:
    if status == -1:
        raise MemoryError("no memory for the work list of a pass")
    if status == -2:
        raise InvariantBroken(f"too many rows for a pass of {num_rows}")
    raise InvariantBroken(
        "a pass cannot be packed: a position lies outside of its page table, a parent does not stand before "
        "its child, or the staging buffer is too small"
    )


def make_packer(layout: Layout, plan: AttentionPlan | None) -> Packer | None:
    """A packer for a layout; None where there is no compiler, or the plan is not one that C++ knows."""
    library = _library()
    if library is None or not (plan is None or isinstance(plan, TilePlan)):
        return None
    return Packer(library, layout, plan)


__all__ = ["SOURCE", "Layout", "Packer", "make_packer"]
