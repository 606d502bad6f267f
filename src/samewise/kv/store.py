"""The K and V tensors behind the page numbers, one pair per layer.

Memory is not initialised: attention must never read a slot that was not written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from samewise.errors import InvariantBroken, MachineError
from samewise.kernels.attention.base import PAGE, AttentionKernel, LayerKV, SlotMover
from samewise.kernels.graph import CapturedGraph


def page_bytes(shapes: list[tuple[int, int]], dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, given each layer's (KV heads, head size)."""
    return sum(2 * heads * dim * PAGE * dtype.itemsize for heads, dim in shapes)


class _StagedMoves:
    """Brings pairs of slots to the device and has them moved; captured on CUDA, where launches are slow."""

    @torch.inference_mode(mode=False)  # written inside and outside of inference mode
    def __init__(self, mover: SlotMover, device: torch.device) -> None:
        cuda = device.type == "cuda"
        size = 1 + 2 * mover.max_pairs
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=cuda)
        self._array = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=device) if cuda else self._host
        self._move: Callable[[], None] = functools.partial(mover, self._device)
        self._copied: torch.cuda.Event | None = None
        if cuda:
            self._move = CapturedGraph(self._move, device)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __call__(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move up to `max_pairs` pairs."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy: long done, but for moves without a frame between
        self._array[0] = len(pairs)
        self._array[1 : 1 + 2 * len(pairs)] = np.array(pairs, np.int32).reshape(-1)
        if self._copied is not None:
            self._device.copy_(self._host, non_blocking=True)
            self._copied.record()
        self._move()


class KVStore:
    """Owns the tensors. `shapes` gives each layer's (KV heads, head size)."""

    def __init__(
        self,
        kernel: AttentionKernel,
        shapes: list[tuple[int, int]],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages, self._kernel = num_pages, kernel
        self._queue: list[tuple[int, int]] = []  # moves to do before the next pass
        try:
            self.layers: list[LayerKV] = [
                kernel.allocate(num_pages, heads, dim, dtype, device) for heads, dim in shapes
            ]
        except (RuntimeError, torch.OutOfMemoryError) as error:
            need = num_pages * page_bytes(shapes, dtype)
            raise MachineError(
                f"no memory for {need / 2**30:.1f} GiB of KV cache; lower kv_memory ({error})"
            ) from error
        self._mover = kernel.slot_mover(self.layers)
        self._staged_moves = None if self._mover is None else _StagedMoves(self._mover, device)

    @torch.inference_mode()
    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move K and V of slots (from, to) in all layers, bit for bit, on the device's current stream.

        All slots are read before any is written. What remains in a source that is no target is junk.
        """
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        if not 0 <= min(*sources, *targets) <= max(*sources, *targets) < self.num_pages * PAGE:
            raise InvariantBroken(f"K and V cannot be moved: {pairs} leave the {self.num_pages} pages")
        if len(set(targets)) < len(targets):
            raise InvariantBroken(f"K and V cannot be moved: {pairs} have a target twice")
        if self._staged_moves is not None and len(pairs) <= self.max_moves:
            self._staged_moves(pairs)
            return
        device = self.layers[0].k.device
        slots = torch.tensor(
            [sources, targets], dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        self._kernel.move_slots(self.layers, *slots.to(device, non_blocking=True))

    def queue_moves(self, pairs: list[tuple[int, int]]) -> None:
        """Have slots moved before the next pass of any kind: by the pass itself, or by `flush_moves`."""
        self._queue += pairs

    def take_moves(self) -> list[tuple[int, int]]:
        """The queued moves, for a pass that does them first."""
        pairs, self._queue = self._queue, []
        return pairs

    def flush_moves(self) -> None:
        """Do the queued moves now: another kind of pass is about to read K and V."""
        if self._queue:
            self.move(self.take_moves())

    @property
    def max_moves(self) -> int:
        """Pairs that `move_staged` takes, at most."""
        return 0 if self._mover is None else self._mover.max_pairs

    def move_staged(self, moves: torch.Tensor) -> None:
        """Move slots as a tensor on the device says, see `SlotMover`; a graph may begin with it."""
        if self._mover is None:
            raise InvariantBroken("the attention kernel moves no slots by a tensor on the device")
        self._mover(moves)

    def fill(self, value: float) -> None:
        """Overwrite every element, for tests that results do not depend on unwritten slots."""
        for layer in self.layers:
            layer.k.fill_(value)
            layer.v.fill_(value)


__all__ = ["KVStore", "page_bytes"]
