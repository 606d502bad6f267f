"""The machine: a cache that never fails, and an environment settled once, by a child that may die."""

import json
import signal
import subprocess
import sys
import time

import pytest

from samewise import machine

AMX = "model name : Test CPU\nflags : avx2 avx512f amx_bf16 amx_tile\n\nmodel name : the second processor\n"
PLAIN = "vendor_id : Test\ncpu family : 6\nmodel : 143\nmodel name : Test CPU\nstepping : 8\nflags : b a\n\n"


class Child:
    """A probe that dies by `deaths[cap]`, or lives; it counts how often it was asked."""

    def __init__(self, deaths=None, default=0):
        self.deaths, self.default, self.asked = deaths or {}, default, []

    def __call__(self, cap):
        self.asked.append(cap)
        return self.deaths.get(cap, self.default)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def amx(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(AMX)
    return path


# ---- the cache


def test_cache_dir_goes_by_variable_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert machine.cache_dir() == tmp_path / "a"
    monkeypatch.delenv("SAMEWISE_CACHE")
    assert machine.cache_dir() == tmp_path / "b" / "samewise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert machine.cache_dir() == tmp_path / "c" / ".cache" / "samewise"


def test_what_is_remembered_is_recalled_under_the_same_key_only():
    machine.remember("kind", {"a": 1, "b": "x"}, {"found": [1, 2]})
    assert machine.recall("kind", {"b": "x", "a": 1}) == {"found": [1, 2]}
    assert machine.recall("kind", {"a": 2, "b": "x"}) is None
    assert machine.recall("other", {"a": 1, "b": "x"}) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"key": {"a": 2}, "value": 3}'])
def test_a_damaged_entry_counts_as_absent_and_is_replaced(cache, damage):
    machine.remember("kind", {"a": 1}, "first")
    (entry,) = (cache / "facts" / "kind").iterdir()
    entry.write_bytes(damage)
    assert machine.recall("kind", {"a": 1}) is None
    machine.remember("kind", {"a": 1}, "second")
    assert machine.recall("kind", {"a": 1}) == "second"


def test_an_unwritable_cache_is_not_an_error(cache, caplog):
    cache.write_text("a file where the folder should be")
    machine.remember("kind", {"a": 1}, "value")
    assert machine.recall("kind", {"a": 1}) is None
    assert "cannot write" in caplog.text


def test_a_failed_write_leaves_old_content_and_no_litter(tmp_path):
    path = tmp_path / "file"
    machine.write_atomically(path, b"old")
    with pytest.raises(TypeError):
        machine.write_atomically(path, "not bytes")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# ---- the CPU


def test_cpu_facts_name_the_first_processor(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(PLAIN)
    facts = machine.cpu_facts(path)
    assert (facts["cpu"], facts["cpu_family"], facts["cpu_model"], facts["cpu_stepping"]) == (
        "Test CPU",
        "6",
        "143",
        "8",
    )
    path.write_text(PLAIN.replace("b a", "a b"))
    assert machine.cpu_facts(path) == facts  # the order of flags is the kernel's whim
    path.write_text(PLAIN.replace("b a", "a b c"))
    assert machine.cpu_facts(path)["cpu_features"] != facts["cpu_features"]


def test_cpu_facts_without_cpuinfo(tmp_path):
    facts = machine.cpu_facts(tmp_path / "absent")
    assert facts["cpu"]
    assert all(isinstance(value, str) for value in facts.values())


# ---- settling


def test_no_amx_no_child(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(PLAIN)
    child, env = Child(), {}
    facts = machine.pin_environment(child, cpuinfo=path, environ=env)
    assert child.asked == []
    assert facts == {
        "MKL_DYNAMIC": "FALSE",
        "OMP_DYNAMIC": "FALSE",
        "OMP_NUM_THREADS": str(machine.num_cores()),
    }
    assert env == facts


def test_amx_that_works_is_left_alone_and_asked_once(amx):
    child = Child()
    for _ in range(2):
        assert "ONEDNN_MAX_CPU_ISA" not in machine.pin_environment(child, cpuinfo=amx, environ={})
    assert child.asked == [None]


@pytest.mark.parametrize(
    ("deadly", "cap"),
    [
        ([None], "AVX512_CORE_BF16"),
        ([None, "AVX512_CORE_BF16"], "AVX512_CORE"),
        ([None, "AVX512_CORE_BF16", "AVX512_CORE"], "AVX2"),
        ([None, "AVX512_CORE_BF16", "AVX512_CORE", "AVX2"], "AVX2"),
    ],
)
def test_amx_that_kills_is_capped_at_the_best_that_survives(amx, deadly, cap):
    child = Child(dict.fromkeys(deadly, -signal.SIGILL))
    for _ in range(2):
        env = {}
        assert machine.pin_environment(child, cpuinfo=amx, environ=env)["ONEDNN_MAX_CPU_ISA"] == cap
        assert env["ONEDNN_MAX_CPU_ISA"] == cap
    assert (
        child.asked == [None, *machine.ISA_LADDER][: len(child.asked)]
    )  # once each: the second time is cached


@pytest.mark.parametrize("answer", [None, 1, -signal.SIGKILL, -signal.SIGINT])
def test_no_clear_answer_means_caution_and_is_asked_again(amx, answer):
    child = Child(default=answer)
    for _ in range(2):
        assert (
            machine.pin_environment(child, cpuinfo=amx, environ={})["ONEDNN_MAX_CPU_ISA"]
            == "AVX512_CORE_BF16"
        )
    assert child.asked == [None, None]


@pytest.mark.parametrize("name", machine.ISA_VARIABLES)
def test_what_the_user_set_stays(amx, name):
    env = {name: "AVX2", "OMP_NUM_THREADS": "7", "MKL_DYNAMIC": "TRUE", "MKL_CBWR": "COMPATIBLE"}
    child = Child(default=-signal.SIGILL)
    facts = machine.pin_environment(child, cpuinfo=amx, environ=env)
    assert child.asked == []
    assert facts == {**env, "OMP_DYNAMIC": "FALSE"}


def test_a_damaged_answer_is_asked_for_again(amx, cache):
    machine.pin_environment(Child(), cpuinfo=amx, environ={})
    (entry,) = (cache / "facts" / "isa").iterdir()
    content = json.loads(entry.read_bytes())
    entry.write_text(json.dumps({**content, "value": {"cap": "rm -rf"}}))
    child = Child()
    machine.pin_environment(child, cpuinfo=amx, environ={})
    assert child.asked == [None]


def test_settling_again_is_quick(amx):
    machine.pin_environment(Child(), cpuinfo=amx, environ={})
    best = min(_timed(lambda: machine.pin_environment(Child(), cpuinfo=amx, environ={})) for _ in range(20))
    assert best < 0.005


def test_the_quota_of_a_cgroup(tmp_path):
    path = tmp_path / "cpu.max"
    for text, cores in (("150000 100000\n", 2), ("max 100000\n", sys.maxsize), ("junk", sys.maxsize)):
        path.write_text(text)
        assert machine._quota(path) == cores
    assert machine._quota(tmp_path / "absent") == sys.maxsize


def test_the_real_child_reports_how_it_ended(monkeypatch):
    monkeypatch.setattr(machine, "_PROBE_CODE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert machine.run_probe(None) == -signal.SIGILL
    code = "import os, sys; sys.exit(os.environ.get('ONEDNN_MAX_CPU_ISA') != 'AVX2')"
    monkeypatch.setattr(machine, "_PROBE_CODE", code)
    assert machine.run_probe("AVX2") == 0
    monkeypatch.setattr(machine, "_PROBE_CODE", "import time; time.sleep(9)")
    monkeypatch.setattr(machine, "PROBE_SECONDS", 0.2)
    assert machine.run_probe(None) is None


@pytest.mark.slow
def test_the_real_probe_passes_with_the_lowest_instruction_set():
    assert machine.run_probe("AVX2") == 0


def test_the_module_does_not_bring_torch_in():
    code = "import sys, samewise.machine as m; m.pin_environment(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
