"""The kernels' threads: any number of callers, workers that are busy, a forked child."""

import os
import signal
import threading

import pytest
import torch

from cpp_reference import bits, random_tensor
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
