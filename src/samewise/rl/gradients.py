"""The backward pass: each layer is run again, in torch's own arithmetic, from the engine's activations.

A forward pass gives values that were computed elsewhere; of the graph it keeps the inputs of layers only, as
gradient checkpointing does. The arithmetic of gradients is that of the trainer's own modules. Where a layer
ends by adding a product, no gradient depends on that product: it is left out, a quarter of what is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from samewise.model.arch import Arch, layer_list
from samewise.model.attention_binding import ATTENTION
from samewise.model.fused_layer import NATIVE_FAMILIES
from samewise.model.layer_parts import adds_down_product
from samewise.model.rope import fix_rope
from samewise.model.surgery import plain_copy, with_class, with_forward, with_layers, with_module
from samewise.rl.alias import set_attention

HEAD_ROWS = 512
"""Rows whose logits are computed at once in the backward pass: 100 MB in float32 at 50,000 tokens. Gradients
of several such parts are added in float32."""


class _Replay(torch.autograd.Function):
    """A function whose value is known; it is computed again for its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Callable[[], torch.Tensor],
        compute: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        *params: torch.Tensor,
    ) -> torch.Tensor:
        """The known value. The parameters are saved so that a change before the backward pass is noticed."""
        ctx.compute = compute
        ctx.save_for_backward(x, *params)
        return value()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and of the parameters."""
        x, *params = ctx.saved_tensors
        return None, None, *_gradients(ctx.compute, x, params, grad, ctx.needs_input_grad[2:])


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
    """The gradients of a linear; its value is 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        """Zeros, which take no memory."""
        ctx.save_for_backward(x, weight)
        return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, the weight and the bias, None for those not needed."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad @ weight if of_x else None,
            rows.t() @ x.flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


class _ValuelessLinear(nn.Linear):
    """A linear whose value nothing depends on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros that have the gradients of the product."""
        return _apply(_LinearGradients, x, self.weight, self.bias)


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

    def __init__(self, model: nn.Module, arch: Arch, max_model_len: int) -> None:
        self._model = plain_copy(model).eval()
        fix_rope(self._model, max_model_len)
        set_attention(self._model, "sdpa", instead_of=ATTENTION)
        self._layers_name, layers = layer_list(self._model, arch)
        self._layers = list(layers)
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

    def hidden(self, input_ids: torch.Tensor, activations: list[torch.Tensor]) -> torch.Tensor:
        """What the head is given, [B, T, H]. `activations`: the engine's, layer inputs, then the output."""
        layers = [
            with_forward(layer, _known_layer(layer, activations[i + 1]))
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
            logits = self._logits(rows).float() / temperature
            return logits.log_softmax(-1).gather(1, targets[part][:, None])[:, 0]

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


def _known_layer(layer: nn.Module, value: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A layer's `forward` whose output is known."""
    params = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    replayed = _without_last_product(layer)

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        def compute(x: torch.Tensor) -> torch.Tensor:
            output: Any = replayed(x, *args, **kwargs)
            first: torch.Tensor = output[0] if isinstance(output, tuple) else output
            return first

        return _apply(_Replay, lambda: value, compute, hidden_states, *params)

    return forward


__all__ = ["HEAD_ROWS", "GradientModel"]
