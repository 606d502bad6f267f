"""A minute of bench/soak.py: clients with bad manners, a server that stays whole, answers that stay."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("SAMEWISE_SOAK_SECONDS", "25"))  # of load; starting and looking come on top


@pytest.mark.slow
def test_soak() -> None:
    script, minutes = str(ROOT / "bench" / "soak.py"), str(SECONDS / 60)
    ran = subprocess.run(
        [sys.executable, script, "--minutes", minutes, "--clients", "16", "--rounds", "3", "--asks", "24"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=300 + 2 * SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    counts = found["counts"]
    assert found["num_wrong"] == 0
    assert found["server"]["preempted"] > 0
    assert found["server"]["aborted"] > 0
    for kind in ("left", "cut", "malformed", "completed verified whole", "completed verified stream"):
        assert counts[kind] > 0, counts
