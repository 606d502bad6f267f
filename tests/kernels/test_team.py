"""The kernels' threads: several callers, workers that are late, busy or cannot be made, a forked child."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from cpp_reference import bits, random_tensor
from native_variants import built
from samewise.kernels.linear import packed as linear
from samewise.kernels.native import build as native_build

pytestmark = pytest.mark.skipif(not native_build.compiler_available(), reason="no C++ compiler")


@pytest.fixture
def product():
    """A product that is shared out among three threads, and its bits."""
    weight, x = linear.pack(random_tensor(1000, 320)), random_tensor(9, 320, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    want = bits(linear.multiply(x, weight, None))
    torch.set_num_threads(3)
    yield lambda: torch.equal(bits(linear.multiply(x, weight, None)), want)
    torch.set_num_threads(before)


def test_callers_in_several_threads_get_their_own_results(product):
    same, begin = [], threading.Barrier(4)

    def call():
        torch.set_num_threads(3)
        begin.wait()
        same.extend(product() for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(same) == 200
    assert all(same)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(product):
    assert product()
    child = os.fork()
    if child == 0:
        os._exit(0 if all(product() for _ in range(5)) else 1)
    timer = threading.Timer(60, os.kill, (child, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    assert os.waitstatus_to_exitcode(status) == 0


def test_many_short_regions_end(product):
    assert all(product() for _ in range(300))


def test_more_threads_than_cores_share_a_product(product):
    torch.set_num_threads(4 * (os.cpu_count() or 1) + 1)
    assert all(product() for _ in range(20))


# -- with workers that are held (held_team.cpp) --------------------------------------------------------

USUAL, FAILING, LATE = range(3)  # how threads are made
DEADLINE = (
    60.0  # seconds after which a call that does not return, or a thread that does not sleep, has failed
)
NATIVE = Path(native_build.__file__).parent
FLAGS = ("-static-libstdc++", "-Wl,-Bsymbolic", f"-I{NATIVE}")

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interposes a symbol of ELF")


@pytest.fixture(params=["futex", "no futex"])
def team(request, tmp_path):
    """A library with a pool of its own, without workers yet."""
    flags = FLAGS if request.param == "futex" else (*FLAGS, "-DSAMEWISE_NO_FUTEX")
    library = built((NATIVE / "team.cpp", Path(__file__).with_name("held_team.cpp")), flags)
    copy = tmp_path / "team.so"  # the loader gives every path its own variables
    copy.write_bytes(library.read_bytes())
    team = native_build.load_library(copy)
    team.region_of_tasks.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    team.region_of_tasks.restype = ctypes.c_int64
    team.held_region.argtypes, team.caller_is_leaving.restype = [ctypes.c_int64], ctypes.c_bool
    yield team
    team.start_late_threads()
    team.release_up_to(1000)


def num_workers(team, threads):
    """How many workers, the caller among them, took part in a region; each task must be done once."""
    done = ctypes.create_string_buffer(100)
    workers = team.region_of_tasks(threads, 100, done)
    assert done.raw == b"\1" * 100
    return workers


class Call:
    """A call in a thread of its own."""

    def __init__(self, function, *args):
        self._thread = threading.Thread(target=function, args=args, daemon=True)
        self._thread.start()

    @property
    def is_running(self):
        return self._thread.is_alive()

    @property
    def sleeps(self):
        """Whether its thread waits for the system."""
        stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "S"

    def ends(self):
        self._thread.join(DEADLINE)
        return not self.is_running


def comes_true(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


@on_linux
def test_a_worker_that_comes_late_is_not_waited_for(team):
    team.set_creation(LATE)
    found = []
    assert Call(lambda: found.append(num_workers(team, 3))).ends()
    assert found == [1]
    team.start_late_threads()
    held = Call(team.held_region, 3)  # ends only with both workers
    assert comes_true(team.caller_is_leaving)
    team.release_up_to(2)
    assert held.ends()


@on_linux
def test_where_no_thread_can_be_made_the_caller_works_alone(team):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    team.set_creation(FAILING)
    assert num_workers(team, 4) == 1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    team.set_creation(USUAL)  # threads are asked for again
    held = Call(team.held_region, 2)
    assert comes_true(team.caller_is_leaving)
    team.release_up_to(1)
    assert held.ends()


@on_linux
def test_the_caller_sleeps_until_the_last_worker_is_out(team):
    held = Call(team.held_region, 3)
    assert comes_true(team.caller_is_leaving)
    assert comes_true(lambda: held.sleeps)
    team.release_up_to(1)
    assert comes_true(lambda: team.num_inside() == 1)
    assert held.is_running
    team.release_up_to(2)
    assert held.ends()
    assert 1 <= num_workers(team, 3) <= 3


@on_linux
def test_while_workers_are_busy_another_caller_works_alone(team):
    held = Call(team.held_region, 2)
    assert comes_true(team.caller_is_leaving)
    assert num_workers(team, 2) == 1
    assert held.is_running
    team.release_up_to(1)
    assert held.ends()
