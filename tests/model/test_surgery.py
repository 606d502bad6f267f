"""Surgery on torch modules: what each function shares and changes; no other module touches their insides."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import samewise
from samewise.model.surgery import (
    alias_tensors,
    change_class,
    copy_modules,
    inner_forwards,
    plain_copy,
    replace_child,
    runs_class_forward,
    with_children,
    with_class,
    with_forward,
    with_layers,
    with_module,
)

ROOT = Path(samewise.__file__).parent
INSIDES = frozenset({
    "__class__", "__dict__", "_backward_hooks", "_buffers", "_forward_hooks", "_forward_pre_hooks",
    "_modules", "_parameters",
})  # fmt: skip


def uses_of_insides(source: str) -> list[str]:
    """Lines that name an inner attribute of modules, or set `forward` on an object."""
    uses = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            is_set = isinstance(node.ctx, ast.Store | ast.Del)
            if node.attr in INSIDES or (node.attr == "forward" and is_set):
                uses.append(f"line {node.lineno}: .{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            accessor = node.func.id
            if accessor in {"getattr", "setattr", "delattr", "hasattr"} and name in INSIDES:
                uses.append(f'line {node.lineno}: {accessor}(…, "{name}")')
            if accessor in {"setattr", "delattr"} and name == "forward":
                uses.append(f'line {node.lineno}: {accessor}(…, "forward")')
    return uses


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT).with_suffix(""))
)
def test_only_surgery_touches_the_insides_of_modules(path):
    uses = uses_of_insides(path.read_text(encoding="utf-8"))
    if path == ROOT / "model" / "surgery.py":
        assert uses
    else:
        assert uses == [], f"{path}: use samewise.model.surgery"


@pytest.mark.parametrize(
    "source",
    [
        "module._modules['a'] = b",
        "module.__class__ = Other",
        "module.__dict__",
        "module.forward = f",
        "del module.forward",
        "setattr(module, 'forward', f)",
        "getattr(module, '_parameters')",
        "module._forward_hooks.clear()",
    ],
)
def test_use_of_insides_is_detected(source):
    assert uses_of_insides(source)


@pytest.mark.parametrize(
    "source", ["module.forward(x)", "module.modules()", "getattr(module, 'q_proj', None)"]
)
def test_ordinary_use_of_a_module_is_allowed(source):
    assert uses_of_insides(source) == []


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Model(nn.Module):
    """A list of layers inside a child, as in transformers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x):
        for layer in self.inner.layers:
            x = layer(x)
        return x + self.offset


X = torch.arange(6.0).view(2, 3)


def test_with_class_shares_all_state():
    linear = nn.Linear(3, 3)
    doubled = with_class(linear, Doubled)
    assert type(linear) is nn.Linear
    assert torch.equal(doubled(X), 2 * linear(X))
    doubled.tag = "set on one, seen on both"
    assert linear.tag == doubled.tag
    assert doubled.weight is linear.weight


def test_change_class_keeps_the_object_and_its_weights():
    linear = nn.Linear(3, 3)
    weight, before = linear.weight, linear(X)
    change_class(linear, Doubled)
    assert type(linear) is Doubled
    assert linear.weight is weight
    assert torch.equal(linear(X), 2 * before)


def test_replace_child_accepts_any_module():
    model, child = Model(), nn.Identity()
    replace_child(model.inner, "layers", nn.ModuleList([child]))
    assert list(model.inner.layers) == [child]
    assert torch.equal(model(X), X + 1)


def test_copied_modules_share_tensors_and_nothing_else():
    model = Model()
    copied = copy_modules(model)
    assert torch.equal(copied(X), model(X))
    originals = dict(model.named_modules())
    assert {name for name, module in copied.named_modules() if module is originals[name]} == set()
    assert all(copied.get_parameter(name) is weight for name, weight in model.named_parameters())
    expected = model(X)
    copied.inner.layers[0] = nn.Identity()
    copied.inner.layers[1].tag = "set on the copy"
    copied.offset = torch.zeros(3)
    assert torch.equal(model(X), expected)
    assert not hasattr(model.inner.layers[1], "tag")


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_registered_later_belong_to_one_of_model_and_copy(register):
    model = Model()
    copied, expected = copy_modules(model), model(X)
    handles = [
        getattr(module, register)(lambda *_: torch.zeros(2, 3), **kwargs)
        for module in (model, model.inner.layers[0])
        for kwargs in ({}, {"with_kwargs": True})
    ]
    assert torch.equal(copied(X), expected)
    for handle in handles:
        handle.remove()
    with_hook = copied.inner.layers[0].register_forward_hook(lambda *_: torch.zeros(2, 3))
    assert torch.equal(model(X), expected)
    assert not torch.equal(copied(X), expected)
    with_hook.remove()


def test_module_used_twice_is_copied_once():
    shared = nn.Linear(3, 3)
    copied = copy_modules(nn.Sequential(shared, shared))
    assert copied[0] is copied[1]
    assert copied[0] is not shared


def test_with_children_leaves_the_original():
    model = Model()
    expected = model(X)
    view = with_children(model.inner, {"layers": nn.ModuleList([nn.Identity()])})
    assert len(view.layers) == 1
    assert len(model.inner.layers) == 2
    assert torch.equal(model(X), expected)


def test_with_forward_has_no_children_and_leaves_the_original():
    model = Model()
    expected = model(X)
    view = with_forward(model, lambda x: -x)
    assert torch.equal(view(X), -X)
    assert list(view.children()) == []
    assert torch.equal(model(X), expected)


def test_with_module_replaces_a_nested_module_in_a_copy():
    model = Model()
    expected = model(X)
    view = with_module(model, "inner.layers.1", nn.Identity())
    assert torch.equal(view(X), model.inner.layers[0](X) + 1)
    assert view.inner.layers[0] is model.inner.layers[0]
    assert torch.equal(model(X), expected)


def test_with_layers_replaces_the_list_in_a_copy():
    model = Model()
    view = with_layers(model, "inner.layers", [nn.Identity()])
    assert torch.equal(view(X), X + 1)
    assert len(model.inner.layers) == 2


def test_hooks_and_an_own_forward_are_detected():
    linear = nn.Linear(3, 3)
    assert runs_class_forward(linear)
    for register in (linear.register_forward_hook, linear.register_forward_pre_hook):
        handle = register(lambda *_: None)
        assert not runs_class_forward(linear)
        handle.remove()
        assert runs_class_forward(linear)
    assert not runs_class_forward(with_forward(linear, lambda x: x))
    linear.forward = lambda x: x
    assert not runs_class_forward(linear)


def test_a_plain_copy_has_no_hooks_and_shares_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    expected = model(torch.ones(3))
    model[0].register_forward_hook(lambda *_: torch.zeros(3))
    model.forward = lambda x: x
    copied = plain_copy(model)
    assert torch.equal(copied(torch.ones(3)), expected)
    assert [id(p) for p in copied.parameters()] == [id(p) for p in model.parameters()]
    assert torch.equal(model(torch.ones(3)), torch.ones(3))  # the original is as it was


def test_a_forward_set_inside_a_model_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    assert inner_forwards(model) == []
    model.forward = model[1].forward = lambda x: x
    assert inner_forwards(model) == ["1"]


def test_aliases_share_memory_and_count_writes_of_the_original():
    model = torch.nn.BatchNorm1d(3)
    aliases = alias_tensors(model)
    weight, alias = model.weight, aliases.weight
    assert alias is not weight
    assert alias.data_ptr() == weight.data_ptr()
    assert not alias.requires_grad
    assert aliases.running_mean.data_ptr() == model.running_mean.data_ptr()
    before = alias._version
    with torch.no_grad():
        weight.mul_(2.0)
    assert alias._version > before
    aliases.to(torch.float64)
    assert weight.dtype == torch.float32


def test_tied_parameters_stay_tied_as_aliases():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    aliases = alias_tensors(model)
    assert aliases[1].weight is aliases[0].weight
