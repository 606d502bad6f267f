"""Runs before any test module is imported, and so before torch is."""

import os
from pathlib import Path

import pytest

# Threads that wait by spinning make two busy processes on two cores slow each other down many times over.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from samewise import machine

machine.pin_environment()

import torch  # noqa: E402

# Where there is no CUDA device Triton kernels run in Triton's interpreter, which must be told before
# triton is first imported by anybody.
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
    """The longest first, so that none of them is left to one worker at the end; none without its device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip("no CUDA device"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
