"""A short run of bench/soak.py: clients that disconnect or send errors, and answers that stay the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("SAMEWISE_SOAK_SECONDS", "25"))  # of load, without start-up and checks


@pytest.mark.slow
def test_answers_stay_the_same_under_load_and_disconnects() -> None:
    script, minutes = str(ROOT / "bench" / "soak.py"), str(SECONDS / 60)
    ran = subprocess.run(
        [sys.executable, script, "--minutes", minutes, "--clients", "16", "--rounds", "6", "--asks", "24"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=300 + 2 * SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-3000:]
    report = json.loads(ran.stdout.splitlines()[-1])
    counts = report["counts"]
    assert report["num_wrong"] == 0
    assert report["server"]["preempted"] > 0
    assert report["server"]["aborted"] > 0
    for kind in ("left", "cut", "malformed", "completed verified whole", "completed verified stream"):
        assert counts[kind] > 0, counts
