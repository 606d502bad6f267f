"""Staging buffers: the device sees what was filled in, also when the host is faster."""

import numpy as np
import pytest
import torch

from samewise.execute.staging import FIELDS, StagingBuffer

ROWS, NUM_PAGES, BUFFERS = 4, 8, 3


def make_staging(device):
    return StagingBuffer(ROWS, NUM_PAGES, torch.zeros(0, device=device), torch.device(device), BUFFERS)


def fill_and_send(staging, value):
    """Every field and every page number set to `value`."""
    for name in FIELDS:
        staging.field(name)[:] = value
    return staging.send(np.full(NUM_PAGES, value, dtype=np.int32))


def test_inputs_hold_what_was_filled_in():
    staging = make_staging("cpu")
    for value in range(1, 8):
        inputs = fill_and_send(staging, value)
        assert inputs.tokens.tolist() == [[value] * ROWS]
        assert inputs.rows.pages.tolist() == [value] * NUM_PAGES


@pytest.mark.gpu
def test_a_host_faster_than_the_device_waits():
    staging, sent = make_staging("cuda"), []
    for value in range(1, 20):
        torch.cuda._sleep(5_000_000)  # a few milliseconds before the copy can start
        sent.append(fill_and_send(staging, value).tokens.clone())
    assert [tokens.tolist() for tokens in sent] == [[[value] * ROWS] for value in range(1, 20)]
