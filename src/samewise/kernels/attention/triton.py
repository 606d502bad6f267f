"""Canonical attention on CUDA: launches the functions of `triton_kernels.py` and `triton_wide.py`.

What is computed for a row: its keys are split at absolute multiples of `split`; each split is walked in
absolute blocks of `block` keys, in order, with an online softmax of its own; the splits are folded one after
the other, in order. All of it follows from the row's length alone.

How it is computed: rows at consecutive positions of one sequence share a *tile*, whose keys are read once
(`tiles.py` chooses the tiles). Nodes of a draft tree share a tile too: the blocks before the tree are read
once for all of them, the last ones once per chain of nodes, each key in the column of its position. A program
walks all splits of its tile and folds them as it goes, or several programs walk one split each and the last
to finish folds them: the same operations in the same order. A row's index in its tile, the other rows, the
number of programs and the number of rows decide only when and where a number is computed: matrix units treat
all rows of a tile alike, a tile of one row has the shape of a full one, and where a row sees nothing its
state is kept by selection, not by arithmetic.

The work list is read on the device: one launch, or one captured graph, serves contexts of every length.

Pages are `[P, Hkv, PAGE, D]` for both K and V. Runs on CPU tensors under Triton's interpreter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from samewise.errors import InvariantBroken
from samewise.kernels.attention.base import PAGE, AttentionKernel, Heads, LayerKV, Rows
from samewise.kernels.attention.tiles import COLUMNS, HEADER_LEN, TilePlan
from samewise.kernels.attention.triton_kernels import move_pairs, paged_attend, paged_store
from samewise.kernels.attention.triton_wide import attend_wide
from samewise.kernels.dependent import launch_options


@dataclass(frozen=True)
class TritonConstants:
    """What the kernels are compiled and launched with.

    Set by hand for an H200. `bench/attention.py` (heads of an 8B model, bfloat16) varies and compares most.
    """

    # In the kernel's name, as bits may depend on them.
    tile: int = 16
    """Query rows of a matrix tile (rows of the pass times query heads per KV head): tl.dot's least."""
    wide_tile: int = 64
    """The same for long runs of rows in wide passes, in 16 bits; float32 would not fit in registers. Matrix
    units of one device give a row the same bits in a tile of any size, and no other operation here adds
    across a tile; the probe at start-up compares both."""
    split: int = 256
    """Keys in one split of a context: a fixed size at fixed absolute positions."""
    block: int = 32
    """Keys per step of the online softmax."""
    warps: int = 4
    """Per program; twice as many where a head takes more than 256 bytes, which needs the registers."""
    stages: int = 3
    """Blocks of K and V in flight, as far as shared memory allows."""

    # Bits do not depend on these.
    wide_from: int = 129
    """Rows of a pass from which on long runs are read in wide tiles: one more than a default frame has."""
    wide_stages: int = 2
    """Pairs of blocks in flight in wide tiles: with more, only one program would fit on a processor."""
    busy_rows: int = 64
    """Rows of a pass from which on programs of narrow tiles have half as many warps, so that twice as many
    run at a time. A pass of fewer rows has too few programs for that."""
    fold_stages: int = 4
    """Partial results in flight."""
    search_tiles: int = 256
    """Tiles compared per step when searching the work list."""
    programs_per_processor: int = 8
    """Enough programs that some read memory while others start their next item."""
    concurrent_per_processor: int = 2
    """Programs that run on a processor at the same time, approximately."""
    workspace_bytes: int = 128 * 2**20
    """For partial results, at most; tiles beyond it are walked by one program."""
    move_pairs: tuple[int, int, int] = (16, 64, 256)
    """Pairs of slots for which the moving of K and V is compiled; more are moved layer by layer."""
    move_elements: int = 64
    """Elements of a slot that one program moves: of up to 64 pairs at a time, 32 values a thread."""
    small_head_registers: int = 168
    """Registers per thread, at most, in programs of four warps whose heads take up to 128 bytes, so that
    three programs run on a processor at a time. Found by compiling for an H200: nothing or 8 bytes are
    spilled."""
    fp_fusion: bool = False
    """Whether the compiler may fuse a product and a sum: no, because bits would depend on its choice."""


CONSTANTS = TritonConstants()

_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32}
"""An integer type by its bytes: K and V are moved as integers, bit for bit."""

INTERPRETED = not isinstance(paged_attend, triton.JITFunction)
"""In Triton's interpreter tl.dot is a BLAS call, where a row's bits depend on its index; sums replace it."""


@torch.library.custom_op("samewise::attend_triton", mutates_args=("k_cache", "v_cache", "workspace"))
def attend_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    work_list: torch.Tensor,
    workspace: torch.Tensor,
    scale: float,
    window: int,
    num_programs: int,
) -> torch.Tensor:
    """Launch the kernels. `window` 0 means none, as an operator's arguments must be plain."""
    _check_strides(q, k, v, k_cache, v_cache, workspace)
    num_kv_heads, head_dim = k.shape[1:]
    paged_store[(q.shape[0],)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        *k.stride()[:2],
        *v.stride()[:2],
        HEADS=num_kv_heads,
        HEADS_PAD=triton.next_power_of_2(num_kv_heads),
        DIM=head_dim,
        DIM_PAD=_pad(head_dim),
        PAGE=PAGE,
        num_warps=CONSTANTS.warps,
        enable_fp_fusion=CONSTANTS.fp_fusion,
    )
    read = Reading(lengths, pages, work_list, workspace)
    return attend_stored(q, LayerKV(k_cache, v_cache), read, scale, window, num_programs)


class Reading(NamedTuple):
    """What tells rows which keys to read, and the scratch to read them with: fields of `Rows`."""

    lengths: torch.Tensor
    pages: torch.Tensor
    work_list: torch.Tensor
    workspace: torch.Tensor


def attend_stored(
    q: torch.Tensor,
    kv: LayerKV,
    read: Reading,
    scale: float,
    window: int,
    num_programs: int,
) -> torch.Tensor:
    """Attend to K and V that are in their pages."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    dim_pad = _pad(head_dim)
    head_bytes = dim_pad * q.element_size()
    lists = torch.split(read.work_list, HEADER_LEN + len(COLUMNS) * num_rows)
    if not lists or len(lists) > 2 or len(lists[-1]) != len(lists[0]):
        raise InvariantBroken(f"work lists of {len(read.work_list)} for {num_rows} rows")
    if len(read.workspace) < num_rows * num_kv_heads:
        raise InvariantBroken(f"a workspace of {len(read.workspace)} for {num_rows} rows")
    constants: dict[str, Any] = {
        "KV_HEADS": num_kv_heads, "GROUP": group, "DIM": head_dim, "DIM_PAD": dim_pad, "WINDOW": window,
        "PAGE": PAGE, "SPLIT": CONSTANTS.split, "BLOCK": CONSTANTS.block, "HEADER_LEN": HEADER_LEN,
        "EXPLICIT_SUM": INTERPRETED, "enable_fp_fusion": CONSTANTS.fp_fusion,
    } | launch_options(q.device)  # fmt: skip
    warps = CONSTANTS.warps if head_bytes <= 256 else 2 * CONSTANTS.warps
    tile = _tile_size(group, CONSTANTS.tile)
    halved = num_rows >= CONSTANTS.busy_rows and tile < CONSTANTS.wide_tile
    score_scale = scale * math.log2(math.e)
    paged_attend[(num_programs,)](
        q,
        *kv,
        read.lengths,
        read.pages,
        lists[0],
        read.workspace,
        out,
        *q.stride()[:2],
        score_scale,
        num_rows,
        len(read.workspace),
        TILE=tile,
        SEARCH_TILES=CONSTANTS.search_tiles,
        STAGES=_num_stages(tile, head_bytes, q.device),
        FOLD_STAGES=CONSTANTS.fold_stages,
        num_warps=warps // 2 if halved else warps,
        maxnreg=CONSTANTS.small_head_registers if head_bytes <= 128 and not halved else None,
        **constants,
    )
    for tile_list in lists[1:]:
        attend_wide[(num_programs,)](
            q,
            *kv,
            read.pages,
            tile_list,
            out,
            *q.stride()[:2],
            score_scale,
            num_rows,
            TILE=_tile_size(group, CONSTANTS.wide_tile),
            STAGES=_num_pairs(head_bytes, q.device),
            num_warps=warps,
            **constants,
        )
    return out


@attend_triton.register_fake
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _pad(size: int) -> int:
    """The tile size that holds `size` elements: a power of two, and tl.dot takes no less than 16."""
    return max(16, int(triton.next_power_of_2(size)))


def _check_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *dense: torch.Tensor) -> None:
    """Check the strides that the kernels assume."""
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        raise InvariantBroken("q, k and v must have unit stride within a head")
    if not all(t.is_contiguous() for t in dense):
        raise InvariantBroken("K and V pages and the workspace must be contiguous")


def _tile_size(group: int, min_size: int) -> int:
    """Query rows of a matrix tile for this many query heads per KV head."""
    return max(min_size, int(triton.next_power_of_2(group)))


def _num_stages(tile: int, head_bytes: int, device: torch.device) -> int:
    """Blocks of K and V that fit in shared memory beside the queries and one more tile."""
    shared_bytes, operands_held = _shared_memory(device)
    free_bytes = shared_bytes - (tile + CONSTANTS.block) * head_bytes
    fitting = free_bytes // (2 * CONSTANTS.block * head_bytes) + (0 if operands_held else 1)
    return max(1, min(CONSTANTS.stages, fitting))


def _num_pairs(head_bytes: int, device: torch.device) -> int:
    """Pairs of blocks of K and V that fit beside the queries of a wide tile; 0: not even one."""
    free_bytes = _shared_memory(device)[0] - (CONSTANTS.wide_tile + CONSTANTS.block) * head_bytes
    return max(0, min(CONSTANTS.wide_stages, free_bytes // (4 * CONSTANTS.block * head_bytes)))


def _addresses(caches: list[torch.Tensor]) -> torch.Tensor:
    """Addresses of tensors, on their device."""
    return torch.tensor([x.data_ptr() for x in caches], dtype=torch.int64, device=caches[0].device)


@functools.cache
def _shared_memory(device: torch.device) -> tuple[int, bool]:
    """Bytes of shared memory per program, and whether matrix units keep their operands there (Hopper on)."""
    if device.type != "cuda":
        return 227 * 1024, True
    index = device.index or 0
    max_bytes = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return int(max_bytes), torch.cuda.get_device_capability(index)[0] in {9, 10}


class _Caches(NamedTuple):
    """K and V pages of layers of one shape."""

    tensors: list[torch.Tensor]
    addresses: torch.Tensor  # of these, on the device
    num_heads: int
    head_dim: int


class TritonMover:
    """Moves K and V of slots, one launch for all layers of one shape."""

    def __init__(self, shapes: list[_Caches]) -> None:
        self._shapes = shapes
        self.max_pairs = CONSTANTS.move_pairs[-1]

    def __call__(self, moves: torch.Tensor) -> None:
        """Move slots. A captured launch reads this object's addresses: it must outlive the graph."""
        few, some, many = CONSTANTS.move_pairs
        for caches in self._shapes:
            num_elements = caches.num_heads * caches.head_dim
            move_pairs[(len(caches.tensors), triton.cdiv(num_elements, CONSTANTS.move_elements))](
                caches.addresses,
                moves,
                HEADS=caches.num_heads,
                DIM=caches.head_dim,
                PAGE=PAGE,
                FEW=few,
                SOME=some,
                MANY=many,
                SHARE=CONSTANTS.move_elements,
                ELEMENT=_INTEGERS[caches.tensors[0].element_size()],
            )


@dataclass(frozen=True)
class TritonKernel(AttentionKernel):
    """Canonical attention on CUDA by `num_programs` programs, about `concurrent_programs` at a time.

    Bits depend on neither number.
    """

    num_programs: int
    concurrent_programs: int

    @classmethod
    def on(cls, device: torch.device) -> TritonKernel:
        """A kernel with as many programs as keep this CUDA device busy."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(
            CONSTANTS.programs_per_processor * processors, CONSTANTS.concurrent_per_processor * processors
        )

    @property
    def name(self) -> str:
        """Name, version and every constant the bits may depend on."""
        c = CONSTANTS
        return (
            f"triton-2 tile {c.tile} and {c.wide_tile} split {c.split} block {c.block} "
            f"warps {c.warps} stages {c.stages}"
        )

    def plan(self, layers: Sequence[Heads], dtype: torch.dtype, max_rows: int, max_len: int) -> TilePlan:
        """Tiles of at most the rows that every layer's head group allows, in a bounded workspace."""
        windows = [layer.window for layer in layers if layer.window is not None]
        groups = [layer.num_heads // layer.num_kv_heads for layer in layers]
        tile_rows, wide_rows = (
            min(_tile_size(group, size) // group for group in groups)
            for size in (CONSTANTS.tile, CONSTANTS.wide_tile)
        )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        fits = [_num_pairs(_pad(layer.head_dim) * dtype.itemsize, device) for layer in layers]
        slot_len = max(layer.num_heads * (layer.head_dim + 2) for layer in layers)  # total, top and weight
        max_slots = max_rows * -(-max_len // CONSTANTS.split)
        return TilePlan(
            tile_rows=tile_rows,
            wide_rows=wide_rows if dtype.itemsize == 2 and all(fits) else 0,
            wide_from=CONSTANTS.wide_from,
            split=CONSTANTS.split,
            window=max(windows) if len(windows) == len(layers) else None,
            kv_heads=min(layer.num_kv_heads for layer in layers),
            num_slots=min(max_slots, CONSTANTS.workspace_bytes // (4 * slot_len)),
            slot_len=slot_len,
            num_arrivals=max_rows * max(layer.num_kv_heads for layer in layers),
            concurrent_programs=self.concurrent_programs,
            busy_rows=CONSTANTS.busy_rows,
        )

    def slot_mover(self, layers: Sequence[LayerKV]) -> TritonMover:
        """A mover of one launch for all layers of one shape."""
        caches: dict[tuple[int, int], list[torch.Tensor]] = {}
        for layer in layers:
            caches.setdefault((layer.k.shape[1], layer.k.shape[3]), []).extend(layer)
        return TritonMover(
            [
                _Caches(of_shape, _addresses(of_shape), num_heads, head_dim)
                for (num_heads, head_dim), of_shape in caches.items()
            ]
        )

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
        out: torch.Tensor = attend_triton(
            q,
            k,
            v,
            kv.k,
            kv.v,
            rows.lengths,
            rows.slots,
            rows.pages,
            rows.work_list,
            rows.workspace,
            scale,
            window or 0,
            self.num_programs,
        )
        return out


__all__ = [
    "CONSTANTS",
    "Reading",
    "TritonConstants",
    "TritonKernel",
    "TritonMover",
    "attend_stored",
    "attend_triton",
]
