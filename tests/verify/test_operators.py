"""Trying linears at every frame size: once per shape, and then from the cache."""

from pathlib import Path

import pytest

from samewise.testing import tiny
from samewise.verify import operators
from samewise.verify.operators import check_linears


def test_each_shape_is_tried_once_and_then_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path))
    tried: list[str] = []
    real = operators._try_linear
    monkeypatch.setattr(operators, "_try_linear", lambda *args: (tried.append(args[1]), real(*args))[1])
    facts = {"cpu": "this one"}
    for _ in range(2):
        # Five shapes: q and o, k and v, gate and up, down, head.
        assert len(check_linears(tiny().model, 16, facts)) == 5
        assert len(tried) == 5
    check_linears(tiny().model, 16, {"cpu": "another"})
    assert len(tried) == 10
