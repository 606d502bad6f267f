"""The gate between callers and the engine's thread: open, draining or shut. Used by that thread alone.

While it is not open new requests wait outside. *Draining*: those inside run to their end, because weights are
to be replaced, or a pause is to begin, after them. *Frozen*: nothing runs, because of a pause or because an
update of the weights failed.
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
    """Work to be done when nothing is under way, or at least not before the updates that came earlier."""

    key: object
    run: Work
    pauses: bool = False  # whether it is the beginning of a pause, which resuming calls off
    in_turn: bool = False  # whether it waits for earlier updates alone


class Gate:
    """Holds back requests and delays work until nothing is under way."""

    def __init__(self) -> None:
        self.paused = False
        """Whether a pause was asked for and not ended."""
        self.halted = False
        """Whether an update of the weights failed half-way: nothing runs until another one succeeds."""
        self._stopped = False  # by a pause
        self._lifted = False  # whether a pause that waits for requests to end has ended such a stop
        self._outside: deque[Work] = deque()  # requests that wait
        self._waiting: deque[_Waiting] = deque()

    @property
    def frozen(self) -> bool:
        """Whether no step may be made."""
        return self._stopped or self.halted

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return not (self.paused or self.halted or self._waiting)

    @property
    def updates_wait(self) -> bool:
        """Whether updates of the weights wait for requests to end."""
        return any(not one.pauses for one in self._waiting)

    def hold(self, request: Work) -> None:
        """Keep a request outside until the gate opens."""
        self._outside.append(request)

    def freeze(self) -> None:
        """Pause at once."""
        self.paused = self._stopped = True
        self._lifted = False

    def when_quiet(self, key: object, run: Work, *, pauses: bool = False) -> None:
        """Do something when nothing is under way, or now if nothing runs.

        `pauses`: it begins a pause, before which what an earlier pause stopped goes on to its end.
        """
        if pauses:
            self._lifted |= self._stopped
            self.paused, self._stopped = True, False
        if self.frozen and not pauses:
            run()
        else:
            self._waiting.append(_Waiting(key, run, pauses=pauses))

    def in_turn(self, key: object, run: Work) -> None:
        """Do something after the updates that wait, or now if there is none."""
        if self.updates_wait:
            self._waiting.append(_Waiting(key, run, in_turn=True))
        else:
            run()

    def call_off(self, key: object) -> bool:
        """Forget work that waits, because its caller has left. Returns whether it was there."""
        off = [one for one in self._waiting if one.key is key]
        self._waiting = deque(one for one in self._waiting if one.key is not key)
        if any(one.pauses for one in off) and not any(one.pauses for one in self._waiting):
            self._stopped |= self._lifted
            self.paused, self._lifted = self._stopped, False
        return bool(off)

    def settle(self, *, idle: bool) -> None:
        """Do what was waiting, if nothing is under way or runs, and let requests in if the gate is open."""
        while (one := self._next(idle=idle)) is not None:
            self._waiting.remove(one)
            one.run()
        while self.is_open and self._outside:
            self._outside.popleft()()

    def _next(self, *, idle: bool) -> _Waiting | None:
        """The first that need not wait. A pause that waits for requests to end still waits while frozen."""
        if idle:
            return self._waiting[0] if self._waiting else None
        first = next((one for one in self._waiting if not one.pauses), None)
        return first if first is not None and (self.frozen or first.in_turn) else None

    def resume(self) -> None:
        """End a pause, or call off one that has not begun."""
        off = [one for one in self._waiting if one.pauses]
        self._waiting = deque(one for one in self._waiting if not one.pauses)
        for one in off:
            one.run()
        self.paused = self._stopped = self._lifted = False


def check_mode(mode: str) -> str:
    """The mode; BadParameter for another word."""
    if mode not in MODES:
        raise BadParameter(f"mode={mode!r}: choose one of {', '.join(MODES)}", param="mode")
    return mode


__all__ = ["MODES", "Gate", "Work", "check_mode"]
