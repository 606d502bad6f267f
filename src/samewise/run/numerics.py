"""Numeric switches: set once, before anything runs, and written into the contract.

Anything that lets a library choose another arithmetic by itself is switched off here.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

CUBLAS_WORKSPACE = ":4096:8"

INDUCTOR: dict[str, Any] = {
    "deterministic": True,  # no timing of candidates, here or below
    "max_autotune": False,
    "coordinate_descent_tuning": False,
    "shape_padding": False,
    "benchmark_fusion": False,
    "triton.autotune_pointwise": False,
    "triton.cudagraphs": False,
    "cpp.enable_kernel_profile": False,
}


def inductor_options() -> dict[str, Any]:
    """The compiler's switches, as far as this version of it has them."""
    import torch._inductor.config as inductor

    known = inductor.get_config_copy()
    return {name: value for name, value in INDUCTOR.items() if name in known}


def settle(device: torch.device) -> dict[str, str]:
    """Set the switches and say what was set."""
    if device.type != "cuda":
        return {}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    return {
        "tf32": "off",
        "reduced-precision reductions": "off",
        "cublas workspace": os.environ["CUBLAS_WORKSPACE_CONFIG"],
    }


def facts(device: torch.device) -> dict[str, str]:
    """What the bits of this process depend on, beside model and configuration."""
    found = {
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "platform": platform.machine(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return found | {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}, {properties.multi_processor_count} SMs",
            "cuda": str(torch.version.cuda),
            "cublas": _version("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
            "triton": _version("triton"),
        }
    mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return found | {
        "device": "cpu",
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "blas": "mkl" if mkl else "other",
        "mkl dynamic": os.environ.get("MKL_DYNAMIC", "unset"),
        "onednn isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "unset"),
        "flush denormal": "default",
    }


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "absent"


__all__ = ["facts", "inductor_options", "settle"]
