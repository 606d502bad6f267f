"""bench/host.py: every part of a step is timed, on frames that were follow-ups."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samewise.errors import MachineError
from samewise.kernels.native.build import library_of

ROOT = Path(__file__).parents[2]


def test_parts_of_a_step_are_timed_on_a_device_that_takes_no_time(tmp_path):
    """In a process of its own: methods are wrapped."""
    try:
        library_of(ROOT / "src/samewise/draft/native/drafter.cpp")
    except MachineError:
        pytest.skip("no C++ compiler")
    traces = tmp_path / "traces.json.gz"
    answer = list(range(10)) * 12
    tops = [[token, *range(400, 407)] for token in answer]
    made = [{"kind": "k", "prompt": list(range(100, 112)), "answer": answer, "tops": tops}] * 2
    traces.write_bytes(gzip.compress(json.dumps(made).encode()))
    command = [sys.executable, ROOT / "bench/host.py", "--traces", traces, "--live", "2", "--steps", "40"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    parts = json.loads(output.splitlines()[-1])["host"]["2"]
    assert parts["gap"] >= parts["gap: C++"] > 0
    assert parts["step"] > parts["beside"] > parts["judge"] > 0
