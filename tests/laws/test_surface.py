"""Law 10, the surface: every module has a sorted and complete `__all__`, every room a docstring.

The order of the rooms is checked by import-linter (`make check`; its contracts stand in pyproject.toml).
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


def _name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(ROOT.rglob("*.py"))}
ROOMS = sorted(name for name, path in MODULES.items() if name and path.name == "__init__.py")
RANKED = sorted(name for name in MODULES if name and name not in ROOMS and name != "__main__")


def _tree(name):
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def _taken(name):
    """(module of ours, name in it) for everything a module takes from another."""
    found, aliases = set(), {}
    tree = _tree(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "samewise":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}".removeprefix("samewise.")
                if whole in MODULES:
                    aliases[alias.asname or alias.name] = whole
                elif node.module != "samewise":
                    found.add((node.module.removeprefix("samewise."), alias.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            found.add((aliases[node.value.id], node.attr))
    return found


# ---- host only


def _fresh(program):
    env = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


HEAVY = "print(*[m for m in ('torch', 'transformers', 'numpy', 'triton') if m in sys.modules])"


def test_importing_the_package_is_cheap():
    assert _fresh(f"import sys, samewise; dir(samewise); samewise.__version__; {HEAVY}") == []


# ---- the surface


def _all(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return ast.literal_eval(node.value)
    return None


def _defined(tree):
    """Public names of the classes and functions a module defines."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return {name for name in found if not name.startswith("_")}


def _bound(tree):
    """Everything a module binds at its top level."""
    found = _defined(tree)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _natural(name):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _isort(name):
    """RUF022: SCREAMING first, then Camel, then the rest; naturally within each."""
    if name.isupper() and len(name) > 1:
        kind = 0
    elif name[:1].isupper():
        kind = 1
    else:
        kind = 2
    return kind, _natural(name)


SURFACES = ["", *RANKED]


@pytest.mark.parametrize("name", SURFACES, ids=[name or "samewise" for name in SURFACES])
def test_all_is_there_sorted_and_complete(name):
    tree = _tree(name)
    declared = _all(tree)
    assert declared is not None, f"{name} has no __all__"
    assert len(set(declared)) == len(declared)
    assert declared == sorted(declared, key=_isort)
    if name:
        assert set(declared) <= _bound(tree), f"{name}.__all__ names what it does not define"
        missing = _defined(tree) - set(declared)
        assert not missing, f"{name} defines {sorted(missing)}, which __all__ leaves out"


@pytest.mark.parametrize("name", RANKED)
def test_what_others_take_is_in_all(name):
    """Constants count too, as soon as another module uses them."""
    for other, taken in sorted(_taken(name)):
        assert taken in _all(_tree(other)), f"{name} takes {taken} from {other}, whose __all__ leaves it out"


@pytest.mark.parametrize("name", ROOMS)
def test_every_room_says_what_it_holds_who_owns_its_state_and_what_it_may_import(name):
    said = ast.get_docstring(_tree(name))
    assert said, f"samewise/{name.replace('.', '/')}/__init__.py has no docstring"
    if "." not in name:
        for word in ("Holds", "State", "Imports"):
            assert f"{word}:" in said, f"the docstring of samewise.{name} has no line {word!r}"


def test_the_face_has_everything_it_names():
    import samewise

    for name in samewise.__all__:
        assert getattr(samewise, name) is not None
    assert dir(samewise) == sorted(samewise.__all__)
    with pytest.raises(AttributeError):
        samewise.nothing_of_the_kind  # noqa: B018
