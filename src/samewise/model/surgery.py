"""The only module that touches a torch module's insides: `_modules`, `__class__`, `forward`, `__dict__`.

Every function either returns a new module that shares its weights with the original, or changes one module in
the way its docstring states. `tests/model/test_surgery.py` checks that no other module does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

CONTAINERS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""Attributes of every module that `copy.copy` would share with the copy: parameters, children, hooks, ..."""


def with_class(module: nn.Module, cls: type[M]) -> M:
    """A module of class `cls` that shares all state with `module`: parameters, buffers, attributes."""
    result = cls.__new__(cls)
    result.__dict__ = module.__dict__
    return result


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make `module` an instance of `cls`, a subclass of its class; its state stays."""
    module.__class__ = cls


def replace_child(module: nn.Module, name: str, child: nn.Module) -> None:
    """Put `child` under `name` in `module`, whatever its type."""
    module._modules[name] = child


def copy_modules(model: nn.Module) -> nn.Module:
    """The same model in new module objects over the same tensors.

    Attributes set, children replaced, buffers or hooks registered in one do not show in the other.
    """
    copies: dict[nn.Module, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if module not in copies:
            copies[module] = result = copy.copy(module)
            for name in CONTAINERS:
                result.__dict__[name] = copy.copy(module.__dict__[name])
            result._modules = {name: child and copied(child) for name, child in module._modules.items()}
        return copies[module]

    return copied(model)


def plain_copy(model: nn.Module) -> nn.Module:
    """The same model in new module objects over the same tensors, without hooks or a `forward` set on it.

    Modules inside of it keep theirs; `inner_forwards` names them.
    """
    result = copy_modules(model)
    result.__dict__.pop("forward", None)
    for module in result.modules():
        for name in CONTAINERS:
            if "hook" in name:
                module.__dict__[name] = type(module.__dict__[name])()
    return result


def inner_forwards(model: nn.Module) -> list[str]:
    """The names of modules in a model that have a `forward` of their own, not their class's."""
    return [name for name, module in model.named_modules() if name and "forward" in module.__dict__]


def alias_tensors(model: nn.Module) -> nn.Module:
    """A plain copy of a model over the same memory, whose parameters take no gradients.

    Parameters and buffers are tensors of its own: moving one elsewhere does not move the original.
    """
    result, aliases = plain_copy(model), dict[Tensor, Tensor]()

    def alias(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if tensor not in aliases:
            data = tensor.detach()
            is_parameter = isinstance(tensor, nn.Parameter)
            aliases[tensor] = nn.Parameter(data, requires_grad=False) if is_parameter else data
        return aliases[tensor]

    for module in result.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                held[name] = alias(tensor)  # type: ignore[assignment]
    return result


def with_children(module: nn.Module, changes: Mapping[str, nn.Module]) -> nn.Module:
    """A shallow copy of `module` with other children under some names; the original is not changed."""
    result = copy.copy(module)
    result._modules = {**module._modules, **changes}  # copy.copy alone would share this dict
    return result


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A shallow copy of `module` without children, whose `forward` is `forward`."""
    result = copy.copy(module)
    result._modules = {}
    result.forward = forward
    return result


def with_module(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """A copy of `model` with `module` at the dotted path `name`. Weights are shared; the original stays."""
    first, _, rest = name.partition(".")
    if not rest:
        return with_children(model, {first: module})
    child = model._modules[first]
    assert child is not None
    return with_children(model, {first: with_module(child, rest, module)})


def with_layers(model: nn.Module, name: str, layers: list[nn.Module]) -> nn.Module:
    """A copy of `model` whose layer list at the dotted path `name` holds `layers`."""
    return with_module(model, name, nn.ModuleList(layers))


def runs_class_forward(module: nn.Module) -> bool:
    """Whether a call runs only the class's `forward`: no hooks, no `forward` set on the instance."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


__all__ = [
    "alias_tensors",
    "change_class",
    "copy_modules",
    "inner_forwards",
    "plain_copy",
    "replace_child",
    "runs_class_forward",
    "with_children",
    "with_class",
    "with_forward",
    "with_layers",
    "with_module",
]
