"""Load a model for a command. torch is imported here, after the options were read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samewise.engine import Engine
    from samewise.llm.llm import LLM


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Loading makes millions of objects that all stay; collecting among them only takes time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _quick_start(model: str | None) -> Iterator[None]:
    """Load a model meanwhile: its files are read from the disk while modules are imported."""
    from samewise.config import SETTINGS
    from samewise.model.resolve import read_ahead

    read_ahead(SETTINGS["model"].default if model is None else model)
    with without_garbage_collection():
        yield


def load_llm(**settings: Any) -> LLM:
    """An LLM of these settings."""
    with _quick_start(settings.get("model")):
        from samewise.llm.llm import LLM

        return LLM(**settings)


def load_engine(**settings: Any) -> Engine:
    """An engine of these settings."""
    with _quick_start(settings.get("model")):
        from samewise.config import EngineConfig
        from samewise.engine import build

        return build(EngineConfig.of(**settings))


def runs_on_cuda(device: str) -> bool:
    """Whether an engine with this setting of `device` runs on CUDA; `auto` is what this machine has."""
    if device != "auto":
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


__all__ = ["load_engine", "load_llm", "runs_on_cuda", "without_garbage_collection"]
