"""`--served-model-name A B`: which words are names, and which one is the model."""

from typing import Any

import pytest
from typer.testing import CliRunner

from samewise.cli import serve as serve_module
from samewise.cli.main import app
from samewise.cli.several_values import repeat_option

WITH_VALUE = frozenset({"--served-model-name", "--port"})


@pytest.mark.parametrize(
    ("given", "names", "model"),
    [
        ("m --served-model-name A B", ["A", "B"], "m"),
        ("m --served-model-name A B C --port 1", ["A", "B", "C"], "m"),
        ("m --port 1 --served-model-name A B --json-logs", ["A", "B"], "m"),
        ("m --served-model-name=A B", ["A", "B"], "m"),
        ("m --served-model-name A --served-model-name B C", ["A", "B", "C"], "m"),
        ("--served-model-name A m", ["A"], "m"),  # the model comes last
        ("--served-model-name A --port 1 m", ["A"], "m"),
        ("--port 1 m --served-model-name A B", ["A", "B"], "m"),
        ("m --json-logs", [], "m"),
        ("--served-model-name A", ["A"], None),
        ("--served-model-name A -- m", ["A"], "m"),
    ],
)
def test_words_after_the_model_are_names(given: str, names: list[str], model: str | None) -> None:
    words = repeat_option(given.split(), WITH_VALUE)
    found, arguments, rest = [], [], iter(words)
    for word in rest:
        if word.startswith("--served-model-name="):
            found.append(word.partition("=")[2])
        elif word in WITH_VALUE:
            (found if word == "--served-model-name" else []).append(next(rest))
        elif not word.startswith("--"):
            arguments.append(word)
    assert (found, arguments) == (names, [] if model is None else [model])


def test_serve_takes_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(load: Any, settings: Any, listen: Any, *, version: str) -> int:
        seen.update(names=settings.model_names, port=listen.port)
        return 0

    monkeypatch.setattr("samewise.serve.process.run", run)
    monkeypatch.setattr(serve_module, "set_up", lambda *_, **__: None)
    line = ["serve", "a-model", "--port", "0", "--served-model-name", "A", "B", "--json-logs"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert seen == {"names": ("A", "B"), "port": 0}
