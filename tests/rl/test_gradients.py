"""The backward pass from products that the forward pass kept: right, and without computing them again."""

import gc
import weakref
from typing import Any

import pytest
import torch
from rl_cases import gradients, largest_error, trained_model
from torch.utils._python_dispatch import TorchDispatchMode

from samewise.errors import BadParameter
from samewise.model.fused_cuda_layer import KEPT_PRODUCTS
from samewise.rl import TrainingForward
from samewise.rl import gradients as rl_gradients
from samewise.rl.alias import architecture
from samewise.rl.forward import CUDA_SIZES, rows_of_next_frame
from samewise.rl.gradients import GradientModel

TOLERANCE = 1e-4  # of a parameter's largest gradient, in float32


class Traced:
    """What a model's layers are given and give, and their products, from hooks."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        layers = model.model.layers
        self.activations: list[torch.Tensor] = []
        self.products: list[dict[tuple[str, ...], torch.Tensor]] = []
        outputs: dict[torch.nn.Module, torch.Tensor] = {}
        linears = [layer.get_submodule(path) for layer in layers for paths in KEPT_PRODUCTS for path in paths]
        hooks = [x.register_forward_hook(lambda one, _, y: outputs.__setitem__(one, y)) for x in linears]
        hooks += [layer.register_forward_pre_hook(lambda _, args: self._add(args[0])) for layer in layers]
        hooks.append(layers[-1].register_forward_hook(lambda _, __, y: self._add(y)))
        with torch.no_grad():
            model(input_ids=ids)
        for hook in hooks:
            hook.remove()
        for layer in layers:
            parts = {paths: [outputs[layer.get_submodule(path)] for path in paths] for paths in KEPT_PRODUCTS}
            self.products.append({paths: torch.cat(values, -1) for paths, values in parts.items()})

    def _add(self, x: Any) -> None:
        self.activations.append(x[0] if isinstance(x, tuple) else x)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept_layers", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_gradients_from_kept_products(family: str, kept_layers: int) -> None:
    model = trained_model(family, attention="sdpa").eval()
    ids = torch.randint(3, 250, (3, 40), generator=torch.Generator().manual_seed(0))
    traced = Traced(model, ids)
    num_layers = len(traced.products)
    for products in traced.products[: num_layers - kept_layers]:
        products.clear()
    own = GradientModel(model, architecture(model), 512, few_operators=True)
    hidden = own.hidden(ids, traced.activations, traced.products)[:, :-1].flatten(0, 1)
    values = own.logprobs(torch.zeros(len(hidden)), hidden, ids[:, 1:].flatten(), 0.7)
    expected = (model(input_ids=ids).logits[:, :-1] / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])
    with Products() as counted:
        found = gradients(model, values)
    assert largest_error(found, gradients(model, expected.flatten())) < TOLERANCE
    # The head's product and its two gradients; of a layer's 7 linears two gradients each, and 6 products.
    assert counted.num == 3 + num_layers * 14 + (num_layers - kept_layers) * 6


def test_products_are_dropped_as_the_backward_pass_goes_on() -> None:
    model = trained_model(attention="sdpa").eval()
    ids = torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(0))
    traced = Traced(model, ids)
    alive = [[weakref.ref(x) for x in products.values()] for products in traced.products]
    own = GradientModel(model, architecture(model), 512, few_operators=True)
    hidden = own.hidden(ids, traced.activations, traced.products)
    traced.products.clear()
    seen: list[int] = []
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        weight.register_post_accumulate_grad_hook(
            lambda _: seen.append(sum(ref() is not None for refs in alive for ref in refs))
        )
    assert all(ref() is not None for refs in alive for ref in refs)
    hidden.sum().backward()
    gc.collect()
    assert sum(ref() is not None for refs in alive for ref in refs) == 0
    assert seen == [len(KEPT_PRODUCTS) * i for i in reversed(range(len(alive)))]


def test_a_head_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained_model()
    ids = torch.randint(3, 250, (2, 30), generator=torch.Generator().manual_seed(0))
    forward = TrainingForward(model)
    whole = gradients(model, forward.logprobs(ids))
    monkeypatch.setattr(rl_gradients, "HEAD_ROWS", 7)
    assert largest_error(gradients(model, forward.logprobs(ids)), whole) < TOLERANCE


@pytest.mark.parametrize("given", [-1, True, "8GiB"])
def test_kept_bytes_are_a_number(given: Any) -> None:
    with pytest.raises(BadParameter, match="kept_bytes="):
        TrainingForward(trained_model(), kept_bytes=given)


def test_frames_are_filled_by_three_quarters() -> None:
    def rows(num: int) -> list[int]:
        parts: list[int] = []
        while num:
            parts.append(rows_of_next_frame(num, CUDA_SIZES))
            num -= parts[-1]
        return parts

    assert rows(5000) == [2048, 2048, 904]
    assert rows(700) == [512, 128, 60]
    assert rows(2048 + 1536) == [2048, 1536]
    assert rows(1024) == [1024]
    assert rows(200) == [128, 72]
    assert rows(1) == [1]
    assert all(rows_of_next_frame(num, tuple(range(1, 65))) == min(num, 64) for num in range(1, 200))
