"""The backward pass: each layer is run again, in torch's own arithmetic, from the engine's activations.

A forward pass gives values that were computed elsewhere; of the graph it keeps the inputs of layers, as
gradient checkpointing does, and the products inside where the engine hands them out and there is room. Those
are not computed again. The arithmetic of gradients is that of the trainer's own modules. Where a layer ends
by adding a product, no gradient depends on that product: it is left out too, a quarter of what is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from samewise.model.arch import Arch, layer_list
from samewise.model.attention_binding import ATTENTION
from samewise.model.fused_layer import NATIVE_FAMILIES
from samewise.model.layer_parts import adds_down_product
from samewise.model.rope import fix_rope
from samewise.model.row_pieces import is_norm
from samewise.model.surgery import plain_copy, with_class, with_forward, with_layers, with_module
from samewise.rl.alias import set_attention

Products = dict[tuple[str, ...], torch.Tensor]
"""Of a layer: what linears give for the same input, side by side [B, T, N], by their paths in it."""

HEAD_ROWS = 1024
"""Rows whose logits are computed at once in the backward pass: 200 MB in float32 at 50,000 tokens. Gradients
of several such parts are added in float32."""


CAUSAL = "samewise-causal"
"""Name of torch's attention where every token sees those before it: transformers makes no mask for a name it
does not know, and does not wait for the device to see whether it needs one."""
AttentionInterface.register(CAUSAL, sdpa_attention_forward)


class _Replay(torch.autograd.Function):
    """A function whose value is known; it is computed again for its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Callable[[], torch.Tensor],
        compute: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor],
        kept: Sequence[torch.Tensor],
        x: torch.Tensor,
        *params: torch.Tensor,
    ) -> torch.Tensor:
        """The known value. The parameters are saved so that a change before the backward pass is noticed.

        `kept`: what `compute` is given beside x. It is saved too, so that its memory is free after use.
        """
        ctx.compute, ctx.num_kept = compute, len(kept)
        ctx.save_for_backward(*kept, x, *params)
        return value()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and of the parameters."""
        saved = ctx.saved_tensors
        kept, x, params = saved[: ctx.num_kept], saved[ctx.num_kept], saved[ctx.num_kept + 1 :]

        def compute(x: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = ctx.compute(x, kept)
            return value

        return None, None, None, *_gradients(compute, x, params, grad, ctx.needs_input_grad[3:])


def _gradients(
    compute: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    grad: torch.Tensor,
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Gradients of compute(x) by x and the parameters, None for those not needed.

    In their own dtype, also in a backward pass under autocast.
    """
    with torch.autocast(x.device.type, enabled=False):
        with torch.enable_grad():
            x = x.detach().requires_grad_(needed[0])
            y = compute(x)
        inputs = [x, *params]
        wanted = [i for i, need in enumerate(needed) if need]
        found = torch.autograd.grad(y, [inputs[i] for i in wanted], grad, allow_unused=True)
    result: list[torch.Tensor | None] = [None] * len(inputs)
    for i, gradient in zip(wanted, found, strict=True):
        result[i] = gradient
    return result


def _added(total: torch.Tensor | None, part: torch.Tensor | None, *, more: bool) -> torch.Tensor | None:
    """A sum of gradients, at least in float32 if there are `more` than one."""
    if part is None or total is not None:
        return total if part is None or total is None else total.add_(part)
    return part.to(torch.promote_types(part.dtype, torch.float32)) if more else part


class _HeadReplay(torch.autograd.Function):
    """The same for log-probabilities of rows, some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,  # [M]
        compute: Callable[[torch.Tensor, slice], torch.Tensor],
        x: torch.Tensor,  # [M, H]
        *params: torch.Tensor,
    ) -> torch.Tensor:
        """The known values."""
        ctx.compute = compute
        ctx.save_for_backward(x, *params)
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and of the parameters."""
        x, *params = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        grad_x = torch.empty_like(x) if needed[0] else None
        sums: list[torch.Tensor | None] = [None] * len(params)
        for start in range(0, x.shape[0], HEAD_ROWS):
            part = slice(start, start + HEAD_ROWS)

            def compute(rows: torch.Tensor, part: slice = part) -> torch.Tensor:
                value: torch.Tensor = ctx.compute(rows, part)
                return value

            first, *others = _gradients(compute, x[part], params, grad[part], needed)
            if grad_x is not None and first is not None:
                grad_x[part] = first
            for i, other in enumerate(others):
                sums[i] = _added(sums[i], other, more=x.shape[0] > HEAD_ROWS)
        of_params = (
            total if total is None else total.to(parameter.dtype)
            for total, parameter in zip(sums, params, strict=True)
        )
        return None, None, grad_x, *of_params


class _LogprobGradients(torch.autograd.Function):
    """The gradients of targets' log-probabilities by logits, with one block in float32; the value is 0."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> torch.Tensor:  # [M, V], [M]
        """Zeros."""
        ctx.temperature = temperature
        ctx.save_for_backward(logits, targets)
        return logits.new_zeros(logits.shape[0], dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """(1 where the token is the target, else 0, minus its probability) / temperature, by row."""
        logits, targets = ctx.saved_tensors
        if ctx.temperature != 1.0:
            logits = logits.float() / ctx.temperature
        by_row = (grad.float() / ctx.temperature)[:, None]
        slope = logits.softmax(-1, dtype=torch.float32).mul_(-by_row)
        return slope.scatter_add_(1, targets[:, None], by_row).to(ctx.saved_tensors[0].dtype), None, None


class _Unused(torch.autograd.Function):
    """Values that no parameter has a part in: every gradient is 0, as of a loss in which all is masked."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        """The values."""
        ctx.save_for_backward(*params)
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Zeros."""
        return None, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class _LinearGradients(torch.autograd.Function):
    """The gradients of a linear; its value is known."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Callable[[], torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        _: torch.Tensor | None,
    ) -> torch.Tensor:
        """The known value."""
        ctx.save_for_backward(x, weight)
        return value()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, the weight and the bias, None for those not needed."""
        x, weight = ctx.saved_tensors
        _, of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            None,
            grad @ weight if of_x else None,
            rows.t() @ x.flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


class _ValuelessLinear(nn.Linear):
    """A linear whose value nothing depends on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros that have the gradients of the product and take no memory."""
        zeros = x.new_zeros(()).expand(*x.shape[:-1], self.weight.shape[0])
        return _apply(_LinearGradients, lambda: zeros, x, self.weight, self.bias)


def _with_products(layer: nn.Module, products: dict[str, torch.Tensor]) -> nn.Module:
    """A layer of which some linears have known values, by path. Shares its weights."""

    def known(linear: Any, value: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: _apply(_LinearGradients, lambda: value, x, linear.weight, linear.bias)

    for path, value in products.items():
        linear = layer.get_submodule(path)
        layer = with_module(layer, path, with_forward(linear, known(linear, value)))
    return layer


def _with_torch_norms(layer: nn.Module) -> nn.Module:
    """A layer whose RMS norms are one operator each, of transformers' six. Shares its weights."""

    def norm_of(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)

    for path, norm in [(path, module) for path, module in layer.named_modules() if is_norm(module)]:
        layer = with_module(layer, path, with_forward(norm, norm_of(norm)))
    return layer


def _without_last_product(layer: nn.Module) -> nn.Module:
    """A layer with the same gradients, whose value may be another. Shares its weights."""
    package = type(layer).__module__.split(".")
    known = package[:2] == ["transformers", "models"] and package[2] in NATIVE_FAMILIES
    if not known or not adds_down_product(layer):
        return layer
    down = layer.get_submodule("mlp.down_proj")
    if type(down) is not nn.Linear:
        return layer
    return with_module(layer, "mlp.down_proj", with_class(down, _ValuelessLinear))


class GradientModel:
    """The trainer's model, arranged for the backward pass. Shares its parameters; the model is not changed.

    Its modules are copies in evaluation mode: no dropout, and no checkpointing of their own. Rotary positions
    are those of an engine with this `max_model_len`.
    """

    def __init__(
        self, model: nn.Module, arch: Arch, max_model_len: int, *, few_operators: bool = False
    ) -> None:
        """`few_operators`: run layers, which are Llama's, with torch's own RMS norm and without masks."""
        self._model = plain_copy(model).eval()
        fix_rope(self._model, max_model_len)
        set_attention(self._model, "sdpa", instead_of=ATTENTION)
        if few_operators and all(layer.window is None for layer in arch.layers):
            set_attention(self._model, CAUSAL, instead_of="sdpa")
        self._layers_name, layers = layer_list(self._model, arch)
        self._layers = [_with_torch_norms(layer) if few_operators else layer for layer in layers]
        self._base_name = self._layers_name.rpartition(".")[0]
        base = set(self._model.get_submodule(self._base_name).parameters())
        others = [parameter for parameter in self._model.parameters() if parameter not in base]
        head: nn.Module = self._model.get_output_embeddings()  # type: ignore[operator]
        # A head may share the weight of the embedding, which is part of the base model.
        self._head_params = list(dict.fromkeys([*others, *head.parameters()]))

    @property
    def trains(self) -> bool:
        """Whether any parameter takes a gradient."""
        return any(parameter.requires_grad for parameter in self._model.parameters())

    def width_of(self, linears: Sequence[str]) -> int:
        """Outputs of linears in a layer, by path."""
        return sum(_widths(self._layers[0], linears))

    def hidden(
        self, input_ids: torch.Tensor, activations: list[torch.Tensor], products: list[Products]
    ) -> torch.Tensor:
        """What the head is given, [B, T, H].

        `activations`: the engine's, layer inputs, then the output. `products`: what it kept of each layer.
        """
        layers = [
            with_forward(layer, _known_layer(layer, activations[i + 1], products[i]))
            for i, layer in enumerate(self._layers)
        ]
        model = with_layers(self._model, self._layers_name, layers)
        base = model.get_submodule(self._base_name)
        with torch.autocast(input_ids.device.type, enabled=False):
            hidden: torch.Tensor = base(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden

    def logprobs(
        self,
        values: torch.Tensor,  # [M]
        hidden: torch.Tensor,  # [M, H]
        targets: torch.Tensor,  # [M]
        temperature: float,
    ) -> torch.Tensor:
        """The given log-probabilities of targets, with gradients."""

        def compute(rows: torch.Tensor, part: slice) -> torch.Tensor:
            return _apply(_LogprobGradients, self._logits(rows), targets[part], temperature)

        return _apply(_HeadReplay, values, compute, hidden, *self._head_params)

    def without_targets(self, values: torch.Tensor) -> torch.Tensor:
        """The same values, with gradients: 0 for every parameter that takes one."""
        params = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return _apply(_Unused, values, *params)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[M, H] → [M, V], by the model's own head and scale."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        output = BaseModelOutputWithPast(last_hidden_state=rows[None])
        stub = with_forward(self._model.get_submodule(self._base_name), lambda *_, **__: output)
        logits: torch.Tensor = with_module(self._model, self._base_name, stub)(
            inputs_embeds=rows[None], use_cache=False
        ).logits
        return logits[0]


def _apply(function: Any, *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


def _widths(layer: nn.Module, linears: Sequence[str]) -> list[int]:
    """Outputs of linears in a layer, by path."""
    modules: list[Any] = [layer.get_submodule(path) for path in linears]
    return [module.weight.shape[0] for module in modules]


def _known_layer(layer: nn.Module, value: torch.Tensor, products: Products) -> Callable[..., torch.Tensor]:
    """A layer's `forward` whose output is known, and some of its products."""
    paths, kept = list(products), list(products.values())
    params = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    replayed = _without_last_product(layer)

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        def compute(x: torch.Tensor, kept: Sequence[torch.Tensor]) -> torch.Tensor:
            known: dict[str, torch.Tensor] = {}
            for linears, product in zip(paths, kept, strict=True):
                known |= zip(linears, torch.split(product, _widths(layer, linears), -1), strict=True)
            output: Any = _with_products(replayed, known)(x, *args, **kwargs)
            first: torch.Tensor = output[0] if isinstance(output, tuple) else output
            return first

        return _apply(_Replay, lambda: value, compute, kept, hidden_states, *params)

    return forward


__all__ = ["HEAD_ROWS", "GradientModel", "Products"]
