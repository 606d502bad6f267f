"""Exceptions raised at chosen places of the package's code, as a signal handler or a lack of memory would.

The interpreter's hooks raise them: where a function of the package begins (`calls`), at its lines (`lines`),
or where it begins, ends, or calls a function written in C (`edges`).
"""

import inspect
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import samewise

PACKAGE = str(Path(samewise.__file__).parent)

Place = tuple[CodeType, int, str]
"""A function, a line of it, and the kind of event."""


class PlantedFault(Exception):
    """An exception that no code expects."""


class Faults:
    """While active, raises at the first event that `wanted` chooses. `rooms`: only in these packages."""

    def __init__(
        self,
        error: type[BaseException] = PlantedFault,
        kind: str = "calls",
        *,
        rooms: tuple[str, ...] = ("",),
    ) -> None:
        self.error, self.kind = error, kind
        self.num_raised = 0
        self._armed = False
        self._paths = tuple(f"{PACKAGE}/{room}" for room in rooms)

    def wanted(self, place: Place) -> bool:
        raise NotImplementedError

    def __enter__(self) -> "Faults":
        self._armed = True
        (sys.setprofile if self.kind == "edges" else sys.settrace)(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        self._disarm()

    def _disarm(self) -> None:
        self._armed = False
        (sys.setprofile if self.kind == "edges" else sys.settrace)(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        code = frame.f_code
        file = code.co_filename
        if not self._armed or not file.startswith(self._paths) or file.endswith("testing.py"):
            return None
        if self.kind == "edges" and code.co_flags & inspect.CO_GENERATOR:
            return None  # it may be one that is being thrown away, where Python only prints exceptions
        if any(name.lower().endswith("_lock") for name in code.co_names):
            return None  # a hook can raise between taking a lock and its `with`; a signal handler cannot
        if (self.kind != "lines" or event == "line") and self.wanted((code, frame.f_lineno, event)):
            self._disarm()
            self.num_raised += 1
            raise self.error("planted")
        return self._trace if self.kind == "lines" else None


class EveryPlace(Faults):
    """Raises wherever it has not been before, or with `stride` n at every n-th of these places."""

    def __init__(
        self,
        error: type[BaseException] = PlantedFault,
        kind: str = "calls",
        rooms: tuple[str, ...] = ("",),
        *,
        stride: int = 1,
    ) -> None:
        super().__init__(error, kind, rooms=rooms)
        self._places: set[Place] = set()
        self._stride = stride

    def wanted(self, place: Place) -> bool:
        if place in self._places:
            return False
        self._places.add(place)
        return len(self._places) % self._stride == 0


class AtEvent(Faults):
    """Raises at the event of this number, counted from 1 over all activations; None: nowhere."""

    def __init__(
        self, number: int | None, error: type[BaseException] = PlantedFault, kind: str = "calls"
    ) -> None:
        super().__init__(error, kind)
        self.num_events, self._number = 0, number

    def wanted(self, place: Place) -> bool:
        self.num_events += 1
        return self.num_events == self._number


class AtRandom(Faults):
    """Raises at a random event, one in `mean` on average."""

    def __init__(self, seed: int, mean: int, error: type[BaseException], kind: str = "edges") -> None:
        super().__init__(error, kind)
        self._random, self._chance = random.Random(seed), 1.0 / mean

    def wanted(self, place: Place) -> bool:
        return self._random.random() < self._chance
