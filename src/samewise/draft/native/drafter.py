"""The tree drafter in C++, built once by the machine's own compiler and called through ctypes.

A frame costs two calls, whatever the number of sequences: `commit` and `grow`. Python runs no code inside of
a call, so an interrupt finds the drafter before or after one. Host only.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from samewise.draft import estimates, suffix_counts
from samewise.draft.recycle import WIDTH
from samewise.draft.tree import DraftTree, Limit, RowPrices
from samewise.draft.tree_drafter import Committed, Memory, Sources
from samewise.draft.tuning import DEFAULTS, TreeTuning
from samewise.errors import InvariantBroken
from samewise.kernels.native.build import library_of

SOURCE = Path(__file__).with_name("drafter.cpp")

_WHOLE = (
    "vocab", "suffixes", "rows", "max_context", "max_successors", "store_entries", "max_pools",
    "stored_tokens", "min_resync", "deep_ranks", "num_rows", "max_tables", "check_nodes", "max_length",
    "num_shares", "max_total", "max_distance", "own", "stored", "recycled", "runners_up", "predicted",
    "occurred", "again",
)  # fmt: skip
_REAL = ("step", "first_squares", "max_squares", "patience")


class _Tuning(ctypes.Structure):
    """DrafterTuning of drafter.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in _WHOLE] + [(name, ctypes.c_double) for name in _REAL]


def _tuning(vocab: int, sources: Sources, tuning: TreeTuning) -> _Tuning:
    suffixes, learning = tuning.suffixes, tuning.estimates
    return _Tuning(
        vocab=vocab, suffixes=Sources.SUFFIXES in sources, rows=Sources.ROWS in sources,
        max_context=suffixes.max_context, max_successors=suffixes.max_successors,
        store_entries=suffixes.store_entries, max_pools=suffixes.max_pools,
        stored_tokens=suffixes.stored_tokens, min_resync=suffixes.min_resync,
        deep_ranks=tuning.deep_ranks, num_rows=tuning.num_rows, max_tables=tuning.max_tables,
        check_nodes=tuning.check_nodes, max_length=suffix_counts.MAX_LENGTH,
        num_shares=suffix_counts.NUM_SHARES, max_total=suffix_counts.MAX_TOTAL,
        max_distance=estimates.MAX_DISTANCE, own=estimates.OWN,
        stored=estimates.STORED, recycled=estimates.RECYCLED, runners_up=estimates.RUNNERS_UP[0],
        predicted=estimates.PREDICTED, occurred=estimates.OCCURRED, again=estimates.AGAIN,
        step=learning.step, first_squares=learning.first_squares, max_squares=learning.max_squares,
        patience=tuning.patience,
    )  # fmt: skip


def _library() -> ctypes.CDLL:
    """The library, its functions declared. MachineError where it cannot be built."""
    library = library_of(SOURCE)
    address, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    declared = {
        "new": (address, [ctypes.POINTER(_Tuning), address]),
        "delete": (None, [address]),
        "begin": (whole, [address, whole, address, whole, ctypes.c_char_p, whole, address, whole]),
        "commit": (whole, [address, whole, *[address] * 7]),
        "grow": (whole, [address, whole, *[address] * 3, real, address, whole, real, *[address] * 5]),
        "forget": (whole, [address, whole, whole]),
        "recover": (None, [address]),
        "clear": (whole, [address]),
        "memory": (None, [address, address]),
        "weights": (ctypes.POINTER(real), [address]),
    }
    for name, (result, arguments) in declared.items():
        function = getattr(library, f"drafter_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _address(numbers: array[int] | array[float]) -> int:
    """Of numbers that stay alive until the call returns."""
    return numbers.buffer_info()[0]


class _Trees:
    """Memory for the trees of one call: at most `size` nodes of `num` sequences."""

    def __init__(self, num: int, size: int) -> None:
        self.num, self.size = num, size
        self.counts, self.brought = np.zeros(num, np.int64), np.zeros(1)
        self.tokens, self.parents = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.probs = np.zeros(size)
        outputs = (self.counts, self.tokens, self.parents, self.probs, self.brought)
        self.addresses = [output.ctypes.data for output in outputs]


class NativeDrafter:
    """`TreeDrafter` in C++. MachineError where it cannot be built. One owner, one thread."""

    def __init__(
        self, vocab: int, sources: Sources = Sources.ALL, tuning: TreeTuning = DEFAULTS.trees
    ) -> None:
        self._library = library = _library()
        weights = array("d", estimates.first_weights())
        handle = library.drafter_new(ctypes.byref(_tuning(vocab, sources, tuning)), _address(weights))
        if handle is None:
            raise InvariantBroken("the native drafter does not take this tuning, or memory ran out")
        self._handle = handle
        self._delete = weakref.finalize(self, library.drafter_delete, handle)
        self._trees = _Trees(1, 64)

    def begin(
        self, seq_id: int, tokens: list[int], salt: bytes | None, prediction: Sequence[int] = ()
    ) -> None:
        """Index a text. Without a salt nothing of it is shared, and no other text serves it."""
        text, predicted = array("i", tokens), array("i", prediction)
        salt_len = -1 if salt is None else len(salt)
        self._check(
            self._library.drafter_begin(
                self._handle, seq_id, _address(text), len(text), salt or b"", salt_len,
                _address(predicted), len(predicted),
            )
        )  # fmt: skip

    def commit(self, frame: list[Committed]) -> None:
        """Learn from the last trees, keep the rows' candidates, and append the tokens."""
        seq_ids, num_tokens, num_rows = array("q"), array("q"), array("q")
        tokens, path, inputs, ids = array("i"), array("i"), array("i"), []
        for committed in frame:
            seq_ids.append(committed.seq_id)
            num_tokens.append(len(committed.tokens))
            num_rows.append(len(committed.inputs))
            tokens.extend(committed.tokens)
            if committed.ids is None:
                path.extend(committed.tokens)  # not read: there are no rows
            else:
                path.extend(committed.rows)
                inputs.extend(committed.inputs)
                ids.append(committed.ids)
        candidates = np.ascontiguousarray(np.concatenate(ids) if ids else np.empty((0, WIDTH)), np.int32)
        self._check(
            self._library.drafter_commit(
                self._handle, len(frame), _address(seq_ids), _address(num_tokens), _address(tokens),
                _address(path), _address(num_rows), _address(inputs), candidates.ctypes.data,
            )
        )  # fmt: skip

    def grow(
        self, limits: list[Limit], prices: RowPrices, min_prob: float = 0.0
    ) -> tuple[list[DraftTree], float]:
        """A tree for each limit, of the nodes that bring most tokens per second, and what they bring."""
        num, budget = len(limits), len(prices.seconds) - 1
        trees = self._trees
        if trees.num < num or trees.size < budget:
            trees = self._trees = _Trees(max(num, trees.num), max(budget, trees.size))
        seq_ids, max_nodes, max_depths = (
            (array("q", column) for column in zip(*limits, strict=True)) if limits else [array("q")] * 3
        )
        seconds = prices.seconds if isinstance(prices.seconds, array) else array("d", prices.seconds)
        written = self._library.drafter_grow(
            self._handle, num, _address(seq_ids), _address(max_nodes), _address(max_depths), prices.live,
            _address(seconds), budget, min_prob, *trees.addresses,
        )  # fmt: skip
        self._check(written)
        tokens, parents = trees.tokens[:written].tolist(), trees.parents[:written].tolist()
        probs, grown, end = trees.probs[:written].tolist(), [], 0
        for count in trees.counts[:num].tolist():
            start, end = end, end + count
            tree = DraftTree(tuple(tokens[start:end]), tuple(parents[start:end]), tuple(probs[start:end]))
            grown.append(tree)
        return grown, float(trees.brought[0])

    def forget(self, seq_id: int, *, store: bool = True) -> None:
        """Drop a sequence; its text goes to the store, if it shares and `store`."""
        self._check(self._library.drafter_forget(self._handle, seq_id, store))

    def recover(self) -> None:
        """Drop all sequences; after memory ran out, tables and stored texts too."""
        self._library.drafter_recover(self._handle)

    def clear(self) -> None:
        """Drop tables, stored texts and rows: the weights were replaced. Texts and estimates stay."""
        self._check(self._library.drafter_clear(self._handle))

    def memory(self) -> Memory:
        """Bytes taken now."""
        sizes = array("q", (0, 0, 0))
        self._library.drafter_memory(self._handle, _address(sizes))
        return Memory(*sizes)

    @property
    def weights(self) -> list[float]:
        """Of the estimates."""
        weights: list[float] = self._library.drafter_weights(self._handle)[: 2 * estimates.AGAIN]
        return weights

    @staticmethod
    def _check(status: int) -> None:
        if status == -1:
            raise MemoryError("the native drafter ran out of memory")
        if status < 0:
            raise InvariantBroken("trees were asked for a sequence that the drafter does not know")


__all__ = ["SOURCE", "NativeDrafter"]
