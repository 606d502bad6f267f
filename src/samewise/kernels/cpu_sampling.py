"""What the sampler computes of a row of logits on a CPU: log of the sum of exp, scores, masses, ranks.

`NativeRows` does it in C++ (``native/sampling.cpp``) in a stated order, to the same bits on every machine.
`TorchRows` is for machines without a C++ compiler. There exp and log differ in the last bit between torch's
vector loop and its scalar tail, and where the tail begins depends on the flat offset: so they only ever see a
tensor of V elements made for one row, and the contract names the machine.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samewise.errors import InvariantBroken, MachineError
from samewise.kernels import noise
from samewise.kernels.native import build as native_build

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

MAX_TOP_IDS = 64
"""Of which the C++ kernels keep the order; more are sorted by NumPy."""


class RowStats(NamedTuple):
    """Of every row: its argmax (the lowest id of equals), that logit, and log(sum(exp(logit - top)))."""

    tokens: Ints  # [R]
    top: Floats  # [R]
    log_sum: Floats  # [R]


class RowMath(Protocol):
    """The float arithmetic of the sampler, for rows of V float32 logits on a CPU."""

    name: str
    """For the contract."""

    def stats(self, logits: Tensor) -> RowStats:
        """Of the rows of [R, V]."""

    def scores(self, logits: Tensor, temperature: float, key: tuple[int, int], limit: float) -> Tensor:
        """[V] → Gumbel noise - gap, gap = (largest - logit) / temperature; -inf where it exceeds `limit`."""

    def masses(self, gaps: Floats, bits: int) -> Ints:
        """exp(-gap) in units of 2**-bits, rounded down."""

    def top_ids(self, logits: Tensor, num: int) -> Tensor:
        """The ids of the `num` largest logits of every row, the largest first: int32 [R, num].

        For drafts only: no bit of it is promised. -1 where fewer logits exceed -inf.
        """

    def top(self, logits: Tensor, rows: RowScale, num: int) -> list[tuple[Ints, Floats]]:
        """The `num` likeliest ids of each of these rows and their log-probabilities.

        By falling value, then by rising id. None of a row where log-probabilities are NaN.
        """

    def ranks(self, logits: Tensor, rows: RowScale, tokens: Ints) -> Ints:
        """The place of tokens[i] in row i of these, counted from 1, in the order of `top`."""


class RowScale(NamedTuple):
    """Rows of a block of logits, in any order, and what turns a logit into a log-probability there."""

    at: Ints  # [n] rows of the block
    top: Floats  # [n]
    log_sum: Floats  # [n]

    def logprobs(self, logits: Tensor, i: int) -> Floats:
        """[V] of the i-th of these rows."""
        with np.errstate(all="ignore"):
            values: Floats = (logits[self.at[i]].numpy() - self.top[i]) - self.log_sum[i]
        return values


class _Entries(NamedTuple):
    stats: ctypes._NamedFuncPointer
    scores: ctypes._NamedFuncPointer
    masses: ctypes._NamedFuncPointer
    top_ids: ctypes._NamedFuncPointer
    top: ctypes._NamedFuncPointer
    ranks: ctypes._NamedFuncPointer


@functools.cache
def _entries() -> _Entries:
    library = native_build.library()
    stats, scores, masses = library.samewise_row_stats, library.samewise_scores, library.samewise_masses
    top_ids, top, ranks = library.samewise_top_ids, library.samewise_top_values, library.samewise_ranks
    pointer, int64, uint32, single = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float
    stats.argtypes = [pointer, int64, int64, int64, pointer, pointer, pointer, int64]
    scores.argtypes = [pointer, int64, single, single, uint32, uint32, pointer, int64]
    masses.argtypes = [pointer, int64, int64, pointer]
    top_ids.argtypes = [pointer, int64, int64, int64, int64, pointer, int64]
    top.argtypes = [pointer, pointer, int64, int64, int64, pointer, pointer, int64, pointer, pointer, int64]
    ranks.argtypes = [pointer, pointer, int64, int64, int64, pointer, pointer, pointer, pointer, int64]
    return _Entries(stats, scores, masses, top_ids, top, ranks)


def _raise_if_failed(status: int) -> None:
    """Raise the error that the kernel's return value stands for; 0 is success."""
    if status == 1:
        raise MachineError("Out of memory in the sampler: lower max_num_seqs.")
    if status:
        raise InvariantBroken(f"the native sampler returned {status}: more of the largest ids than it keeps?")


def _checked(logits: Tensor) -> Tensor:
    """The logits with the ids of a row side by side. Other dtypes would be read as float32."""
    if logits.dtype != torch.float32:
        raise InvariantBroken(f"the sampler of a CPU takes logits in torch.float32, not {logits.dtype}")
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class NativeRows:
    """The C++ kernels. Raises MachineError where there is no compiler."""

    name = "native"

    def __init__(self) -> None:
        self._stats, self._scores, self._masses, self._top_ids, self._top, self._ranks = _entries()

    def stats(self, logits: Tensor) -> RowStats:
        """See RowMath."""
        logits = _checked(logits)
        num_rows, vocab = logits.shape
        stats = RowStats(
            np.empty(num_rows, np.int64), np.empty(num_rows, np.float32), np.empty(num_rows, np.float32)
        )
        status = self._stats(
            logits.data_ptr(), num_rows, logits.stride(0), vocab, *(array.ctypes.data for array in stats),
            torch.get_num_threads(),
        )  # fmt: skip
        _raise_if_failed(status)
        return stats

    def scores(self, logits: Tensor, temperature: float, key: tuple[int, int], limit: float) -> Tensor:
        """See RowMath."""
        logits = _checked(logits)
        scores = torch.empty(logits.shape[0], dtype=torch.float32, device="cpu")
        status = self._scores(
            logits.data_ptr(), logits.shape[0], temperature, limit, *key, scores.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        _raise_if_failed(status)
        return scores

    def masses(self, gaps: Floats, bits: int) -> Ints:
        """See RowMath."""
        gaps = np.ascontiguousarray(gaps)
        masses = np.empty(len(gaps), np.int64)
        self._masses(gaps.ctypes.data, len(gaps), bits, masses.ctypes.data)
        return masses

    def top_ids(self, logits: Tensor, num: int) -> Tensor:
        """See RowMath."""
        logits = _checked(logits)
        num_rows, vocab = logits.shape
        ids = torch.empty(num_rows, num, dtype=torch.int32, device="cpu")
        status = self._top_ids(
            logits.data_ptr(), num_rows, logits.stride(0), vocab, num, ids.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        _raise_if_failed(status)
        return ids

    def top(self, logits: Tensor, rows: RowScale, num: int) -> list[tuple[Ints, Floats]]:
        """See RowMath."""
        logits = _checked(logits)
        num_rows = len(rows.at)
        if num > MAX_TOP_IDS:
            return [top_values(rows.logprobs(logits, i), num) for i in range(num_rows)]
        ids, values = np.empty((num_rows, num), np.int32), np.empty((num_rows, num), np.float32)
        status = self._top(
            logits.data_ptr(), rows.at.ctypes.data, num_rows, logits.stride(0), logits.shape[1],
            rows.top.ctypes.data, rows.log_sum.ctypes.data, num, ids.ctypes.data, values.ctypes.data,
            torch.get_num_threads(),
        )  # fmt: skip
        _raise_if_failed(status)
        return [
            # Too few exceed -inf: the others are -inf, or NaN.
            top_values(rows.logprobs(logits, i), num)
            if ids[i, -1] < 0
            else (ids[i].astype(np.int64), values[i])
            for i in range(num_rows)
        ]

    def ranks(self, logits: Tensor, rows: RowScale, tokens: Ints) -> Ints:
        """See RowMath."""
        logits, tokens = _checked(logits), np.ascontiguousarray(tokens)  # C++ reads one after the other
        ranks = np.empty(len(rows.at), np.int64)
        status = self._ranks(
            logits.data_ptr(), rows.at.ctypes.data, len(ranks), logits.stride(0), logits.shape[1],
            rows.top.ctypes.data, rows.log_sum.ctypes.data, tokens.ctypes.data, ranks.ctypes.data,
            torch.get_num_threads(),
        )  # fmt: skip
        _raise_if_failed(status)
        return ranks


class TorchRows:
    """torch's own exp and log, one row at a time."""

    name = "torch"

    def stats(self, logits: Tensor) -> RowStats:
        """See RowMath."""
        block = _checked(logits).numpy()
        tokens = block.argmax(-1)  # NumPy promises the first of equal maxima
        top = block[np.arange(len(tokens)), tokens]
        scratch = torch.empty(logits.shape[-1], dtype=torch.float32, device="cpu")
        log_sums = [_log_sum(row, float(largest), scratch) for row, largest in zip(logits, top, strict=True)]
        return RowStats(tokens, top, np.array(log_sums, dtype=np.float32))

    def scores(self, logits: Tensor, temperature: float, key: tuple[int, int], limit: float) -> Tensor:
        """See RowMath."""
        gap = (logits.amax() - _checked(logits)).div_(temperature)
        gap.masked_fill_(gap > limit, math.inf)
        keys = torch.tensor([key], dtype=torch.int64, device="cpu")
        return noise.gumbel(keys, logits.shape[0])[0].sub_(gap)

    def masses(self, gaps: Floats, bits: int) -> Ints:
        """See RowMath."""
        exps = torch.from_numpy(gaps).neg().exp_()
        masses: Ints = (exps * 2.0**bits).to(torch.int64).numpy()
        return masses

    def top_ids(self, logits: Tensor, num: int) -> Tensor:
        """See RowMath."""
        top = logits.topk(min(num, logits.shape[-1]))
        ids = top.indices.to(torch.int32).masked_fill_(top.values == -math.inf, -1)
        return torch.nn.functional.pad(ids, (0, num - ids.shape[-1]), value=-1)

    def top(self, logits: Tensor, rows: RowScale, num: int) -> list[tuple[Ints, Floats]]:
        """See RowMath."""
        return [top_values(rows.logprobs(logits, i), num) for i in range(len(rows.at))]

    def ranks(self, logits: Tensor, rows: RowScale, tokens: Ints) -> Ints:
        """See RowMath."""
        ranks = np.empty(len(rows.at), np.int64)
        for i, token in enumerate(tokens):
            values = rows.logprobs(logits, i)
            own = values[token]
            lower, higher = values[:token], values[token:]
            ranks[i] = 1 + np.count_nonzero(lower >= own) + np.count_nonzero(higher > own)
        return ranks


def top_values(values: Floats, num: int) -> tuple[Ints, Floats]:
    """The ids of the `num` largest of [V], and these, by falling value, then rising id; none where NaN is."""
    num = min(num, len(values))
    floor = np.partition(values, len(values) - num)[len(values) - num]
    ids = np.flatnonzero(values >= floor)  # the order of equal values is open: all that could belong
    ids = ids[np.lexsort((ids, -values[ids]))[:num]]
    return ids, values[ids]


def _log_sum(row: Tensor, top: float, scratch: Tensor) -> float:
    """`scratch` is [V] and newly allocated, hence aligned: exp and sum always see one shape and alignment."""
    return math.log(torch.sub(row, top, out=scratch).exp_().sum().item())


def pick_row_math(*, native: bool | None = None) -> RowMath:
    """The native kernels or torch's functions; by default native where there is a C++ compiler."""
    if native is None:
        native = native_build.compiler_available()
    return NativeRows() if native else TorchRows()


__all__ = [
    "Floats",
    "Ints",
    "NativeRows",
    "RowMath",
    "RowScale",
    "RowStats",
    "TorchRows",
    "pick_row_math",
    "top_values",
]
