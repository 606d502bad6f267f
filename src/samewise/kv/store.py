"""The K and V tensors behind the page numbers, one pair per layer.

Memory is not initialised: attention must never read a slot that was not written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samewise.errors import InvariantBroken, MachineError
from samewise.kernels.attention.base import PAGE, AttentionKernel, LayerKV


def page_bytes(shapes: list[tuple[int, int]], dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, given each layer's (KV heads, head size)."""
    return sum(2 * heads * dim * PAGE * dtype.itemsize for heads, dim in shapes)


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
        try:
            self.layers: list[LayerKV] = [
                kernel.allocate(num_pages, heads, dim, dtype, device) for heads, dim in shapes
            ]
        except (RuntimeError, torch.OutOfMemoryError) as error:
            need = num_pages * page_bytes(shapes, dtype)
            raise MachineError(
                f"no memory for {need / 2**30:.1f} GiB of KV cache; lower kv_memory ({error})"
            ) from error

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
        device = self.layers[0].k.device
        slots = torch.tensor(
            [sources, targets], dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        self._kernel.move_slots(self.layers, *slots.to(device, non_blocking=True))

    def fill(self, value: float) -> None:
        """Overwrite every element, for tests that results do not depend on unwritten slots."""
        for layer in self.layers:
            layer.k.fill_(value)
            layer.v.fill_(value)


__all__ = ["KVStore", "page_bytes"]
