"""The gate between callers and the engine's thread: open, draining or shut. Used by that thread alone.

While it is not open new requests wait outside. *Draining*: those inside run to their end, because weights are
to be replaced, or a pause is to begin, after them. *Frozen*: nothing runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from samewise.errors import BadParameter

MODES = ("wait", "abort", "keep")
"""What happens to requests under way: they end first; are aborted; or go on afterwards from their tokens."""

Work = Callable[[], None]


class _Waiting(NamedTuple):
    """Work to be done when nothing is under way."""

    run: Work
    pauses: bool  # whether it is the beginning of a pause, which resuming calls off


class Gate:
    """Holds back requests and delays work until nothing is under way."""

    def __init__(self) -> None:
        self.paused = False
        """Whether a pause was asked for and not ended."""
        self.frozen = False
        """Whether no step may be made."""
        self._outside: deque[Work] = deque()  # requests that wait
        self._waiting: deque[_Waiting] = deque()

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return not self.paused and not self._waiting

    def hold(self, request: Work) -> None:
        """Keep a request outside until the gate opens."""
        self._outside.append(request)

    def when_quiet(self, run: Work, *, pauses: bool = False) -> None:
        """Do something when nothing is under way, or now if nothing runs because of a pause."""
        self.paused = self.paused or pauses
        if self.frozen:
            run()
        else:
            self._waiting.append(_Waiting(run, pauses))

    def settle(self, *, idle: bool) -> None:
        """Do what was waiting, if nothing is under way, and let requests in if the gate is open."""
        while idle and self._waiting:
            self._waiting.popleft().run()
        while self.is_open and self._outside:
            self._outside.popleft()()

    def resume(self) -> None:
        """End a pause, or call off one that has not begun."""
        self.paused = self.frozen = False
        off = [one for one in self._waiting if one.pauses]
        self._waiting = deque(one for one in self._waiting if not one.pauses)
        for one in off:
            one.run()
        self.paused = self.frozen = False

    def drain(self) -> list[Work]:
        """Take out everything that waits: the thread ends."""
        works = [*(one.run for one in self._waiting), *self._outside]
        self._waiting.clear()
        self._outside.clear()
        return works


def check_mode(mode: str) -> str:
    """The mode; BadParameter for another word."""
    if mode not in MODES:
        raise BadParameter(f"mode={mode!r}: choose one of {', '.join(MODES)}", param="mode")
    return mode


__all__ = ["MODES", "Gate", "check_mode"]
