"""How many KV pages fit the memory of a device."""

from __future__ import annotations

from pathlib import Path

import torch

from samewise.config import EngineConfig, parse_memory
from samewise.errors import BadParameter
from samewise.execute.choices import pick_dtype
from samewise.execute.runner import kv_page_bytes
from samewise.kernels.attention.base import PAGE
from samewise.model.arch import Arch

FREE_SHARE = {"cpu": 0.25, "cuda": 0.85}
"""Share of the free memory that KV takes by default: on a CPU other processes need theirs. Set by hand."""
UNKNOWN_FREE_BYTES = 2**31
"""Free memory assumed where the operating system does not report it (no /proc/meminfo). Set by hand."""
MIN_PAGES = 4
"""The trash page, and three to run anything at all."""


def count_pages(
    config: EngineConfig, arch: Arch, max_len: int, device: torch.device, *, widest: int = 0
) -> int:
    """As many pages as the memory allows, but no more than `max_num_seqs` sequences of `max_len` tokens use.

    On CUDA room is left for the logits of a frame of `widest` rows: three copies in the model's dtype and two
    in float32, while tokens are sampled.
    """
    dtype = pick_dtype(config.dtype, device, arch.checkpoint_dtype)
    page_bytes = kv_page_bytes(arch, dtype)
    asked = parse_memory(config.kv_memory)
    share = FREE_SHARE[device.type] if asked is None else asked
    if isinstance(share, float):
        logits = widest * arch.vocab * (3 * dtype.itemsize + 8) if device.type == "cuda" else 0
        budget = int(share * max(0, _free_bytes(device) - logits))
    else:
        budget = share
    max_pages = config.max_num_seqs * -(-(max_len + 1) // PAGE) + 2
    num_pages = min(budget // page_bytes, max_pages)
    if num_pages < MIN_PAGES:
        raise BadParameter(
            f"kv_memory={config.kv_memory!r} is {budget} bytes, and one page of {PAGE} tokens takes "
            f"{page_bytes}; give at least {MIN_PAGES * page_bytes} bytes",
            param="kv_memory",
        )
    return int(num_pages)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # torch still holds the memory of operators that were tried before
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            return int(fields["MemAvailable"].split()[0]) * 1024
    return UNKNOWN_FREE_BYTES


__all__ = ["FREE_SHARE", "MIN_PAGES", "UNKNOWN_FREE_BYTES", "count_pages"]
