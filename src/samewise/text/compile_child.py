"""The program of the child process that compiles grammars under limits. Started by `compile_process`.

The child builds the tokenizer's trie once. For each grammar it forks, and the fork compiles under limits of
processor time, address space and stack: whatever a grammar does, it ends with the fork, and its memory is
returned. The child itself has one thread and runs no grammar. It ends when its connection is closed.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from samewise.errors import BadParameter
from samewise.text.grammar_source import compile_matcher
from samewise.types import Grammar

STACK = 2 << 20
"""Bytes of stack for a trial: a quarter of what threads have by default, so that the process itself, which
compiles an accepted grammar again in a thread, does not run out where the trial did not."""

WALL_FACTOR = 10
"""A trial's time on the clock over its limit of processor time, at most: the machine may be busy."""

MAX_OUTCOME = 1 << 16
"""Bytes of a trial's outcome, at most."""


def main(handle: int) -> None:
    """Try the grammars that arrive on a connection, one at a time."""
    _step_back()
    with Connection(handle) as connection:
        try:
            trie = make_trie(json.loads(connection.recv_bytes()))
            with suppress(BadParameter):
                compile_matcher(
                    trie, Grammar.json_object()
                )  # what all grammars share is made before the forks
            connection.send_bytes(b"{}")
            while True:
                job = json.loads(connection.recv_bytes())
                connection.send_bytes(json.dumps(try_grammar(trie, job)).encode())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the process that started this one has closed the connection, or ended


def make_trie(tokenizer: dict[str, Any]) -> Any:
    """llguidance's form of a tokenizer, from keywords of LLTokenizer."""
    from llguidance import LLTokenizer

    return LLTokenizer(**tokenizer)


def try_grammar(trie: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Compile a grammar in a fork. The outcome has `seconds` and `bytes`, or `error`, or `over`.

    `over` names the limit that ended the trial: "time" or "memory".
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _compile_in_fork(trie, job, writer)
    os.close(writer)
    try:
        outcome = _read_until(reader, time.monotonic() + WALL_FACTOR * job["seconds"])
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it has ended, or is overdue
        _, status = os.waitpid(pid, 0)
    if outcome:
        return dict(json.loads(outcome))
    timed_out = outcome is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in _TIME_SIGNALS)
    return {"over": "time" if timed_out else "memory"}


_TIME_SIGNALS = (signal.SIGPROF, signal.SIGXCPU)


def _compile_in_fork(trie: Any, job: dict[str, Any], writer: int) -> NoReturn:
    """Compile, write the outcome and end. Where a limit is reached, the kernel or llguidance ends it."""
    outcome: dict[str, Any] = {"over": "memory"}
    try:
        _limit_this_process(job["seconds"], job["bytes"])
        before, began = _resident(), time.process_time()
        matcher = compile_matcher(trie, Grammar(job["kind"], job["text"]))
        outcome = {"seconds": time.process_time() - began, "bytes": max(0, _resident() - before)}
        del matcher
    except MemoryError:
        pass
    except BadParameter as error:
        outcome = {"error": str(error)}
    except BaseException as error:
        outcome = {"error": f"grammar={job['kind']}: it cannot be compiled: {type(error).__name__}"}
    finally:
        with suppress(OSError):
            os.write(writer, json.dumps(outcome).encode()[:MAX_OUTCOME])
        os._exit(0)


def _limit_this_process(seconds: float, num_bytes: int) -> None:
    """Bound processor time, memory and stack. The default action of SIGPROF ends the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llguidance's last words
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,
        resource.RLIMIT_STACK: STACK,
    }
    if (size := _address_space()) is not None:
        limits[resource.RLIMIT_AS] = size + num_bytes
    for limit, value in limits.items():
        with suppress(ValueError, OSError):  # not known to this system, or lower already
            resource.setrlimit(limit, (value, value))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _step_back() -> None:
    """Leave Ctrl-C to the process that started this one, and processor time and memory to the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(10)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _read_until(reader: int, deadline: float) -> bytes | None:
    """What a fork wrote before it closed its end; None if that did not happen by the deadline."""
    parts: list[bytes] = []
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reader, MAX_OUTCOME)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def _address_space() -> int | None:
    """Bytes of this process's address space; None where the system does not tell, as on macOS."""
    return _status("VmSize")


def _resident() -> int:
    """Bytes of memory this process has allocated and uses."""
    resident = _status("RssAnon")
    if resident is not None:
        return resident
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(name: str) -> int | None:
    """A size among Linux's facts about this process, in bytes; None where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]
    return sizes[0] if sizes else None


__all__ = ["MAX_OUTCOME", "STACK", "WALL_FACTOR", "main", "make_trie", "try_grammar"]
