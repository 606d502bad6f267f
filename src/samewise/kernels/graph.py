"""A function over fixed buffers, captured once as a CUDA graph and replayed for ever."""

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
def _side(device: torch.device) -> torch.cuda.Stream:
    """One for all: libraries keep memory for every stream they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_CAPTURING = threading.Lock()


@contextmanager
def _alone() -> Iterator[None]:
    """One capture at a time, and no collector: a graph that was left in a cycle would spoil it in going."""
    with _CAPTURING:
        was = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was:
                gc.enable()


class Captured(Generic[T]):
    """Calling it replays the graph; the result's tensors are the same ones each time, with new content.

    The function must read only buffers that stay where they are, and must not wait for the device. Graphs
    that are never replayed at the same time may share a `pool` of memory.
    """

    def __init__(self, work: Callable[[], T], device: torch.device, pool: Any = None) -> None:
        side = _side(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # once or twice before capture, as torch asks, off the main stream
            work()
            work()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread must keep still: another may run an engine meanwhile.
        with (
            _alone(),
            torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"),
        ):
            self._result = work()
        torch.cuda.synchronize(device)

    def __call__(self) -> T:
        """Replay."""
        self._graph.replay()
        return self._result


__all__ = ["Captured"]
