"""Law 9, process independence: two fresh processes, cold caches, the same contract and the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PROGRAM = """
import json, sys
from samewise import machine
machine.settle()
import torch
torch.set_num_threads(1)
from samewise.testing import Jitter, run, tiny_engine
from samewise.types import Sampling

compiled, proposer = sys.argv[1] == "compiled", sys.argv[2]
make = (lambda parts: Jitter(parts)) if proposer == "jitter" else None
engine = tiny_engine("llama", make_proposer=make, compile=compiled, max_num_seqs=8)
asks = [
    ([(7 * i + n) % 256 for i in range(n)], Sampling(temperature=t, seed=n, top_p=0.9), 10)
    for n in (1, 17, 40) for t in (0.0, 0.8)
]
found = run(engine, asks)
print(json.dumps({"contract": engine.contract.id, "facts": engine.contract.facts, "said": [vars(t) for t in found]}))
"""


def fresh(tmp_path, name, *, seed, mode="eager", proposer="none", attention_cache=True):
    """What a new process says, with caches of its own."""
    caches = tmp_path / name
    caches.mkdir()
    env = os.environ | {
        "PYTHONPATH": str(SRC),
        "PYTHONHASHSEED": seed,
        "SAMEWISE_CACHE": str(caches / "samewise"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, mode, proposer],
        env=env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_processes_with_cold_caches(tmp_path):
    first = fresh(tmp_path, "first", seed="0")
    second = fresh(tmp_path, "second", seed="4242", proposer="jitter")
    assert first["facts"] == second["facts"]
    assert first["contract"] == second["contract"]
    assert first["said"] == second["said"]


@pytest.mark.slow
def test_two_processes_that_compile(tmp_path):
    first = fresh(tmp_path, "first", seed="1", mode="compiled")
    second = fresh(tmp_path, "second", seed="77", mode="compiled", proposer="jitter")
    assert first["facts"] == second["facts"]
    assert first["contract"] == second["contract"]
    assert first["said"] == second["said"]
