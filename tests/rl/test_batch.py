"""The sequences of a batch."""

import torch

from samewise.rl import TokenBatch


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_without_a_mask_every_row_is_a_sequence() -> None:
    batch = TokenBatch.of(ids([1, 2], [3, 4]))
    assert [(run.row, run.column, run.tokens) for run in batch.runs] == [(0, 0, (1, 2)), (1, 0, (3, 4))]


def test_padding_is_left_out_and_empty_rows_have_no_sequence() -> None:
    mask = ids([0, 1, 1], [1, 0, 0], [0, 0, 0])
    batch = TokenBatch.of(ids([9, 1, 2], [3, 9, 9], [9, 9, 9]), mask)
    assert [(run.row, run.column, run.tokens) for run in batch.runs] == [(0, 1, (1, 2)), (1, 0, (3,))]


def test_positions_that_return_to_zero_begin_a_sequence() -> None:
    batch = TokenBatch.of(ids([1, 2, 3, 4, 5, 9]), ids([1, 1, 1, 1, 1, 0]), ids([0, 1, 0, 0, 1, 0]))
    assert [(run.column, run.tokens) for run in batch.runs] == [(0, (1, 2)), (2, (3,)), (3, (4, 5))]


def test_targets_have_a_token_before_them_and_lie_in_the_wanted_columns() -> None:
    batch = TokenBatch.of(ids([9, 1, 2, 3], [4, 5, 6, 7]), ids([0, 1, 1, 1], [1, 1, 1, 1]))
    assert batch.targets(0) == (
        [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3)],
        [(0, 2), (0, 3), (1, 1), (1, 2), (1, 3)],
    )
    assert batch.targets(3) == ([(0, 2), (1, 3)], [(0, 3), (1, 3)])


def test_sequences_are_padded_on_the_right() -> None:
    batch = TokenBatch.of(ids([9, 1, 2, 3], [4, 9, 9, 9]), ids([0, 1, 1, 1], [1, 0, 0, 0]))
    (block,) = batch.blocks()
    assert batch.padded(block, torch.device("cpu")).tolist() == [[1, 2, 3], [4, 0, 0]]


def test_short_sequences_in_packed_rows_have_blocks_of_their_own() -> None:
    """All padded to the longest would take more room than the row."""
    lengths = [2, 9, 1, 5, 1]
    positions = ids([i for length in lengths for i in range(length)])
    batch = TokenBatch.of(torch.arange(18)[None], position_ids=positions)
    wide, narrow = batch.blocks()
    assert (wide.runs, wide.width, wide.first, wide.end) == ((1, 3), 9, 0, 18)
    assert (narrow.runs, narrow.width, narrow.first, narrow.end) == ((0, 2, 4), 2, 18, 24)
    assert batch.padded(narrow, torch.device("cpu")).tolist() == [[0, 1], [11, 0], [17, 0]]


def test_packed_sequences_of_one_length_are_one_block() -> None:
    batch = TokenBatch.of(torch.arange(8)[None], position_ids=ids([0, 1, 2, 3, 0, 1, 2, 3]))
    assert [block.runs for block in batch.blocks()] == [(0, 1)]
