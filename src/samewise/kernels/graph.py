"""A function over fixed buffers, captured once as a CUDA graph and replayed on every call."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


@functools.cache
def _warm_up_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all warm-ups: CUDA libraries keep memory for every stream they have run on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_CAPTURE_LOCK = threading.Lock()


@contextmanager
def _exclusive_capture() -> Iterator[None]:
    """One capture at a time, without garbage collection: freeing an old graph would invalidate it."""
    with _CAPTURE_LOCK:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class CapturedGraph(Generic[T]):
    """Calling it replays the graph; the result's tensors are the same ones each time, with new content.

    The function must read only buffers whose addresses stay the same, and must not wait for the device.
    Graphs that are never replayed at the same time may share a memory `pool`.
    """

    def __init__(self, function: Callable[[], T], device: torch.device, pool: Any = None) -> None:
        stream = _warm_up_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # torch requires warm-up runs on another stream before capture
            function()
            function()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may run an engine on the device meanwhile.
        with (
            _exclusive_capture(),
            torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"),
        ):
            self._result = function()
        torch.cuda.synchronize(device)

    def __call__(self) -> T:
        """Replay."""
        self._graph.replay()
        return self._result


__all__ = ["CapturedGraph"]
