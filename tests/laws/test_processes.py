"""Law 9, process independence: two fresh processes with cold caches give one contract and the same bits."""

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
from samewise.draft.tuning import SearchTuning, Tuning
from samewise.testing import Jitter, run, tiny_engine
from samewise.types import Sampling

mode, proposer = sys.argv[1:]
make = (lambda parts: Jitter(parts)) if proposer == "jitter" else None
drafting = {} if make else {"proposer": proposer}
device = {"device": "cuda", "dtype": "bfloat16", "frame_rows": 64} if mode == "cuda" else {"device": "cpu"}
layers = {"eager": 4, "compiled": 1, "cuda": 2}[mode]
sizes = {"frame_sizes": [1, 16]} if mode == "compiled" else {}  # each size takes 20 s to compile
engine = tiny_engine("llama", make_proposer=make, compile=mode != "eager", **device, **drafting,
                     **sizes, max_num_seqs=8, tuning=Tuning(search=SearchTuning(every=1, share=1.0)),
                     overrides={"num_hidden_layers": layers})
requests = [
    ([(7 * i + n) % 256 for i in range(n)], Sampling(temperature=t, seed=n, top_p=0.9), 10)
    for n in (1, 17, 40) for t in (0.0, 0.8)
]
outputs = run(engine, requests)
contract = engine.contract
print(json.dumps({"contract": contract.id, "facts": contract.facts, "outputs": [vars(t) for t in outputs]}))
"""


def start(caches, *, seed, mode, proposer):
    """A new process with its own caches."""
    env = os.environ | {
        "PYTHONPATH": str(SRC),
        "PYTHONHASHSEED": seed,
        "SAMEWISE_CACHE": str(caches / "samewise"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, mode, proposer]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    """Contract, facts and outputs of a finished process."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    "mode",
    [
        "eager",
        pytest.param("compiled", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_two_processes_with_cold_caches_give_the_same_bits(tmp_path, mode):
    first = start(tmp_path / "first", seed="0", mode=mode, proposer="none")
    second = start(tmp_path / "second", seed="4242", mode=mode, proposer="jitter")
    one, other = result(first), result(second)
    assert one["facts"] == other["facts"]
    assert one["contract"] == other["contract"]
    assert one["outputs"] == other["outputs"]


@pytest.mark.slow
def test_cached_layer_sets_frame_sizes_and_kernels_change_nothing(tmp_path):
    """Later processes read what earlier ones left in the cache."""
    results = [
        result(start(tmp_path, seed=seed, mode="eager", proposer=proposer))
        for seed, proposer in (("0", "skip"), ("1", "skip"), ("2", "auto"), ("3", "none"))
    ]
    assert all(one == results[0] for one in results)
