"""The threads that torch splits its work over have the modes of the thread that calls the engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import samewise

SCRIPT = """
import ctypes, threading
import torch
from samewise.execute import thread_pool
from samewise.execute.process_state import ProcessState

state = ProcessState(torch.device("cpu"))
with state.pinned():
    pass

def work(disturb, restore):
    disturb()
    torch.ones(1 << 20).div_(3.0)  # makes the threads of this thread's pool
    restore()
    before = thread_pool._as_expected()
    with state.pinned():
        print(before, thread_pool._as_expected())

libc = ctypes.CDLL(None)
for disturb, restore in (
    (lambda: libc.fesetround(0x400), lambda: libc.fesetround(0)),
    (lambda: libc.fesetround(0x800), lambda: libc.fesetround(0)),
    (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
    (lambda: None, lambda: None),
):
    thread = threading.Thread(target=work, args=(disturb, restore))
    thread.start()
    thread.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc, and GNU's OpenMP")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other machines number rounding modes differently")
def test_threads_made_under_other_modes_are_repaired() -> None:
    env = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(samewise.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:4] == ["False True"] * 3 + ["True True"], done.stderr
