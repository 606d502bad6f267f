"""The key of a pass in the compiler's cache of compiled graphs."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch


def cache_key(source: str) -> bytes:
    """A digest of the pass's source file and of the CPU's instruction set.

    The compiler's own key does not name the instruction set (ATEN_CPU_CAPABILITY, or another CPU sharing the
    cache), and a CPU graph cached for another one gives wrong results.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    return sha256(Path(source).read_bytes() + capability.encode()).digest()


__all__ = ["cache_key"]
