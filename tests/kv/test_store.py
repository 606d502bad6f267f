"""KVStore: bytes of a page, copies of pages, and the error for too little memory."""

import pytest
import torch

from samewise.errors import MachineError
from samewise.kernels.attention.base import PAGE
from samewise.kernels.attention.cpu import TorchKernel
from samewise.kv.store import KVStore, page_bytes

SHAPES = [(2, 8), (1, 16)]  # (KV heads, head size) of two layers
NUM_PAGES = 4


def make_store() -> KVStore:
    store = KVStore(TorchKernel(), SHAPES, NUM_PAGES, torch.float32, torch.device("cpu"))
    for i, layer in enumerate(store.layers):
        for tensor in (layer.k, layer.v):
            generator = torch.Generator().manual_seed(i)
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_bytes_are_those_of_the_tensors(dtype: torch.dtype) -> None:
    store = KVStore(TorchKernel(), SHAPES, NUM_PAGES, dtype, torch.device("cpu"))
    total = sum(layer.k.nbytes + layer.v.nbytes for layer in store.layers)
    assert page_bytes(SHAPES, dtype) == total // NUM_PAGES == 2 * 2 * 16 * PAGE * dtype.itemsize


def test_copied_pages_are_equal_and_others_stay() -> None:
    store, before = make_store(), make_store()
    store.copy([(1, 3), (2, 0)])
    for layer, old in zip(store.layers, before.layers, strict=True):
        for new, source in ((layer.k, old.k), (layer.v, old.v)):
            assert torch.equal(new, source[[2, 1, 2, 1]])
    store.copy([])


def test_too_little_memory_is_an_error_that_names_the_setting() -> None:
    class FullDevice(TorchKernel):
        def allocate(self, *_: object) -> None:
            raise RuntimeError("out of memory")

    with pytest.raises(MachineError, match=r"GiB of KV cache; lower kv_memory"):
        KVStore(FullDevice(), SHAPES, NUM_PAGES, torch.float32, torch.device("cpu"))
