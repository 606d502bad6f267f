"""Calls that may be cut short: each is marked before its work, and a mark that is left leads to a repair.

An exception may end a call anywhere: a lack of memory inside a frame, Ctrl-C, a signal handler that raises,
inside the handling of another exception too. So nothing relies on `finally`: each call that changes the
engine first marks itself as unfinished, by one store, and ends with one store that takes the mark away. A
call that finds the mark of an earlier one repairs first. A repair may be cut short as well; it is repeated.

A mark is also found by a call from inside the one that made it: the garbage collector or a signal handler may
call `abort` at any moment. Whether the marked call still runs is read off the interpreter's stack
(`is_nested`), where nothing can be out of date. A nested abort is queued for the next call; any other nested
call is refused.

Some failures cannot be repaired (`is_fatal`): the engine is lost, and says so in every later call.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

import torch

from samewise.errors import CallerError, EngineLost, GuaranteeLost, InvariantBroken
from samewise.schedule.registry import Registry
from samewise.types import Received

Repair = Callable[[Mapping[int, Received | None], bool], None]
"""Rebuilds the engine's state from its requests and what was received of them. True: requests are blamed."""

DEVICE_ERRORS = (
    "CUDA error", "CUDA driver error", "HIP error", "Triton Error [CUDA]", "cuDNN error",
    "CUBLAS_STATUS_", "CUDNN_STATUS_",
)  # fmt: skip
"""In messages of a device that failed, where torch or Triton raise a plain RuntimeError."""

MEMORY_ERRORS = ("out of memory", "ALLOC_FAILED")
"""In messages of a device that only lacks memory: nothing is broken."""


Method = TypeVar("Method", bound=Callable[..., Any])

ENTRIES: set[CodeType] = set()
"""The code of every method that is marked as an `entry`."""


def entry(method: Method) -> Method:
    """Mark a method that changes its object, so that `is_nested` finds it on the stack."""
    ENTRIES.add(method.__code__)
    return method


def is_nested(owner: object) -> bool:
    """Whether the entry of `owner` that is running was called from inside another one, in this thread."""
    num_entries = 0
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - its documented name
    while frame is not None:
        if frame.f_code in ENTRIES and frame.f_locals.get("self") is owner:
            num_entries += 1
        frame = frame.f_back
    return num_entries > 1


def refuse_nested(owner: object) -> None:
    """Raise CallerError if the entry of `owner` that is running is nested."""
    if is_nested(owner):
        raise CallerError(
            "this was called from inside another call of this engine, by a signal handler or a finalizer; "
            "there, only abort a request or close a stream"
        )


class Calls:
    """The mark of an unfinished call, and why the engine is lost, if it is. Owned by the Engine."""

    def __init__(self, owner: object, registry: Registry, repair: Repair) -> None:
        self._owner, self._registry, self._repair = owner, registry, repair
        self._queued: deque[Callable[[], object]] = deque()
        self.lost: EngineLost | None = None
        self.change = _Call(self)
        """A `with` around every change outside of a step."""
        self.delivery = _Step(self)
        """A `with` around a step: at its end the caller has all deltas."""

    @property
    def unfinished(self) -> bool:
        """Whether an earlier call was cut short and not repaired yet."""
        return self._registry.delivery.unfinished

    def repair(self) -> None:
        """Repair what an unfinished call left; raises EngineLost if that is impossible."""
        if self.lost is not None:
            raise self.lost
        if self.unfinished:
            refuse_nested(self._owner)
            self.recover({}, blame=False)

    def recover(self, received: Mapping[int, Received | None], *, blame: bool) -> None:
        """Start every request again from what its caller has."""
        if self.lost is not None:
            raise self.lost
        self._registry.delivery.unfinished = True
        try:
            self._repair(received, blame)
        except Exception as error:
            if is_fatal(error):
                self.lose(error)
            raise
        self._registry.delivery.unfinished = False

    def begin(self) -> None:
        """Mark a call as unfinished, after repairing what an earlier one left; then do what was queued."""
        self.repair()
        self._registry.delivery.unfinished = True
        while self._queued:
            self._queued[0]()  # may be cut short and repeated
            self._queued.popleft()

    def queue(self, work: Callable[[], object]) -> None:
        """Do something at the start of the next call."""
        self._queued.append(work)

    def end(self) -> None:
        """Take the mark away: the call has come to its end."""
        self._registry.delivery.unfinished = False

    def deliver(self) -> None:
        """Take the mark away: the caller gets the step's deltas."""
        self._registry.deliver()

    def forget_received(self) -> None:
        """The caller has the deltas of the step before."""
        self._registry.forget_received()

    def lose(self, error: BaseException) -> None:
        """Give up: from now on every call raises EngineLost."""
        lost = EngineLost(
            f"this engine is lost: {type(error).__name__}: {error}; build another one, "
            "after a device error in a new process"
        )
        lost.__cause__ = error
        self.lost = lost


class _Call:
    """The context of a change. An exception leaves the mark, so that the next call repairs."""

    __slots__ = ("_calls",)

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._calls.end()
        elif is_fatal(error) and not isinstance(error, GuaranteeLost):  # another update may restore it
            self._calls.lose(error)


class _Step(_Call):
    """The context of a step. Some exceptions in it end the engine."""

    def __enter__(self) -> None:
        self._calls.begin()
        self._calls.forget_received()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._calls.deliver()
        elif is_fatal(error):
            self._calls.lose(error)


def is_fatal(error: BaseException) -> bool:
    """Whether nothing that an engine computes after this error can be trusted."""
    if isinstance(error, GuaranteeLost | InvariantBroken | EngineLost):
        return True
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    message = str(error)
    if any(part in message for part in MEMORY_ERRORS):
        return False
    return isinstance(error, torch.AcceleratorError) or any(part in message for part in DEVICE_ERRORS)


def wait_for_device(device: torch.device) -> None:
    """Wait until all work on the device is done; EngineLost where the device has failed."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise EngineLost(f"the device has failed: {error}; build another engine, in a new process") from error


__all__ = ["Calls", "entry", "is_fatal", "is_nested", "refuse_nested", "wait_for_device"]
