"""The memory of a forward and a backward pass is that of gradient checkpointing."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from rl_cases import trained_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samewise.rl import TrainingForward


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made while it is on: those alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._count(one.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size


def peak_of(call: Callable[[], torch.Tensor], model: Any) -> int:
    """The most bytes alive during a forward and a backward pass, gradients of parameters included."""
    call().sum().backward()  # what is made once is not counted
    model.zero_grad()
    with LiveBytes() as bytes_of:
        call().sum().backward()
    model.zero_grad()
    return bytes_of.peak


def ordinary(model: Any, ids: torch.Tensor, **options: Any) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False, **options).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])

    return call


def deep_model() -> Any:
    sizes = {"num_hidden_layers": 12, "vocab_size": 64}
    return trained_model(attention="sdpa", bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)


def test_a_batch_takes_the_memory_of_a_checkpointed_pass() -> None:
    model = deep_model()
    ids = torch.randint(64, (4, 200), generator=torch.Generator().manual_seed(0))
    forward = TrainingForward(model)
    plain = peak_of(ordinary(model, ids), model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = peak_of(ordinary(model, ids), model)
    ours = peak_of(lambda: forward.logprobs(ids), model)
    assert checkpointed < plain / 2  # or nothing would be shown
    assert ours < 1.2 * checkpointed


def test_short_sequences_beside_a_long_one_take_no_more() -> None:
    """Packed into one row, they are not padded to the longest."""
    model = deep_model()
    lengths = [300, *[3] * 100]
    ids = torch.randint(64, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[i for length in lengths for i in range(length)]])
    forward = TrainingForward(model)
    ours = peak_of(lambda: forward.logprobs(ids, position_ids=positions), model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = peak_of(ordinary(model, ids, position_ids=positions), model)
    assert ours < 1.5 * checkpointed
