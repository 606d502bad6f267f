"""`make test-gpu` needs torch, transformers and pytest alone: tests are collected without other packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = (
    "accelerate", "anthropic", "cryptography", "datasets", "httptools", "httpx", "hypothesis", "llguidance",
    "matplotlib", "openai", "prometheus_client", "pydantic", "ray", "schemathesis", "starlette", "trl",
    "uvicorn", "uvloop", "xdist",
)  # fmt: skip
WITHOUT_THEM = (
    f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); "
    "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


@pytest.mark.slow
def test_tests_for_a_gpu_are_collected_without_the_extras() -> None:
    options = ("-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THEM, *options, str(Path(__file__).parent)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "test_logprobs.py::test_values_on_a_gpu" in done.stdout
