"""The sequences of a batch: padded on either side, or packed into one row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samewise.errors import BadParameter


@dataclass(frozen=True, slots=True)
class Run:
    """One sequence of a batch: `len(tokens)` tokens from `column` of `row` on."""

    row: int
    column: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences that the backward pass runs together, one per row and each from column 0 on."""

    runs: tuple[int, ...]  # by number
    width: int  # columns, as many as the longest has tokens
    first: int  # where its tokens begin among those of all blocks, padding included

    @property
    def end(self) -> int:
        """Where they end."""
        return self.first + len(self.runs) * self.width


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The sequences of a batch [B, T] of token ids."""

    shape: tuple[int, int]
    runs: tuple[Run, ...]

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> TokenBatch:
        """Read a batch. The tokens of a row are those where the mask is not 0.

        With `position_ids` a row may hold several sequences: each begins where the positions return to 0.
        """
        _check_shape(input_ids, attention_mask, "attention_mask")
        _check_shape(input_ids, position_ids, "position_ids")
        if attention_mask is not None and not ((attention_mask == 0) | (attention_mask == 1)).all():
            odd = attention_mask[(attention_mask != 0) & (attention_mask != 1)][0].item()
            raise BadParameter(
                f"attention_mask holds {odd}; give 1 for tokens and 0 for padding, and mark packed "
                "sequences by position_ids",
                param="attention_mask",
            )
        ids = input_ids.tolist()
        masks = [[1] * len(row) for row in ids] if attention_mask is None else attention_mask.tolist()
        runs: list[Run] = []
        for i, (tokens, mask) in enumerate(zip(ids, masks, strict=True)):
            columns = [column for column, used in enumerate(mask) if used]
            if not columns:
                continue
            if columns != list(range(columns[0], columns[-1] + 1)):
                raise BadParameter(
                    f"attention_mask: the tokens of row {i} are not in one piece; pad at the ends only",
                    param="attention_mask",
                )
            starts = columns[:1]
            if position_ids is not None:
                starts = _starts(position_ids[i].tolist(), columns, i)
            for start, end in zip(starts, [*starts[1:], columns[-1] + 1], strict=True):
                runs.append(Run(i, start, tuple(tokens[start:end])))
        return cls((input_ids.shape[0], input_ids.shape[1]), tuple(runs))

    def targets(self, first_column: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(run, index) of every token from a column on that has a token before it; its (row, column)."""
        inside: list[tuple[int, int]] = []
        places: list[tuple[int, int]] = []
        for number, run in enumerate(self.runs):
            for index in range(max(1, first_column - run.column), len(run.tokens)):
                inside.append((number, index))
                places.append((run.row, run.column + index))
        return inside, places

    def blocks(self) -> list[Block]:
        """All sequences. One block where that takes no more room than the batch itself.

        Else, in packed rows, short sequences are not padded to the longest: a block holds those of at least
        half its width, so that there are few blocks and at most as much padding as tokens.
        """
        lengths = [len(run.tokens) for run in self.runs]
        num_places = self.shape[0] * self.shape[1]
        if len(lengths) * max(lengths) <= num_places:
            return [Block(tuple(range(len(lengths))), max(lengths), 0)]
        blocks: list[Block] = []
        left = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        while left:
            width = lengths[left[0]]
            runs = tuple(number for number in left if 2 * lengths[number] >= width)
            blocks.append(Block(runs, width, blocks[-1].end if blocks else 0))
            left = left[len(runs) :]
        return blocks

    def padded(self, block: Block, device: torch.device) -> torch.Tensor:
        """The token ids of a block, filled up with token 0."""
        sequences = [self.runs[number].tokens for number in block.runs]
        rows = [[*tokens, *[0] * (block.width - len(tokens))] for tokens in sequences]
        return torch.tensor(rows).to(device, non_blocking=True)  # the host need not wait for the device


def _check_shape(input_ids: torch.Tensor, other: torch.Tensor | None, name: str) -> None:
    if input_ids.dim() != 2:
        raise BadParameter(
            f"input_ids has the shape {tuple(input_ids.shape)}; give [batch, tokens]", param="input_ids"
        )
    if other is not None and other.shape != input_ids.shape:
        raise BadParameter(
            f"{name} has the shape {tuple(other.shape)} and input_ids {tuple(input_ids.shape)}; "
            "give one value per token",
            param=name,
        )


def _starts(positions: list[int], columns: list[int], row: int) -> list[int]:
    """The columns at which sequences of a packed row begin."""
    starts: list[int] = []
    for column in columns:
        if positions[column] == 0:
            starts.append(column)
        elif not starts or positions[column] != column - starts[-1]:
            raise BadParameter(
                f"position_ids: row {row} has {positions[column]} in column {column}; "
                "the positions of each packed sequence are 0, 1, 2, …",
                param="position_ids",
            )
    return starts


__all__ = ["Block", "Run", "TokenBatch"]
