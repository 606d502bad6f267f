"""The K and V tensors behind the page numbers, one pair per layer.

Memory is not initialised: attention must never read a slot that was not written.
"""

from __future__ import annotations

import torch

from samewise.errors import MachineError
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
        self.num_pages = num_pages
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
    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages (from, to) bit for bit, on the device's current stream."""
        if not pairs:
            return
        device = self.layers[0].k.device
        sources, targets = torch.tensor(pairs, dtype=torch.int64).T.to(device, non_blocking=True)
        for layer in self.layers:
            for pages in (layer.k, layer.v):
                pages.index_copy_(0, targets, pages.index_select(0, sources))

    def fill(self, value: float) -> None:
        """Overwrite every element, for tests that results do not depend on unwritten slots."""
        for layer in self.layers:
            layer.k.fill_(value)
            layer.v.fill_(value)


__all__ = ["KVStore", "page_bytes"]
