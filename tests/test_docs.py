"""Code that the docs quote is the code there is."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUOTED = {
    "src/samewise/engine.py": ("step", "_launch_ahead", "_land"),
    "src/samewise/judge.py": ("judge", "settle", "trust"),
}


def functions(text):
    """Every function by name, without what it says of itself."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                del node.body[0]
            found[node.name] = ast.dump(node)
    return found


@pytest.mark.parametrize("path", QUOTED)
def test_the_loop_is_quoted_as_it_is(path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/loop.md").read_text(), re.DOTALL)
    told = functions("\n".join(map(textwrap.dedent, blocks)))
    there = functions((ROOT / path).read_text())
    for name in QUOTED[path]:
        assert told[name] == there[name], f"docs/loop.md quotes another {name}"
