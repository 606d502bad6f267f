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
from samewise.draft.recycle import WIDTH, max_tables
from samewise.draft.tree import DraftTree, Limit, RowPrices
from samewise.draft.tree_drafter import Committed, Memory, Sources
from samewise.draft.tuning import DEFAULTS, TreeTuning
from samewise.errors import InvariantBroken
from samewise.follow_up import SPAN_LEN, FollowUp, FrameOutputs, FrameToFollow
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
    """DrafterTuning of interface.h."""

    _fields_ = [(name, ctypes.c_int64) for name in _WHOLE] + [(name, ctypes.c_double) for name in _REAL]


class _FrameToFollow(ctypes.Structure):
    """FrameToFollow of interface.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num", "page", "max_nodes", "max_depth")),
        *(
            (name, ctypes.c_void_p)
            for name in ("sequences", "inputs", "parents", "next_inputs", "pages", "stop_ids")
        ),
    ]


class _NextFrame(ctypes.Structure):
    """NextFrame of interface.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("numbers", "pages")),
        *((name, ctypes.c_int64) for name in ("spans", "rows", "moves", "num_numbers", "num_pages")),
    ]


class _FrameOutputs(ctypes.Structure):
    """FrameOutputs of interface.h."""

    _fields_ = [("rows", ctypes.c_void_p), ("stride", ctypes.c_int64), ("candidates", ctypes.c_int64)]


def _tuning(vocab: int, sources: Sources, tuning: TreeTuning) -> _Tuning:
    suffixes, learning = tuning.suffixes, tuning.estimates
    return _Tuning(
        vocab=vocab, suffixes=Sources.SUFFIXES in sources, rows=Sources.ROWS in sources,
        max_context=suffixes.max_context, max_successors=suffixes.max_successors,
        store_entries=suffixes.store_entries, max_pools=suffixes.max_pools,
        stored_tokens=suffixes.stored_tokens, min_resync=suffixes.min_resync,
        deep_ranks=tuning.deep_ranks, num_rows=tuning.num_rows,
        max_tables=max_tables(vocab, tuning.table_bytes), check_nodes=tuning.check_nodes,
        max_length=suffix_counts.MAX_LENGTH, num_shares=suffix_counts.NUM_SHARES,
        max_total=suffix_counts.MAX_TOTAL, max_distance=estimates.MAX_DISTANCE, own=estimates.OWN,
        stored=estimates.STORED, recycled=estimates.RECYCLED, runners_up=estimates.RUNNERS_UP[0],
        predicted=estimates.PREDICTED, occurred=estimates.OCCURRED, again=estimates.AGAIN,
        step=learning.step, first_squares=learning.first_squares, max_squares=learning.max_squares,
        patience=tuning.patience,
    )  # fmt: skip


def _library() -> ctypes.CDLL:
    """The library, its functions declared. MachineError where it cannot be built."""
    library = library_of(SOURCE)
    address, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    prices = [whole, real, real, address, whole, real]  # live, own, gap, seconds, budget, min_prob
    declared = {
        "new": (address, [ctypes.POINTER(_Tuning), address]),
        "delete": (None, [address]),
        "begin": (whole, [address, whole, address, whole, ctypes.c_char_p, whole, address, whole]),
        "index": (whole, [address, whole, whole]),
        "commit": (whole, [address, whole, *[address] * 7]),
        "grow": (whole, [address, whole, *[address] * 3, *prices, *[address] * 5]),
        "follow_up": (whole, [*[address] * 3, *prices, *[address] * 6]),
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


NO_TREE = DraftTree()


class _Trees:
    """Memory for the trees of one call: at most `size` nodes of `num` sequences."""

    def __init__(self, num: int, size: int) -> None:
        self.num, self.size = num, size
        self.counts, self.brought = np.zeros(num, np.int64), np.zeros(1)
        self.tokens, self.parents = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.probs = np.zeros(size)
        outputs = (self.counts, self.tokens, self.parents, self.probs, self.brought)
        self.addresses = [output.ctypes.data for output in outputs]

    def holding(self, num: int, size: int) -> _Trees:
        """Memory for at least so many sequences and nodes: this, or a larger one."""
        if self.num >= num and self.size >= size:
            return self
        return _Trees(max(num, self.num), max(size, self.size))

    def read(self, num: int) -> tuple[list[DraftTree], float]:
        """The trees of the last call, and the accepted nodes to expect of them."""
        counts = self.counts[:num].tolist()
        written = sum(counts)
        tokens, parents = self.tokens[:written].tolist(), self.parents[:written].tolist()
        probs, trees, end = self.probs[:written].tolist(), list[DraftTree](), 0
        for count in counts:
            start, end = end, end + count
            trees.append(
                DraftTree(tuple(tokens[start:end]), tuple(parents[start:end]), tuple(probs[start:end]))
                if count
                else NO_TREE
            )
        return trees, float(self.brought[0])


class NativeFollower:
    """Follows one frame: everything but its outputs is known and laid out, so that the call is short."""

    def __init__(
        self,
        library: ctypes.CDLL,
        handle: int,
        frame: FrameToFollow,
        prices: RowPrices,
        max_nodes: int,
        min_prob: float,
        trees: _Trees,
    ) -> None:
        self.frame, self._library, self._handle, self._trees = frame, library, handle, trees
        num, num_known = len(frame.seq_ids), len(frame.next_inputs)
        budget = min(len(prices.seconds) - 1, frame.max_rows - num_known - frame.num_judged)
        self._seconds = prices.seconds if isinstance(prices.seconds, array) else array("d", prices.seconds)
        self._pages = np.frombuffer(frame.pages, np.int32)
        self._frame = _FrameToFollow(
            num, frame.page, min(max_nodes, frame.max_nodes), frame.max_depth, _address(frame.sequences),
            _address(frame.inputs), _address(frame.parents), _address(frame.next_inputs),
            self._pages.ctypes.data, _address(frame.stop_ids),
        )  # fmt: skip
        # Spans, inputs, parents and moves.
        size = (SPAN_LEN + 1) * num + num_known + 2 * budget + 2 * len(frame.inputs)
        self._numbers, self._next_pages = np.empty(size, np.int32), np.empty(len(self._pages), np.int32)
        self._next = _NextFrame(self._numbers.ctypes.data, self._next_pages.ctypes.data)
        self._arguments = (
            prices.live, prices.own, prices.gap, _address(self._seconds), budget, min_prob, *trees.addresses,
            ctypes.addressof(self._next),
        )  # fmt: skip

    def run(self, outputs: FrameOutputs) -> FollowUp | None:
        """The next frame. None, and nothing has changed: a sequence has too few pages, or all have ended."""
        status: int = self._library.drafter_follow_up(
            self._handle, ctypes.addressof(self._frame), ctypes.byref(_FrameOutputs(*outputs)),
            *self._arguments,
        )  # fmt: skip
        if status == -3:
            return None
        if status < 0:
            raise MemoryError("the native drafter ran out of memory")
        made = self._next
        numbers, pages = self._numbers[: made.num_numbers], self._next_pages[: made.num_pages]
        reads = len(self.frame.next_inputs) > 0
        return FollowUp(made.spans, numbers, made.rows, made.moves, pages, reads)

    def trees(self) -> tuple[list[DraftTree], float]:
        """The trees of the next frame, and the accepted nodes to expect of them."""
        return self._trees.read(len(self.frame.seq_ids))


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
        self._trees, self._followers_trees = _Trees(1, 64), _Trees(1, 64)

    def begin(
        self, seq_id: int, tokens: list[int], salt: bytes | None, prediction: Sequence[int] = ()
    ) -> None:
        """Take a text. Without a salt nothing of it is shared, and no other text serves it."""
        text, predicted = array("i", tokens), array("i", prediction)
        salt_len = -1 if salt is None else len(salt)
        self._check(
            self._library.drafter_begin(
                self._handle, seq_id, _address(text), len(text), salt or b"", salt_len,
                _address(predicted), len(predicted),
            )
        )  # fmt: skip

    def index(self, seq_id: int, max_tokens: int) -> int:
        """Index so many tokens of a text that was begun; returns how many are left."""
        left: int = self._library.drafter_index(self._handle, seq_id, max_tokens)
        self._check(left)
        return left

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
        self._trees = trees = self._trees.holding(num, budget)
        seq_ids, max_nodes, max_depths = (
            (array("q", column) for column in zip(*limits, strict=True)) if limits else [array("q")] * 3
        )
        seconds = prices.seconds if isinstance(prices.seconds, array) else array("d", prices.seconds)
        written = self._library.drafter_grow(
            self._handle, num, _address(seq_ids), _address(max_nodes), _address(max_depths), prices.live,
            prices.own, prices.gap, _address(seconds), budget, min_prob, *trees.addresses,
        )  # fmt: skip
        self._check(written)
        return trees.read(num)

    def follower(
        self, frame: FrameToFollow, prices: RowPrices, max_nodes: int, min_prob: float = 0.0
    ) -> NativeFollower:
        """For a frame in flight: verdicts, new tokens and the next trees in one call."""
        num, budget = len(frame.seq_ids), len(prices.seconds) - 1
        self._followers_trees = trees = self._followers_trees.holding(num, budget)
        return NativeFollower(self._library, self._handle, frame, prices, max_nodes, min_prob, trees)

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


__all__ = ["SOURCE", "NativeDrafter", "NativeFollower"]
