"""Law 10, imports and surface: each module has a sorted, complete `__all__`, each package a docstring.

The order of the packages is checked by import-linter (`make check`; its contracts are in pyproject.toml).
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
ROOT = SRC / "samewise"


def _module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {_module_name(path): path for path in sorted(ROOT.rglob("*.py"))}  # "" is samewise itself
PACKAGES = sorted(name for name, path in PATHS.items() if name and path.name == "__init__.py")
MODULES = sorted(name for name in PATHS if name and name not in PACKAGES and name != "__main__")


def _tree(name):
    return ast.parse(PATHS[name].read_text(encoding="utf-8"))


def _names_from_other_modules(name):
    """(module of samewise, name in it) for each name that a module uses from another."""
    used, aliases = set(), {}
    tree = _tree(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "samewise":
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}".removeprefix("samewise.")
                if full_name in PATHS:
                    aliases[alias.asname or alias.name] = full_name
                elif node.module != "samewise":
                    used.add((node.module.removeprefix("samewise."), alias.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            used.add((aliases[node.value.id], node.attr))
    return used


def _declared(tree):
    """The value of `__all__`, or None."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return ast.literal_eval(node.value)
    return None


def _public_definitions(tree):
    """Public classes and functions at the top level of a module."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def _bound_names(tree):
    """All names bound at the top level of a module."""
    names = _public_definitions(tree)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _sort_key(name):
    """ruff's RUF022: SCREAMING_CASE first, then CamelCase, then the others, each in natural order."""
    if name.isupper() and len(name) > 1:
        kind = 0
    elif name[:1].isupper():
        kind = 1
    else:
        kind = 2
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


@pytest.mark.parametrize("name", ["", *MODULES], ids=["samewise", *MODULES])
def test_all_is_sorted_and_complete(name):
    tree = _tree(name)
    declared = _declared(tree)
    assert declared is not None, f"{name} has no __all__"
    assert len(set(declared)) == len(declared)
    assert declared == sorted(declared, key=_sort_key)
    if name:
        assert set(declared) <= _bound_names(tree), f"{name}.__all__ has names that are not defined"
        missing = _public_definitions(tree) - set(declared)
        assert not missing, f"{name}.__all__ lacks {sorted(missing)}"


@pytest.mark.parametrize("name", MODULES)
def test_names_used_by_another_module_are_in_all(name):
    """Constants too."""
    for other, used in sorted(_names_from_other_modules(name)):
        assert used in _declared(_tree(other)), f"{name} uses {used}, which {other}.__all__ lacks"


@pytest.mark.parametrize("name", PACKAGES)
def test_the_docstring_of_a_package_says_what_it_holds_and_imports(name):
    docstring = ast.get_docstring(_tree(name))
    assert docstring, f"samewise/{name.replace('.', '/')}/__init__.py has no docstring"
    for word in ("Holds", "State", "Imports"):
        assert f"{word}:" in docstring, f"the docstring of samewise.{name} has no line {word!r}"


def test_every_public_name_of_the_package_can_be_imported():
    import samewise

    for name in samewise.__all__:
        assert getattr(samewise, name) is not None
    assert dir(samewise) == sorted(samewise.__all__)
    with pytest.raises(AttributeError):
        samewise.nothing_of_the_kind  # noqa: B018


def test_importing_the_package_imports_no_heavy_package():
    heavy = ("torch", "transformers", "numpy", "triton")
    program = (
        "import sys, samewise; dir(samewise); samewise.__version__; "
        f"print(*[name for name in {heavy} if name in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": str(SRC)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == []
