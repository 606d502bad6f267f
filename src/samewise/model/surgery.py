"""The only module that touches a torch module's insides (`_modules`, `__class__`, `forward`, `__dict__`).

Every function either returns a new module that shares its weights with the original, or changes one module in
the way its docstring states. No other module of this package reads or writes these attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def adopt_state(kind: type[M], module: nn.Module) -> M:
    """A module of class `kind` over the very same parameters, buffers and attributes as `module`."""
    made = kind.__new__(kind)
    made.__dict__ = module.__dict__
    return made


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make `module` an instance of `kind`, a subclass of its class; its state stays."""
    module.__class__ = kind


def replace_child(module: nn.Module, name: str, child: nn.Module) -> None:
    """Put `child` under `name` in `module`, even where its type is not the one transformers expects."""
    module._modules[name] = child


def twin(model: nn.Module) -> nn.Module:
    """The same model in new module objects: parameters are shared; bindings, buffers and children are not."""
    made: dict[nn.Module, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if module not in made:
            made[module] = fresh = copy.copy(module)
            fresh._parameters = dict(module._parameters)
            fresh._buffers = dict(module._buffers)
            fresh._modules = {name: child and copied(child) for name, child in module._modules.items()}
        return made[module]

    return copied(model)


def with_children(module: nn.Module, changes: Mapping[str, nn.Module]) -> nn.Module:
    """A shallow copy of `module` with other children under some names; the original is not changed."""
    made = copy.copy(module)
    made._modules = {**module._modules, **changes}  # a copy shares this dict with its original otherwise
    return made


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A shallow copy of `module` without children, whose `forward` is `forward`."""
    made = copy.copy(module)
    made._modules = {}
    made.forward = forward
    return made


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


def is_untouched(module: nn.Module) -> bool:
    """Whether a module has no forward hooks and no `forward` of its own beside its class's."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


__all__ = [
    "adopt_state",
    "change_class",
    "is_untouched",
    "replace_child",
    "twin",
    "with_children",
    "with_forward",
    "with_layers",
    "with_module",
]
