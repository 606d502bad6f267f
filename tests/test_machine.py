"""CPU facts, and the environment that is pinned before torch loads."""

import json
import signal
import subprocess
import sys
import time

import pytest

from samewise import machine

AMX = "model name : Test CPU\nflags : avx2 avx512f amx_bf16 amx_tile\n\nmodel name : the second processor\n"
NO_AMX = "vendor_id : Test\ncpu family : 6\nmodel : 143\nmodel name : Test CPU\nstepping : 8\nflags : b a\n\n"


class FakeChild:
    """Stands in for the child that tries a cap: its exit status is `statuses[cap]` or `default`."""

    def __init__(self, statuses=None, default=0):
        self.statuses, self.default, self.calls = statuses or {}, default, []

    def __call__(self, cap):
        self.calls.append(cap)
        return self.statuses.get(cap, self.default)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def amx(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(AMX)
    return path


# ---- the CPU


def test_cpu_facts_name_the_first_processor(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(NO_AMX)
    facts = machine.cpu_facts(path)
    assert (facts["cpu"], facts["cpu_family"], facts["cpu_model"], facts["cpu_stepping"]) == (
        "Test CPU",
        "6",
        "143",
        "8",
    )
    path.write_text(NO_AMX.replace("b a", "a b"))
    assert machine.cpu_facts(path) == facts  # kernels list the flags in different orders
    path.write_text(NO_AMX.replace("b a", "a b c"))
    assert machine.cpu_facts(path)["cpu_features"] != facts["cpu_features"]


def test_cpu_facts_exist_without_cpuinfo(tmp_path):
    facts = machine.cpu_facts(tmp_path / "absent")
    assert facts["cpu"]
    assert all(isinstance(value, str) for value in facts.values())


# ---- the environment


def test_without_amx_no_child_is_started(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(NO_AMX)
    child, env = FakeChild(), {}
    facts = machine.pin_environment(child, cpuinfo=path, environ=env)
    assert child.calls == []
    assert facts == {
        "MKL_DYNAMIC": "FALSE",
        "OMP_DYNAMIC": "FALSE",
        "OMP_NUM_THREADS": str(machine.num_cores()),
    }
    assert env == facts | {
        "CUBLAS_WORKSPACE_CONFIG": machine.CUBLAS_WORKSPACE,
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def test_amx_that_works_is_not_capped_and_is_tried_once(amx):
    child = FakeChild()
    for _ in range(2):
        assert "ONEDNN_MAX_CPU_ISA" not in machine.pin_environment(child, cpuinfo=amx, environ={})
    assert child.calls == [None]


@pytest.mark.parametrize(
    ("fatal", "cap"),
    [
        ([None], "AVX512_CORE_BF16"),
        ([None, "AVX512_CORE_BF16"], "AVX512_CORE"),
        ([None, "AVX512_CORE_BF16", "AVX512_CORE"], "AVX2"),
        ([None, "AVX512_CORE_BF16", "AVX512_CORE", "AVX2"], "AVX2"),
    ],
)
def test_amx_that_kills_its_process_is_capped_at_the_fastest_set_that_works(amx, fatal, cap):
    child = FakeChild(dict.fromkeys(fatal, -signal.SIGILL))
    for _ in range(2):
        env = {}
        assert machine.pin_environment(child, cpuinfo=amx, environ=env)["ONEDNN_MAX_CPU_ISA"] == cap
        assert env["ONEDNN_MAX_CPU_ISA"] == cap
    # Each cap is tried once: the second call finds the result in the cache.
    assert child.calls == [None, *machine.ISA_CAPS][: len(child.calls)]


@pytest.mark.parametrize("status", [None, 1, -signal.SIGKILL, -signal.SIGINT])
def test_an_unclear_result_caps_below_amx_and_is_not_cached(amx, status):
    child = FakeChild(default=status)
    for _ in range(2):
        assert (
            machine.pin_environment(child, cpuinfo=amx, environ={})["ONEDNN_MAX_CPU_ISA"]
            == "AVX512_CORE_BF16"
        )
    assert child.calls == [None, None]


@pytest.mark.parametrize("name", machine.ISA_VARIABLES)
def test_variables_set_by_the_user_stay(amx, name):
    env = {name: "AVX2", "OMP_NUM_THREADS": "7", "MKL_DYNAMIC": "TRUE", "MKL_CBWR": "COMPATIBLE"}
    child = FakeChild(default=-signal.SIGILL)
    before = dict(env)
    facts = machine.pin_environment(child, cpuinfo=amx, environ=env)
    assert child.calls == []
    assert facts == {**before, "OMP_DYNAMIC": "FALSE"}
    assert env.items() >= before.items()


def test_a_damaged_cached_cap_is_tried_again(amx, cache):
    machine.pin_environment(FakeChild(), cpuinfo=amx, environ={})
    (entry,) = (cache / "facts" / "isa").iterdir()
    content = json.loads(entry.read_bytes())
    entry.write_text(json.dumps({**content, "value": {"cap": "rm -rf"}}))
    child = FakeChild()
    machine.pin_environment(child, cpuinfo=amx, environ={})
    assert child.calls == [None]


def test_pinning_again_takes_less_than_5_ms(amx):
    machine.pin_environment(FakeChild(), cpuinfo=amx, environ={})
    best = min(
        _seconds(lambda: machine.pin_environment(FakeChild(), cpuinfo=amx, environ={})) for _ in range(20)
    )
    assert best < 0.005


def test_a_cgroup_quota_is_rounded_up_to_cores(tmp_path):
    path = tmp_path / "cpu.max"
    for text, cores in (("150000 100000\n", 2), ("max 100000\n", sys.maxsize), ("junk", sys.maxsize)):
        path.write_text(text)
        assert machine._quota(path) == cores
    assert machine._quota(tmp_path / "absent") == sys.maxsize


def test_the_child_reports_its_exit_status_signal_or_timeout(monkeypatch):
    monkeypatch.setattr(machine, "_TRY_ISA_CODE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert machine.try_isa_in_child(None) == -signal.SIGILL
    code = "import os, sys; sys.exit(os.environ.get('ONEDNN_MAX_CPU_ISA') != 'AVX2')"
    monkeypatch.setattr(machine, "_TRY_ISA_CODE", code)
    assert machine.try_isa_in_child("AVX2") == 0
    monkeypatch.setattr(machine, "_TRY_ISA_CODE", "import time; time.sleep(9)")
    monkeypatch.setattr(machine, "TRY_ISA_SECONDS", 0.2)
    assert machine.try_isa_in_child(None) is None


@pytest.mark.slow
def test_the_child_succeeds_with_the_lowest_instruction_set():
    assert machine.try_isa_in_child("AVX2") == 0


def test_pinning_the_environment_does_not_import_torch():
    code = "import sys, samewise.machine as m; m.pin_environment(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---- variables and libraries


def test_variables_that_can_change_bits_on_a_cpu_are_returned():
    set_variables = {
        "OMP_THREAD_LIMIT": "1",
        "OMP_MAX_ACTIVE_LEVELS": "0",
        "OMP_NESTED": "TRUE",
        "KMP_DETERMINISTIC_REDUCTION": "1",
        "GOMP_SOMETHING_NEW": "1",
        "MKL_CBWR": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "TORCHINDUCTOR_CPP_WRAPPER": "1",
    }
    harmless = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_DISPLAY_ENV": "TRUE",
        "KMP_BLOCKTIME": "0",
        "MKL_VERBOSE": "1",
        "TORCHINDUCTOR_CACHE_DIR": "/somewhere",
        "HOME": "/root",
        "TRITON_F32_DEFAULT": "tf32",  # no CPU kernel is Triton's
    }
    assert machine.numeric_variables(set_variables | harmless) == dict(sorted(set_variables.items()))


def test_variables_that_can_change_bits_on_cuda_are_returned():
    set_variables = {
        "CUBLASLT_WORKSPACE_SIZE": "1024",
        "CUBLAS_EMULATE_DOUBLE_PRECISION": "1",
        "CUDA_FORCE_PTX_JIT": "1",
        "DISABLE_ADDMM_CUDA_LT": "1",
        "NVIDIA_TF32_OVERRIDE": "1",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "TORCH_BLAS_PREFER_CUBLASLT": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0",
        "TRITON_F32_DEFAULT": "tf32",
        "TRITON_PTXAS_PATH": "/usr/bin/ptxas",
    }
    harmless = {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",  # has a fact of its own
        "CUBLASLT_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_LAUNCH_BLOCKING": "1",
        "OMP_NUM_THREADS": "3",
        "TORCHINDUCTOR_CACHE_DIR": "/somewhere",
        "TRITON_CACHE_DIR": "/somewhere",
        "TRITON_PRINT_AUTOTUNING": "1",
    }
    assert machine.numeric_variables(set_variables | harmless, cuda=True) == set_variables


def test_the_workspace_of_cublas_is_set_before_torch_loads(tmp_path):
    env: dict[str, str] = {}
    machine.pin_environment(FakeChild(), cpuinfo=tmp_path / "absent", environ=env)
    assert env["CUBLAS_WORKSPACE_CONFIG"] == machine.CUBLAS_WORKSPACE
    env = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    machine.pin_environment(FakeChild(), cpuinfo=tmp_path / "absent", environ=env)
    assert env["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(
    ("given", "policy"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "100"}, None)],
)
def test_threads_of_openmp_do_not_spin_unless_the_user_says_so(given, policy, tmp_path):
    env = dict(given)
    machine.pin_environment(FakeChild(), cpuinfo=tmp_path / "absent", environ=env)
    assert env.get("OMP_WAIT_POLICY") == policy


MAPS = """\
55d0c8a00000-55d0c8a2f000 r--p 00000000 fe:00 123                        /usr/bin/python3.11
7f10c0000000-7f10c0021000 rw-p 00000000 00:00 0
7f10d0000000-7f10d1000000 r-xp 00001000 fe:00 456                        /opt/my libs/libcublasLt.so.13
7f10d1000000-7f10d2000000 r--p 01001000 fe:00 456                        /opt/my libs/libcublasLt.so.13
7f10e0000000-7f10e1000000 r-xp 00000000 fe:00 457                        /opt/cuda/lib64/libcublas.so.13.1.0.3
7f10f0000000-7f10f1000000 r-xp 00000000 fe:00 458                        /opt/cuda/lib64/libcublasmp.so.0
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
"""


def test_loaded_libraries_are_read_from_the_maps_of_the_process(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert [str(path) for path in machine.loaded_libraries(r"libcublas(Lt)?\.so[.\d]*", maps)] == [
        "/opt/cuda/lib64/libcublas.so.13.1.0.3",
        "/opt/my libs/libcublasLt.so.13",
    ]
    assert machine.loaded_libraries(r".*", tmp_path / "absent") == []
