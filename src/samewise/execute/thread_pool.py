"""The OpenMP threads that torch splits its work over: their rounding mode and flushing of subnormals.

Each thread that calls torch has a pool of its own. A pool's threads keep the modes that the calling thread
had when they were made, whatever it sets later.
"""

from __future__ import annotations

import ctypes

import torch

from samewise import machine
from samewise.errors import GuaranteeLost

GRAIN = 32768
"""Elements of an elementwise operation that torch gives to one thread at least."""
THIRD = 11184811 * 2.0**-25  # 1/3 as float32, rounded to nearest
SMALL = 2.0**-126  # the smallest normal float32


def repair_pool() -> None:
    """Give every thread of the calling thread's pool the calling thread's modes: to nearest, no flushing.

    Raises GuaranteeLost where that is impossible. Takes tens of microseconds.
    """
    if _as_expected():
        return
    for library in machine.loaded_libraries(r"libgomp.*\.so.*"):
        _reset_threads(ctypes.CDLL(str(library)))
    if not _as_expected():
        raise GuaranteeLost(
            "torch's threads round or flush numbers in another way than the thread that calls the engine: "
            "they were made while it had another rounding mode. Call the engine from a new thread"
        )


def _as_expected() -> bool:
    """Whether every thread of the pool divides and halves as IEEE arithmetic does by default."""
    num = GRAIN * torch.get_num_threads()
    thirds = torch.ones(num, dtype=torch.float32, device="cpu").div_(3.0)
    negative = torch.full((num,), -1.0, dtype=torch.float32, device="cpu").div_(3.0)
    halves = torch.full((num,), SMALL, dtype=torch.float32, device="cpu").mul_(0.5)
    return bool((thirds == THIRD).all() and (negative == -THIRD).all() and (halves != 0.0).all())


def _reset_threads(openmp: ctypes.CDLL) -> None:
    """Run a function in every thread of the pool that sets the thread's modes."""
    libc = ctypes.CDLL(None)

    def reset(_: int | None) -> None:
        libc.fesetround(0)
        torch.set_flush_denormal(False)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(reset)
    openmp.GOMP_parallel(callback, None, ctypes.c_uint(torch.get_num_threads()), ctypes.c_uint(0))


__all__ = ["repair_pool"]
