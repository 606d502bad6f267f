"""The work list: every row is in one tile, every split in one piece, and long tiles are cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from samewise.kernels.attention.tiles import COLUMNS, HEADER_LEN, TilePlan

H200 = TilePlan(
    tile_rows=16, split=256, window=None, kv_heads=8, num_slots=8000, slot_len=32 * 130, num_arrivals=1024,
    concurrent_programs=264,
)  # fmt: skip

Span = tuple[int, int]
"""A number of rows and the length of the last of them; (rows, 0) is padding."""


def work_list_of(plan: TilePlan, spans: Sequence[Span]) -> dict[str, list[int]]:
    """The work list of a pass of these spans, each of its own sequence: counts and columns by name."""
    lengths: list[int] = []
    starts: list[int] = []
    for i, (rows, length) in enumerate(spans):
        lengths += range(length - rows + 1, length + 1) if length else [0] * rows
        starts += [100 * i if length else 0] * rows
    return columns_of(plan, lengths, starts, lengths, [0] * len(lengths))


def columns_of(
    plan: TilePlan, lengths: list[int], starts: list[int], tail_start: list[int], tail: list[int]
) -> dict[str, list[int]]:
    """The work list of a pass of one list: counts and columns by name."""
    flat = np.full(plan.work_list_len(len(lengths)), -7, np.int32)
    plan.write(*(np.array(x, np.int32) for x in (lengths, starts, tail_start, tail)), flat)
    pieces, cut_tiles, cut_pieces = flat[:HEADER_LEN].tolist()
    num_tiles = cut_tiles + pieces - cut_pieces
    columns = dict(zip(COLUMNS, flat[HEADER_LEN:].reshape(len(COLUMNS), -1).tolist(), strict=True))
    tiles = {
        name: column[: num_tiles if name.startswith("tile") else None] for name, column in columns.items()
    }
    return tiles | {"pieces": [pieces]}


def uncut(plan: TilePlan, spans: Sequence[Span]) -> list[bool]:
    """Whether each tile is uncut, longest first."""
    return [slot < 0 for slot in work_list_of(plan, spans)["tile_slot"]]


def test_tiles_are_runs_of_one_sequence() -> None:
    work_list = work_list_of(H200, [(20, 100), (1, 101), (1, 30), (2, 12), (3, 0), (18, 0)])
    tiles = sorted(zip(work_list["tile_row"], work_list["tile_count"], strict=True))
    assert tiles == [(0, 16), (16, 4), (20, 1), (21, 1), (22, 2), (24, 16), (40, 5)]
    assert work_list["pieces"] == [7]


def test_the_longest_tiles_come_first() -> None:
    work_list = work_list_of(H200, [(1, 10), (1, 2000), (2, 0), (1, 600)])
    assert work_list["tile_row"] == [1, 4, 0, 2]


@pytest.mark.parametrize(
    "spans",
    [
        [(1, 1024)] * 128,
        [(1, 1024)] * 64,
        [(1, 1024)] * 32,
        [(1024, 8192)],
        [(1, 1)],
        [(1, 256)],
        [(128, 0)],
    ],
)
def test_no_tile_is_cut_where_the_device_is_busy_or_contexts_are_short(spans: list[Span]) -> None:
    assert all(uncut(H200, spans))


@pytest.mark.parametrize("spans", [[(1, 1024)], [(1, 1024)] * 8, [(16, 1024)] * 8, [(1, 32768)] * 8])
def test_every_tile_is_cut_where_few_tiles_have_long_contexts(spans: list[Span]) -> None:
    assert not any(uncut(H200, spans))


def test_one_long_context_among_short_ones_is_cut() -> None:
    assert uncut(H200, [*[(1, 200)] * 64, (1, 32768)]) == [False, *[True] * 64]


def test_every_split_has_one_piece_and_every_row_has_slots() -> None:
    work_list = work_list_of(H200, [(17, 1000), (1, 700), (1, 100), (5, 0)])
    assert work_list["tile_slot"] == [0, 64, 68, -1, -1]  # 16 rows of 4 splits; 1 of 4; 1 of 3
    assert work_list["tile_piece"] == [0, 4, 8, 11, 12]
    assert work_list["pieces"] == [13]


def test_splits_before_the_widest_window_are_left_out() -> None:
    narrow = TilePlan(**(vars(H200) | {"window": 1000}))
    work_list = work_list_of(narrow, [(3, 10_000), (1, 500)])
    assert work_list["tile_split"] == [(9998 - 1000) // 256, 0]
    assert work_list["tile_piece"] == [0, 40 - 35]


def test_tiles_that_do_not_fit_the_workspace_stay_uncut() -> None:
    small = TilePlan(**(vars(H200) | {"num_slots": 300}))
    work_list = work_list_of(small, [(1, 32768)] * 4)
    assert work_list["tile_slot"] == [0, 128, -1, -1]
    assert small.workspace_len == 300 * 32 * 130 + 1024


def test_long_runs_of_a_pass_of_many_rows_are_read_in_wide_tiles() -> None:
    plan = TilePlan(**(vars(H200) | {"tile_rows": 4, "wide_rows": 16, "wide_from": 60}))
    assert plan.work_list_len(59) == HEADER_LEN + len(COLUMNS) * 59
    spans = [(37, 1000), (6, 0), (9, 700), (1, 50), (7, 12)]
    lengths = np.array(
        [n for rows, end in spans for n in (range(end - rows + 1, end + 1) if end else [0] * rows)]
    )
    starts = np.repeat(np.arange(5) * 100, [rows for rows, _ in spans])
    flat = np.full(plan.work_list_len(60), -7, np.int32)
    lengths, starts = lengths.astype(np.int32), starts.astype(np.int32)
    plan.write(lengths, starts, lengths, 0 * lengths, flat)
    narrow, wide = (half[HEADER_LEN:].reshape(len(COLUMNS), -1) for half in flat.reshape(2, -1))
    counts = [half[:HEADER_LEN].tolist() for half in flat.reshape(2, -1)]
    assert counts[1] == [3, 0, 0]
    assert [wide[i, :3].tolist() for i in (0, 1, 10)] == [[0, 16, 43], [16, 16, 9], [-1, -1, -1]]
    covered = np.zeros(60, int)
    pieces, cut_tiles, cut_pieces = counts[0]
    for row, count in zip(narrow[0], narrow[1, : cut_tiles + pieces - cut_pieces], strict=False):
        assert count <= 4
        covered[row : row + count] += 1
    for row, count in zip(wide[0, :3], wide[1, :3], strict=True):
        covered[row : row + count] += 1
    assert covered.tolist() == [1] * 60


def test_a_tile_holds_any_rows_of_a_draft_tree_and_is_walked_in_chains() -> None:
    """A root of length 100, two chains of nodes (lengths 101 to 103, 102 to 103) and a last node of 101."""
    plan = TilePlan(**(vars(H200) | {"tile_rows": 4}))
    lengths = [100, 101, 102, 103, 102, 103, 101, 60]
    tail_start = [100, *[100] * 6, 60]
    work_list = columns_of(plan, lengths, [7] * 7 + [40], tail_start, [0, 20, 20, 20, 23, 23, 26, 0])
    assert [work_list[name] for name in ("tile_row", "tile_count")] == [[0, 4, 7], [4, 3, 1]]
    assert [work_list[name] for name in ("tile_shortest", "tile_longest")] == [[100, 101, 60], [103, 103, 60]]
    assert work_list["tile_shared"] == [100, 100, 60]
    assert work_list["tile_chains"] == [1, 2, 1]
    assert work_list["tile_chain_count"] == [4, 2, 1]
    assert work_list["tile_chain_length"] == [100, 102, 60]
    assert work_list["tile_tail_start"] == [100, 100, 60]
    assert work_list["tile_tail"][:2] == [20, 23]
    assert [work_list[name][6] for name in ("chain_count", "chain_tail_start", "chain_tail")] == [1, 100, 26]


def test_equal_lists_of_slots_make_no_chain_where_a_length_is_missing() -> None:
    work_list = columns_of(H200, [100, 101, 103], [0] * 3, [100] * 3, [0, 9, 9])
    assert (work_list["tile_chains"], work_list["tile_chain_count"]) == ([2], [2])


def test_rows_with_tails_are_not_read_in_wide_tiles() -> None:
    plan = TilePlan(**(vars(H200) | {"tile_rows": 4, "wide_rows": 16, "wide_from": 40}))
    lengths = np.array([*range(81, 101), *[101, 102] * 10], np.int32)
    tail_start = np.minimum(lengths, 100)
    tail = np.arange(40, dtype=np.int32) // 2
    flat = np.zeros(plan.work_list_len(40), np.int32)
    plan.write(lengths, 0 * lengths, tail_start, tail, flat)
    narrow, wide = flat.reshape(2, -1)
    assert wide[:HEADER_LEN].tolist() == [1, 0, 0]
    num_tiles = narrow[1] + narrow[0] - narrow[2]
    rows = sorted(narrow[HEADER_LEN:].reshape(len(COLUMNS), -1)[0, :num_tiles].tolist())
    assert rows == [16, 20, 24, 28, 32, 36]


def test_a_plan_follows_from_the_layers_of_the_model() -> None:
    from samewise.kernels.attention.base import Heads
    from samewise.kernels.attention.triton import CONSTANTS, TritonKernel

    tile, split = CONSTANTS.tile, CONSTANTS.split
    kernel = TritonKernel(num_programs=8, concurrent_programs=2)
    full, local = Heads(32, 8, 128, None), Heads(16, 8, 256, 512)
    plan = kernel.plan([full, local], torch.bfloat16, max_rows=4, max_len=split + 1)
    assert (plan.tile_rows, plan.window, plan.kv_heads) == (tile // 4, None, 8)
    assert (plan.num_slots, plan.slot_len) == (8, 32 * 130)
    assert kernel.plan([local], torch.float16, 4, 1000).window == 512
    assert kernel.plan([Heads(2 * tile, 1, 64, None)], torch.bfloat16, 4, 1000).tile_rows == 1
    assert kernel.plan([full], torch.bfloat16, 4, 1000).wide_rows == 16
    assert kernel.plan([full], torch.float32, 4, 1000).wide_rows == 0  # float32 has no wide tiles
    long = kernel.plan([full], torch.bfloat16, 1024, 131072)
    assert 4 * long.num_slots * long.slot_len <= CONSTANTS.workspace_bytes
    assert long.num_arrivals == 1024 * 8
