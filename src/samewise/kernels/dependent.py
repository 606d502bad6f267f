"""Dependent launch on CUDA: a kernel may be started while the one before it in its stream still runs.

A kernel launched so (`launch_options`) waits, in every program, for the one before it to end before it reads
or writes anything but weights and what the host has copied. So when a kernel has ended, all before it have.
A kernel launched without starts after the one before it has ended, whatever that one was.
"""

from __future__ import annotations

import functools

import torch

MIN_CAPABILITY = 9  # Hopper


@functools.cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Options of a launch on this device of a kernel that has a constant DEPENDENT."""
    if device.type != "cuda":  # Triton's interpreter does not know the launch's option
        return {"DEPENDENT": False}
    dependent = torch.cuda.get_device_capability(device)[0] >= MIN_CAPABILITY
    return {"DEPENDENT": dependent, "launch_pdl": dependent}


__all__ = ["MIN_CAPABILITY", "launch_options"]
