"""Settings that must be made before torch is imported; shared fixtures; which tests can run here."""

import os
from pathlib import Path

import pytest

# OpenMP threads that wait by spinning slow down a second process on the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from samewise import machine

machine.pin_environment()

import torch  # noqa: E402

# Without a CUDA device Triton kernels run in Triton's interpreter, which is chosen when triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


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
