"""KVStore: bytes of a page, moves of slots, and the error for too little memory."""

import pytest
import torch

from native_variants import needs_compiler
from samewise.errors import InvariantBroken, MachineError
from samewise.kernels.attention.base import PAGE, AttentionKernel
from samewise.kernels.attention.cpu import TorchKernel, pick_cpu_kernel
from samewise.kv.store import KVStore, page_bytes

SHAPES = [(2, 8), (1, 24)]  # (KV heads, head size) of two layers
NUM_PAGES = 4


def make_store(kernel: AttentionKernel, dtype: torch.dtype = torch.float32) -> KVStore:
    store = KVStore(kernel, SHAPES, NUM_PAGES, dtype, torch.device("cpu"))
    for i, layer in enumerate(store.layers):
        generator = torch.Generator().manual_seed(i)
        for tensor in layer:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_bytes_are_those_of_the_tensors(dtype: torch.dtype) -> None:
    store = KVStore(TorchKernel(), SHAPES, NUM_PAGES, dtype, torch.device("cpu"))
    total = sum(layer.k.nbytes + layer.v.nbytes for layer in store.layers)
    assert page_bytes(SHAPES, dtype) == total // NUM_PAGES == 2 * (2 * 8 + 24) * PAGE * dtype.itemsize


PAIRS = [(20, 17), (17, 40), (5, 20), (63, 16), (31, 31)]
"""Slots (from, to): some are a source and a target, pages differ or not."""


@pytest.fixture(params=[pytest.param("native", marks=needs_compiler), "torch"])
def kernel(request: pytest.FixtureRequest) -> AttentionKernel:
    return pick_cpu_kernel(request.param)


def slots_of(store: KVStore) -> list[torch.Tensor]:
    """K and V of every layer as bits: [slots, Hkv, D]."""
    slots = []
    for (_, dim), layer in zip(SHAPES, store.layers, strict=True):
        k = layer.k if layer.k.shape[-1] == dim else layer.k.transpose(2, 3)
        slots += [pages.transpose(1, 2).flatten(0, 1).clone() for pages in (k, layer.v)]
    return [x.view(torch.int16 if x.itemsize == 2 else torch.int32) for x in slots]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_slots_keep_their_bits_and_others_stay(kernel: AttentionKernel, dtype: torch.dtype) -> None:
    store = make_store(kernel, dtype)
    before = slots_of(store)
    store.move(PAIRS)
    store.move([])
    order = torch.arange(NUM_PAGES * PAGE)
    for source, target in PAIRS:
        order[target] = source
    for new, old in zip(slots_of(store), before, strict=True):
        assert torch.equal(new, old[order])


def test_moving_nan_keeps_its_payload(kernel: AttentionKernel) -> None:
    store = make_store(kernel)
    for layer in store.layers:
        layer.k.view(torch.int32).fill_(0x7FA12345)
    store.move([(1, 18)])
    assert all((layer.k.view(torch.int32) == 0x7FA12345).all() for layer in store.layers)


@pytest.mark.parametrize("pairs", [[(1, 64)], [(-1, 2)], [(64, 1)], [(1, 2), (3, 2)]])
def test_a_move_outside_the_pages_or_twice_to_one_slot_is_refused(
    kernel: AttentionKernel, pairs: list[tuple[int, int]]
) -> None:
    with pytest.raises(InvariantBroken, match="cannot be moved"):
        make_store(kernel).move(pairs)


def test_too_little_memory_is_an_error_that_names_the_setting() -> None:
    class FullDevice(TorchKernel):
        def allocate(self, *_: object) -> None:
            raise RuntimeError("out of memory")

    with pytest.raises(MachineError, match=r"GiB of KV cache; lower kv_memory"):
        KVStore(FullDevice(), SHAPES, NUM_PAGES, torch.float32, torch.device("cpu"))
