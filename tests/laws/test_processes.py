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
machine.pin_environment()
import torch
torch.set_num_threads(1)
from samewise.testing import Jitter, run, tiny_engine
from samewise.types import Sampling

mode, proposer = sys.argv[1:]
make = (lambda parts: Jitter(parts)) if proposer == "jitter" else None
guessing = {} if make else {"proposer": proposer, "search_every": 1, "search_share": 1.0}
where = {"device": "cuda", "dtype": "bfloat16", "frame_rows": 64} if mode == "cuda" else {"device": "cpu"}
layers = {"eager": 4, "compiled": 1, "cuda": 2}[mode]
engine = tiny_engine("llama", make_proposer=make, compile=mode != "eager", **where, **guessing,
                     max_num_seqs=8, overrides={"num_hidden_layers": layers})
asks = [
    ([(7 * i + n) % 256 for i in range(n)], Sampling(temperature=t, seed=n, top_p=0.9), 10)
    for n in (1, 17, 40) for t in (0.0, 0.8)
]
found = run(engine, asks)
contract = engine.contract
print(json.dumps({"contract": contract.id, "facts": contract.facts, "said": [vars(t) for t in found]}))
"""


def begin(caches, *, seed, mode, proposer):
    """A new process with caches of its own."""
    env = os.environ | {
        "PYTHONPATH": str(SRC),
        "PYTHONHASHSEED": seed,
        "SAMEWISE_CACHE": str(caches / "samewise"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, mode, proposer]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process):
    """What it said."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "compiled", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_processes_with_cold_caches(tmp_path, mode):
    first = begin(tmp_path / "first", seed="0", mode=mode, proposer="none")
    second = begin(tmp_path / "second", seed="4242", mode=mode, proposer="jitter")
    here, there = end(first), end(second)
    assert here["facts"] == there["facts"]
    assert here["contract"] == there["contract"]
    assert here["said"] == there["said"]


@pytest.mark.slow
def test_processes_that_remember_what_others_found(tmp_path):
    """Sets of layers, sizes of frames and built kernels are kept; answers are not made of them."""
    said = [
        end(begin(tmp_path, seed=seed, mode="eager", proposer=proposer))
        for seed, proposer in (("0", "skip"), ("1", "skip"), ("2", "auto"), ("3", "none"))
    ]
    assert all(one == said[0] for one in said)
