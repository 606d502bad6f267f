"""Changes of a trainer's tensors are noticed, wherever in the tensor and however they were written."""

from collections.abc import Callable

import pytest
import torch

from samewise.rl import state
from samewise.rl.state import state_of

GENERATOR = torch.Generator()


def pair(size: int) -> tuple[int, int]:
    first, second = torch.randperm(size, generator=GENERATOR)[:2].tolist()
    return first, second


def swap_rows(x: torch.Tensor) -> None:
    a, b = pair(x.shape[0])
    x[[a, b]] = x[[b, a]]


def swap_columns(x: torch.Tensor) -> None:
    a, b = pair(x.shape[1])
    x[:, [a, b]] = x[:, [b, a]]


def swap_elements(x: torch.Tensor) -> None:
    flat = x.view(-1)
    a, b = pair(len(flat))
    flat[[a, b]] = flat[[b, a]]


def change_two_signs(x: torch.Tensor) -> None:
    flat = x.view(-1)
    flat[list(pair(len(flat)))] *= -1


def change_all_signs(x: torch.Tensor) -> None:
    x.neg_()


def reverse(x: torch.Tensor) -> None:
    x.copy_(x.flip(0, 1))


def double_one(x: torch.Tensor) -> None:
    x.view(-1)[pair(x.numel())[0]] *= 2


def add_and_subtract(x: torch.Tensor) -> None:
    a, b = pair(x.shape[0])
    x[a] += 1.0
    x[b] -= 1.0


CHANGES = [
    swap_rows, swap_columns, swap_elements, change_two_signs, change_all_signs, reverse, double_one,
    add_and_subtract,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("content", ["normal", "signs", "rounded"])
def test_no_change_through_data_goes_unseen(
    change: Callable[[torch.Tensor], None], dtype: torch.dtype, content: str
) -> None:
    """Also where values are few, or have many zero bits at their ends."""
    GENERATOR.manual_seed(3)
    shape = (300, 260) if dtype is torch.float32 else (600, 263)  # more than a block; rows of odd words
    x = torch.randn(shape, generator=GENERATOR)
    x = {"normal": x, "signs": x.sign(), "rounded": x.bfloat16().float()}[content].to(dtype)
    before = state_of([x])
    for _ in range(25):
        saved = x.clone()
        with torch.no_grad():
            change(x.data)
        after = state_of([x])
        assert (after == before) == torch.equal(x, saved)
        before = after


def test_the_blocks_of_a_large_tensor_have_places_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "BLOCK", 4)
    state._multipliers.cache_clear()
    try:
        x = torch.randn(50, 2, generator=GENERATOR.manual_seed(0))
        for a in range(0, 50, 4):
            for b in range(a + 4, 50 - 4, 4):
                y = x.clone()
                y[a : a + 4], y[b : b + 4] = x[b : b + 4], x[a : a + 4]
                assert state._digest(y) != state._digest(x)
    finally:
        state._multipliers.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("num", [0, 1, 3, 8, 9])
def test_every_element_counts_at_any_size_and_offset(dtype: torch.dtype, num: int) -> None:
    store = torch.arange(1, 20).to(dtype)
    for offset in range(4):
        x = store[offset : offset + num]
        digest = int(state._digest(x))
        assert digest == int(state._digest(x.clone()))
        for i in range(num):
            y = x.clone()
            y[i] += 1
            assert int(state._digest(y)) != digest


def test_layouts_are_read_without_a_copy_and_belong_to_the_state() -> None:
    x = torch.randn(40, 40, generator=GENERATOR.manual_seed(0))
    square = state_of([x])
    assert int(state._digest(x.t())) == int(state._digest(x))
    x.data = x.data.t()
    assert state_of([x]) != square


def test_the_digest_does_not_depend_on_the_number_of_threads() -> None:
    x = torch.randn(1000, 257, generator=GENERATOR.manual_seed(0))
    num_threads = torch.get_num_threads()
    try:
        digests = set[int]()
        for num in (1, 2):
            torch.set_num_threads(num)
            digests.add(int(state._digest(x)))
        assert len(digests) == 1
    finally:
        torch.set_num_threads(num_threads)


def test_cudas_kernel_has_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors of no, one and several blocks, of blocks of blocks, at any address and in any layout."""
    monkeypatch.setattr(state, "BLOCK", 40)
    state._multipliers.cache_clear()
    try:
        sizes = (0, 1, 3, 40, 160, 161, 163, 4 * 40 * 40, 4 * 40 * 40 + 9)
        store = torch.randn(2 * sum(sizes), generator=GENERATOR.manual_seed(0)).bfloat16()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tensors = [store[i : i + size] for i, size in enumerate(sizes)]
        tensors += [
            store[:600].view(30, 20).t(),
            store[1:601].view(30, 20).t(),
            store[:64].view(8, 8)[:, ::2],
        ]
        expected = [int(state._digest(tensor)) for tensor in tensors]
        assert state._cuda_digests([tensor.to(device) for tensor in tensors]) == expected
        assert state._cuda_digests([tensors[0].to(device)]) == [0]
    finally:
        state._multipliers.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_same_digest(dtype: torch.dtype) -> None:
    shapes = ((3,), (300, 260), (5000, 1025))
    tensors = [torch.randn(shape, generator=GENERATOR.manual_seed(0)).to(dtype) for shape in shapes]
    assert state._cuda_digests([x.cuda() for x in tensors]) == [int(state._digest(x)) for x in tensors]
