"""When a request begins: one in each turn of the event loop, in rotation between the keys.

A thousand requests may arrive at once. Reading a head takes little, what follows ten times as much, and in an
event loop all of it would go before the next head. Here it waits, so that a request for STATE_PATHS is behind
heads only, and one of another key behind one request of each key.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

BEGUN_AT_ONCE = 1
"""Requests that begin in one turn of the event loop. Set by hand: 0.5 ms of work; a turn takes 0.05 ms."""

STATE_PATHS = ("/health", "/ready", "/live")
"""Paths that supervisors ask. They are answered at once, and need no turn and no place."""


class Turns:
    """Lets at most `at_once` callers go on in one turn of the event loop. Used in one event loop."""

    def __init__(self, at_once: int = BEGUN_AT_ONCE) -> None:
        self._at_once = at_once
        self._begun = 0  # in this turn
        self._ticking = False  # whether `_next_turn` will be called
        self._waiting: OrderedDict[object, deque[asyncio.Future[None]]] = OrderedDict()  # by key, next first

    async def wait(self, key: object) -> None:
        """Return when it is the caller's turn: at once, unless many came in this turn or wait already."""
        loop = asyncio.get_running_loop()
        if not self._ticking:
            self._ticking = True
            loop.call_soon(self._next_turn, loop)
        if self._begun < self._at_once and not self._waiting:
            self._begun += 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        await turn

    @property
    def num_waiting(self) -> int:
        """Callers that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the next ones go on, one of each key after the other."""
        self._begun = 0
        while self._waiting and self._begun < self._at_once:
            key, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns
            if not turn.done():  # else its caller was cancelled
                turn.set_result(None)
                self._begun += 1
        self._ticking = self._begun > 0
        if self._ticking:
            loop.call_soon(self._next_turn, loop)


class TurnMiddleware:
    """Has requests that have a place wait for their turn; those for STATE_PATHS do not."""

    def __init__(self, app: ASGIApp, turns: Turns) -> None:
        self._app, self._turns = app, turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and local_path(scope) not in STATE_PATHS:
            await self._turns.wait(scope["state"]["key_digest"])
        await self._app(scope, receive, send)


def local_path(scope: Mapping[str, str]) -> str:
    """The path without the prefix at which the application is mounted."""
    return scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"


__all__ = ["BEGUN_AT_ONCE", "STATE_PATHS", "TurnMiddleware", "Turns", "local_path"]
