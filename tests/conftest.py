"""Settings that must be made before torch is imported; shared fixtures; which tests can run here."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

# OpenMP threads that wait by spinning slow down a second process on the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from samewise import machine

machine.pin_environment()

import torch  # noqa: E402

# Without a CUDA device Triton kernels run in Triton's interpreter, which is chosen when triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# -- machines without the extras `dev` and `serve`: see `make test-gpu` -------------------------------


def _missing(*packages: str) -> list[str]:
    return [package for package in packages if importlib.util.find_spec(package) is None]


FOLDER_NEEDS = {  # folder: packages that its tests import and torch, transformers and pytest do not bring
    "anthropic": _missing("pydantic"),
    "clients": _missing("httpx", "pydantic"),
    "jobs": _missing("pydantic"),
    "kv": _missing("hypothesis"),
    "openai": _missing("pydantic"),
    "page": _missing("starlette", "uvicorn"),
    "scale": _missing("httpx", "prometheus_client", "pydantic", "starlette"),
    "schedule": _missing("hypothesis"),
    "serve": _missing("httpx", "prometheus_client", "pydantic", "starlette", "uvicorn"),
}
collect_ignore = [folder for folder, missing in FOLDER_NEEDS.items() if missing]


if not _missing("hypothesis"):
    import hypothesis

    # By default an example may take 200 ms, which on a busy machine any example may.
    hypothesis.settings.register_profile("samewise", deadline=None)
    hypothesis.settings.load_profile("samewise")


def pytest_report_header() -> list[str]:
    """Name the folders that are left out."""
    return [
        f"not collected: tests/{folder} needs {', '.join(FOLDER_NEEDS[folder])}" for folder in collect_ignore
    ]


if _missing("hypothesis"):  # skip property tests, and keep the other tests of their modules
    stand_in: ModuleType = MagicMock(__spec__=ModuleSpec("hypothesis", None), __path__=[])
    stand_in.given = lambda *_, **__: pytest.mark.skip("hypothesis is not installed")
    stand_in.settings = lambda *_, **__: lambda function: function
    sys.modules |= {"hypothesis": stand_in, "hypothesis.strategies": stand_in.strategies}


# -- fixtures and order -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer, as a folder of safetensors."""
    from samewise.testing import byte_tokenizer, tiny_model

    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def pytest_collection_modifyitems(items):
    """Skip gpu tests without a CUDA device; run slow tests first, so that none is the last on one worker."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip("no CUDA device"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
