"""What a pass travels in, how it is captured and compiled: none of it may be seen in its results."""

import gc

import numpy as np
import pytest
import torch

from samewise.execute.numerics import inductor_options
from samewise.execute.staging import StagingBuffer
from samewise.kernels.graph import Captured, _alone

ROWS, BUFFERS = 4, 3


def staging(device):
    return StagingBuffer(ROWS, 8, torch.zeros(0, device=device), torch.device(device), BUFFERS)


def fill(staging, value):
    for name in ("tokens", "source", "positions", "lengths", "slots", "page_start"):
        staging.field(name)[:] = value
    return staging.send(np.full(8, value, dtype=np.int32))


def test_a_tray_brings_what_was_put_on_it():
    mine = staging("cpu")
    for value in range(1, 8):
        batch = fill(mine, value)
        assert batch.tokens.tolist() == [[value] * ROWS]
        assert batch.rows.pages.tolist() == [value] * 8


@pytest.mark.gpu
def test_a_host_that_is_faster_than_the_device_waits():
    mine, found = staging("cuda"), []
    for value in range(1, 20):
        torch.cuda._sleep(5_000_000)  # a few milliseconds before the copy can start
        found.append(fill(mine, value).tokens.clone())
    assert [one.tolist() for one in found] == [[[value] * ROWS] for value in range(1, 20)]


def test_nothing_is_collected_meanwhile_and_everything_after():
    assert gc.isenabled()
    with _alone():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with _alone():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(RuntimeError), _alone():
        raise RuntimeError
    assert gc.isenabled()


@pytest.mark.gpu
def test_graphs_that_were_left_behind_do_not_spoil_a_capture():
    """Old graphs in cycles, and a collector that is eager."""
    device = torch.device("cuda")
    x = torch.zeros(8, device=device)

    held = []
    for _ in range(4):
        cycle = {"graph": Captured(lambda: x + 1, device)}
        cycle["self"] = cycle
        held.append(cycle)
    del cycle
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:

        def work():
            if torch.cuda.is_current_stream_capturing():
                held.clear()
            for _ in range(50):
                [{} for _ in range(20)]
            return x + 3

        assert Captured(work, device)().tolist() == [3.0] * 8
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_what_is_fused_rounds_as_what_is_not(device, dtype):
    def chain(x, y, z):
        return (x * y + z) * x + (x + z) * y

    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(64, 256, generator=generator).to(device, dtype) for _ in range(3)]
    fused = torch.compile(chain, fullgraph=True, dynamic=False, options=inductor_options())
    assert torch.equal(fused(*given), chain(*given))
