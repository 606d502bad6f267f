"""Code quoted in the docs equals the code."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOOP = ROOT / "docs/loop.md"
SOURCES = [ROOT / "src/samewise/engine/engine.py", ROOT / "src/samewise/verify/judge.py"]
REQUIRED = {"step", "judge"}


def functions(text):
    """Each function's syntax tree by name, without its docstring."""
    trees = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                del node.body[0]
            trees[node.name] = ast.dump(node)
    return trees


def quoted():
    blocks = re.findall(r"```python\n(.*?)```", LOOP.read_text(encoding="utf-8"), re.DOTALL)
    return functions("\n".join(map(textwrap.dedent, blocks)))


def test_the_loop_is_quoted():
    assert quoted().keys() >= REQUIRED


@pytest.mark.parametrize("name", sorted(quoted()))
def test_a_quoted_function_equals_its_source(name):
    sources = [trees[name] for trees in (functions(path.read_text()) for path in SOURCES) if name in trees]
    assert sources == [quoted()[name]], f"docs/loop.md quotes another {name}, or one that is not in {SOURCES}"
