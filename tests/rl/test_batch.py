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
    assert batch.padded(torch.device("cpu")).tolist() == [[1, 2, 3], [4, 0, 0]]
