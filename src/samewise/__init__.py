"""Language models that give the same bits every time, under any load.

>>> from samewise import LLM, SamplingParams
>>> LLM("smollm2").generate("The capital of France is", SamplingParams(temperature=0))

Importing this package is cheap: torch is imported when a name that needs it is first used, after the
environment variables it reads have been pinned.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samewise.config import EngineConfig
    from samewise.contract import Contract
    from samewise.engine import Engine
    from samewise.errors import SamewiseError
    from samewise.llm.aio import AsyncLLM
    from samewise.llm.llm import LLM
    from samewise.outputs import Chunk, CompletionOutput, Logprob, RequestOutput, ScoreOutput
    from samewise.params import SamplingParams
    from samewise.types import Grammar

try:
    __version__ = version("samewise")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0.0.0+source"

_MODULE_OF = {
    "AsyncLLM": "samewise.llm",
    "Chunk": "samewise.outputs",
    "CompletionOutput": "samewise.outputs",
    "Contract": "samewise.contract",
    "Engine": "samewise.engine",
    "EngineConfig": "samewise.config",
    "Grammar": "samewise.types",
    "LLM": "samewise.llm",
    "Logprob": "samewise.outputs",
    "RequestOutput": "samewise.outputs",
    "SamewiseError": "samewise.errors",
    "SamplingParams": "samewise.params",
    "ScoreOutput": "samewise.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'samewise' has no attribute {name!r}")
    from samewise import machine

    machine.pin_environment()  # before torch is imported
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "CompletionOutput",
    "Contract",
    "Engine",
    "EngineConfig",
    "Grammar",
    "Logprob",
    "RequestOutput",
    "SamewiseError",
    "SamplingParams",
    "ScoreOutput",
    "__version__",
]
