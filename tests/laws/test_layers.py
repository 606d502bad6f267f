"""Law 10, imports and surface: the layer table, and `__all__` sorted and complete.

A module imports only modules of strictly lower number. Read from the source, not from what happens to
be loaded: an import inside a function counts; one for annotations alone (TYPE_CHECKING) does too.
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

LAYERS = {
    "counts": 0,
    "errors": 0,
    "serve.logs": 0,
    "serve.manual": 0,
    "serve.sse": 0,
    "batchfile": 1,
    "bench.workload": 1,
    "config": 1,
    "machine": 1,
    "model.attention": 1,
    "model.attention.work": 1,
    "model.fit": 1,
    "scan": 1,
    "serve.bodies": 1,
    "serve.errors": 1,
    "signing": 1,
    "spelling": 1,
    "types": 1,
    "cache.pages": 2,
    "contract": 2,
    "costs": 2,
    "grammar": 2,
    "judge": 2,
    "model.native": 2,
    "noise": 2,
    "outputs": 2,
    "propose.base": 2,
    "recent": 2,
    "run.batch": 2,
    "run.dedupe": 2,
    "run.graph": 2,
    "run.numerics": 2,
    "run.sums": 2,
    "serve.formats": 2,
    "serve.messages": 2,
    "serve.settings": 2,
    "serve.tools": 2,
    "serve.wire": 2,
    "spans": 2,
    "text": 2,
    "cache.prefix": 3,
    "cache.store": 3,
    "model.attention.native": 3,
    "model.attention.triton": 3,
    "model.gguf": 3,
    "model.linear": 3,
    "model.refuse": 3,
    "model.rope": 3,
    "params": 3,
    "propose.ngram": 3,
    "propose.rest": 3,
    "propose.search": 3,
    "run.frame": 3,
    "sampling": 3,
    "serve.gate": 3,
    "serve.live": 3,
    "serve.toolbox": 3,
    "model.attention.cpu": 4,  # picks native, or does without
    "model.weights": 4,  # reads GGUF files too
    "propose.auto": 4,
    "propose.pricing": 4,
    "receipts": 4,
    "schedule": 4,
    "serve.parsed": 4,
    "ledger": 5,
    "model.folder": 5,
    "model.zoo": 5,
    "serve.replies": 5,
    "serve.schema": 5,
    "model.fp8": 6,
    "model.layer": 6,
    "model.views": 6,
    "operators": 6,
    "serve.protocol": 6,
    "run.runner": 7,
    "assemble": 8,
    "probe": 8,
    "propose.decode": 8,
    "propose.model": 8,
    "propose.rehearse": 8,
    "verify": 8,
    "propose.skip": 9,
    "engine": 10,
    "answers": 11,
    "testing": 11,
    "aio": 12,
    "audit": 12,
    "batch": 12,
    "llm": 12,
    "bench.contend": 13,
    "commands": 13,
    "demo": 13,
    "serve.worker": 13,
    "bench.report": 14,
    "serve.metrics": 14,
    "serve.site": 14,
    "bench.timeline": 15,
    "serve.app": 15,
    "bench.run": 16,
    "serve.run": 16,
    "serve.command": 17,
    "cli": 18,
}
PACKAGES = {
    "",
    "bench",
    "cache",
    "model",
    "propose",
    "run",
    "serve",
}  # rooms: they say what is in them, and import nothing

HOST_ONLY = (
    "errors",
    "types",
    "config",
    "machine",
    "grammar",
    "judge",
    "text",
    "contract",
    "cache.pages",
    "cache.prefix",
    "counts",
    "spans",
    "schedule",
    "params",
    "propose.base",
    "propose.ngram",
    "propose.rest",
    "propose.auto",
    "costs",
    "bench.workload",
    "outputs",
    "serve.formats",
    "serve.tools",
    "serve.toolbox",
    "serve.live",
    "serve.errors",
    "serve.bodies",
    "serve.parsed",
    "serve.messages",
    "serve.replies",
    "serve.protocol",
    "serve.settings",
    "serve.logs",
    "serve.manual",
    "serve.sse",
    "spelling",
    "recent",
    "batchfile",
    "ledger",
    "receipts",
    "signing",
)


def _name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(ROOT.rglob("*.py"))}
RANKED = sorted(name for name in MODULES if name not in PACKAGES)


def _tree(name):
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def _imports(name):
    """Modules of ours that a module imports, wherever in its source."""
    found = set()
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {one if one.removeprefix("samewise.") in MODULES else node.module for one in whole}
    return {one.removeprefix("samewise.") for one in found if one.split(".")[0] == "samewise"}


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


# ---- layers


def test_every_module_has_a_layer():
    assert sorted(LAYERS) == RANKED


@pytest.mark.parametrize("name", RANKED)
def test_imports_point_down(name):
    for other in sorted(_imports(name) - ({"samewise"} if name == "cli" else set())):
        assert other in LAYERS, f"{name} imports {other}, which is not a module with a layer"
        assert LAYERS[other] < LAYERS[name], f"{name} ({LAYERS[name]}) imports {other} ({LAYERS[other]})"


@pytest.mark.parametrize("package", sorted(PACKAGES - {""}))
def test_rooms_import_nothing(package):
    assert _imports(package) == set()


def test_siblings_never_import_each_other():
    rooms = {
        name: name.split(".")[0] for name in RANKED if name.split(".")[0] in {"propose", "verify", "schedule"}
    }
    for name, room in rooms.items():
        for other in _imports(name):
            assert rooms.get(other, room) == room, f"{name} imports {other}"


def test_only_the_command_line_imports_the_face():
    for name in set(RANKED) - {"cli"}:
        assert not {"", "samewise"} & _imports(name), f"{name} imports the package's own face"


# ---- host only


def _fresh(program):
    env = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


HEAVY = "print(*[m for m in ('torch', 'transformers', 'numpy', 'triton') if m in sys.modules])"


def test_host_only_modules_do_not_bring_torch_in():
    imports = "; ".join(f"import samewise.{name}" for name in HOST_ONLY)
    assert _fresh(f"import sys; {imports}; {HEAVY}") == []


def test_the_search_has_never_heard_of_a_tensor():
    assert _fresh(f"import sys, samewise.propose.search; {HEAVY}") == ["numpy"]


def test_importing_the_package_is_cheap():
    assert _fresh(f"import sys, samewise; dir(samewise); samewise.__version__; {HEAVY}") == []


def test_host_only_modules_import_only_each_other():
    for name in HOST_ONLY:
        assert _imports(name) <= set(HOST_ONLY), name


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


def test_the_face_has_everything_it_names():
    import samewise

    for name in samewise.__all__:
        assert getattr(samewise, name) is not None
    assert dir(samewise) == sorted(samewise.__all__)
    with pytest.raises(AttributeError):
        samewise.nothing_of_the_kind  # noqa: B018
