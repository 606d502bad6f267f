"""Facts about libraries and threads: of what is loaded, and of what OpenMP really gives."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from samewise import machine
from samewise.execute import numerics

CHILD = """
import torch
from samewise.execute import numerics
print(torch.get_num_threads(), numerics.region_threads(torch.get_num_threads()))
"""
FLUSHING_CHILD = """
import torch
from samewise.execute import numerics
from samewise.execute.process_state import ProcessState
torch.set_num_threads(4)
torch.set_flush_denormal({early})
(torch.ones(1 << 20) * 2.0).sum()  # the threads start here
with ProcessState(torch.device("cpu")).pinned():
    print(numerics.facts(torch.device("cpu"))["flush denormal"])
"""


def run_child(code: str, **variables: str) -> str:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")} | variables
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(not machine.MAPS.exists(), reason="this system does not list loaded libraries")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, "2 2"),
        ({"OMP_THREAD_LIMIT": "1"}, "2 1"),
        ({"OMP_MAX_ACTIVE_LEVELS": "0"}, "2 1"),
        ({"OMP_THREAD_LIMIT": "64"}, "2 2"),
    ],
)
def test_threads_are_those_a_parallel_region_gets(variables, threads):
    assert run_child(CHILD, OMP_NUM_THREADS="2", **variables) == threads


@pytest.mark.slow
@pytest.mark.parametrize("early", ["False", "True"])
def test_threads_that_were_made_to_flush_subnormal_numbers_do_so_no_more(early):
    assert run_child(FLUSHING_CHILD.format(early=early)) == "off"


def test_without_a_list_of_libraries_threads_are_those_asked_for(tmp_path):
    assert numerics.region_threads(7, tmp_path / "absent") == 7


def test_cublas_is_named_by_what_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path))
    (library,) = machine.loaded_libraries(r"libtorch_cpu\.so") or [None]
    if library is None:
        pytest.skip("this system does not list loaded libraries")
    # Any loaded library will do to see its content named; it cannot state cuBLAS's version.
    content = sha256(library.read_bytes()).hexdigest()[:16]
    assert numerics.cublas_fact([library]) == f"libtorch_cpu unknown {content}"


def test_cublas_is_named_by_its_package_where_no_library_is_known():
    assert numerics.cublas_fact([]).startswith("package ")


def test_facts_of_a_cpu_name_threads_and_variables(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    facts = numerics.facts(torch.device("cpu"))
    assert facts["MKL_CBWR"] == "COMPATIBLE"
    assert facts["threads"] == str(torch.get_num_threads())
