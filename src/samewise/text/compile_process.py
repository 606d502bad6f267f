"""A child process that tries grammars under limits, and can be killed at any moment.

The child is a Python interpreter of its own, started without `multiprocessing`: it does not import the
caller's main module, and holds nothing of the process but the tokenizer. See `compile_child`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from samewise.errors import MachineError
from samewise.types import Grammar

START_SECONDS = 120.0
"""Seconds for a child to start and build its trie, at most. About one is usual; a busy machine may need
many."""

REPLY_SECONDS = 60.0
"""Seconds beyond a trial's own limit after which a child that has not replied is killed."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from samewise.text.compile_child import main; main(int(sys.argv[1]))"
)


class ChildLost(MachineError):
    """The child that compiles grammars has ended: it was killed, or it could not be started."""


class OverLimit(Exception):
    """A trial reached a limit: "time" or "memory"."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class Refused(Exception):
    """llguidance refused the grammar; the message says why."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What compiling a grammar took."""

    seconds: float  # of processor time
    num_bytes: int  # of memory


class CompileProcess:
    """One child. Used by one thread; `kill` may be called from any."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._ready = False  # the child has built its trie
        self._killed = False

    def start(self) -> None:
        """Start the child unless it runs. It gets ready while the caller does something else."""
        if self._child is not None:
            return
        ours, theirs = Pipe()
        try:
            with self._lock:  # `kill` finds either no child, or one that it can kill
                if self._killed:
                    raise ChildLost("no grammar is compiled any more: the engine was closed")
                self._child = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C in a terminal reaches the whole session
                )
                self._connection = ours
        except OSError as error:
            ours.close()
            raise ChildLost(f"the process that compiles grammars cannot be started: {error}") from error
        finally:
            theirs.close()
        self._send(self._tokenizer)

    def trial(self, grammar: Grammar, *, seconds: float, num_bytes: int) -> Trial:
        """Compile a grammar in the child. Raises Refused, OverLimit, or ChildLost."""
        self.start()
        if not self._ready:
            self._receive(START_SECONDS)
            self._ready = True
        self._send({"kind": grammar.kind, "text": grammar.text, "seconds": seconds, "bytes": num_bytes})
        outcome = self._receive(REPLY_SECONDS + 10 * seconds)
        if "over" in outcome:
            raise OverLimit(str(outcome["over"]))
        if "error" in outcome:
            raise Refused(str(outcome["error"]))
        return Trial(float(outcome["seconds"]), int(outcome["bytes"]))

    def stop(self) -> None:
        """End the child; a later trial starts another."""
        child, connection = self._child, self._connection
        with self._lock:
            self._child = self._connection = None
        self._ready = False
        if connection is not None:
            connection.close()
        if child is not None:
            _kill(child)
            child.wait()

    def kill(self) -> None:
        """End the child for good, from any thread; a trial under way raises ChildLost."""
        with self._lock:
            self._killed = True
            if self._child is not None:
                _kill(self._child)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except (OSError, ValueError) as error:
            self.stop()
            raise ChildLost("the process that compiles grammars has ended") from error

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self._connection is not None
        try:
            if self._connection.poll(timeout):
                return dict(json.loads(self._connection.recv_bytes()))
        except (EOFError, OSError, ValueError) as error:
            self.stop()
            raise ChildLost("the process that compiles grammars has ended") from error
        self.stop()
        raise ChildLost(f"the process that compiles grammars did not answer in {timeout:g} seconds")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and its forks, which are a process group of their own."""
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


__all__ = [
    "REPLY_SECONDS",
    "START_SECONDS",
    "ChildLost",
    "CompileProcess",
    "OverLimit",
    "Refused",
    "Trial",
]
