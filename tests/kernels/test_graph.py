"""Capturing CUDA graphs: one at a time, and not disturbed by the garbage collector."""

import gc

import pytest
import torch

from samewise.kernels.graph import CapturedGraph, _exclusive_capture


def test_the_garbage_collector_is_off_during_a_capture_and_as_before_afterwards():
    assert gc.isenabled()
    with _exclusive_capture():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with _exclusive_capture():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(RuntimeError), _exclusive_capture():
        raise RuntimeError
    assert gc.isenabled()


@pytest.mark.gpu
def test_unreachable_graphs_in_cycles_do_not_spoil_a_capture():
    """With old graphs that only the collector can free, and thresholds at which it would run constantly."""
    device = torch.device("cuda")
    x = torch.zeros(8, device=device)

    held = []
    for _ in range(4):
        cycle = {"graph": CapturedGraph(lambda: x + 1, device)}
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

        assert CapturedGraph(work, device)().tolist() == [3.0] * 8
    finally:
        gc.set_threshold(*before)
