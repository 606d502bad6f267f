"""`samewise …` in this process, and a tiny model for it."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from samewise import LLM
from samewise.cli.main import main
from samewise.testing import tiny_engine


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


RunCommand = Callable[..., CommandResult]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run `samewise` with these arguments; the exit code and what was printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def run_command(*args: object, stdin: str = "") -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["samewise", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        printed = capsys.readouterr()
        return CommandResult(int(code or 0), printed.out, printed.err)

    return run_command


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    """The folder of a tiny model."""
    return str(folder)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The same tiny model, loaded without the command line."""
    return LLM.over(tiny_engine(eos=True))
