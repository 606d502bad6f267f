"""Edits of logits that depend on token ids: penalties, bias, allowed ids, grammar masks, bans.

In order: repetition, frequency and presence penalties, logit bias, allowed ids, grammar, bad words,
min_tokens. Every edit is exact at any number of rows: comparisons and single operations per element.

If the bans would leave no token, the last ones are dropped: min_tokens first, then bad words. Allowed ids
and grammars always hold, even where the model's logits are -inf.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import add, mul, truediv
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samewise.execute.sampling_rows import SamplingRow

_FLOAT32_MIN = -3.4028234663852886e38  # the lowest finite float32

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]


class LogitEditor:
    """Applies the edits of sampling rows to a block of logits. Keeps no state between calls.

    `unpack_on_host`: masks are unpacked by NumPy, which is faster for a CPU device.
    """

    def __init__(self, vocab: int, device: torch.device, *, unpack_on_host: bool) -> None:
        self._vocab, self._device, self._unpack_on_host = vocab, device, unpack_on_host

    def apply(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """A copy of [R, V] with the rows' edits applied to them."""
        logits = logits.clone(memory_format=torch.contiguous_format)
        flat = logits.view(-1)
        if (edit := self._collect(rows, _repetitions)) is not None:
            at, penalty = edit
            old = flat[at]
            divided, multiplied = elementwise(truediv, old, penalty), elementwise(mul, old, penalty)
            flat[at] = torch.where(old > 0, divided, multiplied)
        for kind in (_occurrences, _biases):
            if (edit := self._collect(rows, kind)) is not None:
                at, amount = edit
                flat[at] = elementwise(add, flat[at], amount)
        restricted = [row for row in rows if row.sampling.allowed_token_ids is not None]
        masked = [(row.row, row.mask) for row in rows if row.mask is not None]
        banning = [row for row in rows if _may_ban(row)]
        if touched := sorted({row.row for row in (*restricted, *banning)} | {row for row, _ in masked}):
            # The model's own -inf must still beat a ban, or an allowed id might not be chosen.
            where = send(np.array(touched), self._device)
            logits.index_copy_(0, where, logits[where].clamp_(min=_FLOAT32_MIN))
        if (edit := self._collect(restricted, _allowed)) is not None:
            allowed = flat[edit[0]]
            where = send(np.array([row.row for row in restricted]), self._device)
            logits.index_fill_(0, where, -math.inf)
            flat[edit[0]] = allowed
        if masked:
            where = send(np.array([row for row, _ in masked]), self._device)
            outside = self._outside([mask for _, mask in masked])
            logits.index_copy_(0, where, logits[where].masked_fill_(outside, -math.inf))
        if (edit := self._collect(banning, self._bans)) is not None:
            flat[edit[0]] = -math.inf
        return logits

    def _collect(
        self, rows: Sequence[SamplingRow], kind: Callable[[SamplingRow], tuple[Ids, Values] | None]
    ) -> tuple[Tensor, Tensor] | None:
        """One kind of edit of all rows: flat indices into the block, and a value for each."""
        edits = [(row.row, edit) for row in rows if (edit := kind(row)) is not None]
        if not edits:
            return None
        inside = [(row, ids, values, ids < self._vocab) for row, (ids, values) in edits]
        indices = np.concatenate([ids[ok] + row * self._vocab for row, ids, _, ok in inside])
        amounts = np.concatenate([values[ok] for _, _, values, ok in inside])
        return send(indices, self._device), send(amounts, self._device)

    def _outside(self, masks: Sequence[bytes]) -> Tensor:
        """[K, V] bool: the ids the masks leave out. To a CUDA device the bits are sent packed."""
        width = -(-self._vocab // 8)
        packed = np.frombuffer(b"".join(_resized(mask, width) for mask in masks), dtype=np.uint8)
        packed = packed.reshape(len(masks), width)
        if self._unpack_on_host:
            return torch.from_numpy(_unpack(packed, self._vocab) == 0)
        shifts = torch.arange(8, dtype=torch.uint8, device=self._device)
        bits = (send(packed.copy(), self._device)[:, :, None] >> shifts) & 1
        return bits.view(len(masks), width * 8)[:, : self._vocab] == 0

    def _bans(self, row: SamplingRow) -> tuple[Ids, Values] | None:
        """Ids that bad words and min_tokens ban; a kind that would leave no token is skipped."""
        left = self._allowed_ids(row)
        banned: list[Ids] = []
        for kind in (_bad_endings(row), _early_stops(row)):
            ids = np.array([token for token in kind if token < self._vocab], dtype=np.int64)
            remaining = left.copy()
            remaining[ids] = False
            if len(ids) and remaining.any():
                left = remaining
                banned.append(ids)
        return _edit(np.unique(np.concatenate(banned))) if banned else None

    def _allowed_ids(self, row: SamplingRow) -> npt.NDArray[np.bool_]:
        """[V]: the ids that allowed_token_ids and the grammar leave."""
        allowed, left = row.sampling.allowed_token_ids, np.ones(self._vocab, dtype=np.bool_)
        if allowed is not None:
            left[:] = False
            left[[token for token in allowed if token < self._vocab]] = True
        if row.mask is not None:
            packed = np.frombuffer(_resized(row.mask, -(-self._vocab // 8)), dtype=np.uint8)
            left &= _unpack(packed, self._vocab) == 1
        return left


def elementwise(operation: Callable[[Any, Any], Any], x: Tensor, y: Tensor) -> Tensor:
    """A float operation on each pair of elements; on a CPU by NumPy, in the calling thread.

    torch's other threads keep the rounding mode they were started with, which may be another.
    """
    if x.device.type != "cpu":
        return operation(x, y)  # type: ignore[no-any-return]
    with np.errstate(all="ignore"):
        return torch.from_numpy(operation(x.numpy(), y.numpy()))


def send(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device, without waiting for the work queued there."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def _edit(ids: npt.ArrayLike, values: npt.ArrayLike = 0.0) -> tuple[Ids, Values]:
    array = np.asarray(ids, dtype=np.int64)
    return array, np.broadcast_to(np.asarray(values, dtype=np.float32), array.shape)


def _repetitions(row: SamplingRow) -> tuple[Ids, Values] | None:
    penalty = row.sampling.repetition_penalty
    if penalty == 1.0:
        return None
    # An id that occurs twice is harmless: both read its old logit and write the same new one.
    past = [np.asarray(tokens, dtype=np.int64) for tokens in (row.prompt, row.output)]
    return _edit(np.concatenate(past), penalty)


def _occurrences(row: SamplingRow) -> tuple[Ids, Values] | None:
    frequency, presence = row.sampling.frequency_penalty, row.sampling.presence_penalty
    if (frequency == 0.0 and presence == 0.0) or not row.output:
        return None
    counts = Counter(row.output)
    return _edit(list(counts), [-(count * frequency + presence) for count in counts.values()])


def _biases(row: SamplingRow) -> tuple[Ids, Values] | None:
    bias = dict(row.sampling.logit_bias)
    return _edit(list(bias), list(bias.values())) if bias else None


def _allowed(row: SamplingRow) -> tuple[Ids, Values] | None:
    allowed = row.sampling.allowed_token_ids
    return None if allowed is None else _edit(sorted(set(allowed)))


def _may_ban(row: SamplingRow) -> bool:
    return bool(row.sampling.bad_words) or len(row.output) < row.sampling.min_tokens


def _bad_endings(row: SamplingRow) -> Iterator[int]:
    """Last tokens of the bad words whose other tokens stand right before this position."""
    words = row.sampling.bad_words
    max_len = max((len(word) - 1 for word in words), default=0)
    recent = (*row.prompt[-max_len:], *row.output[-max_len:]) if max_len else ()
    for word in words:
        *before, last = word
        if not before or recent[-len(before) :] == tuple(before):
            yield last


def _early_stops(row: SamplingRow) -> Sequence[int]:
    """Stop ids, before min_tokens is reached."""
    return sorted(row.sampling.stop_ids) if len(row.output) < row.sampling.min_tokens else ()


def _resized(mask: bytes, width: int) -> bytes:
    """A mask of the model's vocabulary size; the tokenizer's may be smaller or larger."""
    return mask[:width].ljust(width, b"\0")


def _unpack(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint8]:
    return np.unpackbits(packed, axis=-1, count=count, bitorder="little")


__all__ = ["LogitEditor", "elementwise", "send"]
